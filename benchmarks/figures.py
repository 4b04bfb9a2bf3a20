"""Measure in ten CPU minutes, and name the figures that left their range: ``make figures``.

    --store        also keep the figures in benchmarks/results, and write the pages from them

Every benchmark runs as a command of its own; one that fails leaves the figures of the others. Run
it on a machine that does nothing else.

Each ratio is measured in :data:`PROCESSES` processes, one after the other. Their median is the
figure, their lowest and highest are its range: rounds of one process are more alike than processes.
A ratio has left its range if it is above the highest that is stored by more than a factor, or
missing: :data:`SLACK`, and :data:`FILE_SLACK` where the time is that of a disk. One that is below
the lowest by more than that is named as quicker, and fails nothing: what is published promises
less than there is, and ``--store`` mends that. A figure of learning has left its range if it is
beyond those of the stored seeds by more than their spread, on either side: of a seed, every figure
repeats, so that a better one says as well that learning has changed. Of the same command, a figure
that is stored and missing now, or the other way round, has left its range as well.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import pages
from benchmarks.published import runs
from benchmarks.published.defaults import DEFAULTS
from benchmarks.published.rows import Row
from benchmarks.records import RESULTS, RecordError, keep, read

PROCESSES = 3
SLACK = 1.25
"""The ratios of a run beside other programs were beyond stored quartiles by at most 1.13."""
FILE_SLACK = 2.0
"""The same of files of a gigabyte and of syncs to a disk that others use: 1.5."""
FILES = ("save_checkpoint", "journal")
"""Beginnings of the names of comparisons whose time is that of a disk."""
NOT_COMPARED = ("journal, always, against extend",)
"""The latency of a disk, relative to a call that needs none."""
LIMIT = 600  # seconds of a command
TIMED = {
    "groups": ["--parts", "extend", "prompts", "--effort", "0.2"],
    "interop": ["--parts", "best", "--effort", "0.3"],
    "rollout": ["--parts", "forward", "backward", "--effort", "0.2"],
    "local": ["--parts", "cycle", "--effort", "0.2"],
    "checkpoint": ["--seconds", "2", "--least", "1"],
}
"""What one process of each is given."""
LEARNED = tuple(DEFAULTS[task] for task in ("tfbind8", "qm9", "hypergrid_8"))


@dataclass(frozen=True)
class Left:
    """A figure that is not in its range.

    Args:
        line: its name, what was found and what is stored.
        is_quicker: whether it only takes less time than what is stored.
    """

    line: str
    is_quicker: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the commands, and print what left its range; 1 if anything did.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in TIMED.items():
            rows.append(_checked(name, _timed(name, words, Path(folder), options.store)))
        for row in LEARNED:
            rows.append(_checked(row.name, _learned(row, Path(folder), options.store)))
    if options.store:
        keep(RESULTS / "figures.json", "figures", "last", rows, options=TIMED)
        pages.main()
    left, quicker = ([line for row in rows for line in row[key]] for key in ("left", "quicker"))
    print("\n".join([*quicker, *(left or ["no figure has left its range"])]))
    return int(bool(left))


def _checked(name: str, figures: Iterator[Left | None]) -> dict[str, Any]:
    """Return how many figures were compared, which left their range, and the CPU time.

    Args:
        name: of the benchmark.
        figures: each figure, None for one that is in its range.
    """
    begun = _cpu_seconds()
    try:
        found = [*figures]
    except (subprocess.SubprocessError, RecordError, OSError) as error:
        found = [Left(str(error))]
    left = [each for each in found or [Left("nothing was compared")] if each is not None]
    seconds = round(_cpu_seconds() - begun)
    print(f"{name}: {len(found)} figures, {seconds} CPU s", flush=True)
    return {
        "name": name,
        "compared": len(found),
        "left": [f"{name}, {each.line}" for each in left if not each.is_quicker],
        "quicker": [f"{name}, {each.line}" for each in left if each.is_quicker],
        "cpu_seconds": seconds,
    }


def _timed(name: str, words: Sequence[str], folder: Path, store: bool) -> Iterator[Left | None]:
    """Run a benchmark in several processes, and yield what :func:`ratios_out_of_range` does."""
    path = RESULTS / f"{name}.json"
    before, reports = read(path), []
    for i in range(PROCESSES):
        _run(name, *words, "--json", str(folder / f"{name}_{i}.json"))
        reports.append(read(folder / f"{name}_{i}.json"))
    found = merged(reports)
    for part, of in found["parts"].items() if store else ():
        facts = of["measured"]
        options = {**facts["options"], "processes": PROCESSES}
        keep(path, name, part, of["results"], options=options, seeds=facts["seeds"])
    yield from ratios_out_of_range(found, before)


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the report of several processes: medians, and the range of their ratios.

    Args:
        reports: of the same command.
    """
    parts = {}
    for part, first in reports[0]["parts"].items():
        same = zip(*(each["parts"][part]["results"] for each in reports), strict=True)
        parts[part] = {**first, "results": [_merged_row(rows) for rows in same]}
    return {"parts": parts}


