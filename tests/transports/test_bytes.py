"""Memory for messages is aligned, and joined copies are exact."""

from __future__ import annotations

import pytest

from gfn_rb.codec.buffers import LazyBuffer
from gfn_rb.transports.bytes import blank, joined


@pytest.mark.parametrize("nbytes", [1, 63, 64, 4097, 1_000_003])
def test_blank_memory_is_aligned_and_writable(nbytes: int) -> None:
    data = blank(nbytes)
    assert data.ctypes.data % 16 == 0
    data.fill(7)
    assert int(data.sum()) == 7 * nbytes


def test_no_bytes_at_all() -> None:
    assert len(blank(0)) == len(joined([], 0)) == len(joined([memoryview(b"")], 0)) == 0


def test_joined_is_one_after_another_and_a_copy() -> None:
    first = bytearray(b"ab")
    data = joined([memoryview(first), LazyBuffer(3, lambda: b"cde"), memoryview(b"f")], 6)
    first[:] = b"zz"
    assert bytes(data) == b"abcdef"
