"""Runs that are killed and resumed, beside undisturbed ones: ``python -m benchmarks.resume``.

    --runs N       how many, 0 for as many as it takes to try every pair of options together
    --seed S       of the choice and of the instants

Each combination of options is trained twice by ``gfn-rb train``: once to its end; and once until
all its processes are killed (SIGKILL) at a random instant after the first checkpoint, then by
``gfn-rb resume`` to its end. Combinations are chosen so that each has as many new pairs of options
as can be found.

What all workers hold in the end is compared bit for bit: weights, optimiser, random generators,
buffers with writers and samplers, history and tables, less seconds. Workers that a manager feeds
are not compared, as the order of messages decides what is fed.

With a manager, the rows that a worker sent must add up to what became of them, at the worker and at
the manager, and the manager must hold every object that a worker found and holds. What a worker was
fed is not compared: the rank that found it may go on from an earlier step.

The exit status is 1 if any comparison failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from benchmarks.kill_ranks import Failed, Job, TooLate
from gfn_rb import CompactRows
from gfn_rb.codec.files import ValueFile
from gfn_rb.containers.objects import objects_in
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import CONDITION, NEXT_DONE, STATE
from gfn_rb.remote.messages import OUTCOMES
from gfn_rb.training import DRAW, KEEP, FeedOptions, ManagersOptions, SearchOptions
from gfn_rb.training.config import CONFIGS
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

ALONE, AVERAGED, MANAGED = "1", "2, averaged", "2 and a manager"
BOTH = "2, averaged, and a manager"
OPTIONS: dict[str, tuple[Any, ...]] = {
    "task": ("tfbind8", "hypergrid", "conditional_hypergrid", "bit_sequence", "box"),
    "replay": ("trajectories", "transitions", "states", "terminal"),
    "keep": ("top", "diverse", "recent"),
    "draw": ("softmax", "rank", "quantile", "priority", "uniform"),
    "ranks": (ALONE, AVERAGED, MANAGED, BOTH),
    "compact": ("none", "narrow", "rebuild"),
    "transport": ("mpi", "tcp"),
}
STEPS = 60
SIZES: dict[str, Any] = {
    "steps": STEPS, "batch_size": 8, "hidden": (16,), "eval_every": 7, "checkpoint_every": 5,
    "search": 0,
}  # fmt: skip
LOSS = {"transitions": "db", "states": "fm"}
MISSED = 5  # tries in a row that come too late
SECONDS = 900  # then a run hangs, however busy the machine is


class Case(NamedTuple):
    """A combination of options."""

    task: str
    replay: str
    keep: str
    draw: str
    ranks: str
    compact: str
    transport: str

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return {ALONE: 1, AVERAGED: 2, MANAGED: 3, BOTH: 3}[self.ranks]

    @property
    def pairs(self) -> set[tuple[Any, ...]]:
        """Every two of its options."""
        return set(combinations(zip(self._fields, self, strict=True), 2))

    def options(self) -> dict[str, Any]:
        """Return the options of its configuration."""
        names = ("replay", "keep", "draw", "compact")
        named = {name: getattr(self, name) for name in names}
        named |= {**SIZES, "loss": LOSS.get(self.replay, "tb")}
        if self.ranks != ALONE:
            named["transport"] = self.transport
        named["average_gradients"] = self.ranks in (AVERAGED, BOTH)
        if self.is_managed:  # the manager has room for all that is found
            return {**named, "managers": 1, "feed": "top" if self.is_fed else "none"}
        return {**named, "capacity": 200}

    @property
    def is_managed(self) -> bool:
        """Whether there is a manager."""
        return self.ranks in (MANAGED, BOTH)

    @property
    def is_fed(self) -> bool:
        """Whether the manager feeds the workers, which takes a draw by numbers that all share."""
        return self.is_managed and self.replay == "trajectories" and self.draw != "priority"

    @property
    def must(self) -> str:
        """What is compared, in words."""
        return ", ".join(
            [*["every bit"] * (not self.is_fed), *["accounts", "objects"] * self.is_managed]
        )

    def words(self) -> list[str]:
        """Return the command line that trains it."""
        words = ["train", self.task]
        for name, value in self.options().items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                words += [flag] if value else []
            else:
                words += [flag, *map(str, value if isinstance(value, tuple) else [value])]
        return words

    def is_allowed(self) -> bool:
        """Return whether its options go together."""
        groups: dict[str, Any] = {"keep": KEEP[self.keep](), "draw": DRAW[self.draw]()}
        groups["search"] = SearchOptions()
        if self.ranks == ALONE and self.transport != "mpi":
            return False
        if self.task == "box" and self.replay == "states":  # flow matching needs numbered actions
            return False
        if self.is_managed:
            feed = FeedOptions(self.options()["feed"])
            groups |= {"managers": ManagersOptions(1), "feed": feed}
        try:
            CONFIGS[self.task](**{**self.options(), **groups}).validate()
        except ArgumentError:
            return False
        return True


def chosen(draw: random.Random) -> Iterator[tuple[Case, float]]:
    """Yield cases until every pair of options was tried, and which share was tried by then."""
    cases = [case for each in product(*OPTIONS.values()) if (case := Case(*each)).is_allowed()]
    draw.shuffle(cases)
    left = set().union(*(case.pairs for case in cases))
    n_pairs = len(left)
    while left:
        best = max(cases, key=lambda case: len(case.pairs & left))
        left -= best.pairs
        yield best, 1 - len(left) / n_pairs


# Runs.


def started(words: Sequence[str], log: Path, size: int) -> Job:
    """Return a job whose ranks find each other over sockets as well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return Job(words, (), log, size)


