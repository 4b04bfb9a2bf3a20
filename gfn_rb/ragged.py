"""Storage of rows in which some entries differ in length, such as tokens or the nodes of a graph.

Such an entry is kept in pages of a pool, as vLLM keeps its key-value cache (Kwon et al. 2023,
https://arxiv.org/abs/2309.06180). A row occupies as many pages as its length needs, in any order. A
slot holds the length and the numbers of the pages, in columns like all others, so that writers move
rows as they move any others. A page belongs to a row as long as a slot in use names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_non_tensor,
    lazy_stack,
    unravel_key,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gfn_rb.arguments import as_count, kind_of, require_key, require_kind, shown
from gfn_rb.containers.objects import hashed_rows
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, KeyMismatchError, ShapeError
from gfn_rb.keys import ESTIMATOR_OUTPUT, INDEX, LOG_PROB, key_path, length_key, mask_key
from gfn_rb.numerics.flat import resized
from gfn_rb.shapes import Bool, Int, Int64, Rows, Shaped
from gfn_rb.storages import EncodedStorage, RowEntry, require_same_entries
from gfn_rb.torchrl_compat import (
    all_slots,
    entry_of,
    forget_layout,
    length_of,
    new_tensordict,
    set_length,
)

_LENGTH, _PAGES, _VALUES = "length", "pages", "values"
_SPARE = 64  # a pool has at least one spare page for so many, or it grows
_BLOCK = 1024  # rows that are loaded or saved at a time
_PAGE_NUMBER_BYTES = 4


class PagePool:
    """Pages of equally many elements, for entries that are of one length in each row.

    Page 0 holds zeros. Page tables name it where a row has no more pages.

    Args:
        rows: padded entries of the first rows, [n, T, *E] each.
        longest: highest length of a row.
        page_size: elements in a page. None weighs unused elements of last pages against the width
            of page tables.
        device: device of the pages.
    """

    def __init__(
        self,
        rows: Mapping[NestedKey, Tensor],
        longest: int,
        page_size: int | None,
        device: torch.device,
    ) -> None:
        if page_size is None:
            nbytes = sum(each[0, :1].numel() * each.element_size() for each in rows.values())
            best = 2 * _PAGE_NUMBER_BYTES * longest / max(nbytes, 1)
            page_size = 1 << max(round(math.log2(best) / 2), 0)
        self.page_size = page_size
        self.width = -(-longest // page_size)
        self.entries = {
            name: torch.zeros((1, page_size, *each.shape[2:]), dtype=each.dtype, device=device)
            for name, each in rows.items()
        }
        self.n_pages = 1
        self._free: list[Tensor] = []
        self._n_free = 0

    def take(self, n: int, old: Tensor, tables: Callable[[], Tensor], share: float) -> Tensor:
        """Return the numbers of n free pages, int64, which are then no longer free.

        Args:
            n: number of pages.
            old: pages of rows that are about to be written over, int64. They are used last.
            tables: returns the page tables of the rows in use.
            share: how full the storage will be, in (0, 1]; the pool grows in proportion.
        """
        self._free.insert(0, old)
        self._n_free += len(old)
        if n > self._n_free:
            self._sweep(tables())
            self._free.append(old)
            self._n_free += len(old)
            if n + self.n_pages // _SPARE > self._n_free:
                self._grow(n, share)
        taken, missing = [old[:0]], n
        while missing:
            last = self._free.pop()
            if len(last) > missing:
                self._free.append(last[missing:])
            taken.append(last[:missing])
            missing -= len(taken[-1])
        self._n_free -= n
        return torch.cat(taken)

    def forget(self) -> None:
        """Have free pages looked for when some are needed next."""
        self._free, self._n_free = [], 0

    def _sweep(self, tables: Shaped[Tensor, "rows width"]) -> None:
        """Find the pages that no row in use names (mark and sweep)."""
        is_free = torch.ones(self.n_pages, dtype=torch.bool, device=tables.device)
        is_free[tables.reshape(-1)] = False
        is_free[0] = False
        self._free = [is_free.nonzero()[:, 0].cpu()]
        self._n_free = len(self._free[0])

    def _grow(self, n: int, share: float) -> None:
        """Make room for n pages, for as many rows as the storage holds if these are typical."""
        needed = self.n_pages - self._n_free + n
        typical = min(math.ceil(needed / share * (1 + 1 / (2 * _SPARE))), 2 * needed)
        n_pages = max(typical, needed + needed // _SPARE + 1)
        grown = {}
        for name, held in self.entries.items():
            grown[name] = held.new_empty((n_pages, *held.shape[1:]))
        for name, held in self.entries.items():
            grown[name][: self.n_pages] = held
            self.entries[name] = grown[name]
        self._free.append(torch.arange(self.n_pages, n_pages))
        self._n_free += n_pages - self.n_pages
        self.n_pages = n_pages

    def write(
        self, rows: Mapping[NestedKey, Tensor], length: Int64[Tensor, "n"], **pages: Any
    ) -> Shaped[Tensor, "n width"]:
        """Copy padded rows into free pages and return their page tables.

        Args:
            rows: entries, [n, T, *E] each.
            length: length of each row, on the host.
            **pages: arguments of :meth:`take`.
        """
        size, n = self.page_size, length.shape[0]
        count = (length + (size - 1)) // size
        k = int(count.max())
        at = (torch.arange(k) < count[:, None]).view(-1).nonzero()[:, 0]
        taken = self.take(len(at), **pages)
        table = torch.zeros((n, k), dtype=torch.int32)
        table.view(-1)[at] = taken.to(torch.int32)
        # Behind the end of a row, pages hold zeros, so that what is read needs no mask.
        ends = count > 0
        last, used = (count.cumsum(0) - 1)[ends], (length - (count - 1) * size)[ends]
        is_blank = torch.arange(size) >= used[:, None]
        for name, held in self.entries.items():
            padded = resized(rows[name], k * size).reshape(n * k, *held.shape[1:])
            came = padded.index_select(0, at.to(padded.device))
            here = last.to(came.device)
            blank = is_blank.view(*is_blank.shape, *[1] * (held.ndim - 2)).to(came.device)
            came.index_copy_(0, here, came.index_select(0, here).masked_fill(blank, 0))
            held.index_copy_(0, taken.to(held.device), came.to(held.device, non_blocking=True))
        return F.pad(table, (0, self.width - k))

    def read(self, name: NestedKey, table: Shaped[Tensor, "*n width"], width: int) -> Tensor:
        """Return an entry of rows, padded with zeros to a length, [*n, width, *E]."""
        held = self.entries[name]
        used = table[..., : -(-width // self.page_size)]
        rows = held.index_select(0, used.reshape(-1))
        rows = rows.view(*used.shape[:-1], used.shape[-1] * self.page_size, *held.shape[2:])
        return rows.narrow(used.ndim - 1, 0, width)


class RaggedStorage(EncodedStorage):
    r"""A storage of rows in which some entries are tensors of different lengths.

    Such an entry has shape [L, \\*E] in a row, and L differs from row to row. A row occupies the
    bytes of its own content, not those of the longest row. All other entries are tensors of one
    shape.

    Rows are accepted as a lazy stack of rows, with nested tensors (``layout=torch.jagged``), or
    padded with a mask or lengths beside: ``tokens`` [n, T, \\*E] and ``tokens_mask`` [n, T] or
    ``tokens_length`` [n]. Without either, all rows of the batch have length T. Rows are returned
    padded: tensors [n, T, \\*E], zeros behind the end of each row, and a mask ``tokens_mask`` [n,
    T]. T is the highest length in the batch, and on a device the highest length stored so far, so
    that a draw does not wait for the device.

    Args:
        max_size: number of rows.
        ragged: entries that differ in length. The value is the highest length, or the name of
            another entry of this dict that has the same length in each row.
        text: entries among ``ragged`` that are strings, stored as UTF-8; their highest length is
            one of bytes. Rows have strings; writers see the bytes.
        page_size: number of elements in a page; None chooses it by the highest length.
        device: device of the rows.

    Examples:
        >>> storage = RaggedStorage(1000, {"tokens": 4096, "log_prob": "tokens"})
        >>> rb = TensorDictReplayBuffer(storage=storage, batch_size=2)
        >>> rows = [TensorDict({"tokens": torch.arange(n)}) for n in (2, 3)]
    """

    def __init__(
        self,
        max_size: int,
        ragged: Mapping[NestedKey, int | NestedKey],
        *,
        text: Sequence[NestedKey] = (),
        page_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        require_kind("ragged", ragged, Mapping)
        self.page_size = None if page_size is None else as_count("page_size", page_size)
        self._limit, self._groups = _groups(ragged)
        require_kind("text", text, list, lambda value: isinstance(value, tuple))
        self.text = frozenset(unravel_key(name) for name in text)
        if not self.text <= {*self.ragged}:
            raise ArgumentError(
                f"text must name entries of ragged, {list(self.ragged)}, got {list(text)}"
            )
        self._pools: dict[NestedKey, PagePool] = {}
        self._highest = dict.fromkeys(self._groups, 0)  # length that was ever stored
        super().__init__(as_count("max_size", max_size), device=device)

    @property
    def ragged(self) -> dict[NestedKey, NestedKey]:
        """Entries that differ in length, and of each the entry whose lengths it has."""
        return {name: key for key, group in self._groups.items() for name in group}

    @property
    def nbytes(self) -> int:
        """Bytes allocated: the pages and the columns."""
        columns = [] if all_slots(self) is None else [*all_slots(self).values(True, True)]
        pages = [each for pool in self._pools.values() for each in pool.entries.values()]
        return sum(each.numel() * each.element_size() for each in (*columns, *pages))

    def attach(self, buffer: Any) -> None:
        """Attach a buffer, which must not be shared: processes would not see each other's pages."""
        if getattr(buffer, "shared", False):
            raise ArgumentError("storage must not be a RaggedStorage with shared=True")
        super().attach(buffer)

    # Rows that come in.

    def padded(self, data: Rows) -> TensorDictBase:
        """Return padded rows, checked against what is stored.

        Args:
            data: batch size [n]; see the class for what is accepted.

        Raises:
            KeyMismatchError: keys are missing or unknown to the storage.
            ShapeError: an entry has another dtype or shape than the stored one, a row is too long,
                or entries of one length differ in length.
        """
        columns, rows, entries = _columns(data), {}, dict[NestedKey, RowEntry]()
        for name in self.text & columns.keys():
            columns[name] = _utf8(name, columns[name], len(data))
        for key, group in self._groups.items():
            came, length = {}, None
            for name in group:
                if name not in columns:
                    raise _lacks(name, columns)
                came[name], own = _as_padded(name, key, columns)
                if length is not None and not torch.equal(own, length):
                    raise ShapeError(f"key {name!r} must have the length of {key!r} in each row")
                length = own
            assert length is not None
            longest, limit = int(length.max()) if len(length) else 0, self._limit[key]
            if longest > limit:
                raise ShapeError(
                    f"key {key!r} must have at most {limit} elements in a row, got {longest}"
                )
            entries |= {name: (("L", *each.shape[2:]), each.dtype) for name, each in came.items()}
            width = max(each.shape[1] for each in came.values())
            mask = columns.get(mask_key(key))
            if not isinstance(mask, Tensor) or mask.shape[1] != width:
                mask = _mask(length, width).to(came[key].device, non_blocking=True)
            rows[mask_key(key)] = mask
            rows |= {name: resized(each, width) for name, each in came.items()}
        beside = {each for name in self.ragged for each in (mask_key(name), length_key(name))}
        fixed = {
            name: _stacked(name, each)
            for name, each in columns.items()
            if name not in rows and name not in beside
        }
        if self.initialized and self._pools:
            held = self._entries()
            if INDEX not in held:  # it is the writer's
                fixed.pop(INDEX, None)
            entries |= {name: (each.shape[1:], each.dtype) for name, each in fixed.items()}
            if INDEX not in fixed:
                held.pop(INDEX, None)
            require_same_entries(entries, held)
        return _tree({**fixed, **rows}, data.batch_size)

    def hashes(self, data: Rows, name: NestedKey) -> Int64[Tensor, "n 2"]:
        """Return two integers for each row, equal exactly where an entry that differs in length is.

        Args:
            data: batch size [n], in any of the forms that the class accepts.
            name: the entry.

        Raises:
            KeyMismatchError: rows lack it.
            ShapeError: it does not hold rows of different lengths.
        """
        if not data.shape[0]:
            return torch.empty((0, 2), dtype=torch.int64)
        key = self.ragged[name]
        beside = {each(other) for each in (mask_key, length_key) for other in (name, key)}
        columns = _columns(data, {name} | beside)
        if name not in columns:
            raise _lacks(name, data.keys(True))
        if name in self.text:
            columns[name] = _utf8(name, columns[name], len(data))
        return hashed_rows(*_as_padded(name, key, columns))

    def _entries(self) -> dict[NestedKey, RowEntry]:
        """Return shape and dtype in a row of each entry stored; "L" stands for any length."""
        held = {name: (e.shape[1:], e.dtype) for name, e in all_slots(self).items(True, True)}
        for key, group in self._groups.items():
            del held[_within(key, _LENGTH)], held[_within(key, _PAGES)]
            for name in group:
                pages = self._pools[key].entries[name]
                held[name] = ("L", *pages.shape[2:]), pages.dtype
        return held

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write rows, in any of the forms that the class accepts.

        Args:
            cursor: one slot, or one for each row.
            data: item of batch size [], or batch.
            set_cursor: whether the rows count as new.

        Raises:
            KeyMismatchError, ShapeError: as :meth:`padded` raises them.
        """
        data = lazy_stack(data) if isinstance(data, list) else data
        if not data.ndim:
            data, cursor = data.unsqueeze(0), [int(cursor)]
        slot = torch.arange(self.max_size)[cursor] if isinstance(cursor, slice) else cursor
        slot = torch.as_tensor(slot).reshape(-1).cpu()
        slot = slot.nonzero()[:, 0] if slot.dtype == torch.bool else slot.to(torch.int64)
        rows = self.padded(data)
        if slot.shape != rows.batch_size:
            raise ShapeError(f"cursor must name {rows.shape[0]} slots, got {len(slot)}")
        if len(slot):
            self.write(slot, rows, set_cursor=set_cursor)

    def write(
        self, slot: Int64[Tensor, "n"], rows: TensorDictBase, *, set_cursor: bool = False
    ) -> None:
        """Write rows that :meth:`padded` returned."""
        lengths, stored, columns = {}, length_of(self), dict(rows.items(True, True))
        share = min(max(stored, int(slot.max()) + 1) / self.max_size, 1.0)
        pools, old = dict(self._pools), self._pages_of(slot[slot < stored])
        for key, group in self._groups.items():
            lengths[key] = length = _lengths_of(columns.pop(mask_key(key)))
            came = {name: columns.pop(name).detach() for name in group}
            if key not in pools:
                pools[key] = PagePool(came, self._limit[key], self.page_size, self.device)
            table = pools[key].write(
                came, length, old=old[key], tables=lambda key=key: self._tables(key), share=share
            )
            columns[_within(key, _LENGTH)] = length.to(torch.int32)
            columns[_within(key, _PAGES)] = table
        placed = {name: each.to(self.device) for name, each in columns.items()}
        super().set(slot, _tree(placed, rows.batch_size), set_cursor=set_cursor)
        if set_cursor:  # which counts rows that are written over as well
            set_length(self, max(stored, int(slot.max()) + 1))
        self._pools = pools
        for key, length in lengths.items():
            self._highest[key] = max(self._highest[key], int(length.max()))

    def _tables(self, key: NestedKey) -> Shaped[Tensor, "rows width"]:
        """Return the page tables of the rows in use."""
        if not self.initialized:
            return torch.empty((0, 0), dtype=torch.int64)
        return all_slots(self).get(_within(key, _PAGES))[: length_of(self)]

    def _pages_of(self, slot: Int64[Tensor, "n"]) -> dict[NestedKey, Tensor]:
        """Return the pages of rows that are about to be written over.

        On a device none are looked up; they are found once the pool runs out of free pages.
        """
        if not len(slot) or self.device.type != "cpu":
            return dict.fromkeys(self._groups, slot[:0])
        slot = torch.from_numpy(np.unique(slot.numpy()))
        pages = {key: self._tables(key).index_select(0, slot) for key in self._groups}
        return {key: each[each > 0].to(torch.int64) for key, each in pages.items()}

    def _init(self, data: TensorDictBase) -> None:
        super()._init(data)
        all_slots(self).zero_()  # slots that were never written are rows of length 0

    def _empty(self) -> None:
        super()._empty()
        self._highest = dict.fromkeys(self._groups, 0)
        for pool in self._pools.values():
            pool.forget()

    # Rows that go out.

    def get(self, index: Any) -> Any:
        """Return padded rows; of a single slot, entries of its length."""
        return self._padded(super().get(index), self.text)

    def padded_rows(self, index: Any) -> TensorDictBase:
        """Return padded rows, text in bytes."""
        return self._padded(super().get(index), frozenset())

    def blocks(self) -> Iterator[TensorDictBase]:
        """Yield all rows in use, padded, some at a time."""
        for start in range(0, len(self), _BLOCK):
            yield self.padded_rows(slice(start, min(start + _BLOCK, len(self))))

    def _padded(self, columns: TensorDictBase, text: frozenset[NestedKey]) -> TensorDictBase:
        if columns is all_slots(self):  # which all rows of a full storage are
            columns = columns.copy()
        for key, group in self._groups.items():
            held = columns.get(key)
            length, table, width = held.get(_LENGTH), held.get(_PAGES), self._highest[key]
            if length.is_cpu or not length.ndim:
                width = int(length.max()) if length.numel() else 0
            for name in group:
                value = self._pools[key].read(name, table, width)
                columns.set(name, _decoded(value, length) if name in text else value)
            if not text >= {*group}:
                columns.set(mask_key(key), _mask(length, width))
        return columns

    # State.

    def content(self, slot: Int64[Tensor, "n"] | None = None) -> dict[str, Tensor]:
        r"""Return rows, by default all, as flat tensors: of ragged entries one value after another.

        ``tokens/values`` [sum of lengths, \\*E] and ``tokens/length`` [n]; other entries [n, ...].
        Nested keys are joined by "/".
        """
        if not self.initialized:
            return {}
        if slot is None:
            stored, blocks = all_slots(self)[: len(self)].clone(), self.blocks()
        else:
            stored, blocks = super().get(slot), map(self.padded_rows, slot.split(_BLOCK))
        held = dict(stored.items(True, True))
        for key, group in self._groups.items():
            del held[_within(key, _PAGES)]
            total = int(held[_within(key, _LENGTH)].sum())
            for name in group:
                pages = self._pools[key].entries[name]
                held[_within(name, _VALUES)] = pages.new_empty((total, *pages.shape[2:]))
        at = dict.fromkeys(self._groups, 0)
        for rows in blocks:
            for key, group in self._groups.items():
                length = _lengths_of(rows.get(mask_key(key)))
                place = _places(length, rows.get(key).shape[1])
                end = at[key] + len(place)
                for name in group:
                    values, target = rows.get(name).flatten(0, 1), held[_within(name, _VALUES)]
                    target[at[key] : end] = values.index_select(0, place.to(values.device))
                at[key] = end
        return {key_path(name): each for name, each in held.items()}

    def restore(self, content: Mapping[str, Tensor]) -> None:
        """Replace all rows by what :meth:`content` returned.

        Raises:
            CheckpointMismatchError: the content has other entries, has more or longer rows than
                there is room for, or does not match its own lengths. Nothing was written then.
        """
        n = self.check_content(content)
        forget_layout(self)  # into other memory: what there was may have to be put back
        self._pools = {}
        self._empty()
        at = dict.fromkeys(self._groups, 0)
        for start in range(0, n, _BLOCK):
            end, rows = min(start + _BLOCK, n), {}
            for name, each in content.items():
                if not name.endswith((f"/{_VALUES}", f"/{_LENGTH}")):
                    rows[tuple(name.split("/"))] = each[start:end]
            for key, group in self._groups.items():
                length = content[key_path(_within(key, _LENGTH))][start:end]
                rows[length_key(key)] = length
                width, to = int(length.max()), at[key] + int(length.sum())
                place = _places(length, width)
                for name in group:
                    values = content[key_path(_within(name, _VALUES))][at[key] : to]
                    flat = values.new_zeros((len(length) * width, *values.shape[1:]))
                    flat.index_copy_(0, place, values)
                    rows[name] = flat.view(len(length), width, *values.shape[1:])
                at[key] = to
            self.set(range(start, end), _tree(rows, torch.Size([end - start])))

    def check_content(self, content: Mapping[str, Tensor]) -> int:
        """Return the number of rows of a content, or raise unless it fits; see :meth:`restore`."""
        if not content:
            return 0
        lengths = {key: key_path(_within(key, _LENGTH)) for key in self._groups}
        values = {key_path(_within(name, _VALUES)): key_path(name) for name in self.ragged}
        came: dict[str, RowEntry] = {}
        for name, each in content.items():
            if name in values:
                came[values[name]] = ("L", *each.shape[1:]), each.dtype
            elif name not in lengths.values():
                came[name] = (*each.shape[1:],), each.dtype
        if self.initialized:
            held = {key_path(name): entry for name, entry in self._entries().items()}
            if came != held:
                raise CheckpointMismatchError(f"storage state is of {came}, expected {held}")
        if not content.keys() >= {*values, *lengths.values()}:
            raise CheckpointMismatchError(
                f"storage state holds {sorted(content)}, expected {sorted(values)} among them"
            )
        counts = {len(each) for name, each in content.items() if name not in values}
        if len(counts) > 1 or max(counts) > self.max_size:
            raise CheckpointMismatchError(
                f"storage state is of {sorted(counts)} rows, expected at most {self.max_size}"
            )
        for key, group in self._groups.items():
            length = content[lengths[key]]
            total = {len(content[key_path(_within(name, _VALUES))]) for name in group}
            limit = self._limit[key]
            if len(length) and not 0 <= int(length.min()) <= int(length.max()) <= limit:
                raise CheckpointMismatchError(
                    f"storage state has rows of {int(length.max())} elements of {key!r}, expected "
                    f"at most {limit}"
                )
            if total != {int(length.sum())}:
                raise CheckpointMismatchError(
                    f"storage state has {sorted(total)} elements of {group}, expected "
                    f"{int(length.sum())}"
                )
        return counts.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return the rows as flat tensors; see :meth:`content`."""
        return {"_storage": self.content(), "initialized": self.initialized, "_len": len(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatchError: as :meth:`restore` raises it.
        """
        self.restore(state_dict["_storage"])

    def dumps(self, path: str | Path) -> None:
        """Save the rows to a folder, as memory-mapped flat tensors."""
        TensorDict(self.content()).memmap(path)

    def loads(self, path: str | Path) -> None:
        """Load what :meth:`dumps` saved."""
        self.restore(dict(TensorDict.load_memmap(path).items()))


def _groups(
    ragged: Mapping[NestedKey, int | NestedKey],
) -> tuple[dict[NestedKey, int], dict[NestedKey, list[NestedKey]]]:
    """Return the highest length of each group of entries of one length, and its entries."""
    limit: dict[NestedKey, int] = {}
    groups: dict[NestedKey, list[NestedKey]] = {}
    for key, value in ragged.items():
        require_key("ragged", key)
        if not isinstance(value, (str, tuple)):
            limit[unravel_key(key)] = as_count(f"ragged[{key!r}]", value)
            groups[unravel_key(key)] = [unravel_key(key)]
    for key, value in ragged.items():
        if isinstance(value, (str, tuple)):
            if unravel_key(value) not in groups:
                raise ArgumentError(
                    f"ragged[{key!r}] must be a length or an entry with a length, got {value!r}"
                )
            groups[unravel_key(value)].append(unravel_key(key))
    if not groups:
        raise ArgumentError(f"ragged must name an entry, got {dict(ragged)}")
    return limit, groups


def _columns(data: Rows, only: Collection[NestedKey] | None = None) -> dict[NestedKey, Any]:
    """Return entries of rows by name: tensors, or of a lazy stack lists of tensors."""
    if not isinstance(data, LazyStackedTensorDict):
        held = data.items(True, True, is_leaf=is_leaf_nontensor)
        return {name: each for name, each in held if only is None or name in only}
    if data.stack_dim:
        raise ShapeError(f"data must be stacked along dimension 0, got {data.stack_dim}")
    names = data.keys(True, True, is_leaf=is_leaf_nontensor)
    rows = data.tensordicts
    return {n: [entry_of(row, n) for row in rows] for n in names if only is None or n in only}


def _stacked(name: NestedKey, column: Any) -> Tensor:
    """Return an entry of one shape in all rows."""
    if isinstance(column, list):
        if len({each.shape for each in column}) > 1:
            raise ShapeError(
                f"key {name!r} must have one shape in all rows, or be named in ragged, got "
                f"{tuple(column[0].shape)} and others"
            )
        column = torch.stack(column)
    if not isinstance(column, Tensor) or column.is_nested:
        raise ShapeError(
            f"key {name!r} must hold tensors of one shape, or be named in ragged, and in text if "
            f"it holds strings, got {kind_of(column)}"
        )
    return column


def _utf8(name: NestedKey, column: Any, n: int) -> Any:
    """Return the bytes of strings, one tensor for each; what is in bytes already as it is."""
    if isinstance(column, Tensor) or (isinstance(column, list) and isinstance(column[0], Tensor)):
        return column
    texts = [each.data if is_non_tensor(each) else each for each in _listed_texts(column, n)]
    if not all(isinstance(each, str) for each in texts):
        raise ShapeError(f"key {name!r} must hold strings, got {shown(texts)}")
    return [torch.from_numpy(np.frombuffer(bytearray(each.encode()), np.uint8)) for each in texts]


def _listed_texts(column: Any, n: int) -> list[Any]:
    """Return one entry per row; rows of one text may share it."""
    if isinstance(column, list):
        return column
    listed = column.tolist() if column.ndim else [column.data] * n
    return listed if isinstance(listed, list) else [listed] * n


def _decoded(value: Tensor, length: Int[Tensor, "*n"]) -> Any:
    """Return the text of padded bytes."""
    if not length.ndim:
        return NonTensorData(bytes(value[: int(length)].tolist()).decode())
    rows = zip(value.cpu().numpy(), length.tolist(), strict=True)
    return NonTensorStack.from_list([row[:end].tobytes().decode() for row, end in rows])


def _as_padded(
    name: NestedKey, key: NestedKey, columns: dict[NestedKey, Any]
) -> tuple[Shaped[Tensor, "n T *E"], Int64[Tensor, "n"]]:
    """Return an entry padded to one length, and the length of each row, on the host."""
    value: Any = columns[name]
    if getattr(value, "is_nested", False):
        if value.layout is torch.jagged and value.lengths() is None:
            length = value.offsets().diff().cpu()
            rows = value.values().split(length.tolist())
            return pad_sequence(rows, batch_first=True), length
        value = list(value.unbind(0))
    if isinstance(value, list):
        kinds = {(each.dtype, each.shape[1:]) if each.ndim else None for each in value}
        if len(kinds) > 1 or None in kinds:
            raise ShapeError(
                f"key {name!r} must have one dtype and differ in the first dimension alone, got "
                f"{sorted(map(str, kinds))[:2]}"
            )
        length = torch.tensor([each.shape[0] for each in value])
        return pad_sequence(value, batch_first=True), length
    if not isinstance(value, Tensor) or value.ndim < 2:
        raise ShapeError(f"key {name!r} must have shape [n, T, ...], got {kind_of(value)}")
    beside = name if {mask_key(name), length_key(name)} & columns.keys() else key
    n, width = value.shape[:2]
    if (length := columns.get(length_key(beside))) is not None:
        length = _stacked(length_key(beside), length).reshape(-1).to("cpu", torch.int64)
        if not bool(((length >= 0) & (length <= width)).all()):
            raise ShapeError(
                f"key {length_key(beside)!r} must be 0 to {width}, got {shown(length)}"
            )
        return value, length
    if (mask := columns.get(mask_key(beside))) is None:
        return value, torch.full((n,), width)
    mask = _stacked(mask_key(beside), mask).cpu()
    is_mask = mask.dtype == torch.bool and mask.shape == (n, width)
    length = _lengths_of(mask) if is_mask else mask
    if not is_mask or int(length.sum()) != np.count_nonzero(mask.numpy()):
        raise ShapeError(
            f"key {mask_key(beside)!r} must be bool [n, {width}], true up to the end of each row, "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    return value, length


def _lengths_of(mask: Bool[Tensor, "n T"]) -> Int64[Tensor, "n"]:
    """Return where masks end that are true up to the end of each row, on the host."""
    host = mask.cpu().numpy()  # NumPy stops at the first gap
    n, width = host.shape
    is_full = host[:, -1] if width else np.ones(n, dtype=bool)
    return torch.from_numpy(np.where(is_full, width, host.argmin(1) if width else 0))


def _mask(length: Int[Tensor, "*n"], width: int) -> Bool[Tensor, "*n {width}"]:
    """Return a mask that is true up to the end of each row."""
    return torch.arange(width, dtype=torch.int32, device=length.device) < length[..., None].int()


def _places(length: Int[Tensor, "n"], width: int) -> Int64[Tensor, "total"]:
    """Return where the elements of rows are in padded rows, flat."""
    length = length.to(torch.int64)
    shift = torch.arange(len(length)) * width - (length.cumsum(0) - length)
    place = shift.repeat_interleave(length)
    return place + torch.arange(len(place))


def _tree(entries: Mapping[NestedKey, Tensor], batch_size: torch.Size) -> TensorDict:
    """Return a TensorDict of entries by their names."""
    rows = new_tensordict({}, batch_size)
    for name, each in entries.items():
        rows.set(name, each)
    return rows


def _within(key: NestedKey, name: str) -> tuple[str, ...]:
    return (key, name) if isinstance(key, str) else (*key, name)


def _lacks(name: NestedKey, held: Iterable[NestedKey]) -> KeyMismatchError:
    hint = "; presets drop it unless keep names it" if name in (LOG_PROB, ESTIMATOR_OUTPUT) else ""
    names = sorted(map(str, held))
    return KeyMismatchError(f"data lacks the key {name!r}: it holds {names}{hint}")
