"""Where the tensors of a frame lie."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import torch

from gfn_rb.remote.schema import Field

SMALL_NBYTES = 1 << 14
ALIGNMENT = 64
_SUM = struct.Struct("<Q")


class Place(NamedTuple):
    """Where one tensor lies."""

    field: int
    """Its number."""
    start: int
    """In bytes: within the small part, or within the large one."""
    end: int


class Plan:
    """Where the tensors of a frame lie.

    Args:
        fields: of the schema.
        n_rows: of each tensor.

    Attributes:
        fields: of the schema.
        n_rows: of each tensor.
        small: tensors within the head, from the end of its texts aligned.
        small_nbytes: what they take.
        large: the others, from the end of the head.
        large_nbytes: what they take.
        sums: how the checksums after them are packed.
        sums_at: where these begin, from the end of the head.
        tail_nbytes: what the large tensors and their checksums take.
        truths: which fields are truth values.
    """

    def __init__(self, fields: tuple[Field, ...], n_rows: int) -> None:
        sizes = [field.row_nbytes * n_rows for field in fields]
        order = range(len(fields))
        small = [i for i in order if sizes[i] < SMALL_NBYTES]
        large = [i for i in order if sizes[i] >= SMALL_NBYTES]
        large.sort(key=lambda i: -fields[i].dtype.itemsize)
        self.fields = fields
        self.n_rows = n_rows
        self.small, self.small_nbytes = _placed(small, sizes, ALIGNMENT)
        self.large, self.large_nbytes = _placed(large, sizes, 1)
        self.sums = struct.Struct(f"<{len(large)}Q")
        self.sums_at = aligned(self.large_nbytes, _SUM.size)
        self.tail_nbytes = aligned(self.sums_at + self.sums.size)
        self.truths = [i for i in order if fields[i].dtype is torch.bool]

    def head_nbytes(self, texts_end: int) -> int:
        """Return the bytes of the head.

        Args:
            texts_end: where prefix, schema and metadata end.
        """
        return aligned(aligned(texts_end) + self.small_nbytes)


@lru_cache(maxsize=128)
def planned(fields: tuple[Field, ...], n_rows: int) -> Plan:
    """Return a plan, the same one again for rows that look the same.

    Args:
        fields: of the schema.
        n_rows: of each tensor.
    """
    return Plan(fields, n_rows)


def aligned(position: int, alignment: int = ALIGNMENT) -> int:
    """Return the next multiple.

    Args:
        position: in bytes.
        alignment: of what.
    """
    return -(-position // alignment) * alignment


def _placed(indices: list[int], sizes: list[int], alignment: int) -> tuple[list[Place], int]:
    places, end = [], 0
    for i in indices:
        start = aligned(end, alignment)
        end = start + sizes[i]
        places.append(Place(i, start, end))
    return places, end
