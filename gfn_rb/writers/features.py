"""Numbers that the items of a buffer are compared by, and an index of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.arguments import as_keys, kind_of, require_key
from gfn_rb.containers import convert
from gfn_rb.containers.objects import object_columns
from gfn_rb.errors import ArgumentError, KeyMismatchError, NaNError, ShapeError
from gfn_rb.keys import (
    ACTION,
    CONDITION,
    IS_BACKWARD,
    IS_TERMINATING,
    LENGTH,
    N_USES,
    NEXT,
    NEXT_STATE,
    STATE,
)
from gfn_rb.numerics.flat import equal_bits, flat_rows, on_host
from gfn_rb.shapes import Int64, Rows, Shaped
from gfn_rb.storages.column import Version
from gfn_rb.storages.tensors import EncodedStorage
from gfn_rb.torchrl_compat import all_slots, length_of

_Key: TypeAlias = str | tuple[Any, ...]  # mypy takes tensordict's NestedKey for anything
Unique: TypeAlias = _Key | Sequence[_Key] | Callable[[TensorDictBase], Tensor] | None

_READ_BY_DEFAULT = (STATE, NEXT_STATE, LENGTH, IS_BACKWARD, CONDITION)


class Features:
    """Turns items into rows of numbers to measure distances between; see ``DiversityWriter``."""

    def __init__(self, source: NestedKey | Callable[[TensorDictBase], Tensor] | None) -> None:
        if not (source is None or callable(source) or isinstance(source, (str, tuple))):
            raise ArgumentError(
                f"features must be a key, a callable or None, got a {type(source).__name__}"
            )
        if isinstance(source, (str, tuple)):
            require_key("features", source)
        self.source = source

    def __call__(self, data: Rows) -> Shaped[Tensor, "n d"]:
        """Return one row per item."""
        names = set(data.keys())  # a lookup in a TensorDict takes longer
        rows = _default(data, names) if self.source is None else self._of(data)
        if CONDITION in names:
            condition = _flat(data.get(CONDITION))
            dtype = torch.promote_types(rows.dtype, condition.dtype)
            if rows.is_floating_point() != condition.is_floating_point():
                dtype = torch.float64  # which holds both without loss
            rows = torch.cat([rows.to(dtype), condition.to(dtype)], 1)
        if rows.is_cpu:  # what is on a device is looked at once it was fetched
            require_finite(rows)
        return rows.detach() if rows.requires_grad else rows

    def register_storage(self, storage: Storage) -> None:
        """Note in which storage the items are kept."""

    def reads(self, name: NestedKey) -> bool:
        """Return whether the numbers may depend on an entry."""
        read = _READ_BY_DEFAULT if self.source is None else (self.source, CONDITION)
        # A callable may read all but the number of draws, which each draw changes.
        return name != N_USES if callable(self.source) else name in read

    def same_entry(self, stored: Mapping[NestedKey, Tensor]) -> NestedKey | None:
        """Return the entry whose integers are these numbers, None if they are computed.

        Args:
            stored: the entries of the rows.
        """
        return None

    def _of(self, data: Rows) -> Tensor:
        if not callable(self.source):
            return _flat(_entry(data, self.source))
        rows = self.source(data)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or rows.shape[0] != data.shape[0]:
            came = list(rows.shape) if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
            raise ShapeError(
                f"features must return a tensor of shape [n, d] with n={data.shape[0]}, got {came}"
            )
        return _real(rows)


class ObjectColumns(Features):
    """Turns items into rows of integers that are equal exactly where items are of one object.

    See ``unique`` of ``RewardPrioritizedWriter``.
    """

    def __init__(self, source: Unique, name: str = "unique") -> None:
        source = as_keys(source)
        keys = source if isinstance(source, list) and source else [source]
        if not (callable(source) or all(isinstance(key, (str, tuple)) and key for key in keys)):
            raise ArgumentError(
                f"{name} must be a key, a list of keys, a callable or None, got {source!r}"
            )
        super().__init__(source if callable(source) else None)
        self._read, self._name = keys, name
        self._encoded: EncodedStorage | None = None

    def register_storage(self, storage: Storage) -> None:
        """Note the storage of the items if some of their entries differ in length."""
        self._encoded = storage if isinstance(storage, EncodedStorage) else None

    def __call__(self, data: Rows) -> Int64[Tensor, "n d"]:
        """Return one row per item."""
        if callable(self.source):
            return self._fingerprints(self.source(data), data.shape[0])
        if self._read != [STATE]:
            parts = [self._columns(data, key) for key in self._read]
            return torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if self._encoded is not None and STATE in self._encoded.ragged:
            keys = [STATE, CONDITION] if CONDITION in set(data.keys()) else [STATE]
            return torch.cat([self._columns(data, key) for key in keys], 1)
        return object_columns(data)

    def _columns(self, data: Rows, key: NestedKey) -> Int64[Tensor, "n d"]:
        """Return integers that are equal exactly where an entry is."""
        if self._encoded is None or key not in self._encoded.ragged:
            if (value := data.get(key, None)) is None:
                raise KeyMismatchError(
                    f"data lacks the key {key!r} of {self._name}: it holds "
                    f"{sorted(map(str, data.keys(True)))}"
                )
            entry = _flat(value)
            is_checked = self._name == "group" and entry.is_cpu and entry.is_floating_point()
            if is_checked and bool(entry.isnan().any()):  # which is in no group
                raise NaNError(f"group {key!r} is NaN in some items: nothing was written")
            return equal_bits(entry)
        return self._encoded.hashes(data, key)

    def _fingerprints(self, rows: Any, n: int) -> Int64[Tensor, "n d"]:
        name = self._name
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim not in (1, 2):
            came = f"{rows.dtype} of shape {list(rows.shape)}" if isinstance(rows, Tensor) else rows
            raise ShapeError(f"{name} must return int64 fingerprints, [n] or [n, d], got {came}")
        if rows.shape[0] != n:
            raise ShapeError(f"{name} must return {n} fingerprints, one per item, got {len(rows)}")
        return rows if rows.ndim == 2 else rows[:, None]

    def same_entry(self, stored: Mapping[NestedKey, Tensor]) -> NestedKey | None:
        """Return the entry whose integers these are, None if they are computed."""
        if callable(self.source) or len(self._read) > 1 or self._encoded is not None:
            return None
        name = self._read[0]
        beside = {ACTION, CONDITION, IS_TERMINATING} if name == STATE else set()
        return _integers(stored, name) if beside.isdisjoint(stored) else None

    def reads(self, name: NestedKey) -> bool:
        """Return whether the numbers may depend on an entry; see :meth:`Features.reads`."""
        read = (STATE, LENGTH, IS_BACKWARD, CONDITION) if self._read == [STATE] else self._read
        return name != N_USES if callable(self.source) else name in read


class EqualFeatures(Features):
    """Turns items into rows of integers that are equal exactly where :class:`Features` are."""

    def __call__(self, data: Rows) -> Int64[Tensor, "n d"]:
        """Return one row per item."""
        return equal_bits(super().__call__(data))

    def same_entry(self, stored: Mapping[NestedKey, Tensor]) -> NestedKey | None:
        """Return the entry whose integers these are, None if they are computed."""
        if callable(self.source) or not {ACTION, CONDITION, NEXT}.isdisjoint(stored):
            return None
        return _integers(stored, STATE if self.source is None else self.source)


def _integers(stored: Mapping[NestedKey, Tensor], name: NestedKey) -> NestedKey | None:
    """Return the name of an entry that has vectors of integers, else None."""
    entry = stored.get(name)
    return name if entry is not None and entry.ndim == 2 and entry.dtype == torch.int64 else None


def read_by_any(compared: list[Features], name: NestedKey) -> bool:
    """Return whether any of several features may depend on an entry."""
    return any(each.reads(name) for each in compared)


def read_stored(features: Features, storage: Storage) -> np.ndarray:
    """Return what all stored rows are compared by, on the host: int64 [len, d]."""
    if isinstance(storage, EncodedStorage):
        rows = torch.cat([on_host(features(block))[0] for block in storage.blocks()])
    else:
        rows = on_host(features(all_slots(storage)[: length_of(storage)]))[0]
    return np.ascontiguousarray(rows.numpy())


def _default(data: Rows, names: set[str]) -> Tensor:
    state = _entry(data, STATE)
    if ACTION in names and LENGTH in names:
        step = convert.exit_step(data) + convert.direction(data)
        return _flat(state[torch.arange(state.shape[0], device=state.device), step])
    after = data.get(NEXT_STATE, None) if NEXT in names else None
    return _flat(state) if after is None else torch.cat([_flat(state), _flat(after)], 1)


def _entry(data: Rows, key: NestedKey) -> Any:
    value = data.get(key, None)
    if value is None:
        held = sorted(map(str, data.keys(True, True)))
        raise KeyMismatchError(f"data lacks the key {key!r} of features: it holds {held}")
    return value


def _flat(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.is_nested:
        raise ShapeError(f"features must be tensors of one shape, got {kind_of(value)}")
    if type(value) is not Tensor:  # a memory-mapped one
        value = value.as_subclass(Tensor)
    return _real(flat_rows(value))


def _real(rows: Tensor) -> Tensor:
    if rows.is_complex():
        raise ShapeError(f"features must be real numbers, got {rows.dtype}")
    return rows


def require_finite(rows: Tensor) -> Tensor:
    """Return features that are on the host."""
    if not rows.is_floating_point() or bool(torch.isfinite(rows).all()):
        return rows
    bad = ~torch.isfinite(rows).all(1)
    first = int(bad.to(torch.uint8).argmax())
    raise NaNError(
        f"features are NaN or infinite in {int(bad.sum())} of {rows.shape[0]} items, first at "
        f"position {first}: expected finite numbers, nothing was written"
    )


class SyncedIndex:
    """An index of what the rows of a storage are compared by, one in each process.

    It is read anew if the storage was written to by others. ``make`` returns an empty index of so
    many slots, for rows as those given: ``prepare`` returns rows as ``put`` takes them.
    """

    def __init__(self, features: Features, make: Callable[[int, Tensor], Any]) -> None:
        self.features = features
        self._make = make
        self.index: Any = None  # once it was synced
        self._like: Tensor | None = None  # rows of the width and dtype of the index
        self.version: Version | None = None  # of the storage's content that the index holds

    def read(self, data: Rows) -> Shaped[Tensor, "n d"]:
        """Return what rows are compared by, on the host."""
        rows = self.features(data)
        return rows if rows.is_cpu else require_finite(rows.cpu())

    def sync(self, storage: Storage, rows: Shaped[Tensor, "n d"], version: Version | None) -> Any:
        """Return an index fit to look rows up, read anew unless it is of this version."""
        index, like = self.index, self._like
        fits = like is not None and (rows.dtype, rows.shape[1]) == (like.dtype, like.shape[1])
        if like is not None and not fits and length_of(storage):
            raise ShapeError(
                f"features must stay alike: got {rows.dtype} of width {rows.shape[1]}, expected "
                f"{like.dtype} of width {like.shape[1]} as before"
            )
        # Without a version, the storage is not laid out and has nothing to compare with.
        is_old = version is not None and version != self.version
        if index is None or not fits or is_old:
            index, self._like = self._make(storage.max_size, rows), rows[:0].clone()
            # A new index, since an exception while the old one is filled would leave it between
            # two.
            if is_old and len(storage):
                held = self.read_stored(storage)
                index.put(np.arange(len(held)), index.prepare(held))
            self.version = version if is_old else self.version
        self.index = index
        return index

    def forget(self) -> None:
        """Read everything anew: an exception may have left the index in the middle of a change."""
        self.index = self._like = self.version = None

    def read_stored(self, storage: Storage) -> Shaped[Tensor, "n d"]:
        """Return what all stored rows are compared by, on the host."""
        if isinstance(storage, EncodedStorage):
            return torch.cat([self.read(rows) for rows in storage.blocks()])
        return self.read(all_slots(storage)[: length_of(storage)])

    def follow(self, move: Any, prepared: Any, version: Version | None) -> None:
        """Follow rows that were written, if any, and moved in a storage that it matched before."""
        # In the order of the exchange: rows that came in may have taken slots of rows that left,
        # and rows move only from the end, to slots that none of them took.
        index = self.index
        if prepared is not None:
            index.put(move.target, prepared)
        if len(move.source):
            index.move(move.source, move.hole)
        if move.length < move.before:
            index.remove(move.tail)
        self.version = version

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the index, which each process makes from the storage."""
        return {**self.__dict__, "index": None, "_like": None, "version": None}
