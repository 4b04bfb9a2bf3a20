"""Messages of managers and workers: kinds of frames, scores, counters, errors and open accounts.

A message is a frame: a kind, metadata, and up to two tables of rows. Names are those of metadata::

    worker                                      manager
    HELLO    protocol, managers,          ->
             rows, subscription
                                          <-    HELLO    protocol, rows, baseline
    ITEMS    id, quota; rows to store     ->
                                          <-    SCORES   to, outcomes, scores, baseline, error;
                                                         rows to feed, and scores of each row
                                          <-    ERROR    to, error; instead of an answer
    ALIVE    without an answer            ->
    GOODBYE                               ->
                                          <-    GOODBYE  counters of the worker

    manager                                     manager
    EXCHANGE protocol, managers,          ->
             rows, first, last; rows to
             store, without an answer

    any rank, on a tag of its own
    METADATA, CHECKPOINT, HELD            ->
                                          <-    the same kind: state, path, or capacity and rows

``rows`` of a greeting names the compact form of rows, and ``compact`` marks rows that came in it.
``to`` is the ``id`` that is answered. A manager that does not answer within the ``timeout`` of a
worker is lost to it, and a worker that sends nothing within ``worker_timeout`` is lost to the
manager: a worker that works for long sends ALIVE.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from numbers import Real
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError, RemoteError, ShapeError
from gfn_rb.transports.base import Deadline

PROTOCOL: Final = 6  # raised by each change that makes two sides misunderstand each other

DATA_TAG: Final = 0  # items, scores and fed items
METADATA_TAG: Final = 1  # questions of any rank, and their answers


class Kind(IntEnum):
    """Kinds of frames. A question and its answer have the same kind."""

    HELLO = 1  # worker: its terms; manager: its protocol, baseline and form of rows
    ITEMS = 2  # worker: rows
    SCORES = 3  # manager, in answer to ITEMS: outcomes, scores, baseline, and fed items
    GOODBYE = 4  # worker: it will send no more; manager: the worker's counters
    ERROR = 5  # manager: refuses a frame
    METADATA = 6  # any rank asks a manager for its state
    CHECKPOINT = 7  # any rank asks a manager to save
    HELD = 8  # any rank asks a manager for the rows that it keeps
    ALIVE = 9  # worker, without an answer: it is alive and has nothing to send
    EXCHANGE = 10  # manager, without an answer: rows that another manager does not know


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


@dataclass
class Outcomes:
    """Numbers of rows by their outcome at a manager.

    Attributes:
        stored: they are in its buffer, or were for a while.
        rejected: its writer did not keep them.
        duplicates: it held the same object, or the batch did.
        scored: they were only scored, because there is no buffer.
        refused: they do not fit its buffer.
    """

    stored: int = 0
    rejected: int = 0
    duplicates: int = 0
    scored: int = 0
    refused: int = 0

    def count(self, **rows: int) -> None:
        """Add to counters by name."""
        for name, n in rows.items():
            setattr(self, name, getattr(self, name) + n)


OUTCOMES = tuple(each.name for each in fields(Outcomes))


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


def outcomes_in(meta: Mapping[str, Any], n: int) -> dict[str, int]:
    """Return the outcomes of n rows that were sent."""
    said = meta.get("outcomes")
    known = {k: said[k] for k in OUTCOMES if k in said} if isinstance(said, dict) else {}
    if {*map(type, known.values())} - {int} or min(known.values(), default=0) < 0:
        raise ArgumentError(f"outcomes must be counts, got {said!r:.200}")
    if sum(known.values()) != n:
        raise ArgumentError(f"outcomes must add up to the {n} rows sent, got {said!r:.200}")
    return known


def scores_in(meta: Mapping[str, Any], rows: TensorDictBase | None, n: int) -> Scores:
    """Return the scores of n rows that were sent."""
    numbers = meta.get("scores")
    if not isinstance(numbers, dict) or {*map(type, numbers.values())} - {int, float}:
        raise ArgumentError(f"scores must be numbers by name, got {numbers!r:.200}")
    if rows is not None and len(rows) != n:
        raise ShapeError(f"scores must be of the {n} rows sent, got {len(rows)}")
    scores: Scores = {name: float(value) for name, value in numbers.items()}
    if rows is not None:
        scores.update({str(name): torch.as_tensor(value) for name, value in rows.items()})
    return scores


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


def is_number(value: Any) -> TypeGuard[int]:
    """Return whether a value can number a batch: an integer of 64 bits."""
    return type(value) is int and abs(value) < 1 << 63


@dataclass
class WorkerStatistics(Outcomes):
    """Counters of a worker.

    ``offered`` is the sum of ``filtered``, ``skipped``, ``sent`` and pending rows.
    ``sent`` plus ``resent`` is the sum of the outcomes, ``lost`` and unanswered rows.

    Attributes:
        offered: rows given to the worker.
        filtered: rows below the baseline, not sent.
        skipped: rows not sent, because too many batches were unanswered, their manager is lost, or
            the rows cannot be sent.
        sent: rows sent, one frame for each manager that owns any of them.
        resent: rows sent again, because their manager returned: its unanswered ones, and those of
            the worker's buffer.
        batches: frames of rows sent.
        replies: replies to them.
        errors: replies with an error.
        lost: rows sent that will not be answered.
        fed: rows received for the manager-fed buffer.
        fed_duplicates: fed rows that were dropped because held or fed before.
        bytes_sent: size of all frames sent.
        bytes_received: size of all frames received.
        seconds_sending: seconds in which frames were made and sent.
        seconds_blocked: seconds in which the worker waited for a manager.
    """

    offered: int = 0
    filtered: int = 0
    skipped: int = 0
    sent: int = 0
    resent: int = 0
    batches: int = 0
    replies: int = 0
    errors: int = 0
    lost: int = 0
    fed: int = 0
    fed_duplicates: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_sending: float = 0.0
    seconds_blocked: float = 0.0


@dataclass(frozen=True)
class Reply:
    """The managers' reply to a batch.

    Attributes:
        managers: ranks of the managers that owned any of the rows.
        n: number of rows sent.
        scores: scores by name: one number for the batch, the mean over rows of several managers; or
            a tensor with one entry per sent row, NaN without a score.
        outcomes: numbers of rows by outcome: ``stored``, ``rejected``, ``duplicates``, ``scored``
            or ``refused``.
        baseline: log-reward below which items need not be sent; None while unknown.
        error: error of a manager; None without one.
    """

    managers: tuple[int, ...]
    n: int
    scores: Scores
    outcomes: dict[str, int]
    baseline: float | None
    error: RemoteError | None = None


@dataclass(eq=False)
class SentBatch:
    """A batch, of which each manager was sent the rows that it owns.

    Attributes:
        n: number of its rows.
        is_new: whether the caller gets the reply; False for rows that are sent again.
        unanswered: number of managers that have not answered.
        answers: replies of single managers, each with the positions of its rows in the batch; None
            for all positions.
    """

    n: int
    is_new: bool = True
    unanswered: int = 0
    answers: list[tuple[Tensor | None, Reply]] = field(default_factory=list)

    def reply(self) -> Reply:
        """Return the answers joined."""
        at, first = self.answers[0]
        if at is None:
            return first
        replies = [reply for _, reply in self.answers]
        outcomes: Counter[str] = Counter()
        for each in replies:
            outcomes.update(each.outcomes)
        names = dict.fromkeys(name for each in replies for name in each.scores)
        return Reply(
            tuple(sorted({rank for each in replies for rank in each.managers})),
            self.n,
            {name: self._score(name) for name in names},
            dict(outcomes),
            replies[-1].baseline,
            next((each.error for each in replies if each.error is not None), None),
        )

    def _score(self, name: str) -> float | Tensor:
        """Return one score of all rows: entries in their order, or the mean of numbers."""
        parts = [(at, r.n, r.scores[name]) for at, r in self.answers if name in r.scores]
        known = sum(n for _, n, _ in parts)
        values = [value for _, _, value in parts if isinstance(value, Tensor)]
        if len(values) < len(parts):
            return sum(n * float(torch.as_tensor(v).mean()) for _, n, v in parts) / known
        score = torch.full((self.n, *values[0].shape[1:]), torch.nan)
        if known == self.n:
            score = score.to(values[0].dtype)
        for at, _, value in parts:
            score[at] = torch.as_tensor(value).to(score.dtype)
        return score


class SentShare(NamedTuple):
    """The rows of a batch that one manager was sent."""

    batch: SentBatch
    manager: int
    n: int
    at: Tensor | None
    """Positions of the rows in the batch, None for all."""
    deadline: Deadline
    """Of the answer."""
    rows: TensorDictBase
    """The rows themselves, which are sent again to a manager that was restarted."""
