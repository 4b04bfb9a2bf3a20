"""Prefixes: byte by byte, and what is refused before anything else is looked at."""

from __future__ import annotations

import struct

import pytest
import xxhash

from gfn_rb.codec.layout import FRAME, MAGIC, VERSION, Prefix
from gfn_rb.errors import WireCorruptError

FIELDS = {
    "version": VERSION, "kind": 7, "form": FRAME, "sum": 0, "nbytes": 128, "head_nbytes": 96,
    "structure_nbytes": 3, "meta_nbytes": 2, "n_rows": 11,
}  # fmt: skip


def sealed(**changes: int) -> bytearray:
    """Return bytes of zeros that begin with a prefix."""
    fields = {**FIELDS, **changes}
    data = bytearray(128)
    Prefix(**fields).seal(memoryview(data)[: max(64, min(128, fields["head_nbytes"]))])
    return data


def checked(data: bytearray | memoryview) -> Prefix:
    return Prefix.checked(memoryview(data), "it", FRAME)[0]


def test_every_byte_has_its_place() -> None:
    data = sealed()
    summed = xxhash.xxh3_64_intdigest(data[24:96], seed=int.from_bytes(data[8:16], "little"))
    expected = MAGIC + struct.pack("<HH4sQQQQQQ", 3, 7, b"rows", summed, 128, 96, 3, 2, 11)
    assert data[:64] == expected
    assert not any(data[64:])


def test_what_was_sealed_is_read() -> None:
    prefix = checked(sealed())
    assert prefix._replace(sum=0) == Prefix(**FIELDS)
    assert (prefix.meta_at, prefix.texts_end) == (67, 69)


def test_every_flipped_bit_of_the_head_is_noticed() -> None:
    data = sealed()
    for at in range(96):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises(WireCorruptError):
                checked(data)
            data[at] ^= 1 << bit
    data[96] ^= 1  # not of the head
    checked(data)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 127])
def test_truncated_ones_are_refused(n: int) -> None:
    with pytest.raises(WireCorruptError, match=f"has {n} bytes"):
        checked(memoryview(sealed())[:n])


def test_another_magic_is_named() -> None:
    data = sealed()
    data[:4] = b"HTTP"
    with pytest.raises(WireCorruptError, match=r"it begins with b'HTTPrb\\r\\n'"):
        checked(data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nbytes": 127}, "has 128 bytes; expected 127"),
        ({"head_nbytes": 68}, "a head of 68 bytes with texts up to 69"),
        ({"head_nbytes": 129}, "a head of 129 bytes"),
        ({"meta_nbytes": 30}, "texts up to 97"),
        ({"structure_nbytes": (1 << 64) - 1}, "expected it to hold the texts"),
    ],
)
def test_sizes_beyond_the_bytes_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(WireCorruptError, match=words):
        checked(sealed(**changes))
