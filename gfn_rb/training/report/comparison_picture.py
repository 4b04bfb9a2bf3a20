"""The picture of a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gfn_rb.errors import ArgumentError
from gfn_rb.training.report.comparison import (
    Comparison,
    Configuration,
    direction,
)
from gfn_rb.training.report.style import (
    finish,
    number_calls,
    panel_grid,
    scale_if_wide,
    several_colors,
    write_figure,
)


def check_format(path: Path) -> str:
    """Return the format that a picture's name asks for."""
    known = FigureCanvasAgg.get_supported_filetypes()
    ending = path.suffix.lower().removeprefix(".")
    if ending not in known:
        raise ArgumentError(f"out must end in one of {', '.join(sorted(known))}, got {path}")
    return ending


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Draw a comparison and write it in the format of its name."""
    ending = check_format(path)
    write_figure(path, draw_comparison(comparison), ending)


def draw_comparison(comparison: Comparison) -> Figure:
    """Return a panel for each metric: means over seeds against reward calls, and their spread."""
    configurations = comparison.configurations
    headline = _plain(f"{comparison.env}, mean ± standard deviation over seeds")
    n_runs = [len(each.runs) for each in configurations]
    seeds = ["" if n == 1 else f" ({n} seeds)" for n in n_runs]
    labels = [_plain(each.label) + n for each, n in zip(configurations, seeds, strict=True)]
    colors = several_colors(len(labels))
    legend = [Line2D([], [], color=color, linewidth=2.2) for color in colors]
    figure, panels = panel_grid(len(comparison.metrics), headline, legend, labels)
    for axes, metric in zip(panels, comparison.metrics, strict=True):
        for each, color, label in zip(configurations, colors, labels, strict=True):
            _draw(axes, each, metric, color, label)
        axes.axvline(comparison.calls, color="0.7", linestyle=":")
        number_calls(axes, "reward calls")
        if "loss" in metric:
            scale_if_wide(axes)
        words = metric.replace("_", " ")
        better = {1: " (higher is better)", -1: " (lower is better)", 0: ""}[direction(metric)]
        finish(axes, words + better, words)
    return figure


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula


def _draw(axes: Axes, each: Configuration, metric: str, color: str, label: str) -> None:
    calls = np.unique(np.concatenate([run.columns["reward_calls"] for run in each.runs]))
    calls = calls[calls <= min(run.calls for run in each.runs)]
    mean, spread = each.at(metric, calls)
    axes.plot(calls, mean, color=color, linewidth=2.2, label=label)
    axes.fill_between(calls, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)
