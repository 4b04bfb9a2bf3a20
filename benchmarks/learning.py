"""What replay does for learning: ``python -m benchmarks.learning``.

    --env NAME         tfbind8 or hypergrid, in their default configurations
    --keep, --draw     rules to compare, every pair of them; by name
    --seeds N          seeds 0 to N-1
    --calls N ...      reward calls at which to compare
    --replay-ratio X   replayed trajectories per fresh one, in the runs with replay
    --lr X             learning rate of all runs
    --jobs N           processes, of one thread each
    --out FOLDER       where learning_ENV.json and learning_ENV.png go

Every run is one of ``gfn_rb.training.Trainer``; runs of one seed start from the same weights. All
figures are exact but for the choice of seeds, and repeat. Replay costs no reward calls.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import StrMethodFormatter

from benchmarks.timing import environment
from gfn_rb.training import (
    DRAW,
    KEEP,
    HyperGridConfig,
    TFBind8Config,
    TrainConfig,
    Trainer,
)

CONFIGS: dict[str, TrainConfig] = {"tfbind8": TFBind8Config(), "hypergrid": HyperGridConfig()}
ROOT = Path(__file__).parent
# Okabe and Ito's colours; no replay is grey.
COLORS = ("#767676", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Arm:
    """One side of the comparison.

    Args:
        name: what it is called.
        config: its configuration, but for the seed.
    """

    name: str
    config: TrainConfig


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
        key: its name in a row.
        digits: how many decimals to print.
    """

    key: str
    digits: int

    def of(self, arm: Arm, curves: Iterable[Curve], calls: int) -> list[float]:
        """Return its value in each run of an arm."""
        return [curve.at(calls)[self.key] for curve in curves if curve.arm == arm.name]


FIGURES = {
    "modes found": Figure("modes_found", 1),
    "total variation": Figure("total_variation", 4),
    "JS distance": Figure("jensen_shannon_distance", 4),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare learning with and without replay at equal reward calls.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    options = _parse(arguments)
    config = CONFIGS[options.env]
    if options.lr is not None:
        config = replace(config, lr=options.lr)
    arms = make_arms(config, options.keep, options.draw, options.replay_ratio)
    curves = run_all(arms, range(options.seeds), options.calls, options.jobs)
    print(table(arms, curves, options.calls))
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"learning_{options.env}"
    write_json(options.out / f"{name}.json", arms, curves, options.calls)
    draw(options.out / f"{name}.png", arms, curves, options.env)


def make_arms(
    config: TrainConfig, keeps: Iterable[str], draws: Iterable[str], ratio: float
) -> list[Arm]:
    """Return no replay, and every pair of what to keep and how to draw.

    Args:
        config: what all have in common.
        keeps: names out of ``gfn_rb.training.KEEP``.
        draws: names out of ``gfn_rb.training.DRAW``.
        ratio: replayed trajectories per fresh one.
    """
    pairs = [(keep, draw) for keep in keeps for draw in draws]
    return [
        Arm("no replay", replace(config, replay_ratio=0.0)),
        *(
            Arm(f"{keep}, {draw}", replace(config, keep=keep, draw=draw, replay_ratio=ratio))
            for keep, draw in pairs
        ),
    ]


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
    while trainer.tally.calls < max(calls):
        trainer.step()
        if trainer.steps_done % arm.config.eval_every == 0 or trainer.tally.calls in calls:
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
    lines = [head]
    for n in calls:
        titles = "".join(f"{title:40}" for title in FIGURES)
        lines += ["", f"{f'{n:,} reward calls':24}{titles}"]
        for arm in arms:
            cells = (_cell(figure, arm, arms[0], curves, n) for figure in FIGURES.values())
            lines.append(f"{arm.name:24}{''.join(f'{cell:40}' for cell in cells)}")
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
    path: Path, arms: Sequence[Arm], curves: Sequence[Curve], calls: Sequence[int]
) -> None:
    """Write every configuration, and the values of every seed.

    Args:
        path: the file.
        arms: what was compared.
        curves: what came out.
        calls: reward calls at which to compare.
    """
    report = {
        "environment": environment(),
        "configurations": {arm.name: arm.config.to_dict() for arm in arms},
        "results": [
            {"arm": curve.arm, "seed": curve.seed, **curve.at(n)} for n in calls for curve in curves
        ],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def draw(path: Path, arms: Sequence[Arm], curves: Sequence[Curve], title: str) -> None:
    """Draw modes found and total variation against reward calls.

    Args:
        path: the PNG to write.
        arms: what was compared.
        curves: what came out.
        title: name of the environment.
    """
    picture = Picture(figsize=(13, 5), dpi=120, layout="constrained")
    for axes, (name, figure) in zip(picture.subplots(1, 2), list(FIGURES.items())[:2], strict=True):
        for arm, color in zip(arms, cycle(COLORS)):
            own = [curve for curve in curves if curve.arm == arm.name]
            calls = [row["reward_calls"] for row in own[0].rows]
            values = np.array([[row[figure.key] for row in curve.rows] for curve in own])
            axes.fill_between(calls, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
            axes.plot(calls, values.mean(0), color=color, lw=2.5, label=arm.name)
        axes.set_title(f"{name.capitalize()}, {title}", loc="left", fontsize=13)
        axes.set_xlabel("reward calls")
        axes.set_ylabel(name)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, title=f"mean and range of {_n_seeds(curves)} seeds")
    FigureCanvasAgg(picture).print_png(str(path))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=main.__doc__)
    parser.add_argument("--env", choices=CONFIGS, default="tfbind8")
    parser.add_argument("--keep", nargs="+", choices=KEEP, default=["top"])
    parser.add_argument("--draw", nargs="+", choices=DRAW, default=["softmax"])
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--calls", nargs="+", type=int, default=[16_000, 32_000], metavar="N")
    parser.add_argument("--replay-ratio", type=float, default=1.0, metavar="X")
    parser.add_argument("--lr", type=float, metavar="X")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "results", metavar="FOLDER")
    options = parser.parse_args(arguments)
    batch = CONFIGS[options.env].batch_size
    if wrong := [n for n in options.calls if n < 1 or n % batch]:
        parser.error(f"--calls must be multiples of the batch size {batch}, got {wrong[0]}")
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
