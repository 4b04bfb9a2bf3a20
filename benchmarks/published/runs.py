"""Running a row with some seeds, and keeping what came out."""

from __future__ import annotations

import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from benchmarks import records
from benchmarks.published.rows import Figure, Row
from benchmarks.records import RecordError, read, require_same
from gfn_rb.training.metrics import ExactFit

RESULTS = Path(__file__).parent.parent / "results"
N_POINTS = 200  # of a curve, were all calls taken
N_FITS = 20  # of total variation, each of which takes as long as some steps


@dataclass(frozen=True)
class Result:
    """What one run came to.

    Args:
        seed: its seed.
        calls: reward calls it took.
        cpu_seconds: CPU time of its process, evaluation left out.
        figures: what the row asks for, by name.
        curve: pairs of reward calls and modes found on the way; none where there are no modes.
        fit: pairs of reward calls and total variation, where the policy can be listed.
        measured: commit, machine, versions and date; None before they were recorded.
        confirmed: the same of a later run with this seed, whose figures were equal bit for bit.
    """

    seed: int
    calls: int
    cpu_seconds: float
    figures: dict[str, float]
    curve: list[list[int]]
    fit: list[list[float]] = field(default_factory=list)
    measured: dict[str, Any] | None = None
    confirmed: dict[str, Any] | None = None


def run_all(rows: Sequence[Row], seeds: Iterable[int], jobs: int) -> Iterator[tuple[Row, Result]]:
    """Run rows with every seed, in processes of one thread each, and give each result in turn.

    Args:
        rows: what to run; all of them with the first seed, then all with the next.
        seeds: with which seeds.
        jobs: number of processes.
    """
    pairs = [(row, seed) for seed in seeds for row in rows]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        results = pool.map(run_one, *zip(*pairs, strict=True))
        yield from ((row, result) for (row, _), result in zip(pairs, results, strict=True))


def run_one(row: Row, seed: int) -> Result:
    """Train once, until the calls are spent or the last milestone is reached.

    Args:
        row: what to run.
        seed: with which seed.
    """
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(seed)  # of peers without a generator of their own
    begun = time.process_time()
    trainer = row.trainer(replace(row.config, seed=seed), hooks=row.hooks())
    found, curve, reached, n_fresh = trainer.discovery, [], {}, 0
    measured, fit = 0.0, []
    while n_fresh < row.calls and not (row.milestones and len(reached) == len(row.milestones)):
        trainer.step()
        n_fresh += row.calls_per_step
        past = [n for n in row.milestones if found.modes_found >= n]
        reached = dict.fromkeys(past, n_fresh) | reached
        if row.n_modes and n_fresh * N_POINTS >= row.calls * (len(curve) + 1):
            curve.append([n_fresh, found.modes_found])
        is_listed = isinstance(trainer.fit, ExactFit)
        if is_listed and n_fresh * N_FITS >= row.calls * (len(fit) + 1):
            before = time.process_time()
            fit.append([n_fresh, trainer.fit.columns()["total_variation"]])
            measured += time.process_time() - before
    seconds = time.process_time() - begun - measured
    figures = row.measure(trainer)
    figures |= {f"calls_to_{n}": reached.get(n, row.calls) for n in row.milestones}
    figures |= {f"modes_at_{n}": modes_at(curve, n) for n in row.looks}
    print(f"{row.name}, seed {seed}: {figures}, {seconds:.0f} s", file=sys.stderr, flush=True)
    facts = records.measured("published", {"row": row.name}, [seed])
    return Result(seed, n_fresh, seconds, figures, curve, fit, facts)


def confirm(folder: Path, row: Row) -> Result:
    """Run the first stored seed again, and write down that its figures are equal.

    Args:
        folder: where ``published_ROW.json`` lies.
        row: what was run.

    Raises:
        RecordError: there are no results, or another configuration, or figures differ.
    """
    require_addable(folder, row)
    known = load(folder, row)
    if not known:
        raise RecordError(f"published_{row.name}.json must have results to confirm, got none")
    again = run_one(row, known[0].seed)
    if again.figures != known[0].figures:
        raise RecordError(
            f"{row.name}, seed {again.seed}, must give {known[0].figures}, got {again.figures}"
        )
    result = replace(known[0], confirmed=again.measured)
    save(folder, row, [result])
    return result


