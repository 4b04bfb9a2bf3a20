import pytest
from remote.remote_runs import group, objects

from gfn_rb.errors import PeerLostError, ShapeError
from gfn_rb.remote.link import Link


def test_rows_and_metadata_arrive():
    (mine, theirs), rows = map(Link, group(2)), objects([1, 2])
    nbytes = mine.post(1, 7, 3, {"id": 5}, rows)
    parcel = theirs.receive()
    assert (parcel.source, parcel.tag, parcel.kind, parcel.meta) == (0, 7, 3, {"id": 5})
    assert parcel.nbytes == nbytes
    assert parcel.error is None
    assert (parcel.rows == rows).all()
    assert theirs.receive() is None


def test_one_tag_can_be_waited_for():
    mine, theirs = map(Link, group(2))
    mine.post(1, 1, 3)
    mine.post(1, 2, 4)
    assert theirs.receive(tag=2).kind == 4
    assert theirs.receive(source=0).kind == 3


def test_what_is_no_frame_is_a_parcel_with_an_error():
    mine, theirs = group(2)
    mine.send([b"no frame"], 1, 3)
    parcel = Link(theirs).receive()
    assert (parcel.source, parcel.tag, parcel.nbytes, parcel.rows) == (0, 3, 8, None)
    assert type(parcel.error).__name__.startswith("Wire")


def test_a_reader_that_lost_track_is_told_everything_anew():
    one, other = group(2)
    mine, late = Link(one), Link(other)
    mine.post(1, 0, 1, rows=objects([1]))
    other.recv(0, 0)  # lost, and the schema with it
    mine.post(1, 0, 1, rows=objects([2]))
    assert late.receive().error is not None
    mine.begin_anew(1, 0)
    mine.post(1, 0, 1, rows=objects([3]))
    assert late.receive().rows["state"].tolist() == [[3, 0]]


def test_a_frame_that_could_not_be_made_or_sent_is_forgotten():
    one, other = group(2)
    mine, theirs = Link(one), Link(other)
    with pytest.raises(ShapeError):
        mine.post(1, 0, 1, rows=objects([1]).set("state", objects([1])["state"].to_sparse()))
    mine.post(1, 0, 1, rows=objects([1]))
    assert theirs.receive().rows["state"].tolist() == [[1, 0]]
    other.close()
    with pytest.raises(PeerLostError):
        mine.post(1, 0, 1, rows=objects([1]))


def test_frames_leave():
    mine, theirs = map(Link, group(2))
    mine.post(1, 0, 1)
    theirs.receive()
    assert mine.leaving(1) == 0
    assert mine.flush(0.1) == 0
