"""Where a compiled loop writes rows: the addresses of a batch and of the columns of a storage."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.kernels.exchange import CAME_AT, FIRST_LEAF, LEAF_SIZE, N_BYTES, STORED_AT, WIDTH
from gfn_rb.kernels.memory import IS_AVAILABLE
from gfn_rb.shapes import Int64, Rows
from gfn_rb.storages.sharing import has_recorders
from gfn_rb.storages.tensors import EncodedStorage
from gfn_rb.writers.rows import tensors_of

NO_SLOTS = torch.zeros(0, dtype=torch.int64)


class RowAddresses:
    """Addresses of the columns of a storage, as a compiled loop writes to them."""

    def __init__(self) -> None:
        self._stored: Any = None  # the columns, when they were looked up
        # Of each column: its name, a tensor, a batch without rows.
        self._leaves: list[tuple[Any, Tensor, Tensor]] | None = None
        self._put = NO_SLOTS  # what :meth:`addresses` returned last
        self.tensors: list[Tensor] = []
        self._came: list[Tensor] = []  # copies of rows that did not lie side by side

    def addresses(
        self, storage: Storage, data: Rows | None, ages: Tensor, counters: Tensor
    ) -> Int64[Tensor, "m"]:
        """Return where a compiled loop writes rows, nothing where it cannot.

        ``data`` is None where rows only move. Its rows have the entries, dtypes and shapes of the
        storage, as ``RowLayout`` checks. Here all are checked to lie side by side on the host, in
        memory of this process alone.
        """
        if not IS_AVAILABLE or has_recorders(storage):
            return NO_SLOTS
        if compat.all_slots(storage) is not self._stored:
            self._look_up(storage)
        counts = compat.counter_addresses(storage)
        if self._leaves is None or counts is None:
            return NO_SLOTS
        stamps = compat.slot_generations(storage)
        beside = counters.data_ptr(), ages.data_ptr(), 0 if stamps is None else stamps.data_ptr()
        rows = None if data is None else tensors_of(data)
        self._came = []
        put = self._put.numpy()
        put[:FIRST_LEAF] = *counts, *beside
        at = FIRST_LEAF
        for name, leaf, none in self._leaves:
            value: Any = none if rows is None else rows.get(name)
            # A wrong address would corrupt memory, so that everything doubtful goes by PyTorch.
            if type(value) is not Tensor or not value.is_cpu or value.dtype != leaf.dtype:
                return NO_SLOTS
            if not value.is_contiguous() or value.is_neg() or value.is_conj():
                value = value.resolve_conj().resolve_neg().contiguous()
                self._came.append(value)  # so that its memory is there when it is read
            # Also that of the storage: who shares its memory with a process moves it.
            put[at + STORED_AT], put[at + CAME_AT] = leaf.data_ptr(), value.data_ptr()
            at += LEAF_SIZE
        return self._put

    def _look_up(self, storage: Storage) -> None:
        """Look up the columns on the host, none where some lie elsewhere."""
        stored, self._leaves = compat.all_slots(storage), None
        if not isinstance(storage, EncodedStorage) and isinstance(stored, TensorDictBase):
            leaves = [(name, compat.as_plain(leaf)) for name, leaf in tensors_of(stored).items()]
            self.tensors = [leaf for _, leaf in leaves]
            if all(
                isinstance(leaf, Tensor) and leaf.is_cpu and leaf.is_contiguous()
                for leaf in self.tensors
            ):
                self._leaves = [(name, leaf, leaf[:0]) for name, leaf in leaves]
                self._put = torch.zeros(FIRST_LEAF + LEAF_SIZE * len(leaves), dtype=torch.int64)
                put = self._put[FIRST_LEAF:].view(-1, LEAF_SIZE)
                for i, leaf in enumerate(self.tensors):
                    put[i, WIDTH], put[i, N_BYTES] = leaf.nbytes // len(leaf), leaf.nbytes
        self._stored = stored  # last, or an interrupt would leave the others as they were
