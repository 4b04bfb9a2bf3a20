"""What pictures have in common."""

from __future__ import annotations

import textwrap

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

# Told apart with any kind of colour vision (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
COLORS = (BLUE, ORANGE, GREEN, PINK, "#E69F00", "#56B4E9", "#000000")
GREY = "#767676"

_COLUMNS = {1: 1, 2: 2, 4: 2, 7: 4, 8: 4}  # for so many panels; three for others
_WIDTH, _HEIGHT = 5.4, 4.5  # of a panel, inches
_LETTERS = 7  # of a headline in an inch


def several_colors(n: int) -> list[str]:
    """Return ``n`` different colours."""
    if n <= len(COLORS):
        return list(COLORS[:n])
    return [to_hex(colormaps["turbo"]((i + 1) / (n + 1))) for i in range(n)]


def panel_grid(n: int, headline: str) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``n`` panels under a headline, which takes as many lines as it needs."""
    n_columns = _COLUMNS.get(n, 3)
    n_rows = -(-n // n_columns)
    width = _WIDTH * n_columns
    lines = textwrap.wrap(headline, int(_LETTERS * width))
    size = (width, _HEIGHT * n_rows + 0.3 * len(lines))
    figure = Figure(figsize=size, dpi=110, layout=ConstrainedLayoutEngine(wspace=0.05, h_pad=0.08))
    figure.suptitle("\n".join(lines), fontsize=13, fontweight="bold")
    panels = [*figure.subplots(n_rows, n_columns, squeeze=False).flat]
    for unused in panels[n:]:
        unused.remove()
    return figure, panels[:n]


def finish(axes: Axes, title: str, ylabel: str, legend: bool = True) -> None:
    """Label a panel, its lines too unless they are labelled elsewhere."""
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_ylabel(ylabel)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(loc="best", frameon=False)


def scale_if_wide(axes: Axes) -> None:
    """Use a logarithmic vertical axis where numbers are positive and span more than a decade."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if 0 < 10 * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def number_calls(axes: Axes, label: str) -> None:
    """Label the horizontal axis of a panel as reward calls."""
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.03 * max(axes.dataLim.x1, 1))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
