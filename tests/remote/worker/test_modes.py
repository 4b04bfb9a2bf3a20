import pytest

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.worker.modes import AwaitReply, CollectLater, NonBlocking


class ManagerClient:
    """Notes what it is asked for."""

    def __init__(self, unanswered=0):
        self.unanswered, self.asked = unanswered, []

    def collect(self):
        self.asked.append("collect")

    def wait(self):
        self.asked.append("wait")
        return True


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        (AwaitReply(), [], ["wait"]),
        (CollectLater(), ["wait"], []),
        (NonBlocking(), ["collect"], []),
    ],
)
def test_modes_differ_in_when_they_wait(mode, before, after):
    desk = ManagerClient()
    assert mode.before(desk)
    assert desk.asked == before
    desk.asked.clear()
    mode.after(desk)
    assert desk.asked == after


def test_without_waiting_the_number_on_their_way_is_bounded():
    mode = NonBlocking(in_flight=2)
    assert [mode.before(ManagerClient(n)) for n in range(4)] == [True, True, False, False]


def test_a_mode_shows_its_bound():
    assert repr(NonBlocking(in_flight=2)) == "NonBlocking(in_flight=2)"
    assert repr(AwaitReply()) == "AwaitReply()"


def test_a_bound_below_one_is_refused():
    with pytest.raises(ArgumentError, match="in_flight must be at least 1, got 0"):
        NonBlocking(0)
