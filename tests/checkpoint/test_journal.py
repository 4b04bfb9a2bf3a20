"""The journal of a buffer: what was accepted comes back, and nothing else."""

import os
import resource
import shutil
import sqlite3
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint.journal_kill import kill_loop
from factories import (
    Ladder,
    assert_equal,
    in_fresh_process,
    journaled,
    objects,
    seeded,
    with_journal,
)
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from xxhash import xxh3_64_digest

import gfn_rb
from gfn_rb import load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import Journal, database, journal, recover
from gfn_rb.checkpoint.slots import counts_of, slot_states
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)
from gfn_rb.samplers import PrioritySampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

CAPACITY = 12
FILES = ("", "-wal", "-mark")
# The whole check is of 1,000 kills: GFN_RB_KILLS=1000 pytest tests/checkpoint/test_journal.py
KILLS = int(os.environ.get("GFN_RB_KILLS", "16"))

_ENV = Ladder(5)
diverse_buffer = with_journal(gfn_rb.diverse_buffer)
fifo_buffer = with_journal(gfn_rb.fifo_buffer)
reward_prioritized_buffer = with_journal(gfn_rb.reward_prioritized_buffer)
terminating_state_buffer = with_journal(gfn_rb.terminating_state_buffer)
transition_buffer = with_journal(gfn_rb.transition_buffer)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rb.journal"


@pytest.fixture(autouse=True)
def closed():
    """Close what a test leaves open, as a process does that ends."""
    opened = []
    init = Journal.__init__

    def remember(self, *args, **options):
        init(self, *args, **options)
        opened.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "__init__", remember)
        yield
    for each in opened:
        each.close()


def items(n, seed):
    """Rows of few objects, with tied rewards and versions that rise."""
    generator = seeded(seed)
    values = torch.randint(0, 30, (n,), generator=generator)
    reward = torch.randint(-3, 4, (n,), generator=generator).float()
    return objects(values, reward).set("policy_version", torch.full((n,), seed))


def rejected(n, seed):
    return items(n, seed).set("log_reward", torch.full((n,), -50.0))


def trajectories(n, seed):
    length = 1 + torch.randint(0, _ENV.max_length, (n,), generator=seeded(seed))
    step = torch.arange(_ENV.max_length)
    action = (step == length[:, None] - 1).long().where(step < length[:, None], -1)
    rows = {"state": _ENV.states_of(action, length), "action": action, "length": length}
    reward = {"log_reward": length.float(), "condition": torch.ones(n, 1)}
    return TensorDict({**rows, **reward}, [n])


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def copied(path):
    """What a process leaves that is killed now."""
    target = path.with_name(f"copy-{len(os.listdir(path.parent))}")
    for suffix in FILES:
        if Path(f"{path}{suffix}").exists():
            shutil.copy(f"{path}{suffix}", f"{target}{suffix}")
    return target


def assert_comes_back(rb, make, path, **more):
    """Return a buffer that is what a process finds that opens the journal now."""
    again = make(journal=copied(path), **more)
    assert_equal(state_of(again), state_of(rb))
    return again


def state_of(rb):
    """What is to come back; of the transform's state the draws are as of the last record."""
    return {
        "rows": dict(sorted(rb.storage[:].clone().flatten_keys().items())) if len(rb) else None,
        "writer": rb.writer.state_dict(),
        # The next draw forgets the priorities of slots that hold no row.
        "sampler": {
            k: v[: len(rb)] if k == "priority" else v for k, v in rb.sampler.state_dict().items()
        },
        "generations": rb.writer.generations_of(torch.arange(CAPACITY)),
        "counts": {k: v for k, v in rb.stats().items() if "write" in k or "offered" in k},
    }


