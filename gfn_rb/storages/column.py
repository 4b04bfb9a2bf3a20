"""One key of a storage: its values, and which of its rows changed since they were read.

A storage can change through several buffers, from another process, by ``rb[i:j] = rows``,
``rb.set_at_(key, ...)`` or a plain in-place write to ``rb["log_reward"]``. Two counters see all of
them: the storage's mutation revision (shared between processes) and the key tensor's version
(bumped by every in-place write of this process). A write that was announced together with its rows
moves each by exactly one; whatever else moves them means "anything may have changed".
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import KeyMismatchError, ShapeError
from gfn_rb.shapes import Float, Int64, Shaped
from gfn_rb.storages.tensors import require_rows

# What identifies a content: the storage's revision, then of each tensor watched its version and its
# address, for it may be replaced by another.
Version = tuple[int, ...]
_FLOATS = torch.float32, torch.float64  # as loops read them
_UNKNOWN = object()  # in place of the slots of a storage


class RowChanges:
    """Rows that changed since they were taken last, all of them where these are many."""

    def __init__(self) -> None:
        self._rows: list[Tensor] | None = None  # None for "perhaps all"
        self._count = 0

    def note(self, rows: Int64[Tensor, "m"], stored: int) -> None:
        """Record that some rows changed, of so many."""
        if self._rows is not None:
            self._rows.append(rows)
            self._count += rows.shape[0]
            if self._count > stored // 4:
                self.forget()

    def take(self) -> Int64[Tensor, "m"] | None:
        """Return the rows, each perhaps repeatedly, or None for "perhaps all"."""
        rows, self._rows, self._count = self._rows, [], 0
        if not rows:
            return None if rows is None else torch.empty(0, dtype=torch.int64)
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def forget(self) -> None:
        """Make the next :meth:`take` answer "perhaps all"."""
        self._rows = None


class KeyColumn:
    """One scalar-valued key of a TorchRL storage, as a tensor."""

    def __init__(self, key: NestedKey) -> None:
        self.key = key
        self._reads: Callable[[NestedKey], bool] | None = None
        self._seen: Version | None = None
        self._changes = RowChanges()
        self._raw: Tensor | None = None
        self._plain: Tensor | None = None
        self._slots: Any = _UNKNOWN  # of the storage, whose entries were looked up
        self._entries: list[tuple[NestedKey, Any]] = []  # that are watched
        self._watched: list[Tensor] = []  # the same, as plain tensors

    def values(self, storage: Storage) -> Shaped[Tensor, "len"]:
        """Return the key of every stored row, a view that only :meth:`write` may write to."""
        plain, n = self._plain, compat.length_of(storage)
        if plain is None or compat.entry_in(storage, self.key) is not self._raw:
            plain = self._leaf(storage)
        return plain if n == plain.shape[0] else plain[:n]

    def floats_of(self, data: TensorDict) -> Float[Tensor, "n"] | None:
        """Return the key of each row of a batch if it can be read as it is, else None."""
        key = compat.entry_of(data, self.key)
        if key is None or key.ndim != 1 or key.dtype not in _FLOATS:
            return None
        return key if key.is_contiguous() and not key.is_neg() else None

    def write(
        self, storage: Storage, index: Int64[Tensor, "m"], value: Shaped[Tensor, "m"]
    ) -> None:
        """Set the key of some rows, which has then to be announced."""
        values = self.values(storage)
        index = index.to(values.device, non_blocking=True)
        values[index] = value.to(values, non_blocking=True)
        compat.bump_mutation_revision(storage)

    def watch_also(self, reads: Callable[[NestedKey], bool]) -> None:
        """Have :meth:`version` change with other entries, too."""
        self._reads, self._slots = reads, _UNKNOWN

    def announce(self, storage: Storage, index: Tensor) -> None:
        """Record that rows were just written; -1 stands for a row that was not."""
        if storage.ndim != 1:
            require_rows(storage)
        seen = self._seen
        if seen is None or not index.is_cpu or (now := self.version_after_write(storage)) == seen:
            return
        rows = index if index.ndim == 1 else index.reshape(-1)
        if rows.shape[0] and int(rows.amin()) < 0:  # to choose rows takes ten times as long
            rows = rows[rows >= 0]
        if rows.shape[0] == 0:
            return
        # First: an interrupt must not lose them.
        self._changes.note(rows, compat.length_of(storage))
        # One write through the storage raises each counter by one. If they moved any further,
        # something else was written as well, and nobody knows where.
        expected = tuple(map(add, seen, (1, *(1, 0) * len(self._watched))))
        self._seen = now if now == expected else None

    def changed(self, storage: Storage) -> Int64[Tensor, "m"] | None:
        """Return the rows that changed since the last call, or None for "perhaps all"."""
        now, rows = self.version(storage), self._changes.take()
        is_known, self._seen = now == self._seen, now
        return rows if is_known else None

    def forget(self) -> None:
        """Make the next :meth:`changed` answer "perhaps all"."""
        self._seen = None

    def version(self, storage: Storage) -> Version:
        """Return what identifies the present content."""
        known = compat.column_version(storage, self._slots, self._entries, self._watched)
        return self._looked_up(storage) if known is None else known

    def version_after_write(self, storage: Storage) -> Version:
        """Return the :meth:`version` after a write in place, which replaces no tensor."""
        known = compat.column_version(storage, self._slots, (), self._watched)
        return self._looked_up(storage) if known is None else known

    def _looked_up(self, storage: Storage) -> Version:
        """Look up the tensors that are watched, which may have been replaced."""
        self._entries, self._watched = [], []
        self._watch_own(storage)
        if self._reads is not None:
            for name, entry in compat.all_slots(storage).items(True, True):
                if self._reads(name):
                    self._entries.append((name, entry))
                    self._watched.append(entry.detach().as_subclass(Tensor))
        slots = compat.all_slots(storage)
        self._slots = _UNKNOWN if slots is None else slots  # looked up again until there are any
        version = compat.column_version(storage, slots, (), self._watched)
        assert version is not None  # these are its slots
        return version

    def _watch_own(self, storage: Storage) -> None:
        self._watched.append(self._leaf(storage))
        self._entries.append((self.key, self._raw))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the counters and tensors of this process."""
        return {**KeyColumn(self.key).__dict__, "_reads": self._reads}

    def _leaf(self, storage: Storage) -> Tensor:
        """Return the key tensor as a plain and flat one, checked where it was not seen before.

        A memory-mapped tensor dispatches every operation through Python; its plain view does not.
        """
        data = compat.all_slots(storage)
        if data is None:
            compat.open_shared(storage)
            data = compat.all_slots(storage)
        get = getattr(data, "get", None)  # of a TensorDict, a tensorclass or a dict of tensors
        raw = None if get is None else compat.entry_of(data, self.key)
        if self._plain is None or raw is None or raw is not self._raw:
            require_rows(storage)
            if raw is None:
                raise _lacks(self.key, data)
            if raw.numel() != raw.shape[0]:
                raise ShapeError(
                    f"key {self.key!r} must hold one number per row, got shape "
                    f"{tuple(raw.shape[1:])} per row"
                )
            self._raw, self._plain = raw, raw.detach().as_subclass(torch.Tensor).reshape(-1)
        return self._plain


class EqualKeys(KeyColumn):
    """A column that storages need not have, as each row has the same key."""

    def values(self, storage: Storage) -> Float[Tensor, "len"]:
        """Return zeros."""
        return torch.zeros(len(storage))

    def floats_of(self, data: TensorDict) -> Float[Tensor, "n"]:
        """Return zeros."""
        return torch.zeros(data.batch_size[0])

    def _watch_own(self, storage: Storage) -> None:
        compat.open_shared(storage)


def _lacks(key: NestedKey, rows: Any) -> KeyMismatchError:
    if is_tensor_collection(rows):
        held = str(sorted(map(str, rows.keys(True, True))))
    else:
        held = str(sorted(map(str, rows))) if isinstance(rows, dict) else type(rows).__name__
    return KeyMismatchError(f"key {key!r} is not in the storage, which holds {held}")
