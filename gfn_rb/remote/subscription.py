"""A worker's subscription: rows that managers feed it, and what it knows of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import require_kind
from gfn_rb.containers.objects import objects_in
from gfn_rb.kernels.objects import Hashed, Objects
from gfn_rb.remote.feeding import ObjectIndex, look_up, require_terms
from gfn_rb.remote.ranks import batches_of, join_batches
from gfn_rb.writers.rows import select_rows, shallow_copy

_REMEMBERED = 100_000  # objects fed earlier that are known to a worker at least


class Subscription:
    """A worker's subscription to rows that other workers found.

    Objects that the worker holds or was fed before are dropped on arrival.

    Args:
        buffer: second buffer, beside the worker's own, that stores the fed rows. Draw from both
            through a :class:`~gfn_rb.MergedReplayBuffer`.
        quota: highest number of rows with each reply, 1 to 4096.
        policy: which unknown rows are fed: ``"top"`` for those of highest log-reward, ``"softmax"``
            for a draw by reward, ``"newest"`` for the newest.
        own: whether rows of this worker are fed to it too.

    Raises:
        ArgumentError: ``quota`` is out of range, or ``policy`` is unknown.

    Examples:
        >>> fed = reward_prioritized_buffer(10_000)
        >>> worker = ReplayBufferWorker(transport, 0, local, subscription=Subscription(fed, 32))
        >>> rb = MergedReplayBuffer(local, fed, p="mass", batch_size=64)
    """

    def __init__(
        self, buffer: ReplayBuffer, quota: int, policy: str = "top", own: bool = False
    ) -> None:
        require_kind("buffer", buffer, ReplayBuffer)
        self._terms = require_terms(quota, policy, own)
        self.buffer = buffer
        self._room = buffer.storage.max_size  # rows that are kept for take() at most
        self._known: Objects | None = None  # held or fed, in a ring
        self._n_remembered = 0
        self._untaken: deque[TensorDictBase] = deque()
        self._n_untaken = 0

    def terms(self) -> dict[str, Any]:
        """Return the subscription as the manager needs it."""
        return {**self._terms, "fresh": len(self.buffer) == 0}

    def receive(self, rows: TensorDictBase, local: ObjectIndex | None) -> int:
        """Store the rows that neither the worker's own buffer nor this one has had.

        Args:
            rows: rows of a manager, batch size [n].
            local: objects of the worker's own buffer.

        Returns:
            Number of rows dropped.
        """
        objects = objects_in(rows)
        if self._known is None:
            self._known = Objects(_REMEMBERED + 2 * self._room, objects.columns.shape[1])
            for batch in batches_of(self.buffer):
                self._remember(self._known.hashed(objects_in(batch).columns))
        hashed, slot, first = look_up(self._known, objects)
        is_new = (slot < 0) & (first == np.arange(objects.n))
        if local is not None:
            local.refresh()
            is_new &= local.find(objects) < 0
        at = is_new.nonzero()[0]
        if n_new := len(at):
            fed = rows
            if n_new < objects.n:
                fed = select_rows(rows, torch.from_numpy(at))
                hashed = hashed.select(is_new[objects.at].nonzero()[0])
            # Kept for take() as well: the buffer's writer may not keep them all.
            self.buffer.extend(shallow_copy(fed))  # whose writer may add entries
            self._untaken.append(fed)
            self._n_untaken += n_new
            while self._n_untaken - (oldest := len(self._untaken[0])) >= self._room:
                self._untaken.popleft()
                self._n_untaken -= oldest
            self._remember(hashed)
        return objects.n - n_new

    def _remember(self, hashed: Hashed) -> None:
        """Know objects from now on, in place of those known for longest."""
        known = self._known
        if known is not None and known.width == hashed.rows.shape[1]:
            slot = (self._n_remembered + np.arange(len(hashed.code))) % known.capacity
            known.put(slot, hashed)
            self._n_remembered += len(slot)

    def take(self) -> TensorDictBase | None:
        """Return the rows stored since the last call, as ``ReplayBufferWorker.take_fed`` does."""
        batches, self._untaken, self._n_untaken = self._untaken, deque(), 0
        return join_batches(batches) if batches else None
