"""The first 64 bytes of frames and files."""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gfn_rb.errors import WireCorruptError

MAGIC = b"gfn_rb\r\n"
VERSION = 2
FRAME, FILE = b"rows", b"file"

_PREFIX = struct.Struct("<8sHH4sQQQQQQ")
_WORD = struct.Struct("<Q")
_SEED_AT, _SUM_AT, _SUMMED_FROM = 8, 16, 24
PREFIX_NBYTES = _PREFIX.size


class Prefix(NamedTuple):
    """What a frame or file begins with."""

    version: int
    kind: int
    """Of a frame: what it is about."""
    form: bytes
    """Whether it is a frame or a file."""
    sum: int
    """The checksum of the head but for magic and checksum."""
    nbytes: int
    """Of all."""
    head_nbytes: int
    structure_nbytes: int
    meta_nbytes: int
    n_rows: int
    """Of each tensor of a frame."""

    @classmethod
    def read(cls, data: memoryview, name: str) -> Prefix:
        """Return what bytes begin with, unchecked but for the magic.

        Raises:
            WireCorruptError: they are too few, or begin otherwise.
        """
        if len(data) < PREFIX_NBYTES:
            raise WireCorruptError(
                f"{name} has {len(data)} bytes; expected {PREFIX_NBYTES} or more"
            )
        magic, *values = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise WireCorruptError(f"{name} begins with {magic!r}; expected {MAGIC!r}")
        return cls._make(values)

    def check(self, data: memoryview, name: str) -> None:
        """Compare the sizes and the checksum of the head with what came.

        Raises:
            WireCorruptError: they differ.
        """
        if self.nbytes != len(data):
            raise WireCorruptError(f"{name} has {len(data)} bytes; expected {self.nbytes}")
        if not self.texts_end <= self.head_nbytes <= self.nbytes:
            raise WireCorruptError(
                f"{name} has a head of {self.head_nbytes} bytes with texts up to {self.texts_end}; "
                f"expected it to hold the texts, and to lie within {self.nbytes}"
            )
        if (came := _sum(data[: self.head_nbytes])) != self.sum:
            raise WireCorruptError(
                f"the checksum of the head of {name} is {came:016x}; expected {self.sum:016x}"
            )

    def seal(self, head: memoryview) -> None:
        """Write it to the beginning of a head, with the checksum of all of that."""
        _PREFIX.pack_into(head, 0, MAGIC, *self)
        _WORD.pack_into(head, _SUM_AT, _sum(head))

    @property
    def meta_at(self) -> int:
        """Where the structure ends and the metadata begins, in bytes."""
        return PREFIX_NBYTES + self.structure_nbytes

    @property
    def texts_end(self) -> int:
        """Where the metadata ends, in bytes."""
        return PREFIX_NBYTES + self.structure_nbytes + self.meta_nbytes


def _sum(head: memoryview) -> int:
    # The seed has version, kind and form in it, so that these are summed as well.
    return xxh3_64_intdigest(head[_SUMMED_FROM:], _WORD.unpack_from(head, _SEED_AT)[0])
