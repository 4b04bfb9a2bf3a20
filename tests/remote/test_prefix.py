"""Prefixes: byte by byte, and what is refused before anything else is looked at."""

from __future__ import annotations

import struct

import pytest
import xxhash

from gfn_rb.errors import WireCorruptError, WireVersionError
from gfn_rb.remote.prefix import MAGIC, MAX_META_NBYTES, MAX_ROWS, VERSION, Prefix
from gfn_rb.remote.schema import MAX_SCHEMA_NBYTES

FIELDS = {
    "version": VERSION, "kind": 7, "head_nbytes": 96, "sum": 0, "nbytes": 128,
    "schema_nbytes": 3, "meta_nbytes": 2, "sequence": 5, "schema_id": 9, "n_rows": 11,
}  # fmt: skip


def frame(**changes: int) -> bytearray:
    """Return a frame of zeros that begins with a prefix."""
    fields = {**FIELDS, **changes}
    data = bytearray(128)
    Prefix(**fields).seal(memoryview(data)[: max(64, min(128, fields["head_nbytes"]))])
    return data


def test_every_byte_has_its_place() -> None:
    data = frame()
    summed = xxhash.xxh3_64_intdigest(data[24:96], seed=int.from_bytes(data[8:16], "little"))
    expected = MAGIC + struct.pack("<HHIQQIIQQQ", 1, 7, 96, summed, 128, 3, 2, 5, 9, 11)
    assert data[:64] == expected
    assert not any(data[64:])


def test_what_was_sealed_is_read() -> None:
    prefix = Prefix.read(memoryview(frame()))
    assert prefix._replace(sum=0) == Prefix(**FIELDS)
    assert prefix.texts_end == 69
    assert str(prefix) == "frame 5 of kind 7"


def test_every_flipped_bit_of_the_head_is_noticed() -> None:
    data = frame()
    for at in range(96):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises((WireCorruptError, WireVersionError)):
                Prefix.read(memoryview(data))
            data[at] ^= 1 << bit
    data[96] ^= 1  # not of the head
    Prefix.read(memoryview(data))


@pytest.mark.parametrize("n", [0, 1, 63, 64, 127])
def test_truncated_ones_are_refused(n: int) -> None:
    with pytest.raises(WireCorruptError, match=f"has {n} bytes"):
        Prefix.read(memoryview(frame())[:n])


def test_another_magic_is_named() -> None:
    data = frame()
    data[:4] = b"HTTP"
    with pytest.raises(WireCorruptError, match=r"begins with b'HTTPrb\\r\\n'"):
        Prefix.read(memoryview(data))


def test_another_version_is_named() -> None:
    with pytest.raises(WireVersionError, match=r"frame 5 of kind 7 is of version 2; expected 1"):
        Prefix.read(memoryview(frame(version=2)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nbytes": 127}, "has 128 bytes; expected 127"),
        ({"head_nbytes": 68}, "a head of 68 bytes with texts up to 69"),
        ({"head_nbytes": 129}, "a head of 129 bytes"),
        ({"n_rows": MAX_ROWS + 1}, f"{MAX_ROWS + 1} rows"),
        ({"meta_nbytes": 30}, "texts up to 97"),
    ],
)
def test_sizes_beyond_the_frame_are_refused(changes: dict[str, int], words: str) -> None:
    with pytest.raises(WireCorruptError, match=words):
        Prefix.read(memoryview(frame(**changes)))


@pytest.mark.parametrize(
    ("schema_nbytes", "meta_nbytes"), [(MAX_SCHEMA_NBYTES + 1, 0), (0, MAX_META_NBYTES + 1)]
)
def test_texts_beyond_their_limits_are_refused(schema_nbytes: int, meta_nbytes: int) -> None:
    data = bytearray(1 << 21)
    known = {**FIELDS, "schema_nbytes": schema_nbytes, "meta_nbytes": meta_nbytes}
    Prefix(**{**known, "head_nbytes": 1 << 21, "nbytes": 1 << 21}).seal(memoryview(data))
    with pytest.raises(WireCorruptError, match="expected at most 262144 and 1048576"):
        Prefix.read(memoryview(data))
