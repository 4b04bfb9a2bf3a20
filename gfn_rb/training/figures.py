"""Figures of several panels, and how they are written: reports and comparisons."""

from __future__ import annotations

import textwrap
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gfn_rb.checkpoint.atomic import published
from gfn_rb.training.comparison import Comparison

# Distinct with any kind of colour vision (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#767676"
_LINES = [
    (color, style) for style, color in product(("-", "--"), (BLUE, ORANGE, GREEN, PINK, GREY))
]

_COLUMNS = {1: 1, 2: 2, 4: 2, 7: 4, 8: 4}  # of panels, by their number; 3 for others
_WIDTH, _HEIGHT = 5.4, 4.5  # of a panel, inches
_LINE = 0.3  # height of a line of the headline, inches


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure in the format that the suffix names; the file appears when it is complete."""
    # Glyphs without hinting take less time, and look the same at this size.
    with published(path) as stream, rc_context({"text.hinting": "none"}):
        # Of PNG, this compression takes half of the time, for a tenth of the size.
        png: dict[str, Any] = {"pil_kwargs": {"compress_level": 1}}
        options = png if path.suffix == ".png" else {}
        figure.savefig(stream, format=path.suffix[1:], **options)


def panel_grid(n: int, headline: str) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``n`` panels below a wrapped headline."""
    n_columns = _COLUMNS.get(n, 3)
    n_rows = -(-n // n_columns)
    title = textwrap.wrap(headline, int(7 * _WIDTH * n_columns))  # 7 letters per inch
    width, above = _WIDTH * n_columns, _LINE * len(title)
    height = _HEIGHT * n_rows + above
    figure = Figure(figsize=(width, height), dpi=110)
    # Fixed margins, in inches: matplotlib's layout engines take half of a short run's time.
    figure.subplots_adjust(
        left=0.9 / width, right=1 - 0.2 / width, wspace=0.25, hspace=0.35,
        top=1 - (0.5 + above) / height, bottom=0.65 / height,
    )  # fmt: skip
    figure.suptitle("\n".join(title), fontsize=13, fontweight="bold", y=1 - 0.1 / height)
    return figure, [figure.add_subplot(n_rows, n_columns, 1 + i) for i in range(n)]


def finish(axes: Axes, title: str, ylabel: str) -> None:
    """Label a panel, and draw its grid."""
    axes.set_title(title, fontsize=12, loc="left", y=1)
    axes.set_ylabel(ylabel)
    # At fixed places, as the title: or matplotlib measures all ticks again to place them.
    axes.xaxis.set_label_coords(0.5, -0.09)
    axes.yaxis.set_label_coords(-0.16, 0.5)
    if axes.get_yscale() == "linear":
        axes.locator_params(axis="y", nbins=4)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw each metric of a comparison against reward calls.

    Lines are means over the seeds, and bands reach from the lowest to the highest seed.
    """
    several = any(len(each.runs) > 1 for each in comparison.configurations)
    spread = ": mean, lowest and highest of the seeds" if several else ""
    figure, panels = panel_grid(len(comparison.metrics), f"{comparison.env}{spread}")
    calls = np.linspace(0, comparison.calls, 200)
    for axes, metric in zip(panels, comparison.metrics, strict=True):
        for each, (color, style) in zip(comparison.configurations, cycle(_LINES)):
            values = np.array([[run.at(metric, n) for n in calls.tolist()] for run in each.runs])
            label = f"{each.label} ({len(each.runs)} seeds)" if len(each.runs) > 1 else each.label
            axes.plot(calls, values.mean(0), style, color=color, linewidth=2.4, label=label)
            axes.fill_between(calls, values.min(0), values.max(0), color=color, alpha=0.2)
        axes.set_xlabel("reward calls")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.locator_params(axis="x", nbins=4)
        finish(axes, metric.replace("_", " "), "")
        axes.legend(loc="best", frameon=False)
    return figure
