"""The report of a run, as a picture: a panel for everything that its task has to show."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gfn_rb.training.report.panels import OtherRanks, ReportData, chosen_panels
from gfn_rb.training.report.style import panel_grid, write_figure

__all__ = ["OtherRanks", "ReportData", "draw_report", "write_report"]


def write_report(path: Path, data: ReportData) -> None:
    """Draw the report of a run and write it as PNG."""
    write_figure(path, draw_report(data))


def draw_report(data: ReportData) -> Figure:
    """Return the report of a run."""
    panels, ranks = chosen_panels(data), data.rank_colors
    lines = [Line2D([], [], color=color, linewidth=2) for color in ranks.values()]
    names = [f"rank {rank}" for rank in ranks]
    figure, each = panel_grid(len(panels), _headline(data), lines, names)
    for axes, draw in zip(each, panels, strict=True):
        draw(axes, data)
        axes.legend(loc="best", frameon=False)
    return figure


def _headline(data: ReportData) -> str:
    trainer, others = data.trainer, data.others
    config = trainer.config
    replay = f"{config.replay_ratio:g} replayed per fresh" if config.n_replayed else "no replay"
    ranks = ""
    if others is not None:
        lost = f" ({others.lost} lost)" if others.lost else ""
        ranks = f" on each of {1 + len(others.rows)} ranks{lost}"
    without = trainer.env.n_modes != 0 and not data.has("modes_found", above=0.0)
    return (
        f"{config.env}, {trainer.steps_done:,} steps of {config.batch_size}{ranks}, {replay}, "
        f"seed {config.seed}{', no mode found yet' if without else ''}"
    )
