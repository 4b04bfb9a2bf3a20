"""The journal of a buffer: what was accepted comes back, and nothing else."""

import os
import resource
import shutil
import time
from contextlib import contextmanager
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

import gfn_rb
from gfn_rb import load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import Journal, Secret, inspect_checkpoint, journal, log, recover
from gfn_rb.checkpoint.changes import counts_of, slot_states
from gfn_rb.codec import encode_frame
from gfn_rb.codec.layout import Prefix
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
)
from gfn_rb.samplers import PrioritySampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

CAPACITY = 12
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
    def fail(*_):
        raise error

    return fail


def copied(path):
    """What a process leaves that is killed now."""
    target = path.with_name(f"copy-{len(os.listdir(path.parent))}")
    for suffix in ("", ".gfnrb"):
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
        "sampler": rb.sampler.state_dict(),
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


def test_what_is_loaded_is_journaled(path, tmp_path):
    rb = MAKES["unique"](journal=path, sync="never")
    rb.extend(items(9, 1))
    save_checkpoint(tmp_path / "early", rb)
    rb.extend(items(9, 2))
    load_checkpoint(tmp_path / "early", rb)
    assert_comes_back(rb, MAKES["unique"], path)
    rb.extend(items(9, 3))
    assert_comes_back(rb, MAKES["unique"], path)


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
        patch.setattr(journal, "redo", raising(CheckpointError("no disk")))
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


# When.


@pytest.fixture
def synced(monkeypatch):
    """Sizes of the files that were synced."""
    sizes = []
    fsync = os.fsync

    def count(descriptor):
        sizes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", count)
    return sizes


def test_an_interval_is_one_record_and_one_sync(path, synced):
    rb = MAKES["best"](journal=path, sync="interval")
    synced.clear()
    for seed in range(20):
        rb.extend(items(5, seed))
    assert not synced
    assert rb.journal.position["number"] == 0
    rb.journal._written_at -= 2.0  # seconds
    rb.sample(3)  # any call
    assert len(synced) == rb.journal.position["number"] == 1
    rb.extend(items(5, 20))
    rb.sample(3)
    assert len(synced) == 1
    rb.journal.close()
    assert len(synced) == 2
    assert_comes_back(rb, MAKES["best"], path)


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
def test_one_sync_covers_all_that_a_call_wrote(call, name, path, synced):
    rb = MAKES[name](journal=path, sync="always")
    rb.extend(items(20, 1))
    synced.clear()
    CALLS[call](rb)
    assert synced == [path.stat().st_size]
    assert_comes_back(rb, MAKES[name], path)


def test_what_a_failed_sync_may_have_lost_is_written_again(path, monkeypatch):
    rb = MAKES["tracked"](journal=path, sync="never")
    rb.extend(items(5, 1))
    rb.journal.sync()
    rb.extend(items(5, 2))
    size = path.stat().st_size

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointError, match=r"cannot write the journal .*output error"):
            rb.journal.sync()
    assert path.stat().st_size < size  # what may not be on disk is no part of the chain
    rb.journal.sync()
    assert_comes_back(rb, MAKES["tracked"], path)


# Compaction.


@pytest.mark.parametrize("secret", [None, Secret(bytes(16))])
def test_a_journal_is_compacted_when_a_checkpoint_is_saved(path, tmp_path, secret, monkeypatch):
    rb = MAKES["unique"](journal=path, sync="never", secret=secret)
    begun = path.stat().st_size
    for seed in range(4):
        rb.extend(items(6, seed))
        save_checkpoint(tmp_path / "saved", rb, secret=secret, step=seed)
        assert path.stat().st_size == begun
        assert_comes_back(rb, MAKES["unique"], path, secret=secret)
    assert rb.journal.checkpoint.samefile(tmp_path / "saved")

    monkeypatch.setattr(os, "link", raising(OSError(18, "Invalid cross-device link")))
    rb.extend(items(6, 9))
    save_checkpoint(tmp_path / "saved", rb, secret=secret)
    assert path.stat().st_size == begun
    assert not rb.journal.checkpoint.samefile(tmp_path / "saved")
    rb.extend(items(6, 10))
    save_checkpoint(tmp_path / "other", rb, secret=Secret(bytes(range(16))))
    assert path.stat().st_size > begun  # it cannot continue what it cannot read
    assert_comes_back(rb, MAKES["unique"], path, secret=secret)


