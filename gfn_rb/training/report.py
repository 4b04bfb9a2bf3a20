"""The report of a run, as a picture: modes found, rewards, distance to the target where known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from torch import Tensor

from gfn_rb.checkpoint.atomic import published
from gfn_rb.keys import LOG_REWARD
from gfn_rb.metrics import ConditionalFit, ExactFit, Fit
from gfn_rb.shapes import Float64
from gfn_rb.training.trainer import Row, Trainer

# Told apart with any kind of colour vision (Okabe and Ito 2008).
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#767676"

N_BINS = 40


class OtherRanks(NamedTuple):
    """What the other ranks of a run did.

    Attributes:
        rows: what each measured on the way, by rank; numbers may be text, as in a table.
        modes_found: by all ranks together.
        lost: how many ranks were lost.
    """

    rows: Mapping[int, Sequence[Mapping[str, Any]]]
    modes_found: int
    lost: int = 0


class ReportData(NamedTuple):
    """What a report shows.

    Attributes:
        trainer: the run, at its end; of several ranks, the first.
        rows: what was measured on the way.
        others: the other ranks, None where there are none.
    """

    trainer: Trainer
    rows: Sequence[Row]
    others: OtherRanks | None = None


def write_report(path: Path, data: ReportData) -> None:
    """Draw the report of a run and write it as PNG."""
    with published(path) as stream:
        FigureCanvasAgg(draw_report(data)).print_png(stream)


def draw_report(data: ReportData) -> Figure:
    """Return the report of a run: three panels side by side."""
    layout = ConstrainedLayoutEngine(wspace=0.05, h_pad=0.08)
    figure = Figure(figsize=(16, 5), dpi=120, layout=layout)
    figure.suptitle(_headline(data), fontsize=13, fontweight="bold")
    for axes, draw in zip(figure.subplots(1, 3), PANELS[type(data.trainer.fit)], strict=True):
        draw(axes, data)
    return figure


def draw_modes(axes: Axes, data: ReportData) -> None:
    """Draw modes found against reward calls, and how many there are, where that is known."""
    n_modes = data.trainer.env.n_modes
    if n_modes:
        axes.axhline(n_modes, color=GREY, linewidth=1, linestyle=":", label=f"all {n_modes}")
    if data.others is not None:
        together = data.others.modes_found
        label = f"all ranks together: {together:,}"
        axes.axhline(together, color=ORANGE, linewidth=1.5, linestyle="--", label=label)
    _draw_run(axes, data, "modes_found", "{:,.0f}")
    axes.set_ylim(0, 1.08 * n_modes if n_modes else None)
    _finish(axes, "Modes found", "modes found", "best", data)


def draw_modes_of_target(axes: Axes, data: ReportData) -> None:
    """Draw modes found against reward calls, and how many the target's own draws would find."""
    grid = np.linspace(0, _column(data.rows, "reward_calls")[-1], 200)
    expected = expected_modes(_mode_mass(data.trainer), grid)
    label = "drawing from the target"
    axes.plot(grid, expected, color=GREY, linewidth=1.5, linestyle="--", label=label)
    draw_modes(axes, data)


def draw_rewards(axes: Axes, data: ReportData) -> None:
    """Draw how the buffer's items, the policy and the target are distributed over the reward."""
    fit = data.trainer.fit
    assert isinstance(fit, ExactFit)
    env = fit.env
    reward = env.log_reward(env.terminating_states()).double().exp()
    edges = np.linspace(0, float(reward.max()), N_BINS + 1)
    target = histogram(reward, fit.target.exp(), edges)
    policy = histogram(reward, fit.policy_log_prob().exp(), edges)
    axes.stairs(target, edges, fill=True, color=GREY, alpha=0.35, label="target")
    _draw_buffer(axes, data.trainer, _stored(data.trainer).exp(), edges)
    axes.stairs(policy, edges, color=BLUE, linewidth=2, label="policy (exact)")
    axes.set_xlabel("reward R(x)")
    _finish(axes, "Rewards of what is sampled and stored", "probability per bin", "best")


def draw_stored(axes: Axes, data: ReportData) -> None:
    """Draw how the buffer's items are distributed over the log-reward."""
    stored = _stored(data.trainer)
    edges = np.histogram_bin_edges(stored.cpu().numpy(), N_BINS)
    _draw_buffer(axes, data.trainer, stored, edges)
    axes.set_xlabel("log-reward log R(x), nats")
    _finish(axes, "Log-rewards of what is stored", "share per bin", "best")


def draw_top(axes: Axes, data: ReportData) -> None:
    """Draw the mean score of the best 100 distinct states against reward calls."""
    _draw_run(axes, data, "top_100_score", "{:.3f}")
    _finish(axes, "Best 100 found", "mean score", "lower right", data)


def draw_distance(axes: Axes, data: ReportData) -> None:
    """Draw the exact distances between policy and target against reward calls."""
    calls = _column(data.rows, "reward_calls")
    for key, label, color, style in (
        ("total_variation", "total variation", BLUE, "-"),
        ("jensen_shannon_distance", "Jensen-Shannon distance", ORANGE, "--"),
    ):
        _draw_others(axes, data, key, color, style)
        values = _column(data.rows, key)
        label = f"{label}: {values[-1]:.3f}"
        axes.plot(calls, values, color=color, linewidth=2.5, linestyle=style, label=label)
    axes.set_ylim(bottom=0)
    title = f"Distance from policy to target ({data.trainer.fit.method})"
    _finish(axes, title, "distance", "upper right", data)


