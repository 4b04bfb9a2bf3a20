"""The laws of a journal: what was accepted comes back, and nothing else."""

import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint.journal_kill import kill_loop
from checkpoint.journals import (  # noqa: F401
    CAPACITY,
    ENV,
    MAKES,
    STEPS,
    assert_comes_back,
    by_hand,
    closed,
    copied,
    fifo_buffer,
    items,
    raising,
    rejected,
    remove,
    state_of,
    trajectories,
    transition_buffer,
)
from factories import (
    assert_equal,
    in_fresh_process,
    objects,
)
from tensordict import TensorDict

from gfn_rb import load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import Journal, database, journal, recover
from gfn_rb.errors import (
    ArgumentError,
    CheckpointError,
)
from gfn_rb.writers import RewardPrioritizedWriter

# The whole check is of 1,000 kills: GFN_RB_KILLS=1000 pytest tests/checkpoint/test_journal.py
KILLS = int(os.environ.get("GFN_RB_KILLS", "16"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rb.journal"


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("sync", ["always", "interval"])
def test_a_buffer_comes_back_with_every_writer(name, sync, path):
    rb = MAKES[name](journal=path, sync=sync)
    for step, act in enumerate((*STEPS, lambda rb, _: rb.empty(), *STEPS[:6])):
        act(rb, step)
        if step % 5 == 4 or step > 16:
            rb.journal.sync() if sync == "interval" else None
            again = assert_comes_back(rb, MAKES[name], path, sync=sync)
    for step in (30, 31):  # and goes on alike
        assert_equal(again.extend(items(6, step)), rb.extend(items(6, step)))
    assert_equal(state_of(again), state_of(rb))


def test_rows_and_counts_of_transforms_come_back(path):
    for compact in (None, "narrow"):
        path = path.with_name(f"{compact}")
        rb = transition_buffer(40, journal=path, sync="never", compact=compact, env=ENV)
        for seed in range(5):
            rb.extend(trajectories(4, seed))
        again = transition_buffer(40, journal=copied(path), compact=compact, env=ENV)
        assert_equal(state_of(again), state_of(rb))
        assert_equal(again.transform.state_dict(), rb.transform.state_dict())


@pytest.mark.parametrize(("capacity", "size"), [(1, 1), (2, 1), (2, 0)])
def test_one_row_and_entries_without_elements_come_back(capacity, size, path):
    # Of widths that put every entry where its dtype could not begin.
    rows = {"flag": torch.ones(1, dtype=torch.bool), "half": torch.ones(1, size).half()}
    rb = fifo_buffer(capacity, journal=path, sync="never")
    rb.extend(TensorDict({**rows, "log_reward": torch.ones(1)}, [1]))
    again = fifo_buffer(capacity, journal=copied(path))
    assert_equal(dict(again[:].items()), dict(rb[:].items()))


def test_writes_past_the_writer_come_back(path):
    rb = fifo_buffer(CAPACITY, journal=path, sync="never")
    rb.extend(items(8, 1))
    for write in (
        lambda: rb.__setitem__(slice(2, 4), items(2, 2).set("index", torch.tensor([2, 3]))),
        lambda: rb.set_("log_reward", torch.ones(8)),
        lambda: rb.set_at_("log_reward", torch.zeros(2), torch.tensor([0, 5])),
        lambda: rb.update_({"log_reward": torch.full((8,), 2.0)}),
    ):
        write()
        rb.journal.sync()
        assert_comes_back(rb, MAKES["newest"], path)


def test_updates_of_rows_that_are_still_there_come_back(path):
    rb = MAKES["tracked"](journal=path, sync="never")
    rb.extend(items(8, 1))
    slot = torch.tensor([2, 5])
    rb.update_if_present(
        index=slot,
        generation=rb.writer.generations_of(slot),
        patch={"log_reward": torch.tensor([7.0, 8.0])},
    )
    assert rb[slot]["log_reward"].tolist() == [7.0, 8.0]
    rb.journal.sync()
    assert_comes_back(rb, MAKES["tracked"], path)


def test_a_rewound_buffer_is_what_it_was_in_the_end(path, tmp_path):
    rb = MAKES["unique"](journal=path, sync="always")
    rb.extend(items(4, 1))
    save_checkpoint(tmp_path / "early", rb)
    rb.extend(items(9, 2))
    before, position = state_of(rb), rb.journal.position
    with rb.journal.replaying():
        load_checkpoint(tmp_path / "early", rb)
        assert len(rb) <= 4
        rb.journal.sync()  # as the thread does once in a second
    assert_equal(state_of(rb), before)
    assert rb.journal.position == position
    rb.extend(items(9, 3))
    assert_comes_back(rb, MAKES["unique"], path)


def test_a_buffer_that_stays_rewound_adds_nothing(path, tmp_path, monkeypatch):
    rb = MAKES["unique"](journal=path, sync="interval")
    save_checkpoint(tmp_path / "early", rb)
    rb.extend(items(9, 2))
    before = state_of(rb)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "restore_slots", raising(CheckpointError("no disk")))
        with pytest.raises(CheckpointError, match="no disk"), rb.journal.replaying():
            load_checkpoint(tmp_path / "early", rb)
    with pytest.raises(CheckpointError, match="is closed"):
        rb.extend(items(2, 3))
    assert_equal(state_of(MAKES["unique"](journal=path)), before)


def test_slots_that_are_none_are_passed_over(path):
    rb = MAKES["tracked"](journal=path, sync="never")
    rb.extend(items(8, 1))
    with pytest.raises(IndexError):
        rb.writer.write_at(torch.tensor([99]), items(1, 2))
    rb.extend(items(2, 3))
    assert_comes_back(rb, MAKES["tracked"], path)


CALLS = {
    "extend": lambda rb: rb.extend(items(9, 2)),
    "extend by rows that are rejected": lambda rb: rb.extend(rejected(3, 2)),
    "add": lambda rb: rb.add(items(1, 2)[0]),
    "update": lambda rb: rb.writer.update(torch.tensor([0]), torch.tensor([9.0])),
    "remove": lambda rb: rb.writer.remove(torch.tensor([1])),
    "empty": lambda rb: rb.empty(),
}


@pytest.mark.parametrize("name", ["best", "diverse", "mapped"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one_synced_transaction(call, name, path):
    rb = MAKES[name](journal=path, sync="always")
    rb.extend(items(20, 1))
    before = rb.journal.position["number"]
    CALLS[call](rb)
    rb.sample(3) if len(rb) else None
    assert rb.journal.position["number"] == before + 1
    assert rb.journal._database.is_synced
    assert_comes_back(rb, MAKES[name], path)


def test_an_interval_is_one_transaction(path, monkeypatch):
    monkeypatch.setattr(journal, "_INTERVAL", 100.0)  # seconds, so that a busy machine is in time
    rb = MAKES["best"](journal=path, sync="interval")
    for seed in range(20):
        rb.extend(items(5, seed))
    assert rb.journal.position["number"] == 1
    rb.journal._written_at -= 101.0
    rb.sample(3)  # any call
    assert rb.journal.position["number"] == 2
    assert_comes_back(rb, MAKES["best"], path)
    rb.extend(items(5, 20))
    rb.sample(3)
    assert rb.journal.position["number"] == 2
    rb.journal.close()
    assert_comes_back(rb, MAKES["best"], path)


def test_a_sync_brings_to_disk_what_the_system_has(path):
    rb = MAKES["best"](journal=path, sync="never")
    rb.extend(items(5, 1))
    assert not rb.journal._database.is_synced
    rb.journal.sync()
    assert rb.journal._database.is_synced


@pytest.mark.parametrize("sync", ["never", "interval"])
def test_a_machine_that_stops_may_lose_what_was_not_synced_and_no_more(sync, path, monkeypatch):
    monkeypatch.setattr(journal, "_INTERVAL", 100.0 if sync == "interval" else 0.0)
    rb = MAKES["best"](journal=path, sync=sync)
    rb.extend(items(5, 1))
    rb.journal.sync()
    left, state = copied(path), state_of(rb)
    rb.extend(items(5, 2))
    shutil.copy(f"{path}-mark", f"{left}-mark")  # the only file that reached the disk
    assert_equal(state_of(MAKES["best"](journal=left)), state)


def test_a_file_does_not_grow_with_calls(path):
    rb = MAKES["best"](journal=path, sync="never")
    for seed in range(300):
        rb.extend(items(20, seed))
    rb.journal.close()
    assert path.stat().st_size < 1 << 16


def test_a_buffer_that_holds_rows_begins_with_them(path):
    rb = by_hand(RewardPrioritizedWriter())
    rb.extend(items(9, 1))
    rb.journal = Journal(rb, path, "never")
    rb.extend(items(9, 2))
    again = by_hand(RewardPrioritizedWriter(), journal=copied(path))
    assert_equal(state_of(again), state_of(rb))


def test_draws_continue_from_the_last_checkpoint(path, tmp_path):
    rb = MAKES["tracked"](journal=path, sync="always")
    rb.extend(items(9, 1))
    rb.sample(4)
    save_checkpoint(tmp_path / "saved", rb)
    again = MAKES["tracked"](journal=copied(path))
    assert_equal(again.sample(4), rb.sample(4))


# Paths, disks and processes.


def test_paths_that_cannot_be(path):
    os.mkfifo(path)
    for device, word in ((path, "no regular file"), (path.parent, "a directory")):
        with pytest.raises(CheckpointError, match=f"cannot read .*: Is {word}"):
            MAKES["best"](journal=device)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        MAKES["best"](journal=path.parent / "no" / "x")
    circle = path.parent / "circle"
    circle.symlink_to(circle)
    for use in (
        lambda: MAKES["best"](journal=circle),
        lambda: save_checkpoint(circle, MAKES["best"]()),
        lambda: load_checkpoint(circle, MAKES["best"]()),
        lambda: recover(circle, path),
    ):
        with pytest.raises(CheckpointError, match=r"path .*circle leads nowhere"):
            use()
    with pytest.raises(CheckpointError, match=r"cannot open the journal /proc/\d+/x"):
        MAKES["best"](journal="/proc/self/x")
    (deep := path.parent.joinpath(*["d" * 100] * 12)).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="unable to open database file"):  # SQLite's limit
        MAKES["best"](journal=deep / "x")


def test_two_buffers_on_one_path_are_refused(path):
    rb = MAKES["best"](journal=path, sync="never")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="journal must belong to one buffer"):
            MAKES["best"](journal=path)
        with pytest.raises(ArgumentError, match="a journal that no process uses"):
            recover(path, path.with_name("other"))
        rb.extend(items(5, 1))
        copied(path)  # which closes a file, and so ends the locks of SQLite
    rb.journal.close()
    assert len(MAKES["best"](journal=path)) == len(rb)


def test_a_journal_whose_file_was_replaced_says_so(path):
    rb = MAKES["best"](journal=path, sync="always")
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)
    with pytest.raises(CheckpointError, match=r"lost its file .*, which was removed or replaced"):
        rb.extend(items(5, 1))
    with pytest.raises(CheckpointError, match="path must not be a journal"):
        save_checkpoint(path, rb)
    path.unlink()
    with pytest.raises(CheckpointError, match="lost its file"):
        rb.extend(items(5, 1))
    with pytest.raises(CheckpointError, match="lost its file"):
        rb.journal.close()  # which releases the others


