"""Watching one key of a storage: which of its rows changed since it was read.

A storage can change in many ways: through the buffer that owns a sampler, through another buffer
on the same storage, from another process, by ``rb[i:j] = rows``, ``rb.set_at_(key, ...)`` or a
plain in-place write to ``rb["log_reward"]``. Two counters see all of them: the storage's mutation
revision (shared between processes) and the key tensor's version (bumped by every in-place write
of this process). A write that was announced together with its rows moves each by exactly one;
whatever else moves them means "anything may have changed".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.shapes import Float, Int64
from gfn_rb.torchrl_compat import all_slots, mutation_revision, tensor_version, wait_for_init


class StorageVersion(NamedTuple):
    """What identifies one content of a key column.

    Attributes:
        revision: of the storage, raised by every write through it, from any process.
        tensor: version of the key tensor, raised by every write in place of this process.
        address: where the key tensor lies, for it may be replaced by another.
    """

    revision: int
    tensor: int
    address: int


class KeyColumn:
    """One scalar-valued key of a TorchRL tensor storage.

    Args:
        key: the key to watch.
    """

    def __init__(self, key: NestedKey) -> None:
        self.key = key
        self._seen: StorageVersion | None = None
        self._announced: list[Tensor] = []
        self._count = 0
        self._raw: Tensor | None = None
        self._plain: Tensor | None = None

    def values(self, storage: Storage) -> Float[Tensor, "len"]:
        """Return the key of every stored row, a view on the storage where its layout allows.

        Args:
            storage: a one-dimensional, initialised :class:`TensorStorage`.

        Raises:
            ShapeError: another kind of storage, or a key with several values per row.
            KeyMismatchError: the storage does not hold the key.
        """
        return self._leaf(storage)[: len(storage)].reshape(-1)

    def announce(self, storage: Storage, index: Tensor) -> None:
        """Record that rows were just written; -1 stands for a row that was not.

        Args:
            storage: where they were written.
            index: the rows.
        """
        seen = self._seen
        if seen is None or index.device.type != "cpu" or (now := self.version(storage)) == seen:
            return
        rows = index.reshape(-1)
        rows = rows[rows >= 0]
        if rows.shape[0] == 0:
            return
        self._count += rows.shape[0]
        # One write through the storage raises each counter by one. If they moved any further,
        # something else was written as well, and nobody knows where.
        announced = StorageVersion(seen.revision + 1, seen.tensor + 1, seen.address)
        if now != announced or self._count > len(storage) // 4:
            self.forget()
            return
        self._seen = now
        self._announced.append(rows)

    def changed(self, storage: Storage) -> Int64[Tensor, "m"] | None:
        """Return the rows that changed since the last call, or None for "perhaps all".

        Args:
            storage: the storage to look at.
        """
        now, announced = self.version(storage), self._announced
        known = now == self._seen
        self._seen, self._announced, self._count = now, [], 0
        if not known:
            return None
        return torch.cat(announced) if announced else torch.empty(0, dtype=torch.int64)

    def forget(self) -> None:
        """Make the next :meth:`changed` answer "perhaps all"."""
        self._seen, self._announced, self._count = None, [], 0

    def version(self, storage: Storage) -> StorageVersion:
        """Return what identifies the present content.

        Args:
            storage: the storage to look at.
        """
        leaf = self._leaf(storage)
        return StorageVersion(mutation_revision(storage), tensor_version(leaf), leaf.data_ptr())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the counters and tensors of this process."""
        return KeyColumn(self.key).__dict__

    def _leaf(self, storage: Storage) -> Tensor:
        """Return the key tensor as a plain one, checked where it was not seen before.

        A memory-mapped tensor dispatches every operation through Python; its plain view does not.
        """
        open_shared(storage)
        data = all_slots(storage)
        raw = data.get(self.key, None) if isinstance(data, TensorDictBase) else None
        if self._plain is None or raw is None or raw is not self._raw:
            self._raw, self._plain = raw, self._checked(storage, raw).as_subclass(torch.Tensor)
        return self._plain

    def _checked(self, storage: Storage, leaf: Tensor | None) -> Tensor:
        require_rows(storage)
        if leaf is None:
            held = sorted(map(str, all_slots(storage).keys(True, True)))
            raise KeyMismatchError(f"key {self.key!r} is not in the storage, which holds {held}")
        if leaf.numel() != leaf.shape[0]:
            raise ShapeError(
                f"key {self.key!r} must hold one number per row, got shape "
                f"{tuple(leaf.shape[1:])} per row"
            )
        return leaf


def require_rows(storage: Storage) -> None:
    """Raise unless a storage holds tensors, one row per item.

    Args:
        storage: of any kind.

    Raises:
        ShapeError: another kind of storage, or one of several dimensions.
    """
    if not isinstance(storage, TensorStorage) or storage.ndim != 1:
        raise ShapeError(
            "storage must be a LazyTensorStorage, LazyMemmapStorage or TensorStorage with "
            f"ndim=1, got {type(storage).__name__} with ndim={storage.ndim}"
        )


def open_shared(storage: Storage) -> None:
    """Open a storage that another process has laid out.

    With ``shared_init=True`` the first process to write lays the storage out; the others know its
    length at once, but its memory only when they ask for it.

    Args:
        storage: any storage.
    """
    if getattr(storage, "shared_init", False) and not storage.initialized and len(storage):
        wait_for_init(storage)
