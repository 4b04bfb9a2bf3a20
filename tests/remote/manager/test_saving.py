import shutil

from remote.remote_runs import group, objects, values_of

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, Kind


def made(rb, **kwargs):
    return ReplayBufferManager(group(2)[0], rb, **kwargs)


def test_a_manager_that_is_killed_has_every_row_that_it_answered_for(tmp_path):
    path, copy, (mine, theirs) = tmp_path / "now", tmp_path / "left", group(2)
    path.mkdir()

    def manager_in(folder, transport):
        rb = reward_prioritized_buffer(8, unique="state")
        Journal(rb, folder / "journal", sync="always")
        return ReplayBufferManager(transport, rb, checkpoint=folder / "m.ckpt")

    manager, channel = manager_in(path, mine), FrameChannel(theirs)
    for batch in range(6):
        channel.send(0, DATA_TAG, Kind.ITEMS, {"id": batch}, objects([batch, batch + 3]))
        manager.step()
        if batch == 1:
            manager.save()
    shutil.copytree(path, copy)  # what is left when it is killed now
    again = manager_in(copy, group(2)[0])
    again.load()
    assert values_of(again.buffer) == values_of(manager.buffer)
    assert again.batches == 2  # which is as of its checkpoint
    index = again._index
    index.refresh()
    assert index.sent.has(index.number[1:4], 1).all()  # of the rows that were saved
    assert not index.sent.packed[index.number[4:8]].any()  # nobody knows whose those are
    manager.buffer.journal.close()
    again.buffer.journal.close()


def test_a_journal_that_was_begun_later_leaves_a_checkpoint_its_rows(tmp_path):
    rb = fifo_buffer(4)
    rb.extend(objects([1, 2]))
    made(rb, checkpoint=tmp_path / "m.ckpt").save()
    journaled = fifo_buffer(4)
    Journal(journaled, tmp_path / "journal", sync="never")
    made(journaled, checkpoint=tmp_path / "m.ckpt").load()
    assert values_of(journaled) == [1, 2]
    journaled.journal.close()
    again = fifo_buffer(4)
    Journal(again, tmp_path / "journal")
    assert values_of(again) == [1, 2]
    again.journal.close()
