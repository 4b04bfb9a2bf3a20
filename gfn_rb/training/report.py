"""The report of a run, as a picture: modes found, rewards, distance to the target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter, StrMethodFormatter
from torch import Tensor

from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float, Float64
from gfn_rb.training.folder import replacing
from gfn_rb.training.loop import Row, Trainer

# Told apart with any kind of colour vision (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"

N_BINS = 40


def write_report(path: Path, trainer: Trainer) -> None:
    """Draw the report of a run and write it as PNG.

    Args:
        path: the file to make or replace.
        trainer: the run.
    """
    with replacing(path) as temporary:
        FigureCanvasAgg(draw_report(trainer)).print_png(str(temporary))


def draw_report(trainer: Trainer) -> Figure:
    """Return the report of a run: three panels side by side."""
    figure = Figure(figsize=(16, 5), dpi=120, layout="constrained")
    modes, rewards, distance = figure.subplots(1, 3)
    figure.suptitle(_headline(trainer), fontsize=13, fontweight="bold")
    draw_modes(modes, trainer)
    draw_rewards(rewards, trainer)
    draw_distance(distance, trainer)
    return figure
