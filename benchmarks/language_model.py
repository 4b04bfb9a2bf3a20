"""What replay does for a language model: ``python -m benchmarks.language_model``.

    --seeds N      seeds 0 to N-1
    --tokens N     tokens at which the arms are compared
    --out FOLDER   where language_model.json and language_model.png go

Both arms of ``examples/language_model.py`` start from one reference. The arm on-policy goes on to
three times as many tokens, about as long as the other. Runs that the file holds are not repeated.

Seconds are CPU time of the process that trains. They are the seconds of a clock if each process has
a core, because searchers wait for the trainer.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from benchmarks.records import measured
from examples import language_model as example

COLORS = {"on-policy": "#767676", "replay": "#0072B2"}
ARMS: dict[str, Callable[[example.Trainer], dict[str, float] | None]] = {
    "on-policy": example.on_policy,
    "replay": example.replay_in_processes,
}
TOKENS = {"on-policy": 3, "replay": 1}  # that an arm generates, in those of the comparison
N_POINTS = 25  # of a curve
Run = dict[str, Any]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def run(arm: str, reference: example.LanguageModel, options: example.Options) -> Run:
    """Return the curve of one arm for one seed, a mean of rewards between two points."""
    trainer, before = example.Trainer(reference, options), cpu_seconds()
    statistics = ARMS[arm](trainer)
    curve = []
    for part in np.array_split(np.arange(len(trainer.record)), N_POINTS * TOKENS[arm]):
        rows = [trainer.record[i] for i in part]
        curve.append({**rows[-1], "reward": mean(row["reward"] for row in rows)})
    return {
        "arm": arm,
        "options": asdict(options),
        "updates": len(trainer.losses),
        "cpu_seconds": cpu_seconds() - before,
        "statistics": statistics,
        "curve": curve,
    }


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Draw reward and solutions against tokens and seconds: mean and range over seeds."""
    picture = Figure(figsize=(11, 8), dpi=110, layout="constrained")
    titles = {"reward": "share of solved completions", "solutions": "different solutions found"}
    units = {"tokens": "generated tokens", "seconds": "CPU seconds of the trainer"}
    for row, (y, title) in zip(picture.subplots(2, 2), titles.items(), strict=True):
        for axes, (x, unit) in zip(row, units.items(), strict=True):
            for arm, color in COLORS.items():
                curves = [each["curve"] for each in runs if each["arm"] == arm]
                ends = [curve[-1][x] for curve in curves]
                at = np.linspace(0, min(ends), 100)
                values = np.array(
                    [np.interp(at, [p[x] for p in c], [p[y] for p in c]) for c in curves]
                )
                axes.fill_between(at, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
                axes.plot(at, values.mean(0), color=color, lw=2, label=arm)
            axes.set(xlabel=unit, ylabel=title, xlim=(0, None), ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
            axes.grid(color="0.9")
            axes.spines[["top", "right"]].set_visible(False)
    n_seeds = len({each["options"]["seed"] for each in runs})
    picture.axes[0].legend(frameon=False, title=f"mean and range of {n_seeds} seeds")
    FigureCanvasAgg(picture).print_png(str(path))


def table(runs: Sequence[Run], tokens: int) -> str:
    """Return a table of the arms at numbers of tokens, mean and deviation over seeds.

    Completions count as solved over the last fifth of the tokens.
    """
    names = ("solved", "different solutions", "updates", "CPU s of the trainer", "CPU s of all")
    lines = [f"| | tokens | {' | '.join(names)} |", "| --- " * 7 + "|"]
    for arm, factor in TOKENS.items():
        own = [each for each in runs if each["arm"] == arm]
        for until in sorted({tokens, factor * tokens}):
            curves = [[p for p in run["curve"] if p["tokens"] < 1.03 * until] for run in own]
            share = [
                c[-1]["tokens"] / r["curve"][-1]["tokens"] for c, r in zip(curves, own, strict=True)
            ]
            solved = [
                mean(p["reward"] for p in c if p["tokens"] > 0.8 * c[-1]["tokens"]) for c in curves
            ]
            cells = [
                _cell("{:,.0f}", [c[-1]["tokens"] for c in curves]),
                _cell("{:.3f}", solved),
                _cell("{:,.0f}", [c[-1]["solutions"] for c in curves]),
                f"{mean(s * r['updates'] for s, r in zip(share, own, strict=True)):,.0f}",
                f"{mean(c[-1]['seconds'] for c in curves):.0f}",
                f"{mean(s * r['cpu_seconds'] for s, r in zip(share, own, strict=True)):.0f}",
            ]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(form: str, values: Sequence[float]) -> str:
    spread = stdev(values) if len(values) > 1 else 0.0
    return f"{form.format(mean(values))} ± {form.format(spread)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all arms for all seeds, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=example.Options.tokens)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    file = given.out / "language_model.json"
    facts = measured("language_model", {"tokens": given.tokens}, range(given.seeds))
    held: list[Run] = json.loads(file.read_text())["runs"] if file.exists() else []
    reference, runs = example.pretrain(example.PRETRAIN_STEPS), list[Run]()
    for seed in range(given.seeds):
        for arm, factor in TOKENS.items():
            options = example.Options(tokens=factor * given.tokens, seed=seed)
            asked = {"arm": arm, "options": json.loads(json.dumps(asdict(options)))}
            known = [each for each in held if asked.items() <= each.items()]
            runs.append(known[0] if known else run(arm, reference, options))
            print(f"seed {seed}, {arm}: {runs[-1]['curve'][-1]}", flush=True)
            file.write_text(json.dumps({"measured": facts, "runs": runs}) + "\n")
    draw(given.out / "language_model.png", runs)
    print(table(runs, given.tokens))


if __name__ == "__main__":
    main()
