"""What ranks and a manager do for learning: ``python -m benchmarks.distributed_learning``.

    --seeds N            seeds 0 to N-1
    --free N             at how many points, 3,072 reward calls apart, to compare runs whose rewards
                         cost nothing
    --costly N           likewise, runs whose rewards cost time
    --reward-seconds X   how much
    --arms WORD ...      which of the arms to run, by a word of their names; all by default
    --out FOLDER         where distributed_tfbind8.json and distributed_tfbind8.png go
    --redraw             run nothing: draw the picture anew from the figures there

Every run is what ``gfn-rb train tfbind8`` does, alone or under ``mpiexec``, with a reward that
may take time, see :mod:`benchmarks.costly`. Reward calls are those of all ranks together: each of
three takes a third of them. Ranks that are fed take one optimiser step on each batch that any rank
sampled, and one on as much of replay; those that are not fed are given as many steps on replay, so
that the same work goes into each policy. Gradients are averaged over thirds of a batch, which is
what one process does, on three ranks.

Modes are those that all ranks found together; total variation is exact, of each rank's policy, and
the mean over ranks is given, and the best. Seconds are those of the slowest rank, without the start
and without measuring. What ranks give each other depends on their timing, so that runs with a
manager do not repeat exactly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.ranks import command, environment
from benchmarks.records import measured
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

WORKERS = 3
UNIT = 3072  # reward calls between points: 96 batches of 32
ALONE, APART, FED = "one process", "three workers, not fed", "three workers, fed by a manager"
FED_BY_TWO = "three workers, fed by two managers"
AVERAGED = "three workers, gradients averaged"


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        name: of it.
        color: of its line.
        workers: ranks that train.
        options: of the run.
        batch_size: of each worker.
    """

    name: str
    color: str
    workers: int = WORKERS
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.workers + self.options.get("managers", 0)

    @property
    def every(self) -> int:
        """How many steps of a worker there are between points."""
        return round(UNIT / (self.workers * self.batch_size))

    @property
    def all(self) -> dict[str, Any]:
        """All options that its runs have in common."""
        fixed = {"batch_size": self.batch_size, "eval_every": self.every}
        return {**fixed, "checkpoint_every": 10**6, **self.options}


ARMS = (
    Arm(ALONE, "#767676", workers=1),
    Arm(APART, "#0072B2", options={"managers": 1, "replay_ratio": 5.0}),
    Arm(FED, "#D55E00", options={"managers": 1, "feed": "newest"}),
    Arm(FED_BY_TWO, "#CC79A7", options={"managers": 2, "feed": "newest"}),
    Arm(AVERAGED, "#009E73", options={"average_gradients": True}, batch_size=11),
)


class Point(NamedTuple):
    """Where one run was after so many reward calls.

    Attributes:
        arm: its name.
        seed: of the run.
        reward_seconds: what a reward cost.
        place: number of the point, from 1.
        calls: reward calls of all ranks.
        modes: found by all.
        total_variation: mean over ranks.
        best_total_variation: of the best rank.
        seconds: of training, of the slowest rank.
    """

    arm: str
    seed: int
    reward_seconds: float
    place: int
    calls: int
    modes: int
    total_variation: float
    best_total_variation: float
    seconds: float


FIGURES = {
    "modes": "modes found by all ranks",
    "total_variation": "total variation, mean over ranks",
    "best_total_variation": "total variation, best rank",
    "seconds": "seconds",
}


# Running.


def run(arm: Arm, seeds: Sequence[int], reward_seconds: float, n_points: int) -> list[Point]:
    """Train once with each seed, and return where the runs were at each point."""
    points = []
    with tempfile.TemporaryDirectory() as place:
        folders = {seed: Path(place) / str(seed) for seed in seeds}
        options = {"reward_seconds": reward_seconds, "steps": n_points * arm.every, **arm.all}
        runs = [{**options, "seed": seed, "out": str(path)} for seed, path in folders.items()]
        _start(arm, runs, Path(place) / "runs.json")
        for seed, folder in folders.items():
            tables = [list(_rows(folder, rank)) for rank in range(arm.workers)]
            found = [_found(folder, rank) for rank in range(arm.workers)]
            for k, rows in enumerate(zip(*tables, strict=True), start=1):
                points.append(Point(arm.name, seed, reward_seconds, k, *_state(rows, found)))
    return points


