"""``gfn-rb`` on several ranks: starting it, ending one of them, reading what it wrote."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from transports.ranks import SECONDS, abort, environment, mpiexec

from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

OUTCOMES = ("stored", "rejected", "duplicates", "scored", "refused")
QUICK = ["--batch-size", "8", "--hidden", "16", "--checkpoint-every", "2", "--patience", "20"]
MANAGED = ["--managers", "1", "--feed", "top", "--out"]
STEPS = 12
TRAIN = ["train", "tfbind8", "--steps", str(STEPS), "--eval-every", "6", *QUICK]
PROMPT = 40.0  # seconds in which what is told to stop, or loses a rank, ends

# Each rank writes down which process it is, runs one command after the other, and writes down how
# each ended: an interpreter takes longer to start than a command to run.
PROGRAM = """
import json, os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ["OMPI_COMM_WORLD_RANK"]
folder.mkdir(exist_ok=True)
(folder / rank).write_text(str(os.getpid()))
from gfn_rb.training.cli import main
for words in json.loads(sys.argv[2]):
    code = main(words)
    with (folder / f"{rank}.codes").open("a") as file:
        print(code, file=file)
sys.exit(code)
"""


class Job:
    """Commands under mpiexec, one after the other, in the background. Leaving it ends them.

    ``commands`` are the words after ``gfn-rb`` of each, ``options`` those of mpiexec.
    """

    def __init__(self, size, commands, place, options=()):
        place.mkdir()
        self._log, self._pids = place / "log", place / "pids"
        ranks = [mpiexec(), "--oversubscribe", *options, "-n", str(size), sys.executable]
        words = json.dumps([[*map(str, command)] for command in commands])
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*ranks, "-c", PROGRAM, str(self._pids), words], env=environment(),
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        abort(self._process)

    @property
    def lines(self):
        """What it printed. Messages may stand behind progress, on the same line."""
        return self._log.read_text(errors="replace").replace("\r", "\n").splitlines()

    def codes(self, rank):
        """The exit codes of the commands that a rank has run."""
        return [*map(int, (self._pids / f"{rank}.codes").read_text().split())]

    def until_exists(self, path):
        self.until(path.exists, f"there is no {path}")

    def until(self, happened, otherwise):
        end = time.monotonic() + SECONDS
        while True:
            has_ended = self._process.poll() is not None  # asked first: it may end just after
            if happened():
                return
            if has_ended or time.monotonic() > end:
                self._fail(otherwise)
            time.sleep(0.01)

    def kill(self, rank):
        self.send(signal.SIGKILL, rank)

    def send(self, number, rank):
        assert self._process.poll() is None, "\n".join(self.lines)
        os.kill(int((self._pids / str(rank)).read_text()), number)

    def is_running(self, rank):
        stat = Path("/proc", (self._pids / str(rank)).read_text(), "stat")
        try:
            return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def wait(self, seconds=SECONDS):
        """The exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"it is still running after {seconds:g} s")

    def _fail(self, why):
        """Have all ranks say where they are, and raise with all they said."""
        abort(self._process)
        raise AssertionError("\n".join([why, *self.lines]))


def said(lines):
    """Messages of gfn-rb itself, out of all lines."""
    return [line[line.index("gfn-rb: ") :] for line in lines if "gfn-rb: " in line]


def read_json(path):
    return json.loads(Path(path).read_text())


def rows(path, rank):
    return read_metrics(RunFolder(Path(path), rank).metrics)


def assert_adds_up(sent):
    """What a worker sent is accounted for."""
    all_sent = sent["sent"] + sent["resent"]
    assert all_sent == sum(sent[name] for name in OUTCOMES) + sent["lost"]
    given = ("filtered", "skipped", "sent")
    assert sent["offered"] == sum(sent[name] for name in given)


def assert_same_account(sent, received):
    """A worker and its manager, by name, agree on what became of each row."""
    assert_adds_up(sent)
    assert sent["lost"] == 0
    assert sent["sent"] + sent["resent"] == received["items"]
    assert {name: sent[name] for name in OUTCOMES} == {name: received[name] for name in OUTCOMES}
    assert sent["fed"] == received["fed"]
    assert received["state"] == "gone"
