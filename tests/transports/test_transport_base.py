"""What all transports share: rules for arguments, waiting, and how losses are told."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
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


def test_polling_ends_on_time_and_mostly_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks, slept = 100.0, 0, 0.0

    def look() -> None:
        nonlocal looks, now
        looks, now = looks + 1, now + 1e-6

    def sleep(seconds: float) -> None:
        nonlocal now, slept
        now, slept = now + seconds, slept + seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr("gfn_rb.transports.base.time", clock)
    assert polled(look, 0.3) is None
    assert 100.3 <= now < 100.301
    assert slept > 0.29
    assert 2_000 < looks < 2_400  # 2 ms without a sleep, then at least every 2 ms
