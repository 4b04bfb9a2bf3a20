"""Run the protocol of a published table: ``python -m benchmarks.published ROW``.

Every run is one of ``gfn_rb.training.Trainer``. Reward calls are what is compared; a run's seconds
are the CPU time of its process. ``python -m benchmarks.published page`` writes docs/published.md
anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace as changed
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.published.defaults import DEFAULTS, TUNED
from benchmarks.published.page import write_page
from benchmarks.published.rows import ROWS, Row
from benchmarks.published.runs import (
    RESULTS,
    Result,
    confirm,
    require_addable,
    run_all,
    save,
    summary,
)
from benchmarks.published.sceptic import SCEPTIC
from benchmarks.records import RecordError
from benchmarks.sceptic import page as sceptic
from benchmarks.sceptic.loss_guided import LOSS_GUIDED
from benchmarks.sceptic.questions import QUESTIONS
from benchmarks.sceptic.rows import ARMS, FROZEN

_ROWS = ROWS | {
    row.name: row
    for rows in (DEFAULTS, TUNED, SCEPTIC, FROZEN, QUESTIONS, LOSS_GUIDED)
    for row in rows.values()
}
_GROUPS = {
    "sceptic": [*FROZEN.values()],
    "questions": [*QUESTIONS.values()],
    "loss_guided": [*LOSS_GUIDED.values()],
} | {f"sceptic_{arm}": [row for (_, each), row in FROZEN.items() if each == arm] for arm in ARMS}
Name: Any = Literal[(*_ROWS, *_GROUPS, "page")]


@dataclass(frozen=True)
class Options:
    """What to run."""

    names: tyro.conf.Positional[tuple[Name, ...]]
    """Rows of docs/published.md, defaults_TASK for a task with default options, tuned_TASK for the
    same with tuned ones, fifty_lines_ARM_TASK for it with a buffer of fifty lines, sceptic_TASK_ARM
    for a task that nothing was chosen on, "sceptic_ARM" or "sceptic" for all of these, "questions"
    for small buffers, groups, and steps after the last call, "loss_guided" for a published
    algorithm, or "page" to write that page from the results there are."""
    seeds: int = 3
    """How many seeds."""
    first_seed: int = 0
    """The first of them; results of other seeds are kept."""
    jobs: int = 1
    """Processes, of one thread each."""
    calls: int | None = None
    """Fewer reward calls than the protocol has, to look at a row; nothing is written."""
    replace: bool = False
    """Drop stored results of another configuration."""
    confirm: bool = False
    """Run the first stored seed of each row again; write down that its figures are equal."""
    out: Path = RESULTS
    """Folder of the results."""


def main() -> int:
    """Run a row with some seeds, or write the page."""
    options = tyro.cli(Options, description=__doc__)
    if "page" in options.names:
        write_page(options.out)
        sceptic.draw(options.out)
        return 0
    rows = [row for name in options.names for row in _GROUPS.get(name) or [_ROWS[name]]]
    if options.confirm:
        return _confirm(options.out, rows)
    if options.calls is not None:
        rows = [changed(row, calls=options.calls) for row in rows]
    elif not options.replace:
        try:
            for row in rows:
                require_addable(options.out, row)
        except RecordError as error:
            sys.exit(str(error))
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results: dict[Row, list[Result]] = {}
    for row, result in run_all(rows, seeds, options.jobs):
        results.setdefault(row, []).append(result)
        if options.calls is None:
            save(options.out, row, [result], options.replace)
    print("\n\n".join(summary(row, found) for row, found in results.items()))
    return 0


def _confirm(folder: Path, rows: Sequence[Row]) -> int:
    """Run the first stored seed of rows again; return 1 if any figure differs."""
    failed = 0
    for row in rows:
        try:
            confirm(folder, row)
        except RecordError as error:
            failed = 1
            print(error, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
