"""The layout and colours that all pictures share."""

from __future__ import annotations

import textwrap
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gfn_rb.checkpoint.atomic import published

# Distinct with any kind of colour vision (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#767676"

_COLUMNS = {1: 1, 2: 2, 4: 2, 7: 4, 8: 4}  # of panels, by their number; 3 for others
_WIDTH, _HEIGHT = 5.4, 4.5  # of a panel, inches
_LINE = 0.3  # height of a line of the headline, inches


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


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure as PNG; the file appears when it is complete."""
    # Glyphs without hinting take less time, and look the same at this size.
    with published(path) as stream, rc_context({"text.hinting": "none"}):
        # Half of the time, for a tenth of the size.
        figure.savefig(stream, format="png", pil_kwargs={"compress_level": 1})


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


def scale_if_wide(axes: Axes) -> None:
    """Use a logarithmic vertical axis where numbers are positive and span more than a decade."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if 0 < 10 * low < high:
        axes.set_yscale("log")


def number_calls(axes: Axes, label: str) -> None:
    """Label the horizontal axis of a panel as reward calls."""
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.03 * max(axes.dataLim.x1, 1))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
