"""What replay does for learning: ``python -m benchmarks.learning [ENV]``.

    ENV, --env ENV     any environment that gfn-rb trains, in its default configuration; tfbind8
    --keep, --draw     rules to compare, every pair of them; by name
    --local-search N   also compare replay with N loops of local search; 1 for rna_binding
    --seeds N          seeds 0 to N-1
    --calls N ...      reward calls at which to compare
    --capacity N       items a buffer keeps; 2,000 where several rules of keeping are compared
    --replay-ratio X   replayed trajectories per fresh one, in the runs with replay
    --lr X             learning rate of all runs
    --replace          drop stored results of another configuration
    --jobs N           processes, of one thread each
    --out FOLDER       where learning_ENV.json and learning_ENV.png go, with "_pairs" in their names
                       if there are several pairs

Every run is one of ``gfn_rb.training.Trainer``; runs of one seed start from the same weights. All
figures are exact but for the choice of seeds, and repeat. Replay adds optimizer steps at equal
calls, so runs without replay are shown twice: with the same batches, and with smaller ones, which
take as many steps. Replay costs no reward calls; each loop
of local search costs as many as sampling, so that runs with it take fewer steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import StrMethodFormatter

from benchmarks.records import RecordError, measured, read, require_same
from gfn_rb.errors import ArgumentError
from gfn_rb.training import DRAW, KEEP, KeepDiverse, SearchOptions, TrainConfig, Trainer
from gfn_rb.training.config import CONFIGS

LOOPS = {"rna_binding": 1}  # of local search, where nothing else is asked for
CAPACITY = 2_000  # a buffer that never fills keeps everything, whatever the rule
BASELINE = "no replay"
CONTROL = "no replay, as many steps"
N_RANGES = 3  # lines whose range over seeds still can be told apart
ROOT = Path(__file__).parent
# Okabe and Ito's colours; no replay is grey.
COLORS = ("#767676", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    Args:
        name: what it is called.
        config: its configuration, but for the seed.
        panel: which part of the picture it belongs to; None for all.
        line: what its line is called there.
    """

    name: str
    config: TrainConfig
    panel: str | None = None
    line: str = BASELINE

    @property
    def calls_per_step(self) -> int:
        """How many reward calls one of its steps takes."""
        return self.config.batch_size * (1 + self.config.search.loops)


@dataclass(frozen=True)
class Curve:
    """What one run measured on its way.

    Args:
        arm: the name of the arm it belongs to.
        seed: its seed.
        rows: measurements at increasing reward calls.
    """

    arm: str
    seed: int
    rows: list[dict[str, Any]]

    def at(self, calls: int) -> dict[str, Any]:
        """Return the row after that many reward calls."""
        return next(row for row in self.rows if row["reward_calls"] == calls)


@dataclass(frozen=True)
class Figure:
    """A number that runs are compared by.

    Args:
        title: what it is called.
        key: its name in a row.
        digits: how many decimals to print.
    """

    title: str
    key: str
    digits: int

    def of(self, arm: Arm, curves: Iterable[Curve], calls: int) -> list[float]:
        """Return its value in each run of an arm."""
        return [curve.at(calls)[self.key] for curve in curves if curve.arm == arm.name]


FIGURES = (
    Figure("modes found", "modes_found", 1),
    Figure("total variation", "total_variation", 4),
    Figure("JS distance", "jensen_shannon_distance", 4),
    Figure("best 100, mean score", "top_100_score", 4),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare learning with and without replay at equal reward calls.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    options = _parse(arguments)
    arms = options.arms
    name = f"learning_{options.env}" + ("_pairs" if _are_pairs(options) else "")
    path = options.out / f"{name}.json"
    if path.exists() and not options.replace:
        try:
            require_same(path, read(path)["configurations"], _configurations(arms))
        except RecordError as error:
            sys.exit(str(error))
    curves = run_all(arms, range(options.seeds), options.calls, options.jobs)
    print(table(arms, curves, options.calls))
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(path, arms, curves, options.calls, replace_all=options.replace)
    draw(options.out / f"{name}.png", arms, curves, options.env)


def make_arms(
    config: TrainConfig, keeps: Sequence[str], draws: Sequence[str], ratio: float, loops: int
) -> list[Arm]:
    """Return no replay, every pair of what to keep and how to draw, and those with local search.

    Args:
        config: what all have in common.
        keeps: names out of ``gfn_rb.training.KEEP``.
        draws: names out of ``gfn_rb.training.DRAW``.
        ratio: replayed trajectories per fresh one.
        loops: of local search; 0 for none.
    """
    # At least as many optimizer steps at equal calls, in batches that the calls are multiples of.
    size, most = config.batch_size, round(config.batch_size / (1 + ratio))
    fewer = next(n for n in range(max(most, 1), 0, -1) if size % n == 0)
    arms = [
        Arm(BASELINE, replace(config, replay_ratio=0.0)),
        Arm(CONTROL, replace(config, replay_ratio=0.0, batch_size=fewer), line=CONTROL),
    ]
    for n in [0, loops] if loops else [0]:
        search = ", local search" if n else ""
        for keep in keeps:
            for rule in draws:
                # The published tables were made of any rows, not one for each object.
                kept = KeepDiverse() if keep == "diverse" else KEEP[keep](unique=False)
                options = {"keep": kept, "draw": DRAW[rule](), "replay_ratio": ratio}
                arm = replace(config, **options, search=SearchOptions(n))
                arms.append(Arm(f"{keep}, {rule}{search}", arm, keep, rule + search))
    return arms


def run_all(
    arms: Sequence[Arm], seeds: Iterable[int], calls: Sequence[int], jobs: int
) -> list[Curve]:
    """Run every arm with every seed, in processes of one thread each.

    Args:
        arms: what to run.
        seeds: with which seeds.
        calls: reward calls at which a row is needed, multiples of the batch size.
        jobs: number of processes.

    Returns:
        The curves, in order of arm and seed.
    """
    tasks = [(arm, seed) for arm in arms for seed in seeds]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(partial(run_one, calls=calls), *zip(*tasks, strict=True)))