def test_a_journal_that_has_outgrown_its_checkpoint_is_compacted_when_opened(path, monkeypatch):
    rb = MAKES["unique"](journal=path, sync="never")
    begun = path.stat().st_size
    rb.extend(items(9, 1))
    monkeypatch.setattr(journal, "_LEAST", 0)
    monkeypatch.setattr(journal, "_OUTGROWN", 0)
    again = MAKES["unique"](journal=(copy := copied(path)))
    assert copy.stat().st_size == begun
    assert inspect_checkpoint(f"{copy}.gfnrb")["buffers"][0]["length"] == len(rb)
    assert_equal(state_of(again), state_of(rb))


def test_a_journal_killed_before_its_first_checkpoint_begins_anew(path):
    rb = MAKES["best"](journal=path)
    rb.journal.close()
    Path(f"{path}.gfnrb").unlink()
    for content in (path.read_bytes(), b""):
        path.write_bytes(content)
        rb = MAKES["best"](journal=path)
        rb.extend(items(5, 1))
        rb.journal.close()
        assert len(MAKES["best"](journal=copied(path))) == 5
        Path(f"{path}.gfnrb").unlink()


def test_a_buffer_that_holds_rows_begins_with_them(path):
    rb = by_hand(RewardPrioritizedWriter())
    rb.extend(items(9, 1))
    rb.journal = Journal(rb, path, "never")
    rb.extend(items(9, 2))
    again = by_hand(RewardPrioritizedWriter(), journal=copied(path))
    assert_equal(state_of(again), state_of(rb))


# Damage.


