"""Checksums at the speed of memory: XXH3.

They are meant against accidents of lines, disks and memory, and no protection from whoever means
harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xxhash import xxh3_64, xxh3_64_digest

BLOCK = 1 << 24
SUM_NBYTES = 8


class BlockSums:
    """The checksum of each block of what comes piece by piece."""

    def __init__(self) -> None:
        self._sums: list[Any] = []
        self._room = 0  # bytes that the last block lacks

    def update(self, data: memoryview) -> None:
        """Add bytes to those before."""
        while data:
            if not self._room:
                self._sums.append(xxh3_64())
                self._room = BLOCK
            piece, data = data[: self._room], data[self._room :]
            self._sums[-1].update(piece)
            self._room -= len(piece)

    def digest(self) -> bytes:
        """Return the checksums, one after another."""
        return b"".join(each.digest() for each in self._sums)


def sums_nbytes(nbytes: int) -> int:
    """Return how many bytes the checksums of so many bytes take."""
    return -(-nbytes // BLOCK) * SUM_NBYTES


def find_damage(
    body: memoryview, sums: memoryview, start: int, map_blocks: Callable[..., Any] = map
) -> str:
    """Compare every block with its checksum, and describe the first that differs, if one does.

    It is called by its bytes in the frame or file, in which the body begins at ``start``. Blocks
    are summed by ``map``, or by that of an executor.
    """
    blocks = [body[i : i + BLOCK] for i in range(0, len(body), BLOCK)]
    for i, came in enumerate(map_blocks(xxh3_64_digest, blocks)):
        expected = bytes(sums[i * SUM_NBYTES : (i + 1) * SUM_NBYTES])
        if came != expected:
            first = start + i * BLOCK
            return (
                f"the checksum of bytes {first} to {first + len(blocks[i])} is {came.hex()}; "
                f"expected {expected.hex()}"
            )
    return ""
