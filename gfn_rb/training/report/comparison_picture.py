"""The picture of a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gfn_rb.checkpoint.atomic import published
from gfn_rb.errors import ArgumentError
from gfn_rb.training.report.comparison import (
    HIGHER_IS_BETTER,
    LOWER_IS_BETTER,
    Comparison,
    Configuration,
)
from gfn_rb.training.report.style import (
    finish,
    number_calls,
    panel_grid,
    scale_if_wide,
    several_colors,
)


def check_format(path: Path) -> str:
    """Return the format that a picture's name asks for.

    Raises:
        ArgumentError: there is no such format.
    """
    known = FigureCanvasAgg.get_supported_filetypes()
    ending = path.suffix.lower().removeprefix(".")
    if ending not in known:
        raise ArgumentError(f"out must end in one of {', '.join(sorted(known))}, got {path}")
    return ending


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Draw a comparison and write it in the format of its name."""
    ending = check_format(path)
    with published(path) as stream:
        draw_comparison(comparison).savefig(stream, format=ending)


def draw_comparison(comparison: Comparison) -> Figure:
    """Return a panel for each metric: means over seeds against reward calls, and their spread."""
    headline = f"{comparison.env}, mean ± standard deviation over seeds"
    figure, panels = panel_grid(len(comparison.metrics), headline)
    colors = several_colors(len(comparison.configurations))
    for axes, metric in zip(panels, comparison.metrics, strict=True):
        for each, color in zip(comparison.configurations, colors, strict=True):
            _draw(axes, each, metric, color)
        axes.axvline(comparison.calls, color="0.7", linestyle=":")
        number_calls(axes, "reward calls")
        if "loss" in metric:
            scale_if_wide(axes)
        finish(axes, _title(metric), metric.replace("_", " "), legend=False)
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside lower center", ncols=_n_columns(labels, figure), frameon=False
    )
    return figure


def _draw(axes: Axes, configuration: Configuration, metric: str, color: str) -> None:
    runs = configuration.runs
    calls = np.unique(np.concatenate([run.columns["reward_calls"] for run in runs]))
    calls = calls[calls <= min(run.calls for run in runs)]
    mean, spread = configuration.at(metric, calls)
    n = "" if len(runs) == 1 else f" ({len(runs)} seeds)"
    axes.plot(calls, mean, color=color, linewidth=2.2, label=configuration.label + n)
    axes.fill_between(calls, mean - spread, mean + spread, color=color, alpha=0.2, linewidth=0)


def _title(metric: str) -> str:
    better = {True: "higher is better", False: "lower is better"}
    known = metric in HIGHER_IS_BETTER or metric in LOWER_IS_BETTER
    words = metric.replace("_", " ")
    return f"{words} ({better[metric in HIGHER_IS_BETTER]})" if known else words


def _n_columns(labels: list[str], figure: Figure) -> int:
    """Return how many labels, of the longest's width, stand side by side under a figure."""
    inches = 0.6 + 0.1 * max(map(len, labels))
    return max(1, min(len(labels), int(figure.get_figwidth() / inches)))
