"""Cutting messages: what is copied, what is not, and what contradicts itself."""

from __future__ import annotations

import numpy as np
import pytest

from gfn_rb.errors import TransportError
from gfn_rb.transports.base import Late
from gfn_rb.transports.segments import MAX_SEGMENTS, PREAMBLE, SMALL, cut, sizes_after

LARGE = memoryview(np.arange(SMALL, dtype=np.uint8))


def view(text: bytes) -> memoryview:
    return memoryview(text)


def test_small_messages_are_one_piece() -> None:
    head, segments = cut([view(b"ab"), view(b""), view(b"c")], 3)
    assert segments == []
    assert head[PREAMBLE.size :] == b"abc"
    assert sizes_after(memoryview(head), 0) == (3, [])


def test_large_parts_are_not_copied() -> None:
    head, segments = cut([view(b"head"), LARGE, view(b"x"), view(b"y"), LARGE], 6 + 2 * SMALL)
    assert segments[0] is LARGE
    assert segments[2] is LARGE
    assert bytes(segments[1]) == b"xy"
    assert sizes_after(memoryview(head), 0) == (6 + 2 * SMALL, [SMALL, 2, SMALL])


def test_late_parts_are_made_last() -> None:
    made = []
    late = Late(2, lambda: made.append(1) or b"zz")
    head, segments = cut([view(b"head"), LARGE, late, view(b"!")], 7 + SMALL)
    assert not made
    assert isinstance(segments[1], Late)
    assert segments[1].make() == b"zz!"
    assert head.endswith(b"head")


def test_many_segments_become_one() -> None:
    parts = [LARGE] * (MAX_SEGMENTS + 1)
    head, segments = cut(parts, SMALL * len(parts))
    assert len(segments) == 1
    assert bytes(segments[0]) == bytes(LARGE) * len(parts)
    assert sizes_after(memoryview(head), 0) == (SMALL * len(parts), [SMALL * len(parts)])


@pytest.mark.parametrize(
    "head", [b"", b"x" * 63, PREAMBLE.pack(5, *[0] * 7), PREAMBLE.pack(*[1] * 8)]
)
def test_contradictions_are_refused(head: bytes) -> None:
    with pytest.raises(TransportError, match="rank 3"):
        sizes_after(memoryview(head), 3)
