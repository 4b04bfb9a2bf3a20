"""Paired timing.

How a ratio is measured here, and why it can be trusted on a machine that others use as well. Ours
and the peer run in turn (A B A B ...), so that whatever slows the machine down slows both. Each
call gets a fresh argument from its ``setup``, outside the clock, so that no call works on what an
earlier one left behind. Garbage is collected after each call, not within one: else a buffer of an
earlier call, held by a cycle, makes the next one take memory that the system must fetch first. The
order stays the same: a call that lasts 0.2 ms takes half the time after one of its kind than after
the peer, whose work fills the caches, as training does. After a warm-up, every round gives one
ratio, and the figure reported is the median of these ratios; the median times stand next to it for
orientation only. One thread. A bound is the largest ratio allowed: 2 means "at most twice the
peer's time", 1/20 means "at least twenty times faster".
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from benchmarks import records

SEED = 0  # of the rows and batches
S = TypeVar("S")

_LAYOUT = "{:<68} {:>9} {:>13} {:>13} {:>8} {:>8}  {}"


@dataclass(frozen=True)
class Contender:
    """What is timed.

    Args:
        run: the work, given what ``setup`` returned.
        setup: makes the argument of one run, outside the clock.
    """

    run: Callable[[Any], object]
    setup: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Effort:
    """How long one comparison may take.

    Args:
        seconds: start no further round after this time, setup included.
        least: rounds to run in any case.
        most: rounds to stop after.
        warmup: rounds before the clock counts.
    """

    seconds: float
    least: int = 3
    most: int = 400
    warmup: int = 5


@dataclass(frozen=True)
class Result:
    """One comparison, times in microseconds per call.

    ``capacity`` is the size of what is compared, of a batch where there is no buffer; ``low`` and
    ``high`` are the quartiles of the ratios; ``bound`` and ``met`` are None for a figure that is
    only reported.
    """

    name: str
    capacity: int
    ours: float
    peer: float
    ratio: float
    low: float
    high: float
    rounds: int
    bound: float | None

    @property
    def met(self) -> bool | None:
        """Whether the ratio keeps its bound."""
        return None if self.bound is None else self.ratio <= self.bound

    @classmethod
    def of(
        cls,
        name: str,
        capacity: int,
        ours: Sequence[float],
        peer: Sequence[float],
        bound: float | None,
    ) -> Result:
        """Return what comes of the seconds of each call.

        Args:
            name: what the row is called.
            capacity: the size of what is compared.
            ours: seconds of our calls, one per round.
            peer: seconds of the peer's, of the same rounds.
            bound: the largest ratio of ours to the peer allowed, None to report it only.
        """
        ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
        n = len(ratios)
        return cls(
            name=name,
            capacity=capacity,
            ours=median(ours) * 1e6,
            peer=median(peer) * 1e6,
            ratio=median(ratios),
            low=ratios[n // 4],
            high=ratios[(3 * n) // 4],
            rounds=n,
            bound=bound,
        )


def interleave(contenders: Mapping[str, Contender], effort: Effort) -> dict[str, list[float]]:
    """Run the contenders in turn, round after round, and time each call.

    Args:
        contenders: what to run, in this order within each round.
        effort: when to stop.

    Returns:
        The seconds of each call, per contender; entry i of each comes from round i.
    """
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with _older_objects_left_alone():
        for _ in range(effort.warmup):
            _round(contenders)
        rounds, start = 0, time.perf_counter()
        while rounds < effort.least or (
            rounds < effort.most and time.perf_counter() - start < effort.seconds
        ):
            for name, elapsed in _round(contenders).items():
                seconds[name].append(elapsed)
            rounds += 1
    return seconds


@contextmanager
def _older_objects_left_alone() -> Iterator[None]:
    """Let a collection of garbage look at newer objects alone, which takes well under 1 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def compare(
    name: str,
    capacity: int,
    ours: Contender,
    peer: Contender,
    effort: Effort,
    bound: float | None = None,
) -> Result:
    """Time ours against a peer, print the row and return it.

    Args:
        name: what the row is called.
        capacity: rows the buffers hold.
        ours: the work done with this library.
        peer: the same work done without it.
        effort: when to stop.
        bound: the largest ratio of ours to the peer allowed, None to report it only.
    """
    seconds = interleave({"ours": ours, "peer": peer}, effort)
    result = Result.of(name, capacity, seconds["ours"], seconds["peer"], bound)
    print(row(result), flush=True)
    return result


def _round(contenders: Mapping[str, Contender]) -> dict[str, float]:
    elapsed = {}
    for name, contender in contenders.items():
        argument = contender.setup()
        enabled = gc.isenabled()
        gc.disable()
        try:
            start = time.perf_counter()
            contender.run(argument)
            elapsed[name] = time.perf_counter() - start
        finally:
            if enabled:
                gc.enable()
        del argument
        gc.collect()  # before the next setup: the argument may be a whole buffer, held by a cycle
    return elapsed


