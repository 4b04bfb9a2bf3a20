"""Ranks that die: ``python -m benchmarks.kill_ranks --times 20``.

    --times N      how often to try each kind
    --kinds ...    some of: killed stopped job
    --seed S       of the instants

Each try starts ``mpiexec -n 4 gfn-rb train tfbind8 --managers 1 --feed top``, and at a random
instant of the seconds after its first checkpoint kills (SIGKILL) or stops (SIGSTOP) one rank,
whatever that does at the moment: sample, learn, send, receive or save.

killed     a rank, under ``--with-ft ulfm``: all others end in failure, and one line names the rank;
stopped    a rank, without fault tolerance: all others end in failure, and one line names the rank;
job        any rank, without fault tolerance: the job ends within seconds, in failure.

In each kind ``gfn-rb resume`` then takes the run to its end from the checkpoints.

A try in which the rank was done before it could be killed does not count, and is repeated. The
table has the seconds from the signal until the job had ended. The exit status is 1 if any try
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.ranks import command, environment
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

WORKERS = (0, 1, 2)
MANAGER = 3
STEPS = 150
SPREAD = 4.0  # seconds, less than so many steps take
TOKEN, RANK = "GFN_RB_TRY", "OMPI_COMM_WORLD_RANK"
SECONDS = 240  # then a try hangs
PROMPT = 60  # seconds in which a job ends
PROGRAM = ["-c", "import sys; from gfn_rb.training.cli import main; sys.exit(main())"]
OPTIONS = (
    f"--steps {STEPS} --hidden 16 --batch-size 32 --eval-every {STEPS} --checkpoint-every 5 "
    "--feed top"
).split()
FAULT_TOLERANT = ("--with-ft", "ulfm")


class TooLate(Exception):
    """The rank was done before it could be killed."""


class Failed(Exception):
    """What was promised did not happen."""


class Job:
    """A run under mpiexec.

    Args:
        words: for gfn-rb.
        options: of mpiexec.
        log: where its output goes.
        size: how many ranks.
    """

    def __init__(self, words: Sequence[str], options: Sequence[str], log: Path, size: int) -> None:
        self._token, self._log = secrets.token_hex(8), log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                command(size, [*PROGRAM, *words], options),
                env={
                    **environment(),
                    TOKEN: self._token,
                    "PYTHONPATH": os.getcwd(),
                    "PYTHONFAULTHANDLER": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        """What it printed. Messages may stand behind progress, on the same line."""
        return self._log.read_text(errors="replace").replace("\r", "\n")

    @property
    def messages(self) -> str:
        """What it printed, without its progress."""
        text = re.sub(r"[^\n]*step/s[^]\n]*\]", "", self.said)
        return "\n".join(line for line in text.splitlines() if line.strip())

    def pids(self) -> dict[int, int]:
        """Return the process of each rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                known = _variables(path)
                rank, parent = known.get(RANK), _variables(Path("/proc") / _parent(path))
                # What a rank started, such as Python's resource tracker, has its variables, too.
                if known.get(TOKEN) == self._token and rank is not None and RANK not in parent:
                    found[int(rank)] = int(path.name)
        return found

    def wait(self, seconds: float) -> int:
        """Return the exit code.

        Raises:
            Failed: it hangs.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.abort()
            raise Failed(f"still running after {seconds:g} s") from None

    def abort(self) -> None:
        """Have its ranks say where they are, and end: mpiexec hands the signal on."""
        with suppress(subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(5)

    def end(self) -> None:
        """Kill whatever is left of it."""
        for pid in self.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Try(NamedTuple):
    """A run that is to be disturbed.

    Attributes:
        job: the run.
        folder: of the run.
        draw: source of instants.
    """

    job: Job
    folder: Path
    draw: random.Random

    def hit(self, rank: int, number: int) -> float:
        """Send a signal to a rank in the training, once it has saved; return when."""
        _until(RunFolder(self.folder, rank).checkpoint.exists, self.job)
        pid, wait = self.job.pids().get(rank), self.draw.uniform(0.0, SPREAD)
        time.sleep(wait)
        if pid is None or self.job.process.poll() is not None or self.last_step(rank) == STEPS:
            raise TooLate(f"rank {rank} is done after {wait:.1f} s")
        _signal(pid, number)
        return time.monotonic()

    def is_over(self) -> bool:
        """Return whether rank 0 has written its report."""
        return RunFolder(self.folder).ranks_report.exists()

    def last_step(self, rank: int) -> int:
        """Return the last step in the table of a rank, 0 if there is none."""
        path = RunFolder(self.folder, rank).metrics
        if not path.exists():
            return 0
        return max((int(row["step"]) for row in read_metrics(path)), default=0)

    def report(self) -> dict[str, Any]:
        """Return the report of the run."""
        path = RunFolder(self.folder).ranks_report
        _check(path.exists(), "no report was written")
        return json.loads(path.read_text())


def killed(attempt: Try) -> float:
    """Kill a rank, resume the run, and return how long it took the job to end, in seconds."""
    return _ended(attempt, signal.SIGKILL, "is lost: ")


def stopped(attempt: Try) -> float:
    """Stop a rank, resume the run, and return how long it took the job to end, in seconds."""
    return _ended(attempt, signal.SIGSTOP, "is lost: ")


def job(attempt: Try) -> float:
    """Do as ``killed`` without fault tolerance, where no line has to name the rank."""
    return _ended(attempt, signal.SIGKILL, "")


def _ended(attempt: Try, number: int, said: str) -> float:
    rank = attempt.draw.choice((*WORKERS, MANAGER))
    hit = attempt.hit(rank, number)
    code = attempt.job.wait(PROMPT)
    took = time.monotonic() - hit
    if attempt.last_step(0) == STEPS and attempt.is_over():
        raise TooLate("the run was over")
    _check(code != 0, "the exit code is 0")
    _check(f"rank {rank} {said}" in attempt.job.said, f"rank {rank} is not named")
    if said:
        lines = [line for line in attempt.job.messages.splitlines() if "gfn-rb: " in line]
        _check(len(lines) == 1, f"{len(lines)} lines say so")
    log = attempt.folder.with_suffix(".resumed")
    resumed = Job(["resume", str(attempt.folder)], (), log, len(WORKERS) + 1)
    try:
        code = resumed.wait(SECONDS)
        _check(code == 0, f"resume fails with exit code {code}:\n{resumed.messages}")
    finally:
        resumed.end()
    report = attempt.report()
    _check(sorted(report["ranks"]) == ["0", "1", "2"], f"ranks are {report['ranks'].keys()}")
    for each in WORKERS:
        _check(attempt.last_step(each) == STEPS, f"rank {each} did not train to the end")
    return took


class Kind(NamedTuple):
    """What is tried.

    Attributes:
        check: disturbs a run, and returns how many seconds it took.
        options: of mpiexec.
        patience: of the run, in seconds.
    """

    check: Callable[[Try], float]
    options: tuple[str, ...] = FAULT_TOLERANT
    patience: int = 30


KINDS = {
    "killed": Kind(killed),
    # Only one that is stopped is waited for; elsewhere none is to be lost by being slow.
    "stopped": Kind(stopped, options=(), patience=5),
    "job": Kind(job, options=()),
}


def attempt(kind: str, draw: random.Random) -> float:
    """Try a kind once, and return how many seconds it took the job to end.

    Raises:
        Failed: what was promised did not happen.
        TooLate: the rank was done before.
    """
    check, options, patience = KINDS[kind]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        counts = ["--managers", "1", "--patience", str(patience)]
        words = ["train", "tfbind8", *OPTIONS, *counts, "--out", str(folder)]
        running = Job(words, options, Path(parent) / "log", len(WORKERS) + 1)
        try:
            return check(Try(running, folder, draw))
        except Failed as error:
            raise Failed(f"{error}\n{running.messages}") from None
        finally:
            running.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all kinds, print a table, and return the exit code.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description="Ranks that die, and the end of the others.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    tallies = [Tally(kind) for kind in options.kinds]
    with suppress(KeyboardInterrupt):  # the table is of what was tried so far, then
        for _ in range(options.times):
            for tally in tallies:
                tally.once(draw)
    print(
        "| killed | as promised | too late, repeated | seconds, median | largest |\n"
        "| --- | ---: | ---: | ---: | ---: |"
    )
    print("\n".join(map(str, tallies)))
    return int(any(tally.failed for tally in tallies))


class Tally:
    """What became of all tries of a kind.

    Args:
        kind: one of ``KINDS``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seconds: list[float] = []
        self.late = self.failed = 0

    def once(self, draw: random.Random) -> None:
        """Try until it is not too late."""
        tried = self.tried
        while self.tried == tried:
            start = time.monotonic()
            what = self._attempt(draw)
            told = f"{self.kind}, {self.tried}: {what} (a try of {time.monotonic() - start:.0f} s)"
            print(told, file=sys.stderr, flush=True)

    @property
    def tried(self) -> int:
        """How many tries count."""
        return len(self.seconds) + self.failed

    def _attempt(self, draw: random.Random) -> str:
        try:
            self.seconds.append(attempt(self.kind, draw))
        except TooLate as error:
            self.late += 1
            if self.late > 2 * self.tried + 10:
                raise SystemExit(f"{self.kind}: ranks are done before they are killed") from None
            return f"too late: {error}"
        except Failed as error:
            self.failed += 1
            return f"FAILED: {error}"
        return f"{self.seconds[-1]:.2f} s"

    def __str__(self) -> str:
        took = f"{median(self.seconds):.2f} | {max(self.seconds):.2f}" if self.seconds else "| "
        passed = f"{len(self.seconds)} of {self.tried}"
        return f"| {self.kind} | {passed} | {self.late} | {took} |"


def _variables(process: Path) -> dict[str, str]:
    """Return the environment of a process, given its folder in /proc."""
    entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def _parent(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[1]


def _until(happened: Callable[[], bool], running: Job) -> None:
    """Wait until something has happened, in this run."""
    end = time.monotonic() + SECONDS
    while not happened():
        if running.process.poll() is not None and not happened():
            raise Failed(f"ended with exit code {running.process.returncode}")
        if time.monotonic() > end:
            running.abort()
            raise Failed(f"nothing after {SECONDS} s")
        time.sleep(0.02)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise TooLate("its process has ended") from None


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise Failed(message)


if __name__ == "__main__":
    sys.exit(main())
