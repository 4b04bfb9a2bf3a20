"""Baselines: the log-reward below which a manager would evict an item at once.

A worker that knows the baseline need not send such items.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import as_count
from gfn_rb.containers.objects import stand_alone
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float
from gfn_rb.storages.column import KeyColumn
from gfn_rb.torchrl_compat import length_of

_STALE = 256  # a full buffer is read again once 1/256 of it may have changed


class Baseline:
    """A baseline at a percentile of the finite log-rewards of a full buffer.

    Of n log-rewards it is the number at rank percentile (n - 1), counted from 0 at the lowest, on
    the straight line between the ranks on both sides of it: the linear percentile of NumPy. While
    the buffer is not full, and without a buffer, the baseline is the running mean of the lowest
    finite log-reward of each batch.

    Args:
        percentile: share of rows below the baseline, 0 to 1: 0 is the lowest log-reward. None
            always uses the running mean.
        alpha: weight of the newest batch in the running mean, above 0 and at most 1.

    Raises:
        ArgumentError: ``percentile`` or ``alpha`` is out of range.
    """

    def __init__(self, percentile: float | None = 0.0, alpha: float = 0.1) -> None:
        if percentile is not None and not 0 <= percentile <= 1:
            raise ArgumentError(f"percentile must be in [0, 1], got {percentile}")
        if not 0 < alpha <= 1:
            raise ArgumentError(f"alpha must be above 0 and at most 1, got {alpha}")
        self.percentile, self.alpha = percentile, alpha
        self._column = KeyColumn(LOG_REWARD)
        self._mean: float | None = None
        self._of_full: float | None = None
        self._n_written = math.inf  # rows written since the buffer was read

    def observe(self, log_reward: Float[Tensor, "n"], n_stored: int = 0) -> None:
        """Record the log-rewards of a batch, of which ``n_stored`` rows were stored.

        Args:
            log_reward: log-reward of each row in nats, [n].
            n_stored: number of these rows that the buffer stored.
        """
        self._n_written += n_stored
        lowest = float(log_reward.min()) if log_reward.numel() else math.inf
        if not math.isfinite(lowest):  # rarely, and it takes ten times as long
            finite = log_reward[log_reward.isfinite()]
            lowest = float(finite.min()) if finite.numel() else math.inf
        if lowest < math.inf:
            alpha, mean = self.alpha, self._mean
            self._mean = lowest if mean is None else alpha * lowest + (1 - alpha) * mean

    def value(self, rb: ReplayBuffer | None) -> float | None:
        """Return the baseline of a buffer; None while unknown."""
        percentile = self.percentile
        if percentile is None or rb is None or length_of(rb.storage) < rb.storage.max_size:
            return self._mean
        # A pass over the buffer for each batch would cost more than storing it.
        if self._n_written * _STALE >= rb.storage.max_size:
            values = self._column.values(rb.storage)
            lowest = math.nan if percentile else float(values.min())
            if not math.isfinite(lowest):
                lowest = _percentile(values[values.isfinite()], percentile)
            self._of_full, self._n_written = lowest if lowest < math.inf else None, 0
        return self._mean if self._of_full is None else self._of_full

    def state_dict(self) -> dict[str, Any]:
        """Return the state that does not follow from the buffer."""
        return {"ema": self._mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a result of :meth:`state_dict`."""
        self._mean, self._n_written = state["ema"], math.inf


def _percentile(values: Float[Tensor, "n"], share: float) -> float:
    """Return the number at a share of the order of finite ones; inf without any."""
    if not len(values):
        return math.inf
    return float(np.quantile(values.double().cpu(), share) if share else values.min())


class BaselineFilter:
    """Filter that drops rows below the managers' baseline.

    Only rows that represent a whole object are dropped: trajectories and terminating states, not
    transitions or visited states. A worker without rows to send learns no new baseline. After
    ``refresh_after`` successive batches without a row left, the next batch is therefore sent whole.

    Args:
        refresh_after: number of successive empty batches, at least 1.

    Attributes:
        empty: number of successive batches so far without a row left.

    Raises:
        ArgumentError: ``refresh_after`` is below 1.
    """

    def __init__(self, refresh_after: int = 10) -> None:
        self.refresh_after = as_count("refresh_after", refresh_after)
        self.empty = 0

    def __call__(self, rows: TensorDictBase, baseline: float | None) -> TensorDictBase:
        """Return the rows to send; all of them if a new baseline has to be learnt."""
        if baseline is None or not stand_alone(rows):
            return rows
        keep = ~(rows.get(LOG_REWARD).reshape(-1) < baseline)  # the manager shall see a NaN
        if bool(keep.any()):
            self.empty = 0
            return rows if bool(keep.all()) else rows[keep]
        if self.empty >= self.refresh_after:
            self.empty = 0
            return rows
        self.empty += 1
        return rows[keep]
