"""Journals on file systems, disks and versions of SQLite that are not what they should be."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
import struct
import subprocess
import sys
import sysconfig
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from factories import assert_equal, objects, seeded
from torchrl.data import LazyTensorStorage

from gfn_rb import (
    PrioritySampler,
    SoftmaxRewardSampler,
    fifo_buffer,
    open_buffer,
    reward_prioritized_buffer,
)
from gfn_rb.checkpoint import Journal, recover
from gfn_rb.errors import ArgumentError, CheckpointCorruptError, CheckpointError

FILES = ("", "-wal", "-mark")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rb.journal"


def journaled(path, sync="always", make=None):
    rb = fifo_buffer(50) if make is None else make()
    Journal(rb, path, sync)
    return rb


def copy_of(path, *names):
    """Some of the files of a journal that is open, elsewhere."""
    folder = path.parent / "copy"
    folder.mkdir(exist_ok=True)
    for name in FILES:
        (folder / f"rb{name}").unlink(missing_ok=True)
        if name in names:
            shutil.copyfile(f"{path}{name}", folder / f"rb{name}")
    return folder / "rb"


# Versions of SQLite.


def test_statements_are_known_to_old_versions(path, monkeypatch):
    """The versions in docs/versions.md: sqlite_schema is of 3.33, RETURNING of 3.35."""
    said, connect = [], sqlite3.connect

    def watched(*args, **options):
        connection = connect(*args, **options)
        connection.set_trace_callback(said.append)
        return connection

    monkeypatch.setattr(sqlite3, "connect", watched)
    rb = journaled(path)
    for seed in range(3):
        rb.extend(objects(torch.randint(0, 9, (20,), generator=seeded(seed))))
    rb.journal.close()
    open_buffer(path)
    recover(path, path.with_name("other"))
    assert len(said) > 30
    words = {word.strip("(),;").lower() for each in said for word in each.split()}
    assert words.isdisjoint({"sqlite_schema", "returning", "strict", "materialized"})
    assert "sqlite_master" in words


def test_a_journal_without_sqlite_is_refused_in_words(path, monkeypatch):
    monkeypatch.setattr("gfn_rb.checkpoint.database.sqlite3", None)
    with pytest.raises(CheckpointError, match="journal needs Python's module sqlite3"):
        journaled(path)


WITHOUT = """
import sys
sys.modules["_sqlite3"] = None  # as in a Python that was built without it
from gfn_rb import fifo_buffer, load_checkpoint, open_buffer, save_checkpoint
from gfn_rb.checkpoint import Journal, load_state, save_state
from gfn_rb.errors import CheckpointError
rb = fifo_buffer(3)
save_checkpoint("rb", rb, step=3)
assert load_checkpoint("rb", rb)["step"] == 3
assert open_buffer("rb").storage.max_size == 3
save_state("state", {"x": 1})
assert load_state("state") == {"x": 1}
try:
    Journal(rb, "journal")
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
def test_checkpoints_need_no_sqlite(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "journal needs Python's module sqlite3, which is not there\n"


# File systems without locks.

FAILING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>
static int call(const char *name, int file, int command, void *argument) {
    int (*real)(int, int, ...) = dlsym(RTLD_NEXT, name);
    const char *code = getenv("LOCKS_FAIL");
    if (code && (command == F_SETLK || command == F_SETLKW)) { errno = atoi(code); return -1; }
    return real(file, command, argument);
}
#define WRAP(name) int name(int file, int command, ...) { \
    va_list list; va_start(list, command); void *argument = va_arg(list, void *); va_end(list); \
    return call(#name, file, command, argument); }
WRAP(fcntl)
WRAP(fcntl64)
int flock(int file, int operation) {
    const char *code = getenv("LOCKS_FAIL");
    if (code) { errno = atoi(code); return -1; }
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    return real(file, operation);
}
"""
OPEN = """
import os, sys
from gfn_rb import fifo_buffer, open_buffer, save_checkpoint
from gfn_rb.checkpoint import Journal
from gfn_rb.errors import GfnRbError
save_checkpoint("saved", fifo_buffer(3))  # needs no locks
if "old" in sys.argv:
    Journal(fifo_buffer(3), "journal").close()
os.environ["LOCKS_FAIL"] = sys.argv[1]
save_checkpoint("saved", fifo_buffer(3))
for use in (lambda: Journal(fifo_buffer(3), "journal"), lambda: open_buffer("journal")):
    try:
        use()
    except GfnRbError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def failing_locks(tmp_path_factory):
    """A library that has all locks fail, in processes that load it."""
    if shutil.which("gcc") is None or sysconfig.get_platform().split("-")[0] != "linux":
        pytest.skip("needs gcc and LD_PRELOAD")
    folder = tmp_path_factory.mktemp("locks")
    (folder / "locks.c").write_text(FAILING)
    words = "gcc -shared -fPIC -o locks.so locks.c -ldl"
    subprocess.run(words.split(), cwd=folder, check=True, capture_output=True)
    return folder / "locks.so"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_lock_that_fails_is_no_damage(code, path, monkeypatch):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.lockf", fail)
    with pytest.raises(
        CheckpointError, match=r"POSIX locks, got .* on \w+ \(/.*\): .*; choose"
    ) as no:
        journaled(path)
    assert type(no.value) is CheckpointError
    monkeypatch.undo()
    journaled(path).journal.close()


@pytest.mark.slow
@pytest.mark.parametrize("state", ["new", "old"])
@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EIO", "EINVAL"])
def test_a_file_system_without_locks_is_named(code, state, failing_locks, tmp_path):
    number = getattr(errno, code)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(number), state], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "LD_PRELOAD": str(failing_locks)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 if state == "old" else lines
    for line in lines[: 2 if state == "old" else 1]:
        assert line.startswith("CheckpointError journal must be on a file system with POSIX locks")
        assert f"{os.strerror(number)}; choose a local disk, or mount with locks" in line
    assert "no sound journal" not in done.stdout
    assert "one process" not in done.stdout


# Files that are missing.


@pytest.mark.parametrize("n", [0, 3, 100])
def test_a_copy_without_the_mark_is_refused(n, path):
    rb = journaled(path, "never")
    for i in range(n):
        rb.extend(objects([i % 50]))
    for names in (("",), ("", "-wal")):
        copy = copy_of(path, *names)
        for _ in range(2):  # an error leaves nothing that lets the next call through
            with pytest.raises(CheckpointCorruptError, match=r"no mark .*copy/rb-mark, so it is"):
                journaled(copy)
            with pytest.raises(CheckpointCorruptError, match="no mark"):
                open_buffer(copy)
        assert not Path(f"{copy}-mark").exists()
    assert recover(copy_of(path, "", "-wal"), path.with_name("other"))["left_out"] == 0
    rb.journal.close()


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_goes_is_noticed_at_the_next_call(name, how, path):
    rb = journaled(path)
    rb.extend(objects([1, 2]))
    file, kept = Path(f"{path}{name}"), path.with_name("kept")
    file.rename(kept)
    if how == "replaced":
        shutil.copyfile(kept, file)
    for use in (lambda: rb.extend(objects([3])), rb.journal.sync, lambda: rb.extend(objects([4]))):
        with pytest.raises(CheckpointError, match=f"lost its file .*rb.journal{name}, which was"):
            use()
    with pytest.raises(CheckpointError, match="lost its file"):
        rb.journal.close()
    kept.replace(file)
    assert len(journaled(path)) == 2  # and closing released them


# Disks that are small.


@pytest.mark.parametrize("sync", ["always", "never"])
def test_a_small_disk_is_enough_for_few_rows(sync, path):
    """600 KB for 20 KB of rows: the log is folded before it fills them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, before[1]))  # of each file
    try:
        rb = journaled(path, sync, partial(reward_prioritized_buffer, 20, unique="state"))
        largest = 0
        for i in range(80):
            rows = objects(range(i, i + 20)).set("x", torch.randn(20, 250))
            rb.extend(rows)
            largest = max(largest, sum(Path(f"{path}{name}").stat().st_size for name in FILES))
        rb.journal.close()
        assert largest < 600_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = journaled(path, sync, partial(reward_prioritized_buffer, 20, unique="state"))
    assert_equal(again[:], rb[:])
    again.journal.close()


def test_a_disk_that_was_full_is_used_again(path):
    rb = journaled(path, "always", partial(fifo_buffer, 20))
    rb.extend(objects(range(20)).set("x", torch.randn(20, 250)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for room in (150_000, 250_000, 600_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            refused = 0
            for i in range(60):
                try:
                    rb.extend(objects(range(i, i + 20)).set("x", torch.randn(20, 250)))
                except CheckpointError:
                    refused += 1
        assert refused == 0
        rb.journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_equal(journaled(path, "always", partial(fifo_buffer, 20))[:], rb[:])


# A power loss while SQLite wrote the first page of a new journal.


def test_a_first_page_that_was_not_written_is_no_damage(path):
    """SQLite's rollback journal, synced before, says that the database had no page."""
    path.write_bytes(bytes(4096))
    with pytest.raises(CheckpointCorruptError, match="begins with"):
        journaled(path)
    head = struct.pack(">8sIIIII", bytes.fromhex("d9d505f920a163d7"), 0, 7, 0, 512, 4096)
    path.with_name(f"{path.name}-journal").write_bytes(head.ljust(512, b"\0"))
    rb = journaled(path)
    rb.extend(objects([1, 2]))
    rb.journal.close()
    assert len(journaled(path)) == 2


# Parts that are exchanged, and tables of a stranger.


def test_parts_are_not_exchanged_under_a_journal(path):
    rb = journaled(path, "always", partial(reward_prioritized_buffer, 9, sampler=PrioritySampler()))
    rb.extend(objects([1, 2, 3]))
    for part, new in (("storage", LazyTensorStorage(9)), ("sampler", SoftmaxRewardSampler())):
        former = getattr(rb, part)
        with pytest.raises(
            ArgumentError, match=f"rb must keep its {part} while it has the journal"
        ):
            getattr(rb, f"set_{part}")(new)
        assert getattr(rb, part) is former
    rb.update_priority(torch.tensor([0]), torch.tensor([9.0]))
    rb.writer.remove(torch.tensor([1]))
    rb.journal.close()
    again = journaled(
        path, "always", partial(reward_prioritized_buffer, 9, sampler=PrioritySampler())
    )
    assert_equal(again[:], rb[:])
    assert_equal(again.sampler.log_probs(again.storage), rb.sampler.log_probs(rb.storage))
    again.journal.close()


ENDLESS = "WITH RECURSIVE c(x, y) AS (SELECT 0, 0 UNION ALL SELECT x + 1, 0 FROM c) SELECT * FROM c"


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE state RENAME TO s; CREATE VIEW state(name, value) AS " + ENDLESS,
        "ALTER TABLE row RENAME TO r; CREATE VIEW row(slot, row) AS " + ENDLESS,
        "CREATE TRIGGER t AFTER INSERT ON row BEGIN DELETE FROM row; END",
        "CREATE INDEX i ON row(abs(slot))",
        "DROP TABLE row; CREATE TABLE row (slot INTEGER PRIMARY KEY, row, more)",
    ],
)
def test_tables_that_compute_are_refused(change, path):
    rb = journaled(path)
    rb.extend(objects([1, 2, 3]))
    rb.journal.close()
    with closing(sqlite3.connect(path)) as other:
        other.executescript(change)
    for use in (lambda: open_buffer(path), lambda: journaled(path)):
        with pytest.raises(CheckpointCorruptError, match="its tables are not those of a journal"):
            use()