def undisturbed(case: Case, folder: Path) -> float:
    """Train to the end; return how many seconds that takes from the first checkpoint on."""
    job = started([*case.words(), "--out", str(folder)], folder.with_suffix(".log"), case.size)
    try:
        start = _first_checkpoint(job, folder)
        _finish(job)
        return time.monotonic() - start
    finally:
        job.end()


def disturbed(case: Case, folder: Path, seconds: float) -> int:
    """Train, be killed after so many seconds, and resume; return the oldest step gone on from.

    Raises:
        TooLate: it was done before.
    """
    job = started([*case.words(), "--out", str(folder)], folder.with_suffix(".log"), case.size)
    try:
        _first_checkpoint(job, folder)
        time.sleep(seconds)
        pids = job.pids().values()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait(SECONDS)
    finally:
        job.end()
    saved = [contents(folder, rank)["values"].get("steps_done") for rank in range(case.size)]
    steps = min(step for step in saved if step is not None)
    if not pids or steps == STEPS:
        raise TooLate(f"it was done after {seconds:.1f} s")
    resumed = started(["resume", str(folder)], folder.with_suffix(".resumed"), case.size)
    try:
        _finish(resumed)
    finally:
        resumed.end()
    return int(steps)


def _first_checkpoint(job: Job, folder: Path) -> float:
    """Wait until rank 0 has saved, and return when."""
    end = time.monotonic() + SECONDS
    while not RunFolder(folder).checkpoint.exists():
        if job.process.poll() is not None or time.monotonic() > end:
            raise Failed(f"no checkpoint:\n{job.messages}")
        time.sleep(0.01)
    return time.monotonic()


def _finish(job: Job) -> None:
    if code := job.wait(SECONDS):
        raise Failed(f"exit code {code}:\n{job.messages}")


# Comparisons.


def contents(folder: Path, rank: int) -> dict[str, Any]:
    """Return all that a rank's checkpoint holds, by name; nothing where there is none."""
    path = RunFolder(folder, rank).checkpoint
    if not path.exists():
        return {"values": {}}
    file = ValueFile(path)
    return {name: file.value(name) for name in file.nodes}