@pytest.fixture
def records(path):
    """Head of a journal, of whose five records three were synced; and each record."""
    rb = MAKES["unique"](journal=path, sync="never")
    ends = [path.stat().st_size]
    for seed in range(5):
        rb.extend(items(4, seed))
        ends.append(path.stat().st_size)
        if seed == 2:
            rb.journal.sync()
    content = path.read_bytes()
    aligned = [-(-end // 64) * 64 for end in ends]
    return [content[a:b] for a, b in zip([0, *aligned], aligned, strict=False)]


def opened(path, content):
    target = path.with_name("damaged")
    target.write_bytes(content)
    shutil.copy(f"{path}.gfnrb", f"{target}.gfnrb")
    try:
        rb = MAKES["unique"](journal=target)
    except BaseException:
        assert target.read_bytes() == content  # nothing changed
        raise
    rb.journal.close()
    return rb


def test_the_log_ends_at_the_first_record_that_breaks_the_chain(path, records, caplog):
    expected = [state_of(opened(path, b"".join(records[: n + 1]))) for n in (3, 4)]
    assert "dropped" not in caplog.text
    synced, tail = b"".join(records[:4]), b"".join(records[4:])
    for n in range(1, len(tail), 1 + len(tail) // 60):
        n_whole = int(n >= Prefix.read(memoryview(records[4]), "it").nbytes)
        assert_equal(state_of(opened(path, synced + tail[:n])), expected[n_whole])
    assert "bytes of a torn record are dropped" in caplog.text
    for gap in (records[5:], [bytes(len(records[4])), records[5]], [records[5], records[4]]):
        assert_equal(state_of(opened(path, synced + b"".join(gap))), expected[0])
    rb = MAKES["unique"](journal=path.with_name("damaged"), sync="never")  # and can go on
    rb.extend(items(6, 9))
    assert_comes_back(rb, MAKES["unique"], path.with_name("damaged"))
    rb.journal.close()
    content = path.with_name("damaged").read_bytes()  # with another record 4 than that before 5
    content += bytes(-len(content) % 64) + records[5]
    assert_equal(state_of(opened(path, content)), state_of(rb))


def test_a_byte_flipped_in_what_was_on_disk_is_refused(path, records):
    content = b"".join(records)
    end = sum(map(len, records[:4]))
    sizes = [Prefix.read(memoryview(each), "it").nbytes for each in records]
    starts = [sum(map(len, records[:i])) for i in range(len(records))]
    step = 1 + end // 30
    for at in [*range(0, end, step), *range(len(records[0]) - 64, len(records[0]) + 64, 3)]:
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 8)
        is_mark = len(records[0]) - 64 <= at < len(records[0])
        if is_mark or any(starts[i] <= at < starts[i] + sizes[i] for i in range(len(records))):
            with pytest.raises(CheckpointError, match=r"\A[^\n]*damaged[^\n]*\Z"):
                opened(path, bytes(damaged))
        else:  # between two records, where nothing is read
            assert len(opened(path, bytes(damaged))) == CAPACITY


def test_a_missing_record_that_was_on_disk_is_refused(path, records):
    for kept in ([0], [0, 1], [0, 1, 3, 4, 5], [0, 2, 3, 4, 5], [0, 2, 1, 3], [0, 1, 2]):
        with pytest.raises(CheckpointCorruptError, match="is damaged or missing, and record 3 was"):
            opened(path, b"".join(records[i] for i in kept))


def test_what_is_sound_of_a_damaged_journal_is_recovered(path, records):
    rb, expected = MAKES["unique"](), []
    for seed in range(5):
        rb.extend(items(4, seed))
        expected.append(state_of(rb))
    damaged, target = path.with_name("broken"), path.with_name("recovered")
    shutil.copy(f"{path}.gfnrb", f"{damaged}.gfnrb")
    for broken, n, words in ((2, 1, "record 2 at byte"), (0, 5, "the mark at byte"), (None, 5, "")):
        content = [bytearray(each) for each in records]
        if broken is not None:
            content[broken][-64 if broken == 0 else 70] ^= 1
        damaged.write_bytes(before := b"".join(content))
        found = recover(damaged, target)
        assert found["number"] == n
        assert found["left_out"] == sum(map(len, records[n + 1 :]))
        assert words in (found["damage"] or "")
        assert damaged.read_bytes() == before
        rb = MAKES["unique"](journal=target)
        assert_equal(state_of(rb), expected[n - 1])
        rb.journal.close()
    for wrong in (path.with_name("none"), target):
        with pytest.raises(CheckpointError, match="path must name a journal"):
            recover(wrong, target)


def test_rows_that_hold_records_harm_nothing(path, records):
    """A torn record ends the log, even where its rows are sound records of the same journal."""
    content = b"".join(records)
    held = torch.frombuffer(bytearray(content + content), dtype=torch.uint8)
    where = path.with_name("holder")
    rb = fifo_buffer(4, journal=where, sync="always")
    rb.extend(TensorDict({"bytes": held[None], "log_reward": torch.ones(1)}, [1]))
    own = where.read_bytes()
    own = torch.frombuffer(bytearray(own.ljust(len(held), b"\0")[: len(held)]), dtype=torch.uint8)
    size = where.stat().st_size
    rb.journal._sync = "never"
    rb.extend(TensorDict({"bytes": own[None], "log_reward": torch.ones(1)}, [1]))
    whole = where.read_bytes()
    for n in range(-(-size // 64) * 64 + 64, len(whole), 997):
        damaged = bytearray(whole)
        damaged[n] ^= 1
        copy = copied(where)
        copy.write_bytes(bytes(damaged))
        assert len(fifo_buffer(4, journal=copy)) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"emptied": 2**62}, {"length": 2**62}, {"length": -1}, {"cursor": 2**62}, {"counters": []},
        {"counters": [[2**70, 1]]}, {"transform": {}}, {"emptied": None},
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused_quickly(path, values):
    def make(**more):
        return MAKES["best"](statistics=True, **more)

    rb = make(journal=path, sync="never")
    rb.extend(items(5, 1))
    counts = {**counts_of(rb, slot_states(rb)), "emptied": False, **values}
    rb.journal._log.append([(None, counts)])
    begun = time.monotonic()
    with pytest.raises(CheckpointCorruptError, match="its records do not fit the buffer"):
        make(journal=copied(path))
    assert time.monotonic() - begun < 5


def test_checkpoints_and_journals_that_do_not_fit_are_refused(path):
    rb = MAKES["unique"](journal=path, sync="never")
    early, copy = Path(f"{path}.gfnrb").read_bytes(), path.read_bytes()
    rb.extend(items(9, 1))
    rb.journal.compact()
    rb.extend(items(9, 2))
    rb.journal.close()
    late, checkpoint = path.read_bytes(), Path(f"{path}.gfnrb")
    newer = checkpoint.read_bytes()
    checkpoint.write_bytes(early)
    with pytest.raises(CheckpointCorruptError, match="ends with record 0"):
        MAKES["unique"](journal=path)
    checkpoint.unlink()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        MAKES["unique"](journal=path)
    checkpoint.write_bytes(newer)
    path.write_bytes(copy)  # which lacks a record that the checkpoint holds
    with pytest.raises(CheckpointCorruptError, match=r"records 1 to 0, and .* with record 1"):
        MAKES["unique"](journal=path)
    path.unlink()
    with pytest.raises(CheckpointError, match="is empty or missing, which the checkpoint"):
        MAKES["unique"](journal=path)
    MAKES["unique"](journal=path.with_name("other")).journal.close()
    path.write_bytes(path.with_name("other").read_bytes())
    with pytest.raises(CheckpointMismatchError, match="is of another buffer than the checkpoint"):
        MAKES["unique"](journal=path)
    path.write_bytes(late)
    for other in ("best", "newest", "diverse"):
        with pytest.raises(CheckpointMismatchError):
            MAKES[other](journal=path)
    assert path.read_bytes() == late
    assert len(MAKES["unique"](journal=path)) == len(rb)


def test_other_formats_and_other_files_are_refused(path):
    meta = {"journal": "x", "first": 1}
    for kind, values, match in (
        (1, {**meta, "format": 1}, "of format 1, expected 4"),
        (1, {**meta, "format": 2}, "of format 2, expected 4"),
        (2, {**meta, "format": 4}, "begins with a frame of kind 2"),
        (1, {"format": 4}, "begins with a frame of kind 1 that says"),
        (1, {**meta, "format": 3}, "of format 3, expected 4"),
        (1, {**meta, "format": 4}, "the mark at byte 128 is damaged"),
    ):
        path.write_bytes(b"".join(bytes(part) for part in encode_frame(kind, None, values)))
        with pytest.raises(CheckpointError, match=match):
            MAKES["best"](journal=path)
    for content in (b"x", b"notes\n" * 100):
        path.write_bytes(content)
        with pytest.raises(CheckpointCorruptError, match="is no sound journal: at byte 0"):
            MAKES["best"](journal=path)
        assert path.read_bytes() == content


@pytest.mark.parametrize("zeros", [False, True])
def test_files_with_a_secret_that_are_cut_are_refused(path, zeros):
    """A file that lost its end is corrupt; one whose end is zeros may be anybody's."""
    secret = Secret(bytes(16))
    rb = MAKES["best"](journal=path, sync="always", secret=secret)
    rb.extend(items(5, 1))
    rb.journal.close()
    expected = (CheckpointCorruptError, SecretError) if zeros else CheckpointCorruptError
    for name in (path.name, f"{path.name}.gfnrb"):
        file, copy = path.with_name(name), path.with_name("copy")
        content = file.read_bytes()
        for n in range(1, len(content.rstrip(b"\0")), len(content) // 40):
            for suffix in ("", ".gfnrb"):
                shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
            cut = content[:n].ljust(len(content) if zeros else n, b"\0")
            copy.with_name(name.replace(path.name, "copy")).write_bytes(cut)
            with pytest.raises(expected):
                MAKES["best"](journal=copy, secret=secret)


# Paths, disks and processes.


def test_paths_that_cannot_be(path):
    with pytest.raises(CheckpointError, match="Is a directory"):
        MAKES["best"](journal=path.parent)
    os.mkfifo(path)
    for device, word in ((path, "pipe"), (Path("/dev/null"), "device")):
        with pytest.raises(CheckpointError, match=f"journal must name a file, got the {word}"):
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


def test_two_buffers_on_one_path_are_refused(path):
    rb = MAKES["best"](journal=path, sync="never")
    for _ in range(2):
        with pytest.raises(ArgumentError, match="journal must belong to one buffer"):
            MAKES["best"](journal=path)
        rb.extend(items(5, 1))
        rb.journal.compact()  # which puts another file in the place
    rb.journal.close()
    assert len(MAKES["best"](journal=path)) == len(rb)


def extend_and_sync(rb, seed):
    rb.extend(items(9, seed))
    rb.journal.sync()


@pytest.mark.parametrize("sync", ["always", "interval"])
def test_a_full_disk_is_named_and_loses_nothing_once_there_is_room(path, sync):
    rb = MAKES["best"](journal=path, sync=sync)
    rb.extend(items(9, 1))
    rb.journal.sync()
    size = path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the journal .*: File too large"):
            extend_and_sync(rb, 2)
        rb.sample(3)  # which writes nothing
        with pytest.raises(CheckpointError, match="File too large"):  # rejected for rows not there
            rb.extend(rejected(3, 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # its checkpoint is larger
        held = MAKES["best"](journal=copied(path))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
        with pytest.raises(CheckpointError, match="File too large"):
            rb.extend(items(9, 3))
        with pytest.raises(CheckpointError, match="File too large"):
            rb.journal.compact()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(held) == 9
    rb.extend(items(9, 4))
    rb.journal.sync()
    assert_comes_back(rb, MAKES["best"], path)


@pytest.mark.parametrize("sync", ["never", "interval"])
def test_a_fork_and_a_closed_journal_take_nothing(sync, path, monkeypatch):
    rb = MAKES["best"](journal=path, sync=sync)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as a child sees it
    with pytest.raises(ArgumentError, match="this one is forked from it"):
        rb.journal.sync()
    rb.journal.close()  # which does nothing there
    monkeypatch.undo()
    rb.journal.close()
    rb.journal.sync()
    with pytest.raises(CheckpointError, match="is closed"):
        rb.extend(items(2, 1))
    other = MAKES["best"](journal=path)
    other.extend(items(3, 2))
    other.journal.close()
    with pytest.raises(CheckpointError, match="is closed"):
        rb.journal.compact()
    with pytest.raises(CheckpointError, match="is closed"), rb.journal.replaying():
        pass
    assert_equal(state_of(MAKES["best"](journal=path)), state_of(other))


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
@pytest.mark.parametrize("has_closed", [True, False])
def test_a_forked_process_that_lives_on_leaves_the_file_to_others(path, has_closed, monkeypatch):
    rb = MAKES["best"](journal=path, sync="never")
    if not has_closed:  # as one that had no time to yet
        monkeypatch.setattr(log, "_opened", set())
    with forked():
        with pytest.raises(ArgumentError, match="which another has"):
            MAKES["best"](journal=path)
        if has_closed:
            rb.journal._log._stream.close()  # as of a process that is killed
        else:
            rb.journal.close()
        MAKES["best"](journal=path).journal.close()


@pytest.mark.usefixtures("unchecked")
def test_buffers_that_cannot_be_journaled_are_refused(path):
    with pytest.raises(ArgumentError, match="journal needs a replay buffer of one process"):
        fifo_buffer(3, journal=path, shared=True)
    with pytest.raises(ArgumentError, match="journal needs a writer"):
        Journal(TensorDictReplayBuffer(storage=LazyTensorStorage(3)), path)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(6, ndim=2), writer=FIFOWriter())
    with pytest.raises(ArgumentError, match="journal needs a TensorStorage of one dimension"):
        Journal(rb, path)
    with pytest.raises(ArgumentError, match="sync must be 'always', 'interval' or 'never'"):
        fifo_buffer(3, journal=path, sync="often")
    rb = fifo_buffer(3, journal=path.with_name("other"))
    with pytest.raises(ArgumentError, match="rb must have no other journal, got one that has"):
        Journal(rb, path)
    assert not path.exists()


@pytest.mark.slow
def test_a_kill_at_any_instant_loses_nothing_that_was_acknowledged(tmp_path):
    found = in_fresh_process(kill_loop, tmp_path, KILLS, 1)
    assert found["wrong"] == []
    assert sum(n for n, _ in found["killed"].values()) == KILLS
    assert found["batches"]["rank"] > 0