def _start(arm: Arm, runs: Sequence[dict[str, Any]], file: Path) -> None:
    """Do runs one after the other, in ranks that are started once."""
    file.write_text(json.dumps(runs))
    words = ["-m", "benchmarks.costly", str(file)]
    start = [sys.executable, *words] if arm.size == 1 else command(arm.size, words)
    done = subprocess.run(start, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm.name}: exit code {done.returncode}\n{done.stderr}")


def _rows(folder: Path, rank: int) -> Iterator[dict[str, float]]:
    """Yield what a rank measured at each point."""
    for row in read_metrics(RunFolder(folder, rank).metrics):
        if int(row["step"]):
            yield {key: float(value) for key, value in row.items()}


def _found(folder: Path, rank: int) -> dict[int, int]:
    """Return the modes that a rank found, with the call that did."""
    (told,) = json.loads((folder / f"found-rank{rank}.json").read_text())
    return {int(mode): call for mode, call in told.items()}


def _state(
    rows: Sequence[dict[str, float]], found: Sequence[dict[int, int]]
) -> tuple[int, int, float, float, float]:
    """Return where all ranks were at one point, as a Point has it from its calls on."""
    modes = {
        mode
        for row, each in zip(rows, found, strict=True)
        for mode, call in each.items()
        if call <= row["reward_calls"]
    }
    distances = [row["total_variation"] for row in rows]
    seconds = max(row["time_total"] - row["time_evaluation"] for row in rows)
    calls = sum(int(row["reward_calls"]) for row in rows)
    return calls, len(modes), mean(distances), min(distances), seconds


# Telling.


def values(points: Sequence[Point], arm: Arm, cost: float, place: int, key: str) -> list[float]:
    """Return a figure of all runs of an arm at one point, in the order of seeds."""
    return [
        float(getattr(point, key))
        for point in points
        if (point.arm, point.reward_seconds, point.place) == (arm.name, cost, place)
    ]