Panel = Callable[[Axes, ReportData], None]

# What to show, by what is known of the fit.
PANELS: dict[type[Fit], tuple[Panel, Panel, Panel]] = {
    ExactFit: (draw_modes_of_target, draw_rewards, draw_distance),
    ConditionalFit: (draw_modes, draw_stored, draw_distance),
    Fit: (draw_modes, draw_top, draw_stored),
}


def expected_modes(
    mass: Float64[Tensor, "modes"], n_draws: Float64[np.ndarray, "k"]
) -> Float64[np.ndarray, "k"]:
    r"""Return how many modes n independent draws are expected to reach, sum_m 1 - (1 - p_m)^n.

    Args:
        mass: p_m, the probability of each mode.
        n_draws: numbers of draws n.
    """
    # In logarithms: 1 - p is 1 to all digits for most modes of a large target.
    log_miss = np.log1p(-mass.cpu().numpy())
    return -np.expm1(n_draws[:, None] * log_miss).sum(1)


def histogram(
    value: Float64[Tensor, "n"], weight: Float64[Tensor, "n"], edges: Float64[np.ndarray, "k"]
) -> Float64[np.ndarray, "bins"]:
    """Return the weight in each bin."""
    return np.histogram(value.cpu().numpy(), edges, weights=weight.cpu().numpy())[0]


def _mode_mass(trainer: Trainer) -> Float64[Tensor, "modes"]:
    """Return the target's probability of each mode."""
    fit = trainer.fit
    assert isinstance(fit, ExactFit)
    env = fit.env
    mode, target = env.mode_index(env.terminating_states()), fit.target.exp()
    mass = target.new_zeros(env.n_modes + 1)  # no mode is -1, the last place
    return mass.index_put_((mode,), target, accumulate=True)[:-1]


def _stored(trainer: Trainer) -> Float64[Tensor, "n"]:
    """Return the log-rewards in the buffer, those of terminating rows where it holds others."""
    log_reward = trainer.rb.storage[:].get(LOG_REWARD).double()
    return log_reward[log_reward.isfinite()]


def _draw_buffer(
    axes: Axes, trainer: Trainer, value: Float64[Tensor, "n"], edges: Float64[np.ndarray, "k"]
) -> None:
    """Draw which shares of the buffer's items fall into each bin."""
    shares = histogram(value, value.new_full(value.shape, 1 / max(len(value), 1)), edges)
    axes.stairs(
        shares, edges, color=ORANGE, linewidth=2, label=f"buffer ({len(trainer.rb):,} items)"
    )
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


def _draw_run(axes: Axes, data: ReportData, key: str, number: str) -> None:
    """Draw a column against reward calls, its last value beside the end of the line."""
    _draw_others(axes, data, key, BLUE, "-")
    calls, values = _column(data.rows, "reward_calls"), _column(data.rows, key)
    label = "this run" if data.others is None else "rank 0"
    axes.plot(calls, values, color=BLUE, linewidth=2.5, label=label)
    style: dict[str, Any] = {"color": BLUE, "va": "center", "fontweight": "bold"}
    end, shift = (calls[-1], values[-1]), (6, 0)
    axes.annotate(number.format(values[-1]), end, shift, textcoords="offset points", **style)


def _draw_others(axes: Axes, data: ReportData, key: str, color: str, style: str) -> None:
    """Draw a column of the other ranks, each against its own reward calls."""
    for rank, rows in ({} if data.others is None else data.others.rows).items():
        calls, values = _column(rows, "reward_calls"), _column(rows, key)
        (line,) = axes.plot(calls, values, color=color, linestyle=style, linewidth=1, alpha=0.5)
        line.set_gid(f"rank {rank}")


def _headline(data: ReportData) -> str:
    config, others = data.trainer.config, data.others
    replay = f"{config.replay_ratio:g} replayed per fresh" if config.n_replayed else "no replay"
    ranks = ""
    if others is not None:
        lost = f" ({others.lost} lost)" if others.lost else ""
        ranks = f" on each of {1 + len(others.rows)} ranks{lost}"
    return (
        f"{config.env}, {data.trainer.steps_done:,} steps of {config.batch_size}{ranks}, {replay}, "
        f"seed {config.seed}"
    )


def _column(rows: Sequence[Mapping[str, Any]], key: str) -> Float64[np.ndarray, "k"]:
    values = [row[key] for row in rows]
    return np.array([np.nan if v in (None, "") else float(v) for v in values], dtype=np.float64)


def _finish(
    axes: Axes, title: str, ylabel: str, legend: str, calls_of: ReportData | None = None
) -> None:
    """Label a panel, and its axis of reward calls where it has one."""
    axes.set_title(title, fontsize=13, loc="left")
    axes.set_ylabel(ylabel)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc=legend, frameon=False)
    if calls_of is not None:
        axes.set_xlabel("reward calls" if calls_of.others is None else "reward calls of each rank")
        axes.set_xlim(0, 1.08 * axes.dataLim.x1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
