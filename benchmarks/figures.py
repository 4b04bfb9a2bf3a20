"""Measure in ten CPU minutes, and name the figures that left their range: ``make figures``.

    --store        also keep the figures in benchmarks/results, and write the pages from them

Every benchmark runs as a command of its own; one that fails leaves the figures of the others. Run
it on a machine that does nothing else.

A ratio has left its range if it is beyond the quartiles of the stored rounds by more than a factor:
:data:`SLACK`, and :data:`FILE_SLACK` where the time is that of a disk. A figure of learning has
left it if it is beyond those of the stored seeds by more than their spread. Of the same command, a
figure that is stored and missing now, or the other way round, has left its range as well.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.published import runs
from benchmarks.published.defaults import DEFAULTS
from benchmarks.published.rows import Row
from benchmarks.records import RESULTS, RecordError, keep, read

SLACK = 1.25
"""The ratios of a run beside other programs were beyond stored quartiles by at most 1.13."""
FILE_SLACK = 2.0
"""The same of files of a gigabyte and of syncs to a disk that others use: 1.5."""
FILES = ("save_checkpoint", "load_checkpoint", "journal")
"""Beginnings of the names of comparisons whose time is that of a disk or of its cache."""
NOT_COMPARED = ("journal, always, against extend",)
"""The latency of a disk, relative to a call that needs none."""
LIMIT = 600  # seconds of a command
TIMED = {
    "groups": ["--parts", "extend", "prompts"],
    "interop": ["--parts", "best"],
    "rollout": ["--parts", "forward", "backward"],
    "local": ["--parts", "cycle"],
    "checkpoint": ["--seconds", "15"],
}
LEARNED = tuple(DEFAULTS[task] for task in ("tfbind8", "qm9", "hypergrid_8"))


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
    left = [line for row in rows for line in row["left"]]
    print("\n".join(left) if left else "every figure is in its range")
    return int(bool(left))


def _checked(name: str, lines: Iterator[str | None]) -> dict[str, Any]:
    """Return how many figures were compared, which left their range, and the CPU time.

    Args:
        name: of the benchmark.
        lines: a line for each figure, None for one that is in its range.
    """
    begun = _cpu_seconds()
    try:
        found = [*lines]
    except (subprocess.SubprocessError, RecordError, OSError) as error:
        found = [str(error)]
    left = [f"{name}, {line}" for line in found or ["nothing was compared"] if line is not None]
    seconds = round(_cpu_seconds() - begun)
    print(f"{name}: {len(found)} figures, {seconds} CPU s", flush=True)
    return {"name": name, "compared": len(found), "left": left, "cpu_seconds": seconds}


def _timed(name: str, words: Sequence[str], folder: Path, store: bool) -> Iterator[str | None]:
    """Run a benchmark, and yield what :func:`ratios_out_of_range` does."""
    path = folder / f"{name}.json"
    before = read(RESULTS / path.name)
    _run(name, *words, "--json", str(path), *["--store"] * store)
    yield from ratios_out_of_range(read(path), before)


def _learned(row: Row, folder: Path, store: bool) -> Iterator[str | None]:
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
) -> Iterator[str | None]:
    """Yield a line for each comparison whose ratio is not near the stored quartiles, else None.

    Args:
        found: a report that was made now.
        stored: the stored one; None if there is none.
    """
    known = _comparisons(stored, found["parts"])
    now = _comparisons(found, found["parts"])
    for key in [*now, *(known.keys() - now.keys())]:
        name = f"{key[1]} at {key[2]:,}"
        if key not in now:
            yield f"{name}: stored, not measured now"
        elif key not in known:
            yield f"{name}: {now[key]['ratio']:.3g}, not measured before"
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


def _out_of_range(name: str, now: Mapping[str, Any], old: Mapping[str, Any]) -> str | None:
    is_file = name.startswith(FILES)
    slack = FILE_SLACK if is_file else SLACK
    if old["low"] / slack <= now["ratio"] <= old["high"] * slack:
        return None
    of = ", time of a disk" * is_file
    return f"{name}: {now['ratio']:.3g}, stored {old['low']:.3g} to {old['high']:.3g}{of}"


def learned_out_of_range(
    found: Mapping[str, Any], stored: Mapping[str, Any] | None
) -> Iterator[str | None]:
    """Yield a line for each figure of a run that is far from those of the stored seeds, else None.

    Args:
        found: a report that was made now.
        stored: the stored one; None if there is none.
    """
    if stored is None:
        yield "not measured before"
        return
    for key, value in found["results"][0]["figures"].items():
        old = [each["figures"][key] for each in stored["results"] if key in each["figures"]]
        if not old:
            yield f"{key}: {value:.4g}, not measured before"
            continue
        low, high = min(old), max(old)
        is_near = low - (high - low) <= value <= high + (high - low)
        yield None if is_near else f"{key}: {value:.4g}, stored {low:.4g} to {high:.4g}"


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
