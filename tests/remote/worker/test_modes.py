import pytest

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.worker.client import ManagerClient
from gfn_rb.remote.worker.options import AwaitReply, CollectLater, NonBlocking


class Recorded(ManagerClient):
    """Notes what it is asked for."""

    managers = [1, 2]

    def __init__(self, unanswered=0):
        self._owed, self.asked = unanswered, []

    def unanswered_by(self, manager):
        return self._owed if manager == 1 else 0

    def collect(self):
        self.asked.append("collect")

    def wait(self, limit=None):
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
    client = Recorded()
    assert mode.before(client) == [1, 2]
    assert client.asked == before
    client.asked.clear()
    mode.after(client)
    assert client.asked == after


def test_without_waiting_the_number_on_their_way_is_bounded_for_each_manager():
    mode = NonBlocking(in_flight=2)
    assert [mode.before(Recorded(n)) for n in range(4)] == [[1, 2], [1, 2], [2], [2]]


def test_a_mode_shows_its_bound():
    assert repr(NonBlocking(in_flight=2)) == "NonBlocking(in_flight=2)"
    assert repr(AwaitReply()) == "AwaitReply()"


def test_a_bound_below_one_is_refused():
    with pytest.raises(ArgumentError, match="in_flight must be at least 1, got 0"):
        NonBlocking(0)
