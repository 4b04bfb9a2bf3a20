"""Policies that choose which unknown items a worker is given next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gfn_rb.containers.objects import terminating_states
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.top_k import TopK
from gfn_rb.numerics.weighted_tree import weighted_rows
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.shapes import Float, Float64, Int64

_Rows = Int64[Tensor, "m"]
_POOL = 8  # how many candidates the diverse policy compares for each that it gives


class FeedPolicy(ABC):
    """Rows of a manager's buffer that one worker could be given, ready to be picked from.

    Putting m rows in, or picking k, costs some m or k times the square root of the capacity at
    most, never a pass over it.
    """

    def __init__(self, index: ObjectIndex, generator: torch.Generator | None = None) -> None:
        self.index, self._generator = index, generator

    @abstractmethod
    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them; those of log-reward -inf are never picked."""

    def remove(self, rows: Int64[Tensor, "m"]) -> None:
        """Take rows out; those that were not in are passed over."""
        self.put(rows, torch.full(rows.shape, -math.inf), torch.zeros_like(rows))

    @abstractmethod
    def best(self, k: int) -> tuple[Int64[Tensor, "j"], Float64[Tensor, "j"]]:
        """Return up to k rows and how much each is wanted, most first; they stay in.

        Of rows of several managers, those that are wanted most are the ones to feed: these numbers
        can be compared with those of another manager's policy.
        """

    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Return up to k rows to feed; they stay in."""
        return self.best(k)[0]


class Top(FeedPolicy):
    """The items of highest reward, of equal ones the newest."""

    def __init__(self, index: ObjectIndex, generator: torch.Generator | None = None) -> None:
        super().__init__(index, generator)
        self._top_k = TopK(index.storage.max_size)

    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them."""
        self._top_k.update(rows, self._key(log_reward.to(torch.float64), arrival), -arrival)

    def _key(self, log_reward: Tensor, arrival: Tensor) -> Tensor:
        """Return what to order rows by, the best smallest; inf for what is worth nothing."""
        return -log_reward

    def best(self, k: int) -> tuple[Int64[Tensor, "j"], Float64[Tensor, "j"]]:
        """Return up to k rows and their log-rewards."""
        smallest = self._top_k.smallest(min(k, self._top_k.capacity))
        rows = smallest.rows(int((smallest.key < math.inf).sum()))
        key, order = self._top_k.key[rows].sort(stable=True)
        return rows[order], -key


class Newest(Top):
    """The items that arrived last."""

    def _key(self, log_reward: Tensor, arrival: Tensor) -> Tensor:
        return torch.where(log_reward > -math.inf, -arrival.to(torch.float64), math.inf)

    def best(self, k: int) -> tuple[Int64[Tensor, "j"], Float64[Tensor, "j"]]:
        """Return up to k rows; the more objects came to this manager since, the less wanted."""
        rows, arrival = super().best(k)
        return rows, arrival - self.index.n_arrived


class Diverse(Top):
    """Items of high reward far from each other.

    Of the 8 k items of highest reward, the best; then again and again the one whose terminating
    state is, in L1 distance, furthest from all taken before (Gonzalez 1985).
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

    def best(self, k: int) -> tuple[Int64[Tensor, "j"], Float64[Tensor, "j"]]:
        """Draw up to k rows. The largest numbers of several managers are a draw from all rows."""
        rows, score = self._weights.perturbed(min(k, self._weights.capacity), self._generator)
        return rows[score > -math.inf], score[score > -math.inf]


POLICIES: dict[str, type[FeedPolicy]] = {
    "top": Top,
    "diverse": Diverse,
    "softmax": Softmax,
    "newest": Newest,
}


def check_policy(policy: Any) -> str:
    """Return the name of a policy, or raise."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ArgumentError(f"policy must be one of {sorted(POLICIES)}, got {policy!r:.80}")
    return policy


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
