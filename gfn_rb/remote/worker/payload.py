"""What of the items added to a worker is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase

from gfn_rb.buffers.joining import joined
from gfn_rb.containers.objects import reduce_to_states, stand_alone
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import ESTIMATOR_OUTPUT, INDEX, LOG_PROB, LOG_REWARD

Payload = Literal["items", "terminating", "scoring"]

PAYLOADS = ("items", "terminating", "scoring")
_STALE = (LOG_PROB, ESTIMATOR_OUTPUT)


def check_payload(payload: str, keep: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the entries not to send, or raise.

    Args:
        payload: what is sent.
        keep: which of ``log_prob`` and ``estimator_output`` are sent too.

    Raises:
        ArgumentError: either is something else.
    """
    if payload not in PAYLOADS:
        raise ArgumentError(f"payload must be one of {PAYLOADS}, got {payload!r}")
    if isinstance(keep, str) or not set(keep) <= set(_STALE):
        raise ArgumentError(f"keep must be a list of names out of {_STALE}, got {keep!r}")
    return (INDEX, *(name for name in _STALE if name not in keep))


def require_fit(pending: Sequence[TensorDictBase], rows: TensorDictBase) -> None:
    """Raise unless a batch can be sent together with those that wait for it.

    Args:
        pending: batches.
        rows: batch size [n].

    Raises:
        KeyMismatchError: its keys differ.
        ShapeError: its dtypes or shapes do.
        ArgumentError: it lies on another device.
    """
    if not pending:
        return
    try:
        packed([pending[-1][:1], rows[:1]], "items", ())
    except (KeyMismatchError, ShapeError, ArgumentError) as error:
        raise type(error)(f"items do not go with those added before: {error}") from None


def packed(
    batches: Sequence[TensorDictBase], payload: str, dropped: Sequence[str]
) -> TensorDictBase:
    """Return the rows of batches as one, reduced to what is sent.

    Args:
        batches: at least one; trajectories are padded to the longest.
        payload: ``"items"`` for whole items, anything else for terminating states.
        dropped: entries not to send.

    Raises:
        KeyMismatchError, ShapeError: the batches do not go together.
    """
    kept = [_without(batch, dropped) for batch in batches]
    rows = kept[0]
    if len(kept) > 1:
        rows = joined(kept, range(len(kept)), torch.arange(sum(map(len, kept))))
    return rows if payload == "items" else reduce_to_states(rows)


def _without(rows: TensorDictBase, dropped: Sequence[str]) -> TensorDictBase:
    held = rows.keys()
    return rows.exclude(*dropped) if any(name in held for name in dropped) else rows


class BaselineFilter:
    """Leaves out what lies below the managers' baseline.

    Only rows that stand for a whole object are left out: trajectories and terminating states, not
    transitions nor visited states. A worker that has nothing to send learns of no new baseline:
    after ``refresh_after`` batches in a row of which nothing was left, the next is sent whole.

    Args:
        refresh_after: how many.

    Attributes:
        empty: of how many batches in a row nothing was left.
        refreshes: how many batches were sent whole to learn the baseline anew.

    Raises:
        ArgumentError: ``refresh_after`` below 1.
    """

    def __init__(self, refresh_after: int = 10) -> None:
        if refresh_after < 1:
            raise ArgumentError(f"refresh_after must be at least 1, got {refresh_after}")
        self.refresh_after = refresh_after
        self.empty = 0
        self.refreshes = 0

    def __call__(self, rows: TensorDictBase, baseline: float | None) -> TensorDictBase:
        """Return the rows to send; all of them when the baseline has to be learnt anew.

        Args:
            rows: batch size [n].
            baseline: None while there is none.
        """
        if baseline is None or not stand_alone(rows):
            return rows
        keep = ~(rows.get(LOG_REWARD).reshape(-1) < baseline)  # the manager shall see a NaN
        if bool(keep.any()):
            self.empty = 0
            return rows if bool(keep.all()) else rows[keep]
        if self.empty >= self.refresh_after:
            self.empty = 0
            self.refreshes += 1
            return rows
        self.empty += 1
        return rows[keep]
