"""Journals after a power loss: nothing that was promised is lost, whatever the disk had taken.

The system calls of a journal under random calls are recorded. A power loss keeps, of what was not
synced, any pages in any of their versions, any size of a file, and any of the renames. Each state
that may so be left is opened, and must hold what there was after one of the calls that it may.
"""

import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import gfn_rb
from gfn_rb.checkpoint import Journal, journal
from gfn_rb.checkpoint.changes import slot_states
from gfn_rb.checkpoint.log import JournalLog
from gfn_rb.errors import GfnRbError

PAGE = 512  # bytes that a disk takes whole or not at all
CAPACITY = 6
N_CALLS = 25
CALLS = (*["extend"] * 3, "remove", "update", "empty", "compact", "sync", "due", "kill")
NAMES = ("rb", "rb.gfnrb")


class Disk:
    """What is on a disk, and what is on its way to it, told by the calls of ``os``.

    A name is bound to the number of a file, which keeps its content as of its last sync, and what
    was written to it since: bytes to a place, or a new size without any.
    """

    def __init__(self, patch):
        self.synced = {}
        self.written = {}
        self.names = {}
        self.renames = []
        self.on_change = None  # None: nothing is noted
        self._kept = []  # descriptors, so that no file gets the number of another
        for name in ("pwrite", "fsync", "ftruncate", "replace", "open"):
            patch.setattr(os, name, self._around(getattr(os, name), getattr(self, f"_{name}")))

    def _around(self, call, note):
        def called(*args, **options):
            if self.on_change is None:
                return call(*args, **options)
            self.on_change()
            number = os.stat(args[0]).st_ino if call.__name__ == "replace" else 0
            result = call(*args, **options)
            note(number, result, *args)
            return result

        return called

    def _file(self, descriptor):
        number = os.fstat(descriptor).st_ino
        if number not in self.synced:
            self._kept.append(os.dup(descriptor))
            self.synced[number], self.written[number] = b"", []
        return number

    def _pwrite(self, _, n, descriptor, data, at):
        self.written[self._file(descriptor)].append((at, bytes(data[:n])))

    def _ftruncate(self, _, __, descriptor, size):
        self.written[self._file(descriptor)].append((size, None))

    def _fsync(self, _, __, descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            self.names.update(self.renames)
            self.renames.clear()
            return
        number = self._file(descriptor)
        self.synced[number] = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        self.written[number].clear()

    def _replace(self, number, _, __, target):
        self.renames.append((target.name, number))

    def _open(self, _, descriptor, path, flags, *__):
        if flags & os.O_CREAT and not os.fstat(descriptor).st_size:
            self.renames.append((Path(path).name, self._file(descriptor)))

    def close(self):
        """Forget the files."""
        for descriptor in self._kept:
            os.close(descriptor)

    def after_power_loss(self, pick):
        """Return files by name that may be left if the power fails now."""
        kept = pick.choice((0.0, 0.5, 1.0))
        names = {**self.names, **dict(each for each in self.renames if pick.random() <= kept)}
        return {name: self._content(number, pick) for name, number in names.items()}

    def _content(self, number, pick):
        versions = [self.synced.get(number, b"")]
        for at, data in self.written.get(number, ()):
            before = versions[-1]
            if data is None:
                versions.append(before[:at].ljust(at, b"\0"))
            else:
                versions.append(before[:at].ljust(at, b"\0") + data + before[at + len(data) :])
        if len(versions) == 1:
            return versions[0]
        size = len(pick.choice(versions))
        if pick.random() < 0.2:
            size = pick.randint(len(versions[0]), max(map(len, versions)))
        early = pick.random()  # how many pages are of early versions
        pages = []
        for at in range(0, size, PAGE):
            version = pick.choice(versions) if pick.random() < early else versions[-1]
            pages.append(version[at : at + PAGE].ljust(PAGE, b"\0"))
        return b"".join(pages)[:size]


def make():
    return gfn_rb.reward_prioritized_buffer(CAPACITY, unique="state")


def items(n, pick):
    """Rows of which three take a page."""
    state = torch.tensor([pick.randrange(20) for _ in range(n)])
    reward = torch.tensor([float(pick.randrange(9)) for _ in range(n)])
    content = state[:, None].expand(n, 20).clone()
    return TensorDict({"state": state, "log_reward": reward, "content": content}, [n])


def held(rb):
    """Return all that a journal brings back, as text."""
    rows = rb.storage[:] if len(rb) else {}
    kept = [*sorted(rows.items()), *sorted(rb.writer.state_dict().items())]
    return str([(k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in kept])


class Run:
    """Random calls of a journaled buffer, and what may be there if the power fails.

    Attributes:
        n_states: states that were looked at, by what was found.
        wrong: what was wrong.
    """

    def __init__(self, folder, sync, n_states, seed):
        self.folder, self.sync, self.pick = folder, sync, random.Random(seed)
        self.path, self.left = folder / "rb", folder / "left"
        self.left.mkdir()
        self.per_change, self.n_states = n_states, 0
        self.expected = []  # after each call
        self.n_promised = 0  # calls that a power loss may not undo
        self.opened, self.opener = dict[Any, str](), make()
        self.wrong = []
        self.found = Counter()

    def calls(self, disk):
        """Make the calls."""
        rb = make()
        states = []

        def lose():
            states.extend(disk.after_power_loss(self.pick) for _ in range(self.per_change))

        disk.on_change = lambda: None
        Journal(rb, self.path, self.sync)
        self.expected, self.n_promised = [held(rb)], 0
        for _ in range(N_CALLS):
            disk.on_change = lose
            name = self.pick.choice(CALLS)
            if name == "due":  # or a call that ends a second later
                rb.journal._written_at -= 2.0
                name = "extend" if self.sync == "interval" else "sync"
                due = True
            else:
                due = self.sync == "always" or name in ("compact", "sync", "kill")
            slot = torch.tensor([self.pick.randrange(max(1, len(rb)))])
            if name == "extend":
                rb.extend(items(self.pick.randint(1, 5), self.pick))
            elif name == "empty":
                rb.empty()
            elif name == "remove" and len(rb):
                rb.writer.remove(slot)
            elif name == "update" and len(rb):
                rb.writer.update(slot, torch.tensor([float(self.pick.randrange(9))]))
            elif name in ("compact", "sync"):
                getattr(rb.journal, name)()
            elif name == "kill":
                rb.journal._give_up()
                rb = make()
                Journal(rb, self.path, self.sync)
            lose()
            disk.on_change = None
            self.expected.append(held(rb))
            for files in states:
                self.check(files, name)
            states.clear()
            if due:
                self.n_promised = len(self.expected) - 1
        rb.journal.close()

    def check(self, files, name):
        """Note what is wrong with what is left while the last call was made."""
        self.n_states += 1
        key = tuple(sorted(files.items()))
        if key not in self.opened:
            self.opened[key] = self.open(files)
        came, may = self.opened[key], self.expected[self.n_promised :]
        if came not in may:
            what = "an earlier state" if came in self.expected else came
            self.wrong.append(f"{self.sync}, {name}, call {len(self.expected)}: {what}")
        self.found["newest" if came == may[-1] else "older"] += 1

    def open(self, files):
        """Return what a buffer is given of files."""
        for name in NAMES:
            (self.left / name).unlink(missing_ok=True)
        for name, content in files.items():
            (self.left / name).write_bytes(content)
        parts, log = slot_states(self.opener), JournalLog(self.left / "rb")
        try:
            journal.redo(log, self.left / "rb.gfnrb", self.opener, parts)
            return held(self.opener)
        except GfnRbError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            log.close()


@pytest.fixture
def folder():
    """A folder in memory, where there is one."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("sync", ["always", "interval", "never"])
@pytest.mark.parametrize(
    "n_states", [100, pytest.param(10_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_power_loss_takes_nothing_that_was_promised(sync, n_states, folder):
    n, found = 0, Counter[str]()
    for seed in range(10_000):
        if n >= n_states:
            break
        place = folder / str(seed)
        place.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            disk, run = Disk(patch), Run(place, sync, 1 if n_states < 1000 else 6, seed)
            run.calls(disk)
        disk.close()
        shutil.rmtree(place)
        assert run.wrong == []
        n, found = n + run.n_states, found + run.found
    assert n >= n_states
    assert min(found.values()) > n_states // 50
