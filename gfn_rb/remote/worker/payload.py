"""What of the items added to a worker is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import TensorDictBase

from gfn_rb.buffers.joining import joined
from gfn_rb.containers.objects import stand_alone
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import LOG_REWARD

Payload = Literal["items", "terminating", "scoring"]


def join_batches(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Return the rows of batches as one; trajectories are padded to the longest.

    Args:
        batches: at least one.

    Raises:
        KeyMismatchError: their keys differ.
        ShapeError: their dtypes or shapes do.
        ArgumentError: they lie on different devices.
    """
    return joined(batches, range(len(batches)), torch.arange(sum(map(len, batches))))


def require_fit(pending: TensorDictBase, rows: TensorDictBase) -> None:
    """Raise unless a batch can be sent together with one that waits for it.

    Args:
        pending: the other.
        rows: batch size [n].

    Raises:
        KeyMismatchError, ShapeError, ArgumentError: see :func:`join_batches`.
    """
    try:
        join_batches([pending[:1], rows[:1]])
    except (KeyMismatchError, ShapeError, ArgumentError) as error:
        raise type(error)(f"items do not go with those added before: {error}") from None


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
