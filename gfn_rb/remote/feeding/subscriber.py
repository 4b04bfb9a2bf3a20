"""Feeds of workers from the rows that a manager holds, and policies that choose the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_choice
from gfn_rb.containers.objects import terminating_states
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.weighted_rows import gumbel_of
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.shapes import Float64, Int64
from gfn_rb.torchrl_compat import generator_of, length_of

MAX_QUOTA = 4096  # rows that are fed at a time: diverse ones take time that grows with the square
_POOL = 8  # candidates that the diverse policy compares for each row that it feeds


class Feeder:
    """Feeds workers from a manager's buffer."""

    def __init__(self, rb: ReplayBuffer | None, n_ranks: int) -> None:
        self.index = None if rb is None else ObjectIndex(rb, n_ranks)
        self.subscribers: dict[int, Subscriber] = {}
        generator = None if rb is None else generator_of(rb)
        on_cpu = generator is not None and generator.device.type == "cpu"  # as are the choices
        self.generator = generator if on_cpu else None

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on."""
        self.subscribers[rank] = Subscriber(rank, terms, self)

    def next_for(self, rank: int, quota: int | None = None) -> TensorDictBase | None:
        """Return the next rows for a worker, at most ``quota``; None without any."""
        subscriber = self.subscribers.get(rank)
        if subscriber is None or quota == 0:
            return None
        return subscriber.next(subscriber.quota if quota is None else min(quota, MAX_QUOTA))

    def state_dict(self) -> dict[str, Any]:
        """Return the record of objects and subscribers, without the buffer."""
        return {
            "index": None if self.index is None else self.index.state_dict(),
            "subscribers": {str(rank): each.terms for rank, each in self.subscribers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a buffer restored to that moment."""
        if self.index is not None and state["index"] is not None:
            self.index.load_state_dict(state["index"])
            self.subscribers = {
                int(rank): Subscriber(int(rank), {**terms, "fresh": False}, self)
                for rank, terms in state["subscribers"].items()
            }


class Subscriber:
    """A worker that a manager feeds. Each reply looks through all rows that the manager holds."""

    def __init__(self, rank: int, terms: Any, feeder: Feeder) -> None:
        if (index := feeder.index) is None:
            raise ArgumentError("this manager keeps no items, so that nobody can be fed from it")
        self.rank = rank
        if not isinstance(terms, Mapping):
            raise ArgumentError(f"subscription must be terms by name, got {terms!r:.80}")
        quota, own = terms.get("quota"), terms.get("own", False)
        policy: Any = terms.get("policy")
        if type(own) is not bool:
            raise ArgumentError(f"own must be true or false, got {own!r:.80}")
        if type(quota) is not int or not 1 <= quota <= MAX_QUOTA:
            raise ArgumentError(
                f"quota must be an integer from 1 to {MAX_QUOTA}, got {quota!r:.80}"
            )
        require_choice("policy", policy, POLICIES)
        self.quota, self.own = quota, own
        # Only the terms that are understood: they are saved, and others may be of any size.
        self.terms = {"quota": self.quota, "policy": policy, "own": own}
        self._index, self._choose, self._generator = index, POLICIES[policy], feeder.generator
        if terms.get("fresh"):  # it starts anew, without the rows that it was given
            index.given[:, rank] = False

    def next(self, quota: int) -> TensorDictBase | None:
        """Return the next rows, and record that they were given."""
        index, rank = self._index, self.rank
        if not index.storage.initialized:
            return None
        index.refresh()
        number = index.number[: length_of(index.storage)]
        known = index.given[:, rank] if self.own else index.given[:, rank] | index.sent[:, rank]
        row = np.flatnonzero(~known.take(number))
        log_reward: np.ndarray = index.log_reward(torch.from_numpy(row)).double().numpy()
        is_possible = log_reward > -math.inf
        row, log_reward = row[is_possible], log_reward[is_possible]
        found = Candidates(index, row, log_reward, index.arrival[number[row]], self._generator)
        picked = row[self._choose(found, quota)]
        index.given[number[picked], rank] = True
        return index.read(torch.from_numpy(picked)) if len(picked) else None


class Candidates(NamedTuple):
    """Rows of a manager's buffer that could be fed to one worker, and what they are chosen by."""

    held: ObjectIndex
    row: Int64[np.ndarray, "m"]
    log_reward: Float64[np.ndarray, "m"]
    arrival: Int64[np.ndarray, "m"]
    generator: torch.Generator | None


def _top(found: Candidates, k: int) -> Int64[np.ndarray, "j"]:
    """Choose the items of highest reward, the best first; of equal ones, the newest."""
    return _best(found.log_reward, found.arrival, k)


def _newest(found: Candidates, k: int) -> Int64[np.ndarray, "j"]:
    """Choose the items that arrived last."""
    return _best(found.arrival, found.arrival, k)


def _softmax(found: Candidates, k: int) -> Int64[np.ndarray, "j"]:
    """Draw items without replacement in proportion to exp(log-reward), by the Gumbel trick."""
    uniform = torch.rand(len(found.row), dtype=torch.float64, generator=found.generator)
    return _best(found.log_reward + gumbel_of(uniform).numpy(), found.arrival, k)


def _diverse(found: Candidates, k: int) -> Int64[np.ndarray, "j"]:
    """Choose items of high reward far from each other.

    Of the 8 k items of highest reward: the best, then repeatedly the one whose terminating state
    has the largest L1 distance to all chosen before (Gonzalez 1985).
    """
    pool = _top(found, _POOL * k)
    if len(pool) <= k:
        return pool
    states = terminating_states(found.held.read(torch.from_numpy(found.row[pool])))
    return pool[:k] if states is None else pool[_furthest(states[0], k)]


POLICIES: dict[str, Callable[[Candidates, int], np.ndarray]] = {
    "top": _top,
    "diverse": _diverse,
    "softmax": _softmax,
    "newest": _newest,
}


def _best(key: np.ndarray, arrival: Int64[np.ndarray, "m"], k: int) -> Int64[np.ndarray, "j"]:
    """Return the positions of the k highest keys, the highest first; of equal ones, the newest."""
    at = np.arange(len(key))
    if k < len(key):  # only those that are not below the k-th need be sorted
        at = np.flatnonzero(key >= np.partition(key, -k)[-k])
    return at[np.lexsort((-arrival[at], -key[at]))[:k]]


def _furthest(state: Tensor, k: int) -> Int64[np.ndarray, "k"]:
    """Return k positions, the first and then those furthest from all before."""
    point = state.reshape(len(state), -1).to("cpu", torch.float64)
    taken = torch.zeros(k, dtype=torch.int64)
    nearest = torch.full(point.shape[:1], math.inf, dtype=torch.float64)
    for i in range(1, k):
        last = int(taken[i - 1])
        nearest = torch.minimum(nearest, (point - point[last]).abs().sum(1))
        nearest[last] = -1.0
        taken[i] = nearest.argmax()
    return taken.numpy()
