"""Messages of managers and workers: kinds of frames, scores, counters and errors."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from numbers import Real
from typing import Any, Final, TypeGuard

from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError, RemoteError

PROTOCOL: Final = 4  # raised by each change that makes two sides misunderstand each other

DATA_TAG: Final = 0  # items, scores and fed items
METADATA_TAG: Final = 1  # questions of any rank, and their answers


class Kind(IntEnum):
    """Kinds of frames. A question and its answer have the same kind."""

    HELLO = 1  # worker: its terms; manager: its protocol, baseline and form of rows
    ITEMS = 2  # worker: rows, and whether to store them
    SCORES = 3  # manager, in answer to ITEMS: outcomes, scores, baseline, and fed items
    GOODBYE = 4  # worker: it will send no more; manager: the worker's counters
    ERROR = 5  # manager: refuses a frame
    METADATA = 6  # any rank asks a manager for its state
    CHECKPOINT = 7  # any rank asks a manager to save
    HELD = 8  # any rank asks a manager for the rows that it keeps


Scores = dict[str, float | Tensor]
ScoreFunction = Callable[[TensorDictBase, int], Mapping[str, Any]]
"""``fn(items, sender)``: rows [n] and the rank they came from to scores by name.

A score is a number (a float, or a tensor of one element) for the whole batch, or a tensor
[n, ...] of one entry per row.
"""


def pack(result: Any, n: int) -> tuple[dict[str, float], TensorDict | None]:
    """Split what a scoring function returned into numbers and rows."""
    if not isinstance(result, Mapping) or not all(isinstance(name, str) for name in result):
        raise ArgumentError(f"score must return a dict of scores by name, got {result!r:.200}")
    numbers: dict[str, float] = {}
    rows: dict[str, Tensor] = {}
    for name, value in result.items():
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == n:
            rows[name] = value.detach().cpu()
        elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[name] = float(value)
        else:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ArgumentError(
                f"score {name!r} must be a number or a tensor of {n} rows, got {what}"
            )
    return numbers, TensorDict(rows, [n]) if rows else None


OUTCOMES = ("stored", "rejected", "duplicates", "scored", "refused")


@dataclass
class Outcomes:
    """Numbers of rows by their outcome at a manager.

    Attributes:
        stored: they are in its buffer, or were for a while.
        rejected: its writer did not keep them.
        duplicates: it held the same object, or the batch did.
        scored: they were only scored, because that was asked for or there is no buffer.
        refused: they do not fit its buffer.
    """

    stored: int = 0
    rejected: int = 0
    duplicates: int = 0
    scored: int = 0
    refused: int = 0

    @property
    def outcomes(self) -> int:
        """Number of all rows."""
        return self.stored + self.rejected + self.duplicates + self.scored + self.refused

    def count(self, **rows: int) -> None:
        """Add to counters by name."""
        for name, n in rows.items():
            setattr(self, name, getattr(self, name) + n)

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    def restore(self, values: dict[str, Any]) -> None:
        """Resume from earlier counters."""
        for field in fields(self):
            setattr(self, field.name, values[field.name])


@dataclass
class SenderStatistics(Outcomes):
    """Counters of one worker at a manager. ``items`` is the sum of the outcomes.

    Attributes:
        batches: frames of items received.
        items: rows received.
        bytes: size of all frames received.
        fed: rows fed to the worker.
        unreadable: frames that could not be read.
        errors: batches that could not be stored or scored.
    """

    batches: int = 0
    items: int = 0
    bytes: int = 0
    fed: int = 0
    unreadable: int = 0
    errors: int = 0


_FRAMES = 4
_CHARACTERS = 2000


def describe_error(error: BaseException) -> dict[str, str]:
    """Return an error as plain values: its type, message, and the end of its traceback."""
    steps = traceback.format_tb(error.__traceback__)[-_FRAMES:]
    return {
        "type": type(error).__name__,
        "message": str(error)[:_CHARACTERS],
        "traceback": "".join(steps)[-_CHARACTERS:],
    }


def remote_error(rank: int, values: Any) -> RemoteError:
    """Return the error that :func:`describe_error` described on another rank."""
    said = values if isinstance(values, dict) else {}
    message = f"{said.get('type', 'an error')}: {said.get('message', 'not described')}"
    return RemoteError(rank, message, str(said.get("traceback", "")))


def is_finite(value: Any) -> bool:
    """Return whether a value is a number that a float can hold, neither infinite nor NaN."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def is_number(value: Any) -> TypeGuard[int]:
    """Return whether a value can number a batch: an integer of 64 bits."""
    return type(value) is int and abs(value) < 1 << 63


def one_line(text: str) -> str:
    """Return a text in one line, of at most 500 characters."""
    return " ".join(text.split())[:500]
