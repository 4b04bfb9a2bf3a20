"""Which objects a buffer holds, kept in step with its storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.column import KeyColumn
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.identity import identities
from gfn_rb.shapes import Float, Int64

_AT_ONCE = 4096  # rows whose content is taken out of the storage at a time


class Holdings:
    """The objects that the rows of a storage stand for, looked up by identity.

    What the storage holds is the truth: rows that its writer moves, overwrites or restores are
    read again. Where rows were announced as written, only those are; a look costs as much as
    rows changed since the last one.

    Args:
        rb: a buffer whose storage is a one-dimensional tensor storage with a ``log_reward``.
    """

    def __init__(self, rb: ReplayBuffer) -> None:
        self.storage: Storage = rb.storage
        self._column = KeyColumn(LOG_REWARD)
        self._length = 0
        self._name: list[bytes | None] = [None] * self.storage.max_size
        self._slot: dict[bytes, int] = {}
        self._more: dict[bytes, set[int]] = {}  # further rows of the same object
        self.storage.attach(self)

    def __len__(self) -> int:
        """Return the number of different objects held, as of the last look."""
        return len(self._slot)

    def mark_update(self, index: int | Tensor) -> None:
        """Take note that rows were written: TorchRL's call to what is attached to a storage.

        Args:
            index: the rows, -1 for one that was rejected.
        """
        if self.storage.initialized:
            rows = torch.as_tensor(index, dtype=torch.int64)
            self._column.announce(self.storage, rows.cpu())

    def look(self) -> Int64[Tensor, "m"]:
        """Bring the objects up to date with the storage.

        Returns:
            The rows that were read again, each once.
        """
        if not self.storage.initialized:
            return torch.empty(0, dtype=torch.int64)
        rows, beyond = self._changed(), range(len(self.storage), self._length)
        self._length = len(self.storage)
        gone = self._forget([*rows.tolist(), *beyond])
        if len(rows):
            names = [name for part in rows.split(_AT_ONCE) for name in self._read(part)]
            before = [-1 if n is None else self._slot.get(n, gone.get(n, -1)) for n in names]
            self._moved(rows, torch.tensor(before))
            self._remember(rows.tolist(), names)
        return rows

    def log_reward(self, rows: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return the log-rewards of rows.

        Args:
            rows: in [0, len(storage)).
        """
        return self._column.values(self.storage)[rows].cpu()

    def slots(self, names: Sequence[bytes | None]) -> list[int]:
        """Return the row that holds each object, -1 where none does, as of the last look.

        Args:
            names: from :func:`~gfn_rb.remote.identity.identities`.
        """
        return [-1 if name is None else self._slot.get(name, -1) for name in names]

    def _changed(self) -> Tensor:
        if len(self.storage) < self._length:  # it was emptied
            self._column.forget()
        rows = self._column.changed(self.storage)
        return torch.arange(len(self.storage)) if rows is None else rows.unique()

    def _read(self, rows: Tensor) -> list[bytes | None]:
        return identities(self.storage.get(rows))

    def _forget(self, rows: list[int]) -> dict[bytes, int]:
        """Clear rows, and return where the objects stood of which no row is left."""
        gone = {}
        for row in rows:
            name, self._name[row] = self._name[row], None
            if name is None:
                continue
            others = self._more.get(name)
            if others is None:
                gone[name] = self._slot.pop(name)
                continue
            if self._slot[name] == row:
                self._slot[name] = others.pop()
            else:
                others.discard(row)
            if not others:
                del self._more[name]
        return gone

    def _remember(self, rows: list[int], names: list[bytes | None]) -> None:
        for row, name in zip(rows, names, strict=True):
            self._name[row] = name
            if name is not None and self._slot.setdefault(name, row) != row:
                self._more.setdefault(name, set()).add(row)

    def _moved(self, rows: Tensor, before: Tensor) -> None:
        """Do what there is to do where rows now hold what other rows, or none (-1), held before."""


def distinct(
    names: Sequence[bytes | None], held: Holdings | None = None
) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "j"]]:
    """Return the positions of the objects that are neither held nor repeated.

    Args:
        names: from :func:`~gfn_rb.remote.identity.identities`; what has no identity (None) is
            never a repetition.
        held: what else counts as a repetition.

    Returns:
        The positions to keep, in order; and the rows of ``held`` that the others repeat.
    """
    slots = [-1] * len(names) if held is None else held.slots(names)
    first = {name: i for i, name in reversed(list(enumerate(names))) if name is not None}
    keep = [
        i
        for i, (name, slot) in enumerate(zip(names, slots, strict=True))
        if slot < 0 and (name is None or first[name] == i)
    ]
    return torch.tensor(keep, dtype=torch.int64), torch.tensor(
        [slot for slot in slots if slot >= 0], dtype=torch.int64
    )
