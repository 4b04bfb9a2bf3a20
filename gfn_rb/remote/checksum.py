"""Checksums at the speed of memory."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def checksum(data: memoryview | bytearray, seed: int = 0) -> int:
    """Return 64 bits that depend on every byte and on where it stands: XXH3.

    It is meant against accidents of lines and memory, and no protection from whoever means harm.

    Args:
        data: bytes.
        seed: 64 bits that the result depends on as well.
    """
    return xxh3_64_intdigest(data, seed)