def extend_and_sync(rb, seed):
    rb.extend(items(9, seed))
    rb.journal.sync()


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_a_full_disk_is_named_and_loses_nothing_once_there_is_room(path, sync, caplog, tmp_path):
    rb = MAKES["best"](journal=path, sync=sync)
    rb.extend(items(9, 1))
    rb.journal.sync()
    size = Path(f"{path}-wal").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the journal .*: "):
            extend_and_sync(rb, 2)
        rb.sample(3)  # which writes nothing
        with pytest.raises(CheckpointError, match="cannot write"):  # rejected for rows not there
            rb.extend(rejected(3, 1))
        with pytest.raises(CheckpointError, match="cannot write"):
            rb.extend(items(9, 3))
        with pytest.raises(CheckpointError, match="cannot write the journal"):
            save_checkpoint(tmp_path / "elsewhere", rb)
        left = copied(path)
        rb.journal.__del__()  # as at the end of a process
        assert "changes are lost: cannot write the journal" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(MAKES["best"](journal=left)) == 9
    load_checkpoint(tmp_path / "elsewhere", saved := MAKES["best"]())
    assert_equal(state_of(saved), state_of(rb))
    rb.extend(items(9, 4))
    rb.journal.sync()
    assert_comes_back(rb, MAKES["best"], path)