def without_seconds(value: Any) -> Any:
    """Return nested values without those that are called time, or begin so."""
    if isinstance(value, dict):
        return {k: without_seconds(v) for k, v in value.items() if not str(k).startswith("time")}
    return [*map(without_seconds, value)] if isinstance(value, list) else value


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yield the names of nested values that are not the same, bit for bit."""
    if type(one) is not type(other):
        yield f"{name}: {type(one).__name__} and {type(other).__name__}"
    elif isinstance(one, TensorDictBase):
        yield from differences(dict(one.items()), dict(other.items()), name)
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            yield f"{name}: {[*one]} and {[*other]}"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{name}: {len(one)} and {len(other)} entries"
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, f"{name}[{i}]")
    elif isinstance(one, (Tensor, np.ndarray)):
        a, b = torch.as_tensor(one), torch.as_tensor(other)
        if a.dtype != b.dtype or a.shape != b.shape or _bytes(a) != _bytes(b):
            yield f"{name}: tensors"
    elif one != other and not (one != one and other != other):
        yield f"{name}: {one} and {other}"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def compare(case: Case, whole: Path, resumed: Path) -> list[str]:
    """Return what is wrong with a run that was resumed."""
    found: list[str] = []
    if case.is_managed:
        found += [*_unbalanced(resumed, case.size), *_lost(resumed, case.size)]
    for rank in range(0 if case.is_fed else case.size - case.is_managed):
        one, other = (without_seconds(contents(path, rank)) for path in (whole, resumed))
        found += differences(one, other, f"rank {rank}")
        tables = [read_metrics(RunFolder(path, rank).metrics) for path in (whole, resumed)]
        found += differences(*map(without_seconds, tables), f"metrics of rank {rank}")
    return found


def _unbalanced(folder: Path, size: int) -> Iterator[str]:
    """Yield what does not add up: rows that were sent, and what became of them."""
    report = json.loads(RunFolder(folder).ranks_report.read_text())
    for rank, done in report["ranks"].items():
        known = done["counters"]
        sent = known["sent"] + known["resent"]
        became = sum(known[name] for name in (*OUTCOMES, "lost"))
        if sent != became or known["lost"]:
            yield f"rank {rank} sent {sent}, of which {became}, {known['lost']} of them lost"
        if done["measured"]["step"] != STEPS:
            yield f"rank {rank} took {done['measured']['step']} steps"
    senders = json.loads(RunFolder(folder, size - 1).manager.read_text())["senders"]
    for rank, known in senders.items():
        if known["items"] != sum(known[name] for name in OUTCOMES):
            yield f"the manager has {known} of rank {rank}"


def _lost(folder: Path, size: int) -> Iterator[str]:
    """Yield which ranks hold objects that the manager lacks."""
    held = _objects(folder, size - 1)
    for rank in range(size - 1):
        if missing := _objects(folder, rank) - held:
            yield f"the manager lacks {len(missing)} objects of rank {rank}"


def _objects(folder: Path, rank: int) -> set[bytes]:
    config = RunFolder(folder).read_config()
    found, *_fed = contents(folder, rank)["rows"]
    if config.compact != "none":
        found = CompactRows(config.make_env(), config.compact).forward(found)
    if (done := found.get(NEXT_DONE, None)) is not None:  # transitions: the last ends in the object
        found = found[done[:, 0]].select(STATE, CONDITION, strict=False)
    return {columns.tobytes() for columns in objects_in(found).columns}


# The table.


def attempt(case: Case, draw: random.Random) -> tuple[int, list[str]]:
    """Try a case once; return the step it went on from, and what was wrong in the end."""
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent) / "whole"
        try:
            seconds = undisturbed(case, whole)
            for i in range(MISSED):
                folder = Path(parent) / f"resumed{i}"
                with suppress(TooLate):  # ranks may be done long before all have left
                    steps = disturbed(case, folder, draw.uniform(0.0, 0.7 * seconds / 2**i))
                    return steps, compare(case, whole, folder)
        except Failed as error:
            return 0, [str(error)]
    return 0, [f"done before it was killed, {MISSED} times"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try cases, print a table, and return the exit code.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description="Runs that are resumed, beside undisturbed ones.")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw, failed, share = random.Random(options.seed), 0, 0.0
    print(f"| {' | '.join(OPTIONS)} | resumed from | must hold | does |")
    print(f"| {'--- | ' * len(OPTIONS)}---: | --- | --- |", flush=True)
    with suppress(KeyboardInterrupt):  # the table is of what was tried so far, then
        for i, (case, tried) in enumerate(chosen(draw)):
            if options.runs and i >= options.runs:
                break
            steps, wrong = attempt(case, draw)
            failed, share = failed + bool(wrong), tried
            told = f"{case.task} | {' | '.join(map(str, case[1:]))} | {steps} | {case.must}"
            print(f"| {told} | {'NO' if wrong else 'yes'} |", flush=True)
            print("\n".join(wrong[:10]), file=sys.stderr, flush=True)
    print(f"\n{share:.0%} of all pairs of options; {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