def by_hand(writer, **more):
    """A buffer of TorchRL's own, with a journal where one is asked for."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), writer=writer, batch_size=4, generator=seeded()
    )
    return journaled(rb, **more)


BEST = partial(reward_prioritized_buffer, CAPACITY)
MAKES = {
    "best": BEST,
    "unique": partial(BEST, unique="state"),
    "smallest": lambda **more: BEST(
        writer=RewardPrioritizedWriter(largest=False, track_generations=True), **more
    ),
    "diverse": partial(diverse_buffer, CAPACITY, cutoff_distance=2),
    "newest": partial(fifo_buffer, CAPACITY),
    "newest unique": partial(fifo_buffer, CAPACITY, unique="state"),
    "young": partial(fifo_buffer, CAPACITY, max_age=3),
    "terminal": partial(terminating_state_buffer, CAPACITY),
    "priorities": lambda **more: BEST(sampler=PrioritySampler(), **more),
    "mapped": lambda **more: BEST(storage=LazyMemmapStorage(CAPACITY), **more),
    "tracked": lambda **more: by_hand(FIFOWriter(track_generations=True), **more),
    "by hand": lambda **more: by_hand(
        DiversityWriter(cutoff_distance=1.0, track_generations=True), **more
    ),
}


def relabel(rb, step):
    if hasattr(rb.writer, "update") and rb.writer.key != "index":
        rb.writer.update(torch.tensor([0, 2]), torch.tensor([5.0 + step, -step]))


def remove(rb, _):
    if hasattr(rb.writer, "remove"):
        rb.writer.remove(torch.tensor([1]))


def draw(rb, step):
    index = rb.sample(4)["index"]
    if isinstance(rb.sampler, PrioritySampler):
        rb.update_priority(index, torch.arange(4) + float(step))


STEPS = (
    lambda rb, step: rb.extend(items(5, step)),
    relabel,
    lambda rb, step: rb.extend(items(9, step)),
    draw,
    lambda rb, step: rb.extend(items(9, step)),
    remove,
    lambda rb, step: rb.add(items(1, step)[0]),
    lambda rb, step: rb.extend(rejected(3, step)),
    draw,
    lambda rb, step: rb.extend(items(20, step)),
    relabel,
    remove,
)


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
        rb = transition_buffer(40, journal=path, sync="never", compact=compact, env=_ENV)
        for seed in range(5):
            rb.extend(trajectories(4, seed))
        again = transition_buffer(40, journal=copied(path), compact=compact, env=_ENV)
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


# Damage.


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A journal as a kill leaves it, of whose transactions some are in its log; all its states."""
    path = tmp_path_factory.mktemp("damaged") / "rb.journal"
    rb = MAKES["unique"](journal=path, sync="always")
    states = [state_of(rb)]
    for seed in range(12):
        rb.extend(items(6, seed))
        states.append(state_of(rb))
        if seed == 5:
            rb.journal._database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    left = copied(path)
    rb.journal.close()
    return left, states


def changed(source, target, change):
    """Copy the files of a journal, of which a function changed the content by suffix."""
    files = {suffix: bytearray(Path(f"{source}{suffix}").read_bytes()) for suffix in FILES}
    change(files)
    for suffix in FILES:
        Path(f"{target}{suffix}").unlink(missing_ok=True)
        if suffix in files:
            Path(f"{target}{suffix}").write_bytes(files[suffix])
    return target


def opened(source, folder, change):
    """Open a changed copy of a journal, and return its state."""
    rb = MAKES["unique"](journal=changed(source, folder / "changed", change))
    try:
        return state_of(rb)
    finally:
        rb.journal.close()


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("kind", ["flipped", "torn", "zeros"])
def test_damage_at_any_page_is_an_exact_earlier_state_or_refused(
    damaged, kind, has_mark, tmp_path, request
):
    step = 1031 if request.config.getoption("--all") else 2063
    source, states = damaged
    refused = n_opened = n = 0
    for suffix in FILES[:2]:
        size = Path(f"{source}{suffix}").stat().st_size
        assert size > 2 * 4096
        for at in range(37, size, step):
            n += 1

            def change(files, suffix=suffix, at=at):
                if kind == "flipped":
                    files[suffix][at] ^= 1 << at % 8
                elif kind == "torn":
                    del files[suffix][at:]
                else:
                    files[suffix][at : at + 512] = bytes(len(files[suffix][at : at + 512]))
                if not has_mark:  # as of a time when nothing was synced
                    name = database._MARK.unpack(files["-mark"])[1]
                    checksum = xxh3_64_digest(b"1 " + name)
                    files["-mark"] = database._MARK.pack(1, name, checksum)

            try:
                came = opened(source, tmp_path, change)
            except CheckpointError:
                refused += 1
                continue
            # The last one, such as of a page that is not used, where everything was synced.
            assert str(came) in [*map(str, states[-1:] if has_mark else states)]
            n_opened += 1
    assert refused >= 5 * has_mark
    assert refused + n_opened == n


def test_the_three_files_belong_together(damaged, tmp_path):
    source, states = damaged
    assert_equal(opened(source, tmp_path, lambda files: None), states[-1])
    early = MAKES["unique"](journal=tmp_path / "other")
    early.journal.close()
    others = {suffix: f"{tmp_path / 'other'}{suffix}" for suffix in ("", "-mark")}
    for change, match in (
        (lambda files: files.pop("-mark"), "it has no mark .*-mark, so it is a part of"),
        (lambda files: files.pop("-wal"), "transaction 13 was on disk, and 7 is the last"),
        (lambda files: (files.pop("-wal"), files.pop("")), "has no transaction, and a mark of one"),
        (lambda files: files.update({"": b""}), "is no sound journal"),
        (
            lambda files: files.update({"-mark": Path(others["-mark"]).read_bytes()}),
            "is damaged, missing or another's",
        ),
    ):
        with pytest.raises(CheckpointCorruptError, match=match):
            opened(source, tmp_path, change)


