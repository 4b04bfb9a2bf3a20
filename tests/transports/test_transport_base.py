"""What all transports share: rules for arguments, waiting, and how losses are told."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import ArgumentError
from gfn_rb.transports import LocalTransport
from gfn_rb.transports.base import polled


@pytest.fixture
def alone() -> LocalTransport:
    return LocalTransport.group(1, timeout=5.0)[0]


def test_what_is_too_large_is_refused_before_it_is_made() -> None:
    (small,) = LocalTransport.group(1, max_nbytes=1000)
    made: list[Any] = []
    small.send([bytes(999), LazyBuffer(1, lambda: made.append(1) or b"x")], 0)
    assert made == [1]
    assert len(small.recv().data) == 1000
    tracemalloc.start()
    with pytest.raises(ArgumentError, match="payload has 1001 bytes; expected at most max_nbytes"):
        small.isend([bytes(999), LazyBuffer(2, lambda: made.append(2) or b"xx")], 0)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert made == [1]


def test_an_error_in_a_with_block_is_the_one_heard_of_at_once(
    alone: LocalTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(alone, "_close", waited.append)
    with pytest.raises(KeyError), alone:
        raise KeyError("mine")
    assert alone.closed
    assert waited == [0.0]


def test_polling_ends_on_time_and_mostly_sleeps() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    start = time.monotonic()
    assert polled(look, 0.3) is None
    assert 0.3 <= time.monotonic() - start < 30.0
    assert 20 < looks < 50_000
