import time
from types import SimpleNamespace

import pytest

from gfn_rb.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_time_goes_to_the_innermost_phase(clock):
    watch = Stopwatch(("a", "b"))
    clock.now = 1
    with watch("a"):
        clock.now = 3
        with watch("b"):
            clock.now = 7
        clock.now = 15
    clock.now = 31
    assert watch.read() == {"a": 10, "b": 4, "other": 17}
    assert sum(watch.read().values()) == 31
