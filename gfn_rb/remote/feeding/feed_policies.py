"""Policies that choose which unknown items a worker is given next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gfn_rb.containers.objects import terminating_states
from gfn_rb.numerics.top_k import TopK
from gfn_rb.numerics.weighted_tree import weighted_rows
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.shapes import Float, Int64

_Rows = Int64[Tensor, "m"]
_POOL = 8  # candidates that the diverse policy compares for each row that it feeds


class FeedPolicy(ABC):
    """Rows of a manager's buffer that could be fed to one worker, and the choice among them."""

    def __init__(self, index: ObjectIndex, generator: torch.Generator | None = None) -> None:
        self.index, self._generator = index, generator

    @abstractmethod
    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them; those of log-reward -inf are never picked."""

    def remove(self, rows: Int64[Tensor, "m"]) -> None:
        """Take rows out; rows that are not in are ignored."""
        self.put(rows, torch.full(rows.shape, -math.inf), torch.zeros_like(rows))

    @abstractmethod
    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Return up to k rows to feed; they stay in."""


class Top(FeedPolicy):
    """The items of highest reward; of equal ones, the newest."""

    def __init__(self, index: ObjectIndex, generator: torch.Generator | None = None) -> None:
        super().__init__(index, generator)
        self._top_k = TopK(index.storage.max_size)

    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them."""
        key = self._key(log_reward.to(torch.float64), arrival)
        self._top_k.update(rows.numpy(), key.numpy(), -arrival.numpy())

    def _key(self, log_reward: Tensor, arrival: Tensor) -> Tensor:
        """Return the key to order rows by, ascending; inf for rows that are never picked."""
        return -log_reward

    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Return up to k rows, the best first."""
        key, rows = self._top_k.smallest(min(k, self._top_k.capacity))
        return torch.from_numpy(rows[key < math.inf])


class Newest(Top):
    """The items that arrived last."""

    def _key(self, log_reward: Tensor, arrival: Tensor) -> Tensor:
        return torch.where(log_reward > -math.inf, -arrival.to(torch.float64), math.inf)


class Diverse(Top):
    """Items of high reward far from each other.

    Of the 8 k items of highest reward: the best, then repeatedly the one whose terminating state
    has the largest L1 distance to all picked before (Gonzalez 1985).
    """

    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Return up to k rows."""
        pool = super().pick(_POOL * k)
        if len(pool) <= k:
            return pool
        states = terminating_states(self.index.read(pool))
        return pool[:k] if states is None else pool[_furthest(states[0], k)]


class Softmax(FeedPolicy):
    """Items drawn without replacement in proportion to exp(log-reward)."""

    def __init__(self, index: ObjectIndex, generator: torch.Generator | None = None) -> None:
        super().__init__(index, generator)
        self._weights = weighted_rows(index.storage.max_size)

    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them."""
        self._weights.update(rows, log_reward.to(torch.float64))

    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Draw up to k rows."""
        rows, score = self._weights.perturbed(min(k, self._weights.capacity), self._generator)
        return rows[score > -math.inf]


POLICIES: dict[str, type[FeedPolicy]] = {
    "top": Top,
    "diverse": Diverse,
    "softmax": Softmax,
    "newest": Newest,
}


def _furthest(state: Tensor, k: int) -> Int64[Tensor, "k"]:
    """Return k positions, the first and then those furthest from all before."""
    point = state.reshape(len(state), -1).to("cpu", torch.float64)
    taken = torch.zeros(k, dtype=torch.int64)
    nearest = torch.full(point.shape[:1], math.inf, dtype=torch.float64)
    for i in range(1, k):
        last = int(taken[i - 1])
        nearest = torch.minimum(nearest, (point - point[last]).abs().sum(1))
        nearest[last] = -1.0
        taken[i] = nearest.argmax()
    return taken