def test_what_is_sound_of_a_damaged_journal_is_recovered(damaged, tmp_path):
    source, states = damaged
    target = tmp_path / "recovered"

    def recovered(change):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        changed(source, broken / "rb", change)
        before = {each.name: each.read_bytes() for each in broken.iterdir()}
        found = recover(broken / "rb", target)
        assert before == {each.name: each.read_bytes() for each in broken.iterdir()}
        rb = MAKES["unique"](journal=target, sync="always")
        rb.extend(items(9, 50))
        assert_comes_back(rb, MAKES["unique"], target)
        rb.journal.close()
        return found

    assert recovered(lambda files: None) == {"number": 13, "left_out": 0, "damage": None}
    found = recovered(lambda files: files.pop("-wal"))
    assert (found["number"], found["left_out"]) == (7, 0)
    assert "transaction 13 was on disk" in found["damage"]
    assert recovered(lambda files: files.pop("-mark"))["number"] == 13

    def flip(files):
        del files["-wal"]
        at = files[""].rindex(states[6]["rows"]["state"][3].numpy().tobytes())
        files[""][at] ^= 1

    found = recovered(flip)
    assert (found["number"], found["left_out"]) == (7, 1)
    for wrong in (tmp_path / "none", target):
        with pytest.raises(CheckpointError, match="path must name an existing journal"):
            recover(wrong, target)


def test_what_is_recovered_replaces_what_a_kill_left(path):
    rb = MAKES["unique"](journal=path, sync="always")
    rb.extend(items(9, 1))
    target = copied(path)
    assert Path(f"{target}-wal").exists()
    rb.extend(items(9, 2))
    rb.journal.close()
    assert recover(path, target)["left_out"] == 0
    assert_comes_back(rb, MAKES["unique"], target)


@pytest.mark.parametrize(
    "values",
    [
        {"length": 2**62}, {"length": -1}, {"cursor": 2**62}, {"counters": []},
        {"counters": [[2**70, 1]]}, {"transform": {}}, {"columns": None}, {"columns": {}},
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused_quickly(path, values):
    def make(**more):
        return MAKES["best"](statistics=True, **more)

    rb = make(journal=path, sync="never")
    rb.extend(items(5, 1))
    counts = {**counts_of(rb, slot_states(rb)), "columns": [], **values}
    rb.journal._database.write([], [], 5, counts, {}, sync=True)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="does not fit the buffer"):
        make(journal=copied(path))
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE row SET row = NULL",
        "UPDATE row SET row = 7 WHERE slot = 2",
        "UPDATE row SET slot = -1 WHERE slot = 2",
        "UPDATE row SET slot = 900 WHERE slot = 2",
        "DELETE FROM row WHERE slot = 2",
        "UPDATE state SET name = 5 WHERE name = 'counts'",
        "UPDATE state SET value = 'text'",
        "DELETE FROM state WHERE name = 'base'",
        "DROP TABLE row",
        "PRAGMA user_version=7",
    ],
)
def test_changed_tables_are_refused(path, change):
    rb = MAKES["best"](journal=path, sync="always")
    rb.extend(items(5, 1))
    rb.journal.close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(change)
        other.commit()
    with pytest.raises(CheckpointError, match=r"\A[^\n]*\Z"):
        MAKES["best"](journal=path)


def test_journals_of_other_buffers_are_refused(path):
    rb = MAKES["unique"](journal=path, sync="never")
    rb.extend(items(9, 1))
    rb.journal.close()
    before = path.read_bytes()
    for other in ("best", "newest", "diverse"):
        with pytest.raises(CheckpointMismatchError):
            MAKES[other](journal=path)
    assert path.read_bytes() == before
    assert len(MAKES["unique"](journal=path)) == len(rb)


def test_other_formats_and_other_files_are_refused(path):
    for content, match in (
        (b"gfn_rb\r\n" + bytes(120), "is a checkpoint, or a journal of format 4 or older"),
        (b"x", "is no sound journal: it begins with b'x'"),
        (b"notes\n" * 100, "is no sound journal: it begins with b'notes"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            MAKES["best"](journal=path)
        assert path.read_bytes() == content
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE state (name, value)")
    with pytest.raises(CheckpointCorruptError, match="of another application"):
        MAKES["best"](journal=path)


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