def run_one(arm: Arm, seed: int, calls: Sequence[int]) -> Curve:
    """Train once.

    Args:
        arm: what to train.
        seed: with which seed.
        calls: reward calls at which a row is needed.
    """
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    trainer = Trainer(replace(arm.config, seed=seed))
    trainer.record()
    while trainer.steps_done * arm.calls_per_step < max(calls):
        trainer.step()
        done = trainer.steps_done * arm.calls_per_step
        if done % (arm.config.eval_every * arm.config.batch_size) == 0 or done in calls:
            trainer.record()
    rows = [{k: v for k, v in row.items() if "time" not in k} for row in trainer.history]
    print(f"{arm.name}, seed {seed}: done", file=sys.stderr, flush=True)
    return Curve(arm.name, seed, rows)


# Showing it.


def table(arms: Sequence[Arm], curves: Sequence[Curve], calls: Sequence[int]) -> str:
    """Return the comparison as text.

    Args:
        arms: the first is what the others are compared with, seed by seed.
        curves: of all arms and seeds.
        calls: reward calls at which to compare.
    """
    head = (
        f"Mean ± standard deviation over {_n_seeds(curves)} seeds. In brackets: the difference to "
        f"{arms[0].name} with the\nsame seed, mean ± standard error."
    )
    lines, figures = [head], _figures(curves)
    width = max(24, *(len(arm.name) + 2 for arm in arms))
    for n in calls:
        titles = "".join(f"{figure.title:40}" for figure in figures)
        lines += ["", f"{f'{n:,} reward calls':{width}}{titles}"]
        for arm in arms:
            cells = (_cell(figure, arm, arms[0], curves, n) for figure in figures)
            lines.append(f"{arm.name:{width}}{''.join(f'{cell:40}' for cell in cells)}")
    return "\n".join(line.rstrip() for line in lines)


def _cell(figure: Figure, arm: Arm, baseline: Arm, curves: Sequence[Curve], calls: int) -> str:
    values = figure.of(arm, curves, calls)
    text = f"{mean(values):.{figure.digits}f} ± {_spread(values):.{figure.digits}f}"
    if arm is baseline:
        return text
    differences = [a - b for a, b in zip(values, figure.of(baseline, curves, calls), strict=True)]
    error = _spread(differences) / len(differences) ** 0.5
    return f"{text} ({mean(differences):+.{figure.digits}f} ± {error:.{figure.digits}f})"


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def _n_seeds(curves: Sequence[Curve]) -> int:
    return len({curve.seed for curve in curves})