@pytest.mark.parametrize("sync", ["never", "interval", "always"])
def test_a_fork_and_a_closed_journal_take_nothing(sync, path, monkeypatch):
    rb = MAKES["best"](journal=path, sync=sync)
    rb.extend(items(3, 3))
    before = state_of(rb)
    with monkeypatch.context() as patch:
        patch.setattr(rb.journal, "_process", 1)  # as a child sees it
        for write in (*CALLS.values(), lambda rb: rb.journal.sync()):
            with pytest.raises(ArgumentError, match="this one is forked from it"):
                write(rb)
        rb.journal.close()  # which does nothing there
    rb.journal.close()
    rb.journal.sync()
    for name, write in CALLS.items():
        if "rejected" not in name:
            with pytest.raises(CheckpointError, match="is closed"):
                write(rb)
    rb.sample(2)
    assert_equal(state_of(rb)["rows"], before["rows"])
    with pytest.raises(CheckpointError, match="is closed"), rb.journal.replaying():
        pass
    assert_equal(state_of(MAKES["best"](journal=path)), before)
    with pytest.raises(ArgumentError, match="rb must have no other journal, got one with"):
        Journal(rb, path)


@contextmanager
def forked():
    """Have a forked process live on, from when its hooks have run, until a block ends."""
    (begun, begin), (read, write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(begin, b"1")
        os.read(read, 1)
        os._exit(0)
    os.read(begun, 1)
    try:
        yield
    finally:
        for descriptor in (begun, begin, read, write):
            os.close(descriptor)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("has_hooks", [True, False])
def test_a_forked_process_that_lives_on_leaves_the_file_to_others(path, has_hooks, monkeypatch):
    rb = MAKES["best"](journal=path, sync="never")
    if not has_hooks:  # as one that had no time to run them yet
        monkeypatch.setattr(database, "_opened", set())
    with forked():
        with pytest.raises(ArgumentError, match="which another has"):
            MAKES["best"](journal=path)
        rb.journal.close()
        MAKES["best"](journal=path).journal.close()


@pytest.mark.slow
def test_a_kill_at_any_instant_loses_nothing_that_was_acknowledged(tmp_path):
    found = in_fresh_process(kill_loop, tmp_path, KILLS, 1)
    assert found["wrong"] == []
    assert sum(n for n, _ in found["killed"].values()) == KILLS
    assert found["batches"]["rank"] > 0


def test_a_journal_continues_positions_that_it_holds(path):
    rb = fifo_buffer(CAPACITY, journal=path, sync="always")
    rb.extend(items(2, 1))
    early = copied(path)
    reached = rb.journal.position
    rb.extend(items(2, 2))
    assert rb.journal.continues(reached)
    older = fifo_buffer(CAPACITY, journal=early).journal
    assert older.continues(reached)
    assert not older.continues(rb.journal.position)
    assert not older.continues({**reached, "journal": "another"})
    assert not older.continues(None)


def test_emptied_slots_keep_their_generations(path):
    def make(**more):
        options = {"unique": "state", "on_duplicate": "keep", "track_generations": True}
        return by_hand(RewardPrioritizedWriter(**options), **more)

    rb = make(journal=path, sync="always")
    for values in (range(4), range(2), range(2)):
        rb.empty() if len(rb) == 4 else None
        rb.extend(objects(values))  # the last ones change counts alone
        assert_comes_back(rb, make, path)


def test_the_first_mark_is_on_disk_before_the_first_transaction(path, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(file):
        name = os.readlink(f"/proc/self/fd/{file}").removeprefix(str(path))
        log = Path(f"{path}-wal")
        synced.append((name, log.exists() and log.stat().st_size))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    fifo_buffer(CAPACITY, journal=path)
    assert synced[0] == ("-mark", 0)  # transactions go to the log
