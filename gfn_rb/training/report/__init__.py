"""The report of a run, as a picture: a panel for everything that its task has to show."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gfn_rb.checkpoint.atomic import published
from gfn_rb.training.report.panels import OtherRanks, ReportData, chosen_panels
from gfn_rb.training.report.style import panel_grid

__all__ = ["OtherRanks", "ReportData", "draw_report", "write_report"]


def write_report(path: Path, data: ReportData) -> None:
    """Draw the report of a run and write it as PNG."""
    with published(path) as stream:
        FigureCanvasAgg(draw_report(data)).print_png(stream)


def draw_report(data: ReportData) -> Figure:
    """Return the report of a run."""
    panels = chosen_panels(data)
    figure, each = panel_grid(len(panels), _headline(data))
    for axes, draw in zip(each, panels, strict=True):
        draw(axes, data)
    if ranks := data.rank_colors:
        lines = [Line2D([], [], color=color, linewidth=2) for color in ranks.values()]
        names = [f"rank {rank}" for rank in ranks]
        figure.legend(lines, names, loc="outside lower center", ncols=10, frameon=False)
    return figure


def _headline(data: ReportData) -> str:
    trainer, others = data.trainer, data.others
    config = trainer.config
    replay = f"{config.replay_ratio:g} replayed per fresh" if config.n_replayed else "no replay"
    ranks = ""
    if others is not None:
        lost = f" ({others.lost} lost)" if others.lost else ""
        ranks = f" on each of {1 + len(others.rows)} ranks{lost}"
    modes = (
        ""
        if trainer.env.n_modes == 0 or data.has("modes_found", above=0.0)
        else ", no mode found yet"
    )
    return (
        f"{config.env}, {trainer.steps_done:,} steps of {config.batch_size}{ranks}, {replay}, "
        f"seed {config.seed}{modes}"
    )