def _merged_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of several processes for one comparison."""
    ratios, bound = [row["ratio"] for row in rows], rows[0]["bound"]
    medians = {key: median(row[key] for row in rows) for key in ("ours", "peer", "ratio")}
    return {
        **rows[0],
        **medians,
        "low": min(ratios),
        "high": max(ratios),
        "rounds": sum(row["rounds"] for row in rows),
        "met": None if bound is None else medians["ratio"] <= bound,
    }


def _learned(row: Row, folder: Path, store: bool) -> Iterator[Left | None]:
    """Run the first seed of a row, and yield what :func:`learned_out_of_range` does."""
    runs.require_addable(RESULTS, row)  # else the stored range is that of other options
    _run("published", row.name, "--seeds", "1", "--out", str(folder))
    name = f"published_{row.name}.json"
    yield from learned_out_of_range(read(folder / name), read(RESULTS / name))
    (found,) = runs.load(folder, row)
    for known in runs.load(RESULTS, row):
        if store and (known.seed, known.figures) == (found.seed, found.figures):
            runs.save(RESULTS, row, [replace(known, confirmed=found.measured)])


def ratios_out_of_range(
    found: Mapping[str, Any], stored: Mapping[str, Any] | None
) -> Iterator[Left | None]:
    """Yield each comparison whose ratio is not near the stored range, else None.

    Args:
        found: a report that was made now.
        stored: the stored one; None if there is none.
    """
    known = _comparisons(stored, found["parts"])
    now = _comparisons(found, found["parts"])
    for key in [*now, *(known.keys() - now.keys())]:
        name = f"{key[1]} at {key[2]:,}"
        if key not in now:
            yield Left(f"{name}: stored, not measured now")
        elif key not in known:
            yield Left(f"{name}: {now[key]['ratio']:.3g}, not measured before")
        elif key[1] not in NOT_COMPARED:
            yield _out_of_range(name, now[key], known[key])


def _comparisons(
    report: Mapping[str, Any] | None, parts: Mapping[str, Any]
) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    """Return the comparisons of some parts of a report, by part, name and size."""
    return {
        (part, each["name"], each["capacity"]): each
        for part, of in ({} if report is None else report["parts"]).items()
        if part in parts
        for each in of["results"]
    }


def _out_of_range(name: str, now: Mapping[str, Any], old: Mapping[str, Any]) -> Left | None:
    is_file = name.startswith(FILES)
    slack = FILE_SLACK if is_file else SLACK
    is_quicker = now["ratio"] < old["low"] / slack
    if not is_quicker and now["ratio"] <= old["high"] * slack:
        return None
    of = ", time of a disk" * is_file + ", quicker" * is_quicker
    stored = f"stored {old['low']:.3g} to {old['high']:.3g}"
    return Left(f"{name}: {now['ratio']:.3g}, {stored}{of}", is_quicker)


def learned_out_of_range(
    found: Mapping[str, Any], stored: Mapping[str, Any] | None
) -> Iterator[Left | None]:
    """Yield each figure of a run that is far from those of the stored seeds, else None.

    Args:
        found: a report that was made now.
        stored: the stored one; None if there is none.
    """
    if stored is None:
        yield Left("not measured before")
        return
    for key, value in found["results"][0]["figures"].items():
        old = [each["figures"][key] for each in stored["results"] if key in each["figures"]]
        if not old:
            yield Left(f"{key}: {value:.4g}, not measured before")
            continue
        low, high = min(old), max(old)
        is_near = low - (high - low) <= value <= high + (high - low)
        line = f"{key}: {value:.4g}, stored {low:.4g} to {high:.4g}"
        yield None if is_near else Left(line)


def _run(name: str, *words: str) -> None:
    print(f"python -m benchmarks.{name} {' '.join(words)}", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", *words]
    if status := subprocess.run(command, timeout=LIMIT).returncode:
        raise RecordError(f"benchmarks.{name} ended with status {status}")


def _cpu_seconds() -> float:
    """Return the CPU time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
