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


def test_an_error_ends_its_phase(clock):
    watch = Stopwatch(("a",))
    with pytest.raises(KeyError), watch("a"):  # noqa: PT012
        clock.now = 2
        raise KeyError
    clock.now = 5
    assert watch.read() == {"a": 2, "other": 3}


def test_a_restored_watch_goes_on(clock):
    watch = Stopwatch(("a",))
    clock.now = 100
    watch.restore({"a": 7.0, "other": 1.0})
    with watch("a"):
        clock.now = 102
    assert watch.read() == {"a": 9, "other": 1}


def test_a_summary_says_where_the_time_went(clock):
    watch = Stopwatch(("a",))
    with watch("a"):
        clock.now = 3
    clock.now = 4
    assert watch.summary() == "a 3.00 s (75%), other 1.00 s (25%)"
    clock.now = 0
    assert Stopwatch(("a",)).summary() == "a 0.00 s (0%), other 0.00 s (0%)"
