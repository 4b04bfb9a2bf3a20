"""Ranks that die: ``python -m benchmarks.kill_ranks --times 20``.

    --times N      how often to try each kind
    --kinds ...    some of: worker manager stopped job worker-of-two manager-of-two
                   journaled
    --seed S       of the instants

Each try starts ``mpiexec -n 4 gfn-rb train tfbind8 --managers 1 --feed top``, and at a random
instant of the seconds after its first checkpoint kills (SIGKILL) or stops (SIGSTOP) one rank,
whatever that does at the moment: sample, learn, send, receive or save.

worker     a worker, under ``--with-ft ulfm``: the others train to the end, one report is written,
           the lost rank is named, and the accounts of the others agree at both ends, row by row;
manager    the manager, under ``--with-ft ulfm``: all workers train to the end on their own;
stopped    a worker that answers no more, likewise: as for one that is killed;
job        any rank, without fault tolerance: the job ends within seconds, in failure, and
           ``gfn-rb resume`` takes it to its end from the checkpoints;
...-of-two the first two kinds with a second manager, under ``mpiexec -n 5``. Where one manager
           dies, the other holds in the end what any worker holds: they sent again what the dead
           one owned;
journaled  the manager, as above, with ``--managers.journal``: all rows that it had told its
           workers it stored come back from its file, and none that they had not sent.

A try in which the rank was done before it could be killed does not count, and is repeated. The
table has the seconds from the signal until mpiexec had shown that all others go on without that
rank (they know within a second; it holds output back), or, of a job, until it had ended. The exit
status is 1 if any try failed.
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

import torch

from benchmarks.ranks import command, environment
from gfn_rb import MergedReplayBuffer, load_checkpoint
from gfn_rb.checkpoint import Journal
from gfn_rb.containers.objects import object_keys
from gfn_rb.remote.protocol.messages import OUTCOMES
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

WORKERS = (0, 1, 2)
MANAGER = 3  # the first; a second one has the next rank
STEPS = 150
SPREAD = 4.0  # seconds, less than so many steps take
TOKEN, RANK = "GFN_RB_TRY", "OMPI_COMM_WORLD_RANK"
SECONDS = 240  # then a try hangs
PROMPT = 15  # seconds in which a job without fault tolerance ends
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


class Hit(NamedTuple):
    """A signal that was sent.

    Attributes:
        at: when, of the monotonic clock.
        training: the ranks that had steps to take yet, and so have to notice.
    """

    at: float
    training: list[int]


class Try(NamedTuple):
    """A run that is to be disturbed.

    Attributes:
        job: the run.
        folder: of the run.
        draw: source of instants.
        managers: its ranks that manage.
    """

    job: Job
    folder: Path
    draw: random.Random
    managers: tuple[int, ...]

    def hit(self, rank: int, number: int) -> Hit:
        """Send a signal to a rank at a random instant of the training, once it has saved."""
        _until(RunFolder(self.folder, rank).checkpoint.exists, self.job)
        pid, wait = self.job.pids().get(rank), self.draw.uniform(0.0, SPREAD)
        time.sleep(wait)
        if pid is None or self.job.process.poll() is not None or self.last_step(rank) == STEPS:
            raise TooLate(f"rank {rank} is done after {wait:.1f} s")
        _signal(pid, number)
        return Hit(time.monotonic(), [each for each in WORKERS if self.last_step(each) < STEPS])

    def named(self, *lines: str) -> float:
        """Wait until it has said all of this, and return when."""
        _until(lambda: all(line in self.job.said for line in lines) or self.is_over(), self.job)
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


def worker(attempt: Try) -> float:
    """Kill a worker, and return how long it took the others to notice, in seconds."""
    return _without_worker(attempt, signal.SIGKILL)


def stopped(attempt: Try) -> float:
    """Stop a worker, and return likewise."""
    return _without_worker(attempt, signal.SIGSTOP)


def _without_worker(attempt: Try, number: int) -> float:
    rank = attempt.draw.choice((1, 2))
    hit = attempt.hit(rank, number)
    noticed = attempt.named(f"has lost rank {rank}", f"worker {rank} is lost")
    _until(attempt.is_over, attempt.job)
    accounts = [RunFolder(attempt.folder, rank).manager for rank in attempt.managers]
    _until(lambda: all(path.exists() for path in accounts), attempt.job)
    report = attempt.report()
    if not report["lost"]:
        raise TooLate("nobody missed it")
    _check(list(report["lost"]) == [str(rank)], f"lost is {report['lost']}, expected {rank}")
    others = [each for each in WORKERS if each != rank]
    _check(sorted(map(int, report["ranks"])) == others, f"ranks are {report['ranks'].keys()}")
    for each in others:
        _check(attempt.last_step(each) == STEPS, f"rank {each} did not train to the end")
    senders = [json.loads(path.read_text())["senders"] for path in accounts]
    for known in senders:
        states = {int(each): sender["state"] for each, sender in known.items()}
        _check(states == {**dict.fromkeys(others, "gone"), rank: "lost"}, f"states are {states}")
    for each in others:
        both = {
            name: sum(known[str(each)][name] for known in senders) for name in ("items", *OUTCOMES)
        }
        _check_accounts(report["ranks"][str(each)]["counters"], both)
    _check(f"has lost rank {rank}" in attempt.job.said, f"rank {rank} is not named")
    _check(f"worker {rank} is lost" in attempt.job.said, f"worker {rank} is not named")
    _check_end(attempt)
    return noticed - hit.at


def _check_accounts(sent: dict[str, Any], received: dict[str, Any]) -> None:
    _check(sent["sent"] > 0 and sent["lost"] == 0, f"counters are {sent}")
    _check(sent["sent"] == received["items"], f"sent {sent['sent']}, came {received['items']}")
    for name in OUTCOMES:
        _check(sent[name] == received[name], f"{name}: {sent[name]} and {received[name]}")


def manager(attempt: Try) -> float:
    """Kill the manager, and return how long it took all workers to notice, in seconds."""
    rank = attempt.draw.choice(attempt.managers)
    left = [each for each in attempt.managers if each != rank]
    hit = attempt.hit(rank, signal.SIGKILL)
    lines = {each: f"worker {each}: manager {rank} is lost" for each in hit.training}
    noticed = attempt.named(*lines.values())
    _until(attempt.is_over, attempt.job)
    report = attempt.report()
    _check(sorted(report["ranks"]) == ["0", "1", "2"], f"ranks are {report['ranks'].keys()}")
    if not hit.training:
        raise TooLate("nobody needed it any more")
    for each in WORKERS:
        _check(attempt.last_step(each) == STEPS, f"rank {each} did not train to the end")
        known = report["ranks"][str(each)]["counters"]
        total = sum(known[name] for name in (*OUTCOMES, "lost"))
        sent = known["sent"] + known["resent"]
        _check(sent == total, f"rank {each} sent {sent}, of which {total}")
        if each in hit.training:
            _check(known["managers"] == left, f"rank {each} has managers {known['managers']}")
            _check(lines[each] in attempt.job.said, f"rank {each} does not say so")
            _check(not left or known["resent"] > 0, f"rank {each} sent nothing again")
    for survivor in left:
        _check_union(attempt, survivor)
    _check(list(report["lost"]) == [str(rank)], f"lost is {report['lost']}, expected {rank}")
    _check_end(attempt)
    return noticed - hit.at


def journaled(attempt: Try) -> float:
    """Kill the manager, which writes a journal, and return likewise."""
    took = manager(attempt)
    report, folder = attempt.report(), RunFolder(attempt.folder, MANAGER)
    counters = [report["ranks"][str(each)]["counters"] for each in WORKERS]
    stored, sent = (sum(known[name] for known in counters) for name in ("stored", "sent"))
    config = folder.read_config()
    rb = config.make_buffer(config.make_env(), torch.Generator())
    Journal(rb, folder.journal)
    _check(stored <= len(rb) <= sent, f"{stored} rows stored, {sent} sent, {len(rb)} come back")
    return took


def _check_end(attempt: Try) -> None:
    """Check that the job ends by itself, in success."""
    code = attempt.job.wait(SECONDS)
    _check(code == 0, f"the exit code is {code}")


def _check_union(attempt: Try, survivor: int) -> None:
    """Check that the manager that is left holds all that the workers hold."""
    held = _rewards(attempt, survivor)
    for rank in WORKERS:  # which stored less than there is room for
        missing = _rewards(attempt, rank).keys() - held.keys()
        _check(not missing, f"manager {survivor} lacks {len(missing)} rows of rank {rank}")


def _rewards(attempt: Try, rank: int) -> dict[bytes | None, float]:
    """Return the log-reward of each object in the buffer that a rank saved last."""
    folder = RunFolder(attempt.folder, rank)
    config = folder.read_config()
    one, other = (config.make_buffer(config.make_env(), torch.Generator()) for _ in range(2))
    rb = one if rank in attempt.managers else MergedReplayBuffer(one, other, p="size")
    load_checkpoint(folder.checkpoint, rb)
    found = {}
    for buffer in (one, other):
        rows = buffer[:] if len(buffer) else None
        if rows is not None:
            rewards = rows["log_reward"].tolist()
            found.update(zip(object_keys(rows), rewards, strict=True))
    return found


def job(attempt: Try) -> float:
    """Kill any rank of a job without fault tolerance, and resume it; return when it ended."""
    rank = attempt.draw.choice((*WORKERS, *attempt.managers))
    hit = attempt.hit(rank, signal.SIGKILL)
    code = attempt.job.wait(PROMPT)
    took = time.monotonic() - hit.at
    if attempt.last_step(0) == STEPS and attempt.is_over():
        raise TooLate("the run was over")
    _check(code != 0, "the exit code is 0")
    _check(f"rank {rank}" in attempt.job.said, f"rank {rank} is not named")
    log = attempt.folder.with_suffix(".resumed")
    resumed = Job(["resume", str(attempt.folder)], (), log, len(WORKERS) + len(attempt.managers))
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
        n_managers: how many ranks manage.
        patience: of the run, in seconds.
        words: further ones for gfn-rb.
    """

    check: Callable[[Try], float]
    options: tuple[str, ...] = FAULT_TOLERANT
    n_managers: int = 1
    patience: int = 30
    words: tuple[str, ...] = ()