# Running, and reporting.


def options_of(description: str) -> argparse.ArgumentParser:
    """Return the options that every comparison takes.

    Args:
        description: what is compared.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smoke run: the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument(
        "--store", action="store_true", help="keep them in benchmarks/results, for the pages"
    )
    return parser


def run_parts(
    description: str,
    parts: Mapping[str, Callable[[S], list[Result]]],
    full: S,
    quick: S,
    arguments: Sequence[str] | None,
    size: str = "capacity",
    notes: Callable[[list[Result]], str] | None = None,
) -> None:
    """Run the parts of a benchmark that the command line asks for, and print the table.

    Args:
        description: what is compared.
        parts: the comparisons by name, each a function of a scale.
        full: the scale of a measurement.
        quick: the scale of a smoke run.
        arguments: the command line, ``sys.argv`` if None.
        size: what the second column holds.
        notes: what else to say of the results.
    """
    parser = options_of(description)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--effort", type=float, default=1.0, help="share of the usual time")
    options = parser.parse_args(arguments)
    scale = shortened(quick if options.quick else full, options.effort)
    torch.set_num_threads(1)
    print(header(size))
    found = {}
    for part in options.parts:
        torch.manual_seed(SEED)
        found[part] = parts[part](scale)
    if notes is not None:
        print(notes([result for results in found.values() for result in results]))
    benchmark = Path(next(iter(parts.values())).__code__.co_filename).stem
    conclude(benchmark, found, options, {"scale": asdict(scale)})  # type: ignore[call-overload]


def shortened(scale: S, share: float) -> S:
    """Return a scale whose comparisons last a share of their time, but for their least rounds.

    Args:
        scale: a frozen dataclass, some of whose fields are an :class:`Effort`.
        share: 1 to leave it as it is.
    """
    efforts = {name: each for name, each in vars(scale).items() if isinstance(each, Effort)}
    shares = {name: replace(each, seconds=each.seconds * share) for name, each in efforts.items()}
    return replace(scale, **shares)  # type: ignore[type-var]


def conclude(
    benchmark: str,
    parts: Mapping[str, list[Result]],
    options: argparse.Namespace,
    resolved: Mapping[str, Any],
) -> None:
    """Print which bounds are met, and write the figures where they were asked for.

    Args:
        benchmark: a key of :data:`benchmarks.records.CODE`.
        parts: the comparisons by part.
        options: as of ``options_of``.
        resolved: what the run had beside these options.
    """
    results = [result for found in parts.values() for result in found]
    print(summary(results) + (" (quick run: no measurement)" if options.quick else ""))
    given = {name: value for name, value in vars(options).items() if name not in ("json", "store")}
    if options.store and options.quick:
        print("not stored: a quick run measures nothing")
    elif options.store:
        store(records.RESULTS / f"{benchmark}.json", benchmark, parts, {**given, **resolved})
    if options.json:
        store(options.json, benchmark, parts, {**given, **resolved})


def header(size: str = "capacity") -> str:
    """Return the line above the table.

    Args:
        size: what the second column holds.
    """
    line = _LAYOUT.format("", size, "ours (us)", "peer (us)", "ratio", "bound", "")
    return f"{line}\n{'-' * len(line)}"


def row(result: Result) -> str:
    """Return one line of the table."""
    verdict = {None: "reported", True: "pass", False: "MISS"}[result.met]
    return _LAYOUT.format(
        result.name,
        f"{result.capacity:,}",
        f"{result.ours:,.1f}",
        f"{result.peer:,.1f}",
        _fraction(result.ratio),
        "" if result.bound is None else _fraction(result.bound),
        verdict,
    )


def summary(results: Iterable[Result]) -> str:
    """Return one line: how many bounds are met, and which are not."""
    bounded = [result for result in results if result.met is not None]
    missed = [f"{result.name} at {result.capacity:,}" for result in bounded if not result.met]
    line = f"{len(bounded) - len(missed)} of {len(bounded)} bounds met"
    return f"{line}; missed: {', '.join(missed)}" if missed else line


def store(
    path: Path, benchmark: str, parts: Mapping[str, list[Result]], options: Mapping[str, Any]
) -> None:
    """Write the figures of some parts of a benchmark; those of its other parts are kept.

    Args:
        path: the file.
        benchmark: a key of :data:`benchmarks.records.CODE`.
        parts: the comparisons by part.
        options: all options of the run.
    """
    for part, results in parts.items():
        rows = [{**asdict(result), "met": result.met} for result in results]
        records.keep(path, benchmark, part, rows, options=options, seeds=[SEED])


def _fraction(ratio: float) -> str:
    """Write a ratio up to a tenth as 1/n, which reads as "n times faster"."""
    return f"{ratio:.2f}" if ratio > 0.1 else f"1/{1 / ratio:.0f}"
