import pytest
from remote.remote_runs import group

from gfn_rb.errors import (
    PeerLostError,
    TransportClosedError,
)
from gfn_rb.remote.channel import FrameChannel


@pytest.mark.parametrize(
    "error", [PeerLostError(0, "of a test"), TransportClosedError("of a test")]
)
def test_what_ends_a_connection_is_raised(monkeypatch, error):
    def take(envelope):
        raise error

    mine, theirs = map(FrameChannel, group(2))
    mine.send(1, 0, 1)
    monkeypatch.setattr(theirs.transport, "take", take)
    with pytest.raises(type(error), match="of a test"):
        theirs.receive()


def test_frames_that_do_not_leave_are_counted():
    mine, one, other = map(FrameChannel, group(3))
    for dest in (1, 2):
        mine.send(dest, 0, 1)
    assert mine.flush(0.01) == 2
    assert mine.flush(0.01, exclude=[2]) == 1
    one.receive()
    assert mine.flush(0.01, exclude=[2]) == 0
    assert mine.in_flight(2, 0)[0] == 1
    other.transport.close()
    assert mine.in_flight(2, 0) == (0, 0)