KINDS = {
    "worker": Kind(worker),
    "manager": Kind(manager),
    # Only one that is stopped is waited for; elsewhere none is to be lost by being slow.
    "stopped": Kind(stopped, patience=5),
    "job": Kind(job, options=()),
    "worker-of-two": Kind(worker, n_managers=2),
    "manager-of-two": Kind(manager, n_managers=2),
    # With room for all, so that no row gives way to another.
    "journaled": Kind(journaled, words=("--managers.journal", "--capacity", "100000")),
}


def attempt(kind: str, draw: random.Random) -> float:
    """Try a kind once, and return how many seconds it took the others to notice, or to end.

    Raises:
        Failed: what was promised did not happen.
        TooLate: the rank was done before.
    """
    check, options, n_managers, patience, more = KINDS[kind]
    managers = tuple(range(MANAGER, MANAGER + n_managers))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        counts = ["--managers", str(n_managers), "--patience", str(patience)]
        words = ["train", "tfbind8", *OPTIONS, *counts, *more, "--out", str(folder)]
        running = Job(words, options, Path(parent) / "log", len(WORKERS) + n_managers)
        try:
            return check(Try(running, folder, draw, managers))
        except Failed as error:
            raise Failed(f"{error}\n{running.messages}") from None
        finally:
            running.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all kinds, print a table, and return the exit code.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description="Ranks that die, and what becomes of the others.")
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
