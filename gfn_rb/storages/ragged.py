"""Storage of rows in which some entries differ in length, such as tokens or the nodes of a graph.

Such an entry is kept in the pages of a pool. A slot holds the length and the page table, in columns
like all others, so that writers move rows as they move any others. Rows are written into free
pages. A page belongs to a row as long as a slot in use names it, so a write is undone by the
columns alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, lazy_stack, unravel_key
from torch import Tensor

from gfn_rb.arguments import as_count, as_keys, is_listed, kind_of, require_kind, shown
from gfn_rb.containers.objects import hashed_rows
from gfn_rb.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.keys import ESTIMATOR_OUTPUT, INDEX, LOG_PROB, key_path, length_key, mask_key
from gfn_rb.numerics.flat import resized
from gfn_rb.shapes import Int64, Rows, Shaped
from gfn_rb.storages.pages import BLOCK, PagePool, places
from gfn_rb.storages.ragged_rows import (
    columns_of,
    groups_of,
    in_bytes,
    in_words,
    lengths_of,
    mask_of,
    masks_of,
    padded_entry,
    require_named_mask,
    stacked,
    with_masks,
)
from gfn_rb.storages.tensors import EncodedStorage, RowEntry, require_same_entries
from gfn_rb.torchrl_compat import all_slots, forget_layout, length_of, set_length

_LENGTH, _PAGES, _VALUES = "length", "pages", "values"


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
        mask: entry of rows that is the mask of padded tokens, such as ``"attention_mask"``, or a
            dict from entries of ``ragged`` to their masks. It is read as integers or bool, with
            padding at either end, and returned as int64 beside ``tokens_mask``.
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
        mask: NestedKey | Mapping[NestedKey, NestedKey] | None = None,
        page_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        require_kind("ragged", ragged, Mapping)
        self.page_size = None if page_size is None else as_count("page_size", page_size)
        self._limit, self._groups = groups_of(ragged)
        # Of each entry that differs in length, the entry whose lengths it has.
        self.ragged = {name: key for key, group in self._groups.items() for name in group}
        # Of each entry of a content that holds such values, the entry of the lengths.
        self.lengths_in_content = {
            key_path(_within(name, _VALUES)): key_path(_within(key, _LENGTH))
            for name, key in self.ragged.items()
        }
        if not (isinstance(text, tuple) or is_listed(text)):
            raise ArgumentError(f"text must be a list of keys, got {kind_of(text)}")
        self.text = frozenset(unravel_key(name) for name in as_keys(text))
        if not self.text <= {*self.ragged}:
            raise ArgumentError(
                f"text must name entries of ragged, {list(self.ragged)}, got {list(text)}"
            )
        self.masks = masks_of(mask, [name for name in self._groups if name not in self.text])
        self._pools: dict[NestedKey, PagePool] = {}
        self._highest = dict.fromkeys(self._groups, 0)  # length that was ever stored
        # Of the last write by group: slots, their page tables, and the pages that they had before.
        self._replaced: dict[NestedKey, tuple[Tensor, Tensor, Tensor]] = {}
        super().__init__(as_count("max_size", max_size), device=device)

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
        """Return rows [n] as writers handle them, padded, checked against what is stored.

        Raises:
            KeyMismatchError: keys are missing or unknown to the storage.
            ShapeError: an entry has another dtype or shape than the stored one, a row is too long,
                or entries of one length differ in length.
        """
        columns = with_masks(columns_of(data), self.masks)
        rows, entries = {}, dict[NestedKey, RowEntry]()
        beside = {each for name in self.ragged for each in (name, mask_key(name), length_key(name))}
        for name in (name for name in columns if name not in beside):
            rows[name] = each = stacked(name, columns[name])
            if not self.initialized:
                for key in self._groups:
                    require_named_mask(name, each, key, columns)
            entries[name] = each.shape[1:], each.dtype
        for key, group in self._groups.items():
            came, own = {}, {}
            for name in group:
                came[name], own[name] = self._read(name, columns, len(data))
                if not torch.equal(own[name], own[group[0]]):
                    raise ShapeError(f"key {name!r} must have the length of {key!r} in each row")
            length, limit = own[key], self._limit[key]
            if len(length) and (longest := int(length.max())) > limit:
                raise ShapeError(
                    f"key {key!r} must have at most {limit} elements in a row, got {longest}"
                )
            entries |= {name: (("L", *each.shape[2:]), each.dtype) for name, each in came.items()}
            width = max(each.shape[1] for each in came.values())
            rows |= {name: resized(each, width) for name, each in came.items()}
            rows[mask_key(key)] = mask_of(length, width).to(came[key].device, non_blocking=True)
        if self.initialized:
            held = self._entries()
            if INDEX not in held:  # it is the writer's
                rows.pop(INDEX, None)
            if INDEX not in entries.keys() & held.keys():
                entries.pop(INDEX, None)
                held.pop(INDEX, None)
            require_same_entries(entries, held)
        return TensorDict(rows, data.batch_size)

    def hashes(self, data: Rows, name: NestedKey) -> Int64[Tensor, "n 2"]:
        """Return integers of rows in any form, equal exactly where an entry in ragged is."""
        columns = with_masks(columns_of(data), self.masks)
        return hashed_rows(*self._read(name, columns, len(data)))

    def _read(
        self, name: NestedKey, columns: dict[NestedKey, Any], n: int
    ) -> tuple[Shaped[Tensor, "n T *E"], Int64[Tensor, "n"]]:
        """Return an entry of rows padded to one length, and the length of each row."""
        if name not in columns:
            is_dropped = name in (LOG_PROB, ESTIMATOR_OUTPUT)
            raise KeyMismatchError(
                f"data lacks the key {name!r}: it holds {sorted(map(str, columns))}"
                f"{'; presets drop it unless keep names it' * is_dropped}"
            )
        if name in self.text:
            columns = {**columns, name: in_bytes(name, columns[name], n)}
        return padded_entry(name, self.ragged[name], columns)

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
        data = data if data.ndim else data.unsqueeze(0)
        cursor = cursor.cpu() if isinstance(cursor, Tensor) else cursor
        slot = torch.arange(self.max_size)[cursor].reshape(-1)
        rows, stored = self.padded(data), length_of(self)
        if slot.shape != rows.batch_size:
            raise ShapeError(f"cursor must name {rows.shape[0]} slots, got {len(slot)}")
        if not len(slot):
            return
        if not self.initialized:
            self._init(rows[0])
        super().set(slot, self.encoded(rows, slot).to(self.device), set_cursor=set_cursor)
        if set_cursor:  # which counts rows that are written over as well
            set_length(self, max(stored, int(slot.max()) + 1))

    def encoded(self, rows: TensorDictBase, slot: Int64[Tensor, "n"]) -> TensorDictBase:
        """Copy padded rows into free pages, and return the columns to write to some slots."""
        stored, columns = length_of(self), dict(rows.items(True, True))
        share = min(max(stored, int(slot.max()) + 1) / self.max_size, 1.0)
        self._free_replaced()
        for key, group in self._groups.items():
            length = lengths_of(columns.pop(mask_key(key)))
            came = {name: columns.pop(name).detach() for name in group}
            table = self._pools[key].write(came, length, partial(self._tables, key), share)
            self._highest[key] = max(self._highest[key], int(length.max()))
            columns[_within(key, _LENGTH)] = length.to(torch.int32)
            columns[_within(key, _PAGES)] = table
            if self.device.type == "cpu":  # on a device, free pages are found once they are needed
                old = self._tables(key).index_select(0, slot[slot < stored].unique())
                self._replaced[key] = slot, table, old[old > 0].to(torch.int64)
        return TensorDict(columns, rows.batch_size)

    def _free_replaced(self) -> None:
        """Free the pages of rows that the last write replaced, unless it did not take place."""
        replaced, self._replaced = self._replaced, {}
        for key, (slot, table, old) in replaced.items():
            if torch.equal(all_slots(self).get(_within(key, _PAGES)).index_select(0, slot), table):
                self._pools[key].free(old)

    def _tables(self, key: NestedKey) -> Shaped[Tensor, "rows width"]:
        """Return the page tables of the rows in use."""
        return all_slots(self).get(_within(key, _PAGES))[: length_of(self)]

    def _init(self, data: TensorDictBase) -> None:
        """Allocate columns, and pools without pages, for rows such as a padded one."""
        columns, self._pools, self._replaced = dict(data.items(True, True)), {}, {}
        for key, group in self._groups.items():
            del columns[mask_key(key)]
            came = {name: columns.pop(name) for name in group}
            pool = PagePool(came, self._limit[key], self.page_size, self.device)
            self._pools[key] = pool
            columns[_within(key, _LENGTH)] = torch.tensor(0, dtype=torch.int32)
            columns[_within(key, _PAGES)] = torch.zeros(pool.width, dtype=torch.int32)
        super()._init(TensorDict(columns, data.batch_size))
        all_slots(self).zero_()  # slots that were never written are rows of length 0

    def _empty(self) -> None:
        super()._empty()
        self._highest, self._replaced = dict.fromkeys(self._groups, 0), {}
        for pool in self._pools.values():
            pool.forget()

    # Rows that go out.

    def get(self, index: Any) -> Any:
        """Return padded rows; of a single slot, entries of its length."""
        rows = self._padded(super().get(index), self.text)
        for key, mask in self.masks.items():
            rows.set(mask, rows.get(mask_key(key)).long())
        return rows

    def padded_rows(self, index: Any) -> TensorDictBase:
        """Return padded rows, text in bytes."""
        return self._padded(super().get(index), frozenset())

    def blocks(self) -> Iterator[TensorDictBase]:
        """Yield all rows in use as :meth:`padded_rows` returns them, some at a time."""
        for start in range(0, len(self), BLOCK):
            yield self.padded_rows(slice(start, min(start + BLOCK, len(self))))

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
                columns.set(name, in_words(value, length) if name in text else value)
            if not text >= {*group}:
                columns.set(mask_key(key), mask_of(length, width))
        return columns

    # State.

    def content(self, slot: Int64[Tensor, "n"] | None = None) -> dict[str, Tensor]:
        r"""Return rows, by default all, as flat tensors: of ragged entries one value after another.

        ``tokens/values`` [sum of lengths, \\*E] and ``tokens/length`` [n]; other entries [n, ...].
        Nested keys are joined by "/".
        """
        if not self.initialized:
            return {}
        stored = super().get(torch.arange(len(self)) if slot is None else slot)
        held = dict(stored.items(True, True))
        for key, pool in self._pools.items():
            values = pool.values(held.pop(_within(key, _PAGES)), held[_within(key, _LENGTH)])
            held |= {_within(name, _VALUES): each for name, each in values.items()}
        return {key_path(name): each for name, each in held.items()}

    def restore(self, content: Mapping[str, Tensor]) -> None:
        """Replace all rows by what :meth:`content` returned.

        Raises:
            CheckpointMismatchError: the content has other entries, has more or longer rows than
                there is room for, or does not match its own lengths. Nothing was written then.
        """
        n, ragged = self.check_content(content), self.lengths_in_content
        forget_layout(self)  # into other memory: what there was may have to be put back
        self._pools = {}
        self._empty()
        whole = [name for name in content if name not in {*ragged, *ragged.values()}]
        ends = {each: [0, *content[each].cumsum(0).tolist()] for each in {*ragged.values()} if n}
        for start in range(0, n, BLOCK):
            end = min(start + BLOCK, n)
            rows = {tuple(name.split("/")): content[name][start:end] for name in whole}
            for key, group in self._groups.items():
                name = key_path(_within(key, _LENGTH))
                rows[length_key(key)] = length = content[name][start:end]
                width, first, last = int(length.max()), ends[name][start], ends[name][end]
                place = places(length, width)
                for each in group:
                    values = content[key_path(_within(each, _VALUES))][first:last]
                    flat = values.new_zeros((len(length) * width, *values.shape[1:]))
                    flat.index_copy_(0, place.to(flat.device), values)
                    rows[each] = flat.view(len(length), width, *values.shape[1:])
            self.set(range(start, end), TensorDict(rows, torch.Size([end - start])))

    def check_content(self, content: Mapping[str, Tensor]) -> int:
        """Return the number of rows of a content, or raise unless it fits; see :meth:`restore`."""
        if not content:
            return 0
        ragged = self.lengths_in_content
        if missing := {*ragged, *ragged.values()} - content.keys():
            raise CheckpointMismatchError(
                f"storage state holds {sorted(content)}, expected {sorted(missing)} among them"
            )
        came: dict[str, RowEntry] = {}
        for name, each in content.items():
            if name in ragged:
                came[name.removesuffix(f"/{_VALUES}")] = ("L", *each.shape[1:]), each.dtype
            elif name not in ragged.values():
                came[name] = (*each.shape[1:],), each.dtype
        if self.initialized:
            held = {key_path(name): entry for name, entry in self._entries().items()}
            if came != held:
                raise CheckpointMismatchError(f"storage state is of {came}, expected {held}")
        counts = {len(each) for name, each in content.items() if name not in ragged}
        if len(counts) > 1 or max(counts) > self.max_size:
            raise CheckpointMismatchError(
                f"storage state is of {sorted(counts)} rows, expected at most {self.max_size}"
            )
        limits = {key_path(_within(key, _LENGTH)): limit for key, limit in self._limit.items()}
        for name, of in ragged.items():
            length, total, limit = content[of].to(torch.int64), len(content[name]), limits[of]
            if not bool(((length >= 0) & (length <= limit)).all()) or total != int(length.sum()):
                raise CheckpointMismatchError(
                    f"storage state has {total} elements in {name!r} for rows of {shown(length)}, "
                    f"expected their sum, and at most {limit} in a row"
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
        """Load what :meth:`dumps` saved.

        Raises:
            CheckpointError: the folder cannot be read, or holds pickled values.
        """
        try:
            content = dict(TensorDict.load_memmap(path, allow_pickle=False).items())
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot read {path}: {shown(str(error))}") from error
        self.restore(content)


def _within(key: NestedKey, name: str) -> tuple[str, ...]:
    return (key, name) if isinstance(key, str) else (*key, name)
