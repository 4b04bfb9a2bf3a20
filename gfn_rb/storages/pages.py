"""Pages that hold entries of rows of different lengths.

vLLM keeps its key-value cache this way (Kwon et al. 2023, https://arxiv.org/abs/2309.06180). A row
occupies as many pages as its length needs, in any order. Its page table holds their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from tensordict import NestedKey
from torch import Tensor

from gfn_rb.numerics.flat import resized
from gfn_rb.shapes import Int, Int64, Shaped

BLOCK = 1024  # rows that are read or written at a time: padded, all may be larger than memory
_SPARE = 64  # a pool has at least one spare page for so many, or it grows
_PAGE_NUMBER_BYTES = 4


class PagePool:
    """Pages of equally many elements, for entries that are of one length in each row.

    Page 0 holds zeros. Page tables name it where a row has no more pages.

    Args:
        row: entries of a padded row, [T, *E] each.
        longest: highest length of a row.
        page_size: elements in a page. None weighs unused elements of last pages against the width
            of page tables.
        device: device of the pages.
    """

    def __init__(
        self,
        row: Mapping[NestedKey, Tensor],
        longest: int,
        page_size: int | None,
        device: torch.device,
    ) -> None:
        if page_size is None:
            nbytes = sum(each.shape[1:].numel() * each.element_size() for each in row.values())
            best = 2 * _PAGE_NUMBER_BYTES * longest / max(nbytes, 1)
            page_size = 1 << max(round(math.log2(best) / 2), 0)
        self.page_size = page_size
        self.width = -(-longest // page_size)
        self.entries = {
            name: torch.zeros((1, page_size, *each.shape[1:]), dtype=each.dtype, device=device)
            for name, each in row.items()
        }
        self.forget()

    @property
    def n_pages(self) -> int:
        """Number of pages, which all entries have."""
        return len(next(iter(self.entries.values())))

    # After an exception at any line, fewer free pages are counted than there are, never more.

    def forget(self) -> None:
        """Have free pages looked for when some are needed next."""
        self._n_free = 0
        self._free: list[Tensor] = []

    def free(self, pages: Int64[Tensor, "m"]) -> None:
        """Take back pages that no row names any more."""
        self._free.append(pages)
        self._n_free += len(pages)

    def _take(self, n: int, tables: Callable[[], Tensor], share: float) -> Int64[Tensor, "{n}"]:
        """Return the numbers of n free pages, which are then no longer free; see write."""
        if n > self._n_free:
            # Mark and sweep: pages that no row in use names.
            named = tables().reshape(-1)
            is_free = torch.ones(self.n_pages, dtype=torch.bool, device=named.device)
            is_free[named] = False
            is_free[0] = False
            self.forget()
            self.free(is_free.nonzero()[:, 0].cpu())
            if n + self.n_pages // _SPARE > self._n_free:
                self._grow(n, share)
        taken, missing = [torch.empty(0, dtype=torch.int64)], n
        self._n_free -= n
        while missing:
            last = self._free[-1]
            taken.append(last[:missing])
            self._free[-1:] = [last[missing:]] if len(last) > missing else []
            missing -= len(taken[-1])
        return torch.cat(taken)

    def _grow(self, n: int, share: float) -> None:
        """Make room for n pages, for as many rows as the storage holds if these are typical."""
        needed, before = self.n_pages - self._n_free + n, self.n_pages
        typical = min(math.ceil(needed / share * (1 + 1 / (2 * _SPARE))), 2 * needed)
        n_pages = max(typical, needed + max(needed, before) // _SPARE + 1)
        grown = {
            name: held.new_empty((n_pages, *held.shape[1:])) for name, held in self.entries.items()
        }
        for name, held in self.entries.items():
            grown[name][:before] = held
        self.entries = grown
        self.free(torch.arange(before, n_pages))

    def write(
        self,
        rows: Mapping[NestedKey, Tensor],
        length: Int64[Tensor, "n"],
        tables: Callable[[], Tensor],
        share: float,
    ) -> Shaped[Tensor, "n width"]:
        """Copy padded rows into free pages and return their page tables.

        Args:
            rows: entries, [n, T, *E] each.
            length: length of each row, on the host.
            tables: returns the page tables of the rows in use, whose pages are not written to.
            share: how full the storage will be, in (0, 1]; the pool grows in proportion.
        """
        size, n = self.page_size, length.shape[0]
        count = (length + (size - 1)) // size
        k = int(count.max())
        at = (torch.arange(k) < count[:, None]).view(-1).nonzero()[:, 0]
        taken = self._take(len(at), tables, share)
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

    def values(
        self, table: Shaped[Tensor, "n width"], length: Int[Tensor, "n"]
    ) -> dict[NestedKey, Tensor]:
        """Return each entry of rows, one row after the other, [sum of lengths, *E]."""
        total, at = int(length.sum()), 0
        flat = {
            name: held.new_empty((total, *held.shape[2:])) for name, held in self.entries.items()
        }
        for some, lengths in zip(table.split(BLOCK), length.split(BLOCK), strict=True):
            width = int(lengths.max()) if len(lengths) else 0
            place = places(lengths, width)
            for name, target in flat.items():
                rows = self.read(name, some, width).flatten(0, 1)
                target[at : at + len(place)] = rows.index_select(0, place)
            at += len(place)
        return flat


def places(length: Int[Tensor, "n"], width: int) -> Int64[Tensor, "total"]:
    """Return where the elements of rows are in rows padded to one length, flat."""
    length = length.to(torch.int64)
    shift = torch.arange(len(length), device=length.device) * width - (length.cumsum(0) - length)
    place = shift.repeat_interleave(length)
    return place + torch.arange(len(place), device=length.device)