def table(arms: Sequence[Arm], points: Sequence[Point], cost: float, n_points: int) -> str:
    """Return means and standard deviations over seeds, as Markdown."""
    places = range(1, n_points + 1)
    lines = [f"A reward costs {1000 * cost:g} ms:" if cost else "Rewards cost nothing:", ""]
    for key, title in FIGURES.items():
        lines.append(f"| {title} | {' | '.join(f'{k * UNIT:,} calls' for k in places)} |")
        lines.append("| --- |" + " ---: |" * n_points)
        for arm in arms:
            cells = [_cell(values(points, arm, cost, k, key)) for k in places]
            lines.append(f"| {arm.name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(numbers: Sequence[float]) -> str:
    digits = 1 if mean(numbers) >= 1 else 4
    spread = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{spread}"


def verdict(arms: Sequence[Arm], points: Sequence[Point], cost: float, n_points: int) -> str:
    """Return how arms compare with others at the end: ratios of means, and seed by seed."""
    by_name = {arm.name: arm for arm in arms}
    lines = []
    for one, other in ((FED, APART), (FED, ALONE), (AVERAGED, ALONE)):
        if one not in by_name or other not in by_name:
            continue
        for key in ("modes", "total_variation", "seconds"):
            a, b = (values(points, by_name[name], cost, n_points, key) for name in (one, other))
            better = [x > y if key == "modes" else x < y for x, y in zip(a, b, strict=True)]
            lines.append(
                f"{one} : {other}, {FIGURES[key]}: {mean(a) / mean(b):.2f} times, better with "
                f"{sum(better)} of {len(better)} seeds"
            )
    return "\n".join([*lines, ""])


def draw(path: Path, arms: Sequence[Arm], points: Sequence[Point], costs: dict[float, int]) -> None:
    """Draw modes and distance against reward calls and against seconds."""
    panels = [(next(iter(costs)), "calls"), *((cost, "seconds") for cost in costs)]
    figure = Figure(figsize=(5 * len(panels), 8), dpi=110, layout="constrained")
    grid = figure.subplots(2, len(panels), sharey="row", squeeze=False)
    for row, key in zip(grid, ("modes", "total_variation"), strict=True):
        for axes, (cost, against) in zip(row, panels, strict=True):
            _panel(axes, arms, points, (cost, costs[cost]), against, key)
        row[0].set_ylabel(FIGURES[key])
    grid[0, 0].set_ylim(bottom=0)
    for axes, (cost, against) in zip(grid[0], panels, strict=True):
        rewards = f"a reward costs {1000 * cost:g} ms" if cost else "rewards cost nothing"
        axes.set_title(f"against {against}, {rewards}" if against == "seconds" else "against calls")
    grid[0, 0].legend(frameon=False, fontsize="small", loc="upper left")
    FigureCanvasAgg(figure).print_png(str(path))


def _panel(
    axes: Axes,
    arms: Sequence[Arm],
    points: Sequence[Point],
    runs: tuple[float, int],
    against: str,
    key: str,
) -> None:
    cost, n_points = runs
    for arm in arms:
        x = [mean(values(points, arm, cost, k, against)) for k in range(1, n_points + 1)]
        y = [values(points, arm, cost, k, key) for k in range(1, n_points + 1)]
        axes.errorbar(
            *(x, [mean(v) for v in y], [stdev(v) if len(v) > 1 else 0.0 for v in y]),
            **{"color": arm.color, "marker": "o", "markersize": 4, "capsize": 3, "label": arm.name},
        )
    axes.set_xlabel("reward calls of all ranks" if against == "calls" else "seconds of training")
    axes.set_xlim(left=0)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


# All together.


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all arms, print tables, and write figures and picture.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    options = _parse(arguments)
    if options.redraw:
        redraw(options.out)
        return 0
    arms = [arm for arm in ARMS if not options.arms or any(w in arm.name for w in options.arms)]
    costs = {0.0: options.free, options.reward_seconds: options.costly}
    costs = {cost: n_points for cost, n_points in costs.items() if n_points}
    points: list[Point] = []
    start = time.monotonic()
    for cost, n_points in costs.items():
        for arm in arms:
            points += run(arm, range(options.seeds), cost, n_points)
            print(f"{time.monotonic() - start:6.0f} s  {points[-1]}", file=sys.stderr)
    for cost, n_points in costs.items():
        print(table(arms, points, cost, n_points))
        print(verdict(arms, points, cost, n_points))
    _write(options.out, arms, points, costs)
    return 0


def _write(
    out: Path, arms: Sequence[Arm], points: Sequence[Point], costs: dict[float, int]
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "measured": measured("distributed_learning"),
        "arms": {arm.name: {"workers": arm.workers, **arm.all} for arm in arms},
        "points": [point._asdict() for point in points],
    }
    (out / "distributed_tfbind8.json").write_text(json.dumps(report, indent=1) + "\n")
    draw(out / "distributed_tfbind8.png", arms, points, costs)


def redraw(out: Path) -> None:
    """Draw the picture again, from the figures that lie beside it.

    Args:
        out: the folder of both.
    """
    report = json.loads((out / "distributed_tfbind8.json").read_text())
    points = [Point(**values) for values in report["points"]]
    costs: dict[float, int] = {}
    for point in points:
        cost = point.reward_seconds
        costs[cost] = max(costs.get(cost, 0), point.place)
    arms = [arm for arm in ARMS if arm.name in report["arms"]]
    draw(out / "distributed_tfbind8.png", arms, points, costs)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What ranks and a manager do for learning.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--free", type=int, default=4, metavar="N")
    parser.add_argument("--costly", type=int, default=2, metavar="N")
    parser.add_argument("--reward-seconds", type=float, default=0.005, metavar="X")
    parser.add_argument("--arms", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--redraw", action="store_true")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
