"""The first 64 bytes of a frame."""

from __future__ import annotations

import struct
from typing import NamedTuple

from gfn_rb.errors import WireCorruptError, WireVersionError
from gfn_rb.remote.checksum import checksum
from gfn_rb.remote.schema import MAX_SCHEMA_NBYTES

MAGIC = b"gfn_rb\r\n"
VERSION = 1
MAX_META_NBYTES = 1 << 20
MAX_ROWS = 1 << 31

_PREFIX = struct.Struct("<8sHHIQQIIQQQ")
_WORD = struct.Struct("<Q")
_SEED_AT, _SUM_AT, _SUMMED_FROM = 8, 16, 24
PREFIX_NBYTES = _PREFIX.size


class Prefix(NamedTuple):
    """What a frame begins with."""

    version: int
    kind: int
    head_nbytes: int
    sum: int
    nbytes: int
    schema_nbytes: int
    meta_nbytes: int
    sequence: int
    schema_id: int
    n_rows: int

    @classmethod
    def read(cls, frame: memoryview) -> Prefix:
        """Return what a frame begins with, its sizes and the checksum of its head checked.

        Args:
            frame: the bytes of one message.

        Raises:
            WireCorruptError: it is no frame, truncated, or its head is damaged.
            WireVersionError: it is a frame of another version.
        """
        if len(frame) < PREFIX_NBYTES:
            raise WireCorruptError(
                f"a frame has {len(frame)} bytes; expected {PREFIX_NBYTES} or more"
            )
        magic, *values = _PREFIX.unpack_from(frame)
        prefix = cls._make(values)
        if magic != MAGIC:
            raise WireCorruptError(f"a message begins with {magic!r}; expected {MAGIC!r}")
        if prefix.version != VERSION:
            raise WireVersionError(f"{prefix} is of version {prefix.version}; expected {VERSION}")
        if prefix.nbytes != len(frame):
            raise WireCorruptError(f"{prefix} has {len(frame)} bytes; expected {prefix.nbytes}")
        prefix._check_bounds()
        if (came := _sum_of(frame[: prefix.head_nbytes])) != prefix.sum:
            raise WireCorruptError(
                f"the checksum of the head of {prefix} is {came:016x}; expected {prefix.sum:016x}"
            )
        return prefix

    def seal(self, head: memoryview) -> None:
        """Write it to the beginning of a frame's head, with the checksum of all of that.

        Args:
            head: complete but for the prefix.
        """
        _PREFIX.pack_into(head, 0, MAGIC, *self)
        _WORD.pack_into(head, _SUM_AT, _sum_of(head))

    @property
    def texts_end(self) -> int:
        """Where schema and metadata end, in bytes."""
        return PREFIX_NBYTES + self.schema_nbytes + self.meta_nbytes

    def _check_bounds(self) -> None:
        if not self.texts_end <= self.head_nbytes <= self.nbytes or self.n_rows > MAX_ROWS:
            raise WireCorruptError(
                f"{self} has a head of {self.head_nbytes} bytes with texts up to "
                f"{self.texts_end}, and {self.n_rows} rows; expected it to hold the texts, and "
                f"{MAX_ROWS} rows at most"
            )
        if self.schema_nbytes > MAX_SCHEMA_NBYTES or self.meta_nbytes > MAX_META_NBYTES:
            raise WireCorruptError(
                f"{self} has a schema of {self.schema_nbytes} and metadata of {self.meta_nbytes} "
                f"bytes; expected at most {MAX_SCHEMA_NBYTES} and {MAX_META_NBYTES}"
            )

    def __str__(self) -> str:
        return f"frame {self.sequence} of kind {self.kind}"


def _sum_of(head: memoryview) -> int:
    """Return the checksum of all but the magic and the checksum itself."""
    return checksum(head[_SUMMED_FROM:], _WORD.unpack_from(head, _SEED_AT)[0])
