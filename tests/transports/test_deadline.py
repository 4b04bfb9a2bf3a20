import pytest

from gfn_rb.transports.base import SHUTDOWN_SECONDS, SLICE, Deadline, ShutdownBudget


class Clock:
    """Time that passes when one waits."""

    def __init__(self):
        self.now, self.waits = 100.0, []

    def __call__(self):
        return self.now

    def nothing(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return False


@pytest.fixture
def clock():
    return Clock()


def test_a_wait_is_cut_into_slices_and_ends_in_time(clock):
    deadline = Deadline(0.25, ShutdownBudget(clock=clock))
    assert deadline.remaining == 0.25
    assert not deadline.wait(clock.nothing)
    assert clock.waits == pytest.approx([SLICE, SLICE, 0.05])
    assert clock.now == pytest.approx(100.25)
    assert (deadline.passed, deadline.remaining) == (True, 0.0)
    assert str(deadline) == "within 0.25 s"


def test_what_happens_ends_the_wait(clock):
    deadline = Deadline(30.0, ShutdownBudget(clock=clock))
    assert deadline.wait(lambda seconds: clock.nothing(seconds) or clock.now > 100.25)
    assert len(clock.waits) == 3
    assert deadline.remaining > 0


def test_a_rank_that_is_to_stop_has_one_second_for_all_waits(clock):
    told = []
    shutdown = ShutdownBudget(lambda: bool(told), clock=clock)
    assert not Deadline(50.0, shutdown).wait(clock.nothing)  # which costs nothing yet
    told.append("to stop")
    deadline = Deadline(30.0, shutdown)
    assert deadline.remaining == SHUTDOWN_SECONDS == 1.0
    clock.now += 10.0  # spent on something else
    assert deadline.remaining == 1.0
    start = clock.now
    assert not Deadline(0.75, shutdown).wait(clock.nothing)
    assert clock.now - start == pytest.approx(0.75)
    assert deadline.remaining == pytest.approx(0.25)
    assert not deadline.wait(clock.nothing)
    assert clock.now - start == pytest.approx(1.0)
    assert (deadline.remaining, deadline.passed) == (0.0, False)
    assert str(deadline) == "before this rank was to stop"
    assert not Deadline(30.0, shutdown).wait(clock.nothing)
    assert clock.now - start == pytest.approx(1.0)


def test_a_stop_in_the_course_of_a_wait_is_noticed_after_a_slice(clock):
    shutdown = ShutdownBudget(lambda: clock.now > 100.35, seconds=0.0, clock=clock)
    assert not Deadline(30.0, shutdown).wait(clock.nothing)
    assert clock.now == pytest.approx(100.4)


def test_waits_that_raise_are_counted(clock):
    shutdown = ShutdownBudget(lambda: True, clock=clock)

    def fail(seconds):
        clock.nothing(seconds)
        raise OSError("no network")

    with pytest.raises(OSError, match="no network"):
        Deadline(30.0, shutdown).wait(fail)
    assert shutdown.seconds == pytest.approx(SHUTDOWN_SECONDS - SLICE)