def write_json(
    path: Path,
    arms: Sequence[Arm],
    curves: Sequence[Curve],
    calls: Sequence[int],
    replace_all: bool = False,
) -> None:
    """Write every configuration, and the values of every seed; those of other seeds are kept.

    Args:
        path: the file.
        arms: what was compared.
        curves: what came out.
        calls: reward calls at which to compare.
        replace_all: whether to drop what the file holds.
    """
    known = {} if replace_all else read(path) or {}
    held = {_name(result): result for result in known.get("results", [])}
    found = [
        {"arm": curve.arm, "seed": curve.seed, **curve.at(n)} for n in calls for curve in curves
    ]
    held |= {_name(result): result for result in found}
    order = {arm.name: i for i, arm in enumerate(arms)}
    results = sorted(
        held.values(), key=lambda each: (each["reward_calls"], order[each["arm"]], each["seed"])
    )
    report = {
        "measured": measured("learning", seeds=sorted({each["seed"] for each in results})),
        "configurations": _configurations(arms),
        "results": results,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _configurations(arms: Sequence[Arm]) -> dict[str, Any]:
    return {arm.name: arm.config.to_dict() for arm in arms}


def _name(result: Mapping[str, Any]) -> tuple[str, int, int]:
    return result["arm"], result["seed"], result["reward_calls"]


def draw(path: Path, arms: Sequence[Arm], curves: Sequence[Curve], title: str) -> None:
    """Draw two figures against reward calls: a column for each rule of what to keep.

    Args:
        path: the PNG to write.
        arms: what was compared.
        curves: what came out.
        title: name of the environment.
    """
    panels = list(dict.fromkeys(arm.panel for arm in arms if arm.panel is not None))
    names = dict.fromkeys(arm.line for arm in arms)
    colors = dict(zip(names, cycle(COLORS)))
    shape = (1, 2) if len(panels) == 1 else (2, len(panels))
    picture = Picture(figsize=(6.5 * shape[1], 5 * shape[0]), dpi=110, layout="constrained")
    grid = picture.subplots(*shape, sharey="row" if shape[0] > 1 else False).reshape(2, -1)
    for row, figure in zip(grid, _figures(curves)[:2], strict=True):
        for axes, panel in zip(row, panels, strict=True):
            own = [arm for arm in arms if arm.panel in (None, panel)]
            _draw_panel(axes, figure, own, curves, colors)
            kept = f", keeping {panel}" if len(panels) > 1 else ""
            axes.set_title(f"{figure.title.capitalize()}, {title}{kept}", loc="left", fontsize=13)
    grid[0, 0].legend(frameon=False, title=f"mean of {_n_seeds(curves)} seeds")
    FigureCanvasAgg(picture).print_png(str(path))


def _draw_panel(
    axes: Axes,
    figure: Figure,
    arms: Sequence[Arm],
    curves: Sequence[Curve],
    colors: Mapping[str, str],
) -> None:
    for arm in arms:
        own = [curve for curve in curves if curve.arm == arm.name]
        rows = [i for i, row in enumerate(own[0].rows) if row[figure.key] is not None]
        calls = [own[0].rows[i]["reward_calls"] for i in rows]
        values = np.array([[curve.rows[i][figure.key] for i in rows] for curve in own])
        if len(arms) <= N_RANGES:
            low, high, color = values.min(0), values.max(0), colors[arm.line]
            axes.fill_between(calls, low, high, color=color, alpha=0.15, lw=0)
        axes.plot(calls, values.mean(0), color=colors[arm.line], lw=2, label=arm.line)
    axes.set_xlabel("reward calls")
    axes.set_ylabel(figure.title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _figures(curves: Sequence[Curve]) -> list[Figure]:
    """Return what the environment lets one measure; the exact distances before the scores."""
    known = [figure for figure in FIGURES if figure.key in curves[0].rows[-1]]
    return known[:3]


def _are_pairs(options: argparse.Namespace) -> bool:
    return len(options.keep) * len(options.draw) > 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=main.__doc__)
    parser.add_argument("name", nargs="?", choices=CONFIGS, metavar="ENV")
    parser.add_argument("--env", choices=CONFIGS)
    parser.add_argument("--keep", nargs="+", choices=KEEP, default=["top"])
    parser.add_argument("--draw", nargs="+", choices=DRAW, default=["rank"])
    parser.add_argument("--local-search", type=int, metavar="N")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--calls", nargs="+", type=int, default=[16_000, 32_000], metavar="N")
    parser.add_argument("--capacity", type=int, metavar="N")
    parser.add_argument("--replay-ratio", type=float, default=1.0, metavar="X")
    parser.add_argument("--lr", type=float, metavar="X")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--replace", action="store_true", help="drop what the file holds")
    parser.add_argument("--out", type=Path, default=ROOT / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.name and options.env:
        parser.error(f"the environment is given twice, {options.name} and --env {options.env}")
    options.env = options.name or options.env or "tfbind8"
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    try:
        options.arms = _arms(options)
    except ArgumentError as error:
        parser.error(str(error))
    step = max(arm.calls_per_step for arm in options.arms)
    if wrong := [n for n in options.calls if n < 1 or n % step]:
        parser.error(f"--calls must be multiples of {step}, got {wrong[0]}")
    return options


def _arms(options: argparse.Namespace) -> list[Arm]:
    config = replace(CONFIGS[options.env](), compact="none")  # as in the published tables
    if options.lr is not None:
        config = replace(config, lr=options.lr)
    if options.capacity is not None or len(options.keep) > 1:
        config = replace(config, capacity=options.capacity or CAPACITY)
    loops = options.local_search
    loops = LOOPS.get(options.env, 0) if loops is None else loops
    arms = make_arms(config, options.keep, options.draw, options.replay_ratio, loops)
    for arm in arms:
        arm.config.validate()
    return arms


if __name__ == "__main__":
    main()
