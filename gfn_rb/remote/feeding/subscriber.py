"""Feeds of workers from the rows that a manager holds, and policies that choose the rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_choice
from gfn_rb.containers.objects import terminating_states
from gfn_rb.errors import ArgumentError
from gfn_rb.kernels.order import Order
from gfn_rb.kernels.weights import Weights
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.shapes import Float, Int64
from gfn_rb.torchrl_compat import generator_of, length_of

_Rows = Int64[Tensor, "m"]

MAX_QUOTA = 4096  # rows that are fed at a time: diverse ones take time that grows with the square
_POOL = 8  # candidates that the diverse policy compares for each row that it feeds


class Feeder:
    """Feeds workers from a manager's buffer."""

    def __init__(self, rb: ReplayBuffer | None, n_ranks: int) -> None:
        self.index = None if rb is None else ObjectIndex(rb, n_ranks)
        self.subscribers: dict[int, Subscriber] = {}
        generator = None if rb is None else generator_of(rb)
        on_cpu = generator is not None and generator.device.type == "cpu"  # as are the weights
        self.generator = generator if on_cpu else None

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on."""
        self.subscribers[rank] = Subscriber(rank, terms, self)

    def offer(self, rows: Int64[Tensor, "m"]) -> None:
        """Record that rows of the buffer changed."""
        if len(rows):
            for subscriber in self.subscribers.values():
                subscriber.note(rows.numpy())

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
    """A worker that a manager feeds."""

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
        self._index = index
        self._policy = POLICIES[policy](index, feeder.generator)
        if terms.get("fresh"):  # it starts anew, without the rows that it was given
            index.given[:, rank] = False
        feeder.offer(index.refresh())
        self._changed = [np.arange(length_of(index.storage))]  # rows since the last reply
        self._n_changed = len(self._changed[0])

    def note(self, rows: Int64[np.ndarray, "m"]) -> None:
        """Record that rows of the buffer changed."""
        self._changed.append(rows)
        self._n_changed += len(rows)
        if self._n_changed > 2 * self._index.storage.max_size:  # it has long sent nothing
            self._changed = [np.unique(np.concatenate(self._changed))]
            self._n_changed = len(self._changed[0])

    def next(self, quota: int) -> TensorDictBase | None:
        """Return the next rows, and record that they were given."""
        if not self._index.storage.initialized:
            return None
        changed = np.unique(np.concatenate(self._changed or [np.empty(0, np.int64)]))
        changed = changed[: np.searchsorted(changed, length_of(self._index.storage))]
        self._changed, self._n_changed = [], 0
        if len(changed):
            # The policy is told once of all changes since the last reply.
            rows, number = torch.from_numpy(changed), self._index.number[changed]
            # Known rows are put in as -inf: one update instead of two.
            log_reward = self._index.log_reward(rows)
            log_reward = log_reward.masked_fill(self._is_known(rows), -math.inf)
            self._policy.put(rows, log_reward, torch.from_numpy(self._index.arrival[number]))
        picked = self._pick(quota)
        return self._index.read(picked) if len(picked) else None

    def _is_known(self, rows: Tensor) -> Tensor:
        """Return which rows the worker was given or, unless it wants its own, sent."""
        number, index = self._index.number[rows.numpy()], self._index
        known = index.given[number, self.rank]
        known = known if self.own else known | index.sent[number, self.rank]
        return torch.from_numpy(known)

    def _pick(self, quota: int) -> Tensor:
        """Take rows off the policy until ``quota`` are unknown to the worker; return these."""
        index, picked = self._index, torch.empty(0, dtype=torch.int64)
        while (left := quota - len(picked)) > 0:
            rows = self._policy.pick(left)
            self._policy.remove(rows)
            n_offered = len(rows)
            rows = rows[rows < length_of(index.storage)]
            rows = rows[~self._is_known(rows)]
            index.given[index.number[rows.numpy()], self.rank] = True
            picked = torch.cat([picked, rows])
            if n_offered < left:  # there are no more
                break
        return picked


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
        self._order = Order(index.storage.max_size)

    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them."""
        key = self._key(log_reward.to(torch.float64), arrival)
        self._order.put(rows.numpy(), key.numpy(), -arrival.numpy())

    def _key(self, log_reward: Tensor, arrival: Tensor) -> Tensor:
        """Return the key to order rows by, ascending; inf for rows that are never picked."""
        return -log_reward

    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Return up to k rows, the best first."""
        rows = self._order.first(min(k, len(self._order)))
        return torch.from_numpy(rows[self._order.key[rows] < math.inf])


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
        self._weights = Weights(index.storage.max_size)

    def put(self, rows: _Rows, log_reward: Float[Tensor, "m"], arrival: _Rows) -> None:
        """Put rows in, or change them."""
        self._weights.update(rows, log_reward.to(torch.float64))

    def pick(self, k: int) -> Int64[Tensor, "j"]:
        """Draw up to k rows."""
        return self._weights.draw_distinct(k, self._generator)[0]


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
