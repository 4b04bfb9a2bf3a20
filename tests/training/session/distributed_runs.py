"""``gfn-rb`` on several ranks: starting it, ending one of them, reading what it wrote."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from transports.ranks import abort, environment, mpiexec

from gfn_rb.training.session.folder import RunFolder, read_metrics

OUTCOMES = ("stored", "rejected", "duplicates", "scored", "refused")
QUICK = ["--batch-size", "8", "--hidden", "16", "--checkpoint-every", "2", "--patience", "20"]
SECONDS = 60  # then everything is killed

# Each rank writes down which process it is.
PROGRAM = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv.pop(1))
folder.mkdir(exist_ok=True)
(folder / os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(os.getpid()))
from gfn_rb.cli import main
sys.exit(main())
"""


class Job:
    """A command under mpiexec, in the background. Leaving it ends it.

    Args:
        size: number of ranks.
        words: after ``gfn-rb``.
        place: a new folder for its output.
        options: of mpiexec.
    """

    def __init__(self, size, words, place, options=()):
        place.mkdir()
        self._log, self._pids = place / "log", place / "pids"
        ranks = [mpiexec(), "--oversubscribe", *options, "-n", str(size), sys.executable]
        with self._log.open("wb") as stream:
            self._process = subprocess.Popen(
                [*ranks, "-c", PROGRAM, str(self._pids), *map(str, words)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        abort(self._process)

    @property
    def lines(self):
        """What it printed. Messages may stand behind progress, on the same line."""
        return self._log.read_text(errors="replace").replace("\r", "\n").splitlines()

    def until_exists(self, path):
        end = time.monotonic() + SECONDS
        while True:
            has_ended = self._process.poll() is not None  # asked first: it may end just after
            if path.exists():
                return
            if has_ended or time.monotonic() > end:
                self._fail(f"there is no {path}")
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


def finished(size, words, place, options=()):
    """Run a command on so many ranks to its end; return its exit code and lines."""
    with Job(size, words, place, options) as job:
        return job.wait(), job.lines


def said(lines):
    """Messages of gfn-rb itself, out of all lines."""
    return [line[line.index("gfn-rb: ") :] for line in lines if "gfn-rb: " in line]


def read_json(path):
    return json.loads(Path(path).read_text())


def rows(path, rank):
    return read_metrics(RunFolder(Path(path), rank).metrics)


def assert_adds_up(sent):
    """What a worker sent is accounted for."""
    assert sent["sent"] == sum(sent[name] for name in OUTCOMES) + sent["lost"]
    given = ("reduced", "filtered", "skipped", "sent")
    assert sent["offered"] == sum(sent[name] for name in given)


def assert_same_account(sent, received):
    """A worker and its manager, by name, agree on what became of each row."""
    assert_adds_up(sent)
    assert sent["lost"] == 0
    assert sent["sent"] == received["items"]
    assert {name: sent[name] for name in OUTCOMES} == {name: received[name] for name in OUTCOMES}
    assert sent["fed"] == received["fed"]
    assert received["state"] == "gone"
