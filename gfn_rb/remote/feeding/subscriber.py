"""Who is to be given which of the rows that a manager holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding.feed_policies import POLICIES, check_policy
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.shapes import Int64


class Feeder:
    """Feeds workers from a manager's buffer.

    Args:
        rb: the buffer; None to feed nobody.
        n_ranks: how many ranks there are.
        generator: source of randomness of softmax draws, on the CPU.

    Attributes:
        index: the objects that the buffer holds, None without one.
        subscribers: those who are fed, by rank.
    """

    def __init__(
        self, rb: ReplayBuffer | None, n_ranks: int, generator: torch.Generator | None = None
    ) -> None:
        self.index = None if rb is None else ObjectIndex(rb, n_ranks)
        self.subscribers: dict[int, Subscriber] = {}
        self._generator = generator

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on.

        Raises:
            ArgumentError: they cannot be met.
        """
        if self.index is None:
            raise ArgumentError("this manager keeps no items, so that nobody can be fed from it")
        self.subscribers[rank] = Subscriber(rank, terms, self.index)

    def offer(self, rows: Int64[Tensor, "m"]) -> None:
        """Record that rows of the buffer changed, each named once."""
        for subscriber in self.subscribers.values():
            subscriber.offer(rows)

    def next_for(self, rank: int, quota: int | None = None) -> TensorDictBase | None:
        """Return the rows that a worker is given next, None if there are none or it is not fed.

        At most ``quota``, by default as many as it subscribed to.
        """
        subscriber = self.subscribers.get(rank)
        if subscriber is None:
            return None
        return subscriber.next(quota or subscriber.quota, self._generator)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of the buffer's objects and who is fed, without the buffer."""
        return {
            "index": None if self.index is None else self.index.state_dict(),
            "subscribers": {str(rank): each.terms for rank, each in self.subscribers.items()},
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a buffer restored to that moment.

        Raises:
            CheckpointMismatchError: it is of another buffer.
        """
        if self.index is not None and state["index"] is not None:
            self.index.load_state_dict(state["index"])
            self.subscribers = {
                int(rank): Subscriber(int(rank), {**terms, "fresh": False}, self.index)
                for rank, terms in state["subscribers"].items()
            }
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(state["generator"])


class Subscriber:
    """A worker that a manager feeds.

    Args:
        rank: of the worker.
        terms: what :meth:`~gfn_rb.remote.Subscription.terms` gave.
        index: of the manager's buffer.

    Raises:
        ArgumentError: the terms are none.
    """

    def __init__(self, rank: int, terms: Any, index: ObjectIndex) -> None:
        self.rank = rank
        self.quota, self.own = _check_terms(terms)
        self.terms = dict(terms)
        self._index = index
        self._policy = POLICIES[check_policy(terms.get("policy"))](index)
        if terms.get("fresh"):  # it starts anew, and has nothing of what it was given
            index.given[:, rank] = False
        index.refresh()
        self._changed = [torch.arange(len(index.storage))]
        self._n_changed = len(index.storage)

    def offer(self, rows: Int64[Tensor, "m"]) -> None:
        """Record that rows of the buffer changed, or who knows them, each named once."""
        if len(rows) == 0:
            return
        self._changed.append(rows)
        self._n_changed += len(rows)
        # One that never asks must not hold more than the buffer does: each row is named once.
        if self._n_changed > 2 * self._index.storage.max_size:
            self._changed = [torch.cat(self._changed).unique()]
            self._n_changed = len(self._changed[0])

    def next(self, quota: int, generator: torch.Generator | None) -> TensorDictBase | None:
        """Return the rows to give next, and record that they were given.

        Args:
            quota: how many at most, at least 1.
            generator: source of randomness, on the CPU.

        Returns:
            The rows, None if there are none.
        """
        if not self._index.storage.initialized:
            return None
        self._update_policy()
        rows = self._pick(quota, generator)
        if len(rows) == 0:
            return None
        self._index.given[self._index.number[rows.numpy()], self.rank] = True
        return self._index.read(rows).cpu()

    def _update_policy(self) -> None:
        """Tell the policy what changed: once for all changes since the last reply."""
        if self._n_changed == 0:
            return
        changed = np.unique(torch.cat(self._changed).numpy())
        self._changed, self._n_changed = [], 0
        changed = changed[: np.searchsorted(changed, len(self._index.storage))]
        if len(changed):
            rows, number = torch.from_numpy(changed), self._index.number[changed]
            # What is known is put in as worth nothing: one update instead of two.
            log_reward = self._index.log_reward(rows).masked_fill(self._known(rows), -math.inf)
            self._policy.put(rows, log_reward, torch.from_numpy(self._index.arrival[number]))

    def _known(self, rows: Tensor) -> Tensor:
        """Return whether the worker was given, or sent, what each row holds."""
        number, index = self._index.number[rows.numpy()], self._index
        known = index.given[number, self.rank]
        return torch.from_numpy(known if self.own else known | index.sent[number, self.rank])

    def _pick(self, quota: int, generator: torch.Generator | None) -> Tensor:
        """Take rows off the policy, and return those that still hold what the worker lacks.

        Rows may have been emptied, or hold what another row held that was given.
        """
        while len(rows := self._policy.pick(quota, generator)):
            self._policy.remove(rows)
            rows = rows[rows < len(self._index.storage)]
            rows = rows[~self._known(rows)]
            if len(rows):
                break
        return rows


def _check_terms(terms: Any) -> tuple[int, bool]:
    if not isinstance(terms, Mapping):
        raise ArgumentError(f"subscription must be terms by name, got {terms!r}")
    quota, own = terms.get("quota"), terms.get("own", False)
    if type(own) is not bool:
        raise ArgumentError(f"own must be true or false, got {own!r}")
    if type(quota) is not int or quota < 1:
        raise ArgumentError(f"quota must be a number of at least 1, got {quota!r}")
    return quota, own
