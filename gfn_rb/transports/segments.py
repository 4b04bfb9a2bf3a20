"""Large messages as segments: what is sent first says how many follow, and how large they are."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import TransportError
from gfn_rb.transports.base import Part

WHOLE = 1 << 18  # messages up to here are sent in one piece: a copy costs less than a second one
SMALL = 1 << 15  # parts below are copied together; others are sent from where they are
MAX_SEGMENTS = 7
PREAMBLE = struct.Struct(f"<{1 + MAX_SEGMENTS}Q")  # of the message, and of each later segment
_NO_SIZES = (0,) * MAX_SEGMENTS


def cut(parts: Sequence[Part], nbytes: int) -> tuple[bytes, list[Part]]:
    """Return the preamble of a message with its first few bytes, and its other segments.

    Small parts are joined with their neighbours, up to a late one, which begins a segment. A small
    message is all in the first piece.
    """
    if nbytes <= WHOLE:
        return b"".join([PREAMBLE.pack(nbytes, *_NO_SIZES), *map(_made, parts)]), []
    groups: list[list[Part]] = [[]]
    begin = False
    for part in parts:
        is_large = part.nbytes >= SMALL
        if begin or is_large or isinstance(part, LazyBuffer):
            groups.append([])
        groups[-1].append(part)
        begin = is_large
    first, *later = groups
    if _nbytes(first) >= 2 * SMALL:
        first, later = [], groups
    segments = [_merged(group) for group in later if _nbytes(group)]
    if len(segments) > MAX_SEGMENTS:
        segments = [memoryview(b"".join(map(_made, segments)))]
    sizes = [segment.nbytes for segment in segments] + [0] * (MAX_SEGMENTS - len(segments))
    return b"".join([PREAMBLE.pack(nbytes, *sizes), *map(_made, first)]), segments


def sizes_after(head: memoryview, source: int) -> tuple[int, list[int]]:
    """Return what a preamble says: the bytes of the message, and of each segment to come."""
    if len(head) < PREAMBLE.size:
        raise TransportError(f"rank {source} sent {len(head)} bytes, too few for a preamble")
    nbytes, *sizes = PREAMBLE.unpack(head[: PREAMBLE.size])
    inline = len(head) - PREAMBLE.size
    if inline + sum(sizes) != nbytes:
        raise TransportError(
            f"rank {source} announced {nbytes} bytes, in pieces of {inline} and {sizes}"
        )
    return nbytes, [size for size in sizes if size]


def _nbytes(group: Sequence[Part]) -> int:
    return sum(part.nbytes for part in group)


def _made(part: Part) -> bytes | memoryview:
    return part.make() if isinstance(part, LazyBuffer) else part


def _merged(group: list[Part]) -> Part:
    if len(group) == 1:
        return group[0]
    nbytes = _nbytes(group)
    if isinstance(group[0], LazyBuffer):
        return LazyBuffer(nbytes, lambda: b"".join(map(_made, group)))
    return memoryview(b"".join(map(_made, group)))
