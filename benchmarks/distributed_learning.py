"""What ranks and a manager do for learning: ``python -m benchmarks.distributed_learning``.

    --seeds N        seeds 0 to N-1
    --calls N ...    total reward calls, of all ranks together, at which to compare
    --options ...    further options of all runs, as gfn-rb train takes them
    --feed ...       options of the arm with the manager-fed buffer
    --out FOLDER     where distributed_tfbind8.json and distributed_tfbind8.png go

Every figure is of ``gfn-rb train tfbind8``, alone or under ``mpiexec -n 4``, run for so many reward
calls: three ranks train for a third of the steps each. Modes are those that all ranks found
together; total variation is exact, of each rank's policy, and the mean over ranks is given, and the
best. Seconds are of training, without the start. What ranks give each other depends on their
timing, so that runs with a manager do not repeat exactly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.ranks import command, environment
from benchmarks.timing import environment as facts

WORKERS = 3
BATCH = 32
PROGRAM = ["-c", "import sys; from gfn_rb.cli import main; sys.exit(main())"]
MANAGER = ["--managers", "1"]
FEED = ["--feed", "top", "--feed-quota", "64"]
COLORS = ("#767676", "#0072B2", "#D55E00", "#009E73")


class Arm(NamedTuple):
    """What is compared.

    Attributes:
        name: of it.
        workers: ranks that train.
        options: of gfn-rb train.
    """

    name: str
    workers: int
    options: list[str]


class Point(NamedTuple):
    """How one run ended."""

    arm: str
    seed: int
    calls: int
    modes: int
    total_variation: float
    best_total_variation: float
    seconds: float


FIGURES = {
    "modes": "modes found by all",
    "total_variation": "exact total variation, mean over ranks",
    "best_total_variation": "exact total variation, best rank",
    "seconds": "seconds",
}


def run(arm: Arm, seed: int, calls: int, options: Sequence[str]) -> Point:
    """Train once, and return how it ended."""
    steps = max(1, round(calls / (arm.workers * BATCH)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        words = [*PROGRAM, "train", "tfbind8", "--steps", str(steps), "--seed", str(seed)]
        words += ["--batch-size", str(BATCH), "--eval-every", str(steps), "--out", str(path)]
        words += [*options, *arm.options]
        alone = [sys.executable, *words]
        start = alone if arm.workers == 1 else command(arm.workers + 1, words)
        subprocess.run(start, env=environment(), check=True, capture_output=True)
        return Point(arm.name, seed, *_ended(path, arm.workers))


def _ended(path: Path, workers: int) -> tuple[int, int, float, float, float]:
    if workers == 1:
        last = (path / "metrics.csv").read_text().splitlines()
        row = dict(zip(last[0].split(","), last[-1].split(","), strict=True))
        distance = float(row["total_variation"])
        counts = int(row["reward_calls"]), int(row["modes_found"])
        return (*counts, distance, distance, float(row["time_total"]))
    report = json.loads((path / "report.json").read_text())
    rows = [rank["measured"] for rank in report["ranks"].values()]
    distances = [row["total_variation"] for row in rows]
    seconds = max(row["time_total"] for row in rows)
    counts = report["reward_calls"], report["modes_found"]
    return (*counts, mean(distances), min(distances), seconds)


def table(arms: Sequence[Arm], points: Sequence[Point], calls: Sequence[int]) -> str:
    """Return a table of means and standard deviations over seeds, as Markdown."""
    lines = []
    for figure, title in FIGURES.items():
        lines += [f"| {title} | {' | '.join(f'{n:,} calls' for n in calls)} |"]
        lines += ["| --- |" + " ---: |" * len(calls)]
        for arm in arms:
            cells = [_cell(_values(points, arm, figure, n)) for n in calls]
            lines.append(f"| {arm.name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _values(points: Sequence[Point], arm: Arm, figure: str, calls: int) -> list[float]:
    near = BATCH * WORKERS
    return [
        float(getattr(point, figure))
        for point in points
        if point.arm == arm.name and abs(point.calls - calls) <= near
    ]


def _cell(values: Sequence[float]) -> str:
    digits = 1 if mean(values) >= 10 else 4
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def draw(path: Path, arms: Sequence[Arm], points: Sequence[Point], calls: Sequence[int]) -> None:
    """Draw modes and distance against reward calls and against seconds."""
    figure = Figure(figsize=(13, 9), dpi=110, layout="constrained")
    panels = figure.subplots(2, 2)
    for row, name in zip(panels, ("modes", "total_variation"), strict=True):
        for axes, against in zip(row, ("calls", "seconds"), strict=True):
            _panel(axes, arms, points, calls, against, name)
    panels[0, 0].legend(frameon=False)
    FigureCanvasAgg(figure).print_png(str(path))


def _panel(
    axes: Axes,
    arms: Sequence[Arm],
    points: Sequence[Point],
    calls: Sequence[int],
    against: str,
    name: str,
) -> None:
    for arm, color in zip(arms, COLORS, strict=True):
        x = [mean(_values(points, arm, against, n)) for n in calls]
        y = [_values(points, arm, name, n) for n in calls]
        spread = [stdev(v) if len(v) > 1 else 0.0 for v in y]
        axes.errorbar(
            x, [mean(v) for v in y], spread, color=color, marker="o", capsize=3, label=arm.name
        )
    axes.set_xlabel("reward calls of all ranks" if against == "calls" else "seconds of training")
    axes.set_ylabel(FIGURES[name])
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all arms, print the table, and write figures and picture.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    options = _parse(arguments)
    arms = [
        Arm("one process", 1, []),
        Arm("three workers and a manager", WORKERS, MANAGER),
        Arm("the same with a manager-fed buffer", WORKERS, [*MANAGER, *options.feed]),
        Arm("the same, gradients averaged", WORKERS,
            [*MANAGER, *options.feed, "--average-gradients"]),
    ]  # fmt: skip
    points: list[Point] = []
    start = time.monotonic()
    for seed in range(options.seeds):
        for calls in options.calls:
            for arm in arms:
                points.append(run(arm, seed, calls, options.options))
                print(f"{time.monotonic() - start:6.0f} s  {points[-1]}", file=sys.stderr)
    print(table(arms, points, options.calls))
    _write(options, arms, points)
    return 0


def _write(options: argparse.Namespace, arms: Sequence[Arm], points: Sequence[Point]) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "environment": facts(),
        "options": options.options,
        "arms": {arm.name: arm.options for arm in arms},
        "points": [point._asdict() for point in points],
    }
    (options.out / "distributed_tfbind8.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(options.out / "distributed_tfbind8.png", arms, points, options.calls)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What ranks and a manager do for learning.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--calls", type=int, nargs="+", default=[8_000, 16_000, 32_000])
    parser.add_argument("--options", type=str.split, default=[], metavar="'...'")
    parser.add_argument("--feed", type=str.split, default=FEED, metavar="'...'")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