def ages(results: Iterable[Result]) -> list[str]:
    """Return when results were measured, each sentence once.

    Where the code has changed since, a repeated run with equal figures stands for all seeds.
    """
    known = [*results]
    held = [r.confirmed for r in known if r.confirmed and records.is_current(r.confirmed)]
    if not held or all(r.measured and records.is_current(r.measured) for r in known):
        return [*dict.fromkeys(records.age(result.measured) for result in known)]
    return [
        f"Measured before; one seed repeated on {held[0]['date']} at commit {held[0]['commit']}, "
        "with equal figures."
    ]


def modes_at(curve: Iterable[Sequence[int]], calls: int) -> int:
    """Return how many modes were found after some calls, at the last point before them."""
    return max((modes for n, modes in curve if n <= calls), default=0)


def require_addable(folder: Path, row: Row) -> None:
    """Raise unless results of a row can be added to those that are stored.

    Raises:
        RecordError: these are of another configuration.
    """
    path = folder / f"published_{row.name}.json"
    if (known := read(path)) is not None:
        require_same(path, known["configuration"], _configuration(row))


def save(folder: Path, row: Row, results: Iterable[Result], replace_all: bool = False) -> None:
    """Write the results; those of other seeds are kept.

    Args:
        folder: where ``published_ROW.json`` lies.
        row: what was run.
        results: what came out.
        replace_all: whether to drop the results of another configuration.

    Raises:
        RecordError: there are results of another configuration.
    """
    path = folder / f"published_{row.name}.json"
    own = {result.seed: asdict(result) for result in results}
    if (known := read(path)) is not None:
        try:
            require_addable(folder, row)
            own = {result["seed"]: result for result in known["results"]} | own
        except RecordError:
            if not replace_all:
                raise
    folder.mkdir(parents=True, exist_ok=True)
    report = {
        "row": row.name,
        "configuration": _configuration(row),
        "results": [own[seed] for seed in sorted(own)],
    }
    path.write_text(_lined(report) + "\n")


def load(folder: Path, row: Row) -> list[Result]:
    """Return the results of a row, in order of seeds; none if it was not run.

    Args:
        folder: where ``published_ROW.json`` lies.
        row: what was run.
    """
    known = read(folder / f"published_{row.name}.json") or {"results": []}
    return [Result(**result) for result in known["results"]]


def summary(row: Row, results: Sequence[Result]) -> str:
    """Return the figures of a row as text, a line for each."""
    seconds = [result.cpu_seconds for result in results]
    lines = [
        f"{figure.title}: {typical(figure, results)}"
        + (f", asked {figure.asked}" * (figure.bound is not None))
        for figure in row.figures
        if figure.key in results[0].figures
    ]
    return "\n".join([row.title, *lines, f"CPU seconds a run: {mean(seconds):,.0f}"])


def typical(figure: Figure, results: Sequence[Result]) -> str:
    """Return mean and standard deviation over the runs, if several, or their median and range."""
    values = [result.figures[figure.key] for result in results]
    if figure.is_median:
        ends = f"{min(values):,.{figure.digits}f} to {max(values):,.{figure.digits}f}"
        return f"{median(values):,.{figure.digits}f} (median of {len(values)}, {ends})"
    return spread(values, figure.digits)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and standard deviation."""
    text = f"{mean(values):,.{digits}f}"
    return f"{text} ± {stdev(values):,.{digits}f}" if len(values) > 1 else text


def is_met(figure: Figure, results: Sequence[Result]) -> bool:
    """Tell whether the mean of a figure, or its median, is on the better side of what is asked.

    Raises:
        ValueError: nothing is asked of it.
    """
    if figure.bound is None:
        raise ValueError(f"{figure.title} must have a bound, got None")
    values = [result.figures[figure.key] for result in results]
    value = median(values) if figure.is_median else mean(values)
    return value > figure.bound if figure.more_is_better else value < figure.bound


def _configuration(row: Row) -> dict[str, Any]:
    """Return what the results depend on, but for the seed."""
    values = row.config.to_dict()
    del values["seed"]
    return {"calls": row.calls, **values}


def _lined(report: dict[str, Any]) -> str:
    """Return JSON with a line for each name, and for each run."""
    results = ",\n  ".join(map(json.dumps, report["results"]))
    rest = json.dumps({**report, "results": "RESULTS"}, indent=1)
    return rest.replace('"RESULTS"', f"[\n  {results}\n ]")
