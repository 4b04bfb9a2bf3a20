"""Where a compiled loop writes rows: the addresses of a batch and of the columns of a storage."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.kernels.exchange import FIRST_LEAF, LEAF_SIZE
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
        self._columns: list[Any] = []  # as the storage has them
        # Of each column: its name, its tensor, a batch without rows; of a row, its shape and bytes;
        # the bytes of the tensor.
        self._leaves: list[tuple[Any, Tensor, Tensor, torch.Size, int, int]] | None = None
        self._put = NO_SLOTS  # what :meth:`addresses` returned last
        self._pack: Callable[..., None] | None = None  # writes numbers to it
        self.tensors: list[Tensor] = []
        self._came: list[Tensor] = []  # copies of rows that did not lie side by side

    def addresses(
        self, storage: Storage, data: Rows | None, ages: Tensor, counters: Tensor
    ) -> Int64[Tensor, "m"]:
        """Return where a compiled loop writes rows, nothing where it cannot.

        ``data`` is None where rows only move. Its rows have the entries, dtypes and shapes of the
        storage, and lie side by side on the host, in memory of this process alone. Rows that need
        more than a copy have no addresses, such as those with gradients or further entries:
        ``RowLayout`` says what is wrong or leaves out what is not stored.
        """
        if not IS_AVAILABLE or has_recorders(storage):
            return NO_SLOTS
        stored = compat.all_slots(storage)
        if stored is not self._stored or not compat.holds(stored, self._columns):
            self._look_up(storage)
        counts = compat.counter_addresses(storage)
        if self._leaves is None or self._pack is None or counts is None:
            return NO_SLOTS
        stamps = compat.slot_generations(storage)
        put = [*counts, counters.data_ptr(), ages.data_ptr()]
        put.append(0 if stamps is None else stamps.data_ptr())
        rows = None if data is None else tensors_of(data)
        if rows is not None and len(rows) != len(self._leaves):
            return NO_SLOTS
        self._came = []
        for name, leaf, none, shape, width, n_bytes in self._leaves:
            value: Any = none if rows is None else rows.get(name)
            # A wrong address would corrupt memory, so that everything doubtful goes by PyTorch.
            if (
                type(value) is not Tensor
                or not value.is_cpu
                or value.dtype != leaf.dtype
                or value.shape[1:] != shape
                or value.requires_grad
            ):
                return NO_SLOTS
            if not value.is_contiguous() or value.is_neg() or value.is_conj():
                value = value.resolve_conj().resolve_neg().contiguous()
                self._came.append(value)  # so that its memory is there when it is read
            # Also that of the storage: who shares its memory with a process moves it.
            put += leaf.data_ptr(), value.data_ptr(), width, n_bytes
        self._pack(self._put.numpy().data, 0, *put)
        return self._put

    def _look_up(self, storage: Storage) -> None:
        """Look up the columns on the host, none where some lie elsewhere."""
        stored, self._leaves, self._columns = compat.all_slots(storage), None, []
        if not isinstance(storage, EncodedStorage) and isinstance(stored, TensorDictBase):
            self._columns = [*stored.values()]
            leaves = [(name, compat.as_plain(leaf)) for name, leaf in tensors_of(stored).items()]
            self.tensors = [leaf for _, leaf in leaves]
            if all(
                isinstance(leaf, Tensor) and leaf.is_cpu and leaf.is_contiguous()
                for leaf in self.tensors
            ):
                self._leaves = [
                    (name, leaf, leaf[:0], leaf.shape[1:], leaf.nbytes // len(leaf), leaf.nbytes)
                    for name, leaf in leaves
                ]
                self._put = torch.zeros(FIRST_LEAF + LEAF_SIZE * len(leaves), dtype=torch.int64)
                self._pack = Struct(f"{len(self._put)}q").pack_into
        self._stored = stored  # last, or an interrupt would leave the others as they were
