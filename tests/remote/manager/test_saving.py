import shutil

import pytest
from remote.remote_runs import group, objects, values_of

from gfn_rb import fifo_buffer, reward_prioritized_buffer, save_checkpoint
from gfn_rb.errors import ArgumentError, CheckpointError
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.messages import DATA_TAG, Kind


def made(rb, **kwargs):
    return ReplayBufferManager(group(2)[0], rb, **kwargs)


def test_a_file_holds_the_buffer_and_all_else(tmp_path):
    rb, other = fifo_buffer(4), fifo_buffer(4)
    rb.extend(objects([1, 2]))
    manager = made(rb, checkpoint=tmp_path / "m.ckpt")
    manager._handler.batches = 3
    path = manager.save()
    assert path == str(tmp_path / "m.ckpt")
    again = made(other)
    again.load(path)
    assert again.batches == 3
    assert values_of(other) == [1, 2]


def test_a_manager_without_a_buffer_saves_too(tmp_path):
    manager, again = (made(None, checkpoint=tmp_path / "m.ckpt") for _ in range(2))
    manager._handler.batches = 3
    manager.save()
    again.load()
    assert again.batches == 3


def test_it_is_time_to_save_every_so_many_batches(tmp_path):
    def saves(checkpoint_every, n, after=0):
        """Return at which of n batches a manager saves, one that goes on after some."""
        path, (mine, theirs) = tmp_path / "m.ckpt", group(2)
        manager = ReplayBufferManager(
            mine, None, checkpoint=path, checkpoint_every=checkpoint_every
        )
        channel, saved = FrameChannel(theirs), []
        if after:
            manager.load()
        for batch in range(after, n):
            path.unlink(missing_ok=True)
            channel.send(0, DATA_TAG, Kind.ITEMS, {"id": batch}, objects([batch]))
            manager.step()
            if path.exists():
                saved.append(manager.batches)
        manager.save()
        return saved

    assert saves(5, 12) == [5, 10]
    assert saves(5, 18, after=12) == [17]
    assert saves(None, 9) == []


@pytest.mark.parametrize(("path", "every"), [(None, 5), ("m.ckpt", 0)])
def test_a_period_needs_a_file_and_is_positive(path, every):
    with pytest.raises(ArgumentError, match="checkpoint_every must be at least 1 and needs"):
        made(None, checkpoint=path, checkpoint_every=every)


def test_no_file_and_a_foreign_file_are_refused(tmp_path):
    manager = made(None)
    with pytest.raises(CheckpointError, match="no file to save to: pass checkpoint="):
        manager.save()
    with pytest.raises(CheckpointError, match="no file to load from"):
        manager.load()
    rb = fifo_buffer(2)
    rb.extend(objects([1]))
    save_checkpoint(tmp_path / "rb.ckpt", rb)
    with pytest.raises(CheckpointError, match="holds no manager, but"):
        manager.load(tmp_path / "rb.ckpt")


def test_a_manager_that_is_killed_has_every_row_that_it_answered_for(tmp_path):
    path, copy, (mine, theirs) = tmp_path / "now", tmp_path / "left", group(2)
    path.mkdir()

    def manager_in(folder, transport):
        rb = reward_prioritized_buffer(8, unique="state", journal=folder / "journal", sync="always")
        return ReplayBufferManager(transport, rb, checkpoint=folder / "m.ckpt")

    manager, channel = manager_in(path, mine), FrameChannel(theirs)
    for batch in range(6):
        channel.send(0, DATA_TAG, Kind.ITEMS, {"id": batch}, objects([batch, batch + 3]))
        manager.step()
        if batch == 1:
            manager.save()
        if batch == 3:
            manager.buffer.journal.compact()
    shutil.copytree(path, copy)  # what is left when it is killed now
    again = manager_in(copy, group(2)[0])
    again.load()
    assert values_of(again.buffer) == values_of(manager.buffer)
    assert again.batches == 2  # which is as of its checkpoint
    index = again._feeder.index
    index.refresh()
    assert index.sent[index.number[1:4], 1].all()  # of the rows that were saved
    assert not index.sent[index.number[4:8]].any()  # nobody knows who sent those that came later
    manager.buffer.journal.close()
    again.buffer.journal.close()


def test_a_journal_that_was_begun_later_leaves_a_checkpoint_its_rows(tmp_path):
    rb = fifo_buffer(4)
    rb.extend(objects([1, 2]))
    made(rb, checkpoint=tmp_path / "m.ckpt").save()
    journaled = fifo_buffer(4, journal=tmp_path / "journal", sync="never")
    made(journaled, checkpoint=tmp_path / "m.ckpt").load()
    assert values_of(journaled) == [1, 2]
    journaled.journal.close()
    again = fifo_buffer(4, journal=tmp_path / "journal")
    assert values_of(again) == [1, 2]
    again.journal.close()
