import pytest
from remote.remote_runs import group, objects, transitions

from gfn_rb.errors import (
    ArgumentError,
    PeerLostError,
    ShapeError,
    TransportClosedError,
)
from gfn_rb.remote.channel import FrameChannel


@pytest.mark.parametrize("rows", [None, transitions([4, 5, 6])])
def test_metadata_rows_and_scores_of_others_come_in_one_frame(rows):
    mine, theirs = map(FrameChannel, group(2))
    nbytes = mine.send(1, 7, 3, {"id": 5}, rows, objects([1, 2])).nbytes
    frame = theirs.receive()
    assert frame[:4] == (0, 7, 3, {"id": 5})
    assert (frame.nbytes, frame.error) == (nbytes, None)
    assert theirs.receive() is None
    assert (frame.scores == objects([1, 2])).all()
    assert frame.rows is rows is None or (frame.rows == rows).all()
    mine.send(1, 7, 3, {"id": 5}, rows)
    assert theirs.receive().scores is None


def test_what_cannot_be_read_is_a_parcel_with_an_error():
    mine, theirs = map(FrameChannel, group(2))
    theirs.transport.max_nbytes = 10
    nbytes = mine.send(1, 3, 1, rows=objects([1])).nbytes
    mine.transport.send([b"no frame"], 1, 3)
    for size, error in ((nbytes, "at most max_nbytes, 10"), (8, "Wire")):
        parcel = theirs.receive()
        assert (parcel.source, parcel.tag, parcel.nbytes, parcel.rows) == (0, 3, size, None)
        assert error in repr(parcel.error)


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


def test_a_frame_that_could_not_be_made_or_sent_is_forgotten():
    one, other = group(2)
    mine, theirs = FrameChannel(one), FrameChannel(other)
    with pytest.raises(ShapeError):
        mine.send(1, 0, 1, rows=objects([1]).set("state", objects([1])["state"].to_sparse()))
    mine.send(1, 0, 1, rows=objects([1]))
    assert theirs.receive().rows["state"].tolist() == [[1, 0]]
    one.max_nbytes = 1000
    changed = objects(range(99)).set("more", objects(range(99))["state"])
    with pytest.raises(ArgumentError, match="max_nbytes"):
        mine.send(1, 0, 1, rows=changed)
    mine.send(1, 0, 1, rows=changed[:1])
    assert theirs.receive().rows["more"].tolist() == [[0, 0]]
    other.close()
    with pytest.raises(PeerLostError):
        mine.send(1, 0, 1, rows=objects([1]))


def test_frames_that_do_not_leave_are_counted():
    mine, one, other = map(FrameChannel, group(3))
    for dest in (1, 2):
        mine.send(dest, 0, 1)
    assert mine.flush(0.01) == 2
    assert mine.flush(0.01, exclude=[2]) == 1
    one.receive()
    assert mine.flush(0.01, exclude=[2]) == 0
    assert mine.in_flight(2)[0] == 1
    other.transport.close()
    assert mine.in_flight(2) == (0, 0)
