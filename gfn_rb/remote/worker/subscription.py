"""Items that come back from a manager: where they land."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.containers.objects import object_keys
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding.feed_policies import check_policy
from gfn_rb.remote.feeding.object_index import ObjectIndex
from gfn_rb.remote.worker.payload import join_batches
from gfn_rb.writers.rows import select_rows, shallow_copy

_REMEMBERED = 100_000  # objects fed earlier that are known to a worker at least


class Subscription:
    """A worker's wish to be given what others found: which items, how many, and where to.

    Objects that the worker holds already, or was given before, are dropped on arrival.

    Args:
        buffer: where they are stored, a second buffer beside the worker's own; draw from both
            through a :class:`~gfn_rb.MergedReplayBuffer`.
        quota: how many rows come with each reply, at most.
        policy: which of the rows that the worker does not know yet: the ``"top"`` ones,
            ``"diverse"`` ones out of these, a ``"softmax"`` draw, or the ``"newest"``.
        own: whether to be given also what came from this worker.

    Raises:
        ArgumentError: ``quota`` below 1, an unknown ``policy``, or a buffer over another storage
            than a one-dimensional tensor storage.

    Examples:
        >>> fed = reward_prioritized_buffer(10_000)
        >>> worker = ReplayBufferWorker(transport, 0, local, subscription=Subscription(fed, 32))
        >>> rb = MergedReplayBuffer(local, fed, p="mass", batch_size=64)
    """

    def __init__(
        self, buffer: ReplayBuffer, quota: int, policy: str = "top", own: bool = False
    ) -> None:
        if quota < 1:
            raise ArgumentError(f"quota must be at least 1, got {quota}")
        self.buffer = buffer
        self.quota = quota
        self.policy = check_policy(policy)
        self.own = own
        self._room = buffer.storage.max_size  # rows, for somebody who never takes them
        self._fed = ObjectIndex(buffer, n_remembered=_REMEMBERED + self._room)
        self._untaken: deque[TensorDictBase] = deque()

    def terms(self) -> dict[str, Any]:
        """Return what the manager has to know."""
        fresh = len(self.buffer) == 0
        return {"quota": self.quota, "policy": self.policy, "own": self.own, "fresh": fresh}

    def receive(self, rows: TensorDictBase, local: ObjectIndex | None) -> int:
        """Store rows that the worker does not know.

        Args:
            rows: from a manager, batch size [n].
            local: what the worker holds itself.

        Returns:
            How many were dropped, because held, or fed before.
        """
        keys = object_keys(rows)
        self._fed.refresh()
        new, _ = self._fed.new(keys)
        if local is not None:
            local.refresh()
            new = new[local.find([keys[i] for i in new.tolist()]) < 0]
        if len(new):
            fed = select_rows(rows, torch.from_numpy(new))
            self.buffer.extend(shallow_copy(fed))  # whose writer may add entries
            self._untaken.append(fed)
            while sum(map(len, self._untaken)) - len(self._untaken[0]) >= self._room:
                self._untaken.popleft()
            self._fed.remember([keys[i] for i in new.tolist()])
        return len(rows) - len(new)

    def take(self) -> TensorDictBase | None:
        """Return the rows stored since the last call, see :meth:`ReplayBufferWorker.take_fed`."""
        batches = [*self._untaken]
        self._untaken.clear()
        return join_batches(batches) if batches else None
