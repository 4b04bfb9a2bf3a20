"""The report of a run, as a picture: a panel for everything that its task has to show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float64
from gfn_rb.training.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    finish,
    panel_grid,
    write_figure,
)
from gfn_rb.training.metrics import ExactFit
from gfn_rb.training.trainer import Row, Trainer


class OtherRanks(NamedTuple):
    """What the ranks of a run did together."""

    n_ranks: int
    modes_found: int


class ReportData(NamedTuple):
    """What a report shows."""

    trainer: Trainer
    rows: Sequence[Row]
    others: OtherRanks | None = None

    def has(self, key: str, above: float = -np.inf) -> bool:
        """Whether some measured number is larger than this."""
        return bool((column(self.rows, key) > above).any())


class Curve(NamedTuple):
    """A column of metrics as a line of a panel."""

    key: str
    label: str
    color: str
    style: str = "-"


MODES = (Curve("modes_found", "modes", BLUE),)
TOP = (Curve("top_100_score", "best 100", BLUE),)
DISTANCES = (
    Curve("total_variation", "total variation", BLUE),
    Curve("jensen_shannon_distance", "Jensen-Shannon", ORANGE, "--"),
)
AGREEMENT = (
    Curve("spearman", "Spearman", BLUE),
    Curve("pearson", "Pearson", ORANGE, "--"),
    Curve("accuracy", "mean score over target's", GREEN, "-."),
)
LOSSES = (Curve("loss", "fresh", BLUE), Curve("replay_loss", "replayed", ORANGE, "--"))
LOG_Z = (
    Curve("log_z", "learned", BLUE),
    Curve("log_z_importance", "importance", PINK, ":"),
    Curve("elbo", "ELBO", GREEN, "-."),
    Curve("eubo", "EUBO", ORANGE, "--"),
)


def draw_modes(axes: Axes, data: ReportData) -> None:
    """Draw modes found against reward calls, their number, and what the target would find."""
    env, fit = data.trainer.env, data.trainer.fit
    if isinstance(fit, ExactFit) and env.condition_shape is None:
        calls = np.linspace(0, column(data.rows, "reward_calls")[-1], 200)
        expected = expected_modes(_mode_mass(fit), calls)
        axes.plot(calls, expected, color=GREY, linestyle="--", label="draws from the target")
    if env.n_modes:
        axes.axhline(env.n_modes, color=GREY, linestyle=":", label=f"all {env.n_modes:,}")
    if data.others is not None:
        together = data.others.modes_found
        axes.axhline(together, color="black", linestyle="--", label=f"all ranks: {together:,}")
    _draw_curves(axes, data, MODES, "Modes found", "modes", "{:,.0f}")
    axes.set_ylim(bottom=0)


def draw_rewards(axes: Axes, data: ReportData) -> None:
    """Draw the share of the buffer, and of target and policy, that has at least some reward."""
    rb, fit = data.trainer.rb, data.trainer.fit
    log_reward = rb.storage[:].get(LOG_REWARD).double()
    stored = log_reward[log_reward.isfinite()].cpu()  # of steps, those that terminate
    shown: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = []
    title, label = "Log-rewards stored", "log-reward log R(x), nats"
    if isinstance(fit, ExactFit) and fit.env.condition_shape is None:
        title, label, stored = "Rewards sampled and stored", "reward R(x)", stored.exp()
        reward = fit.env.log_reward(fit.env.terminating_states()).double().exp()
        policy = fit.policy_log_prob().exp()
        shown += [(reward, fit.target.exp(), {"color": GREY, "linewidth": 4, "label": "target"})]
        shown += [(reward, policy, {"color": BLUE, "label": "policy (exact)"})]
    name = f"buffer ({len(rb):,} items)"
    shown += [(stored, None, {"color": ORANGE, "linestyle": "--", "label": name})]
    for value, weight, options in shown:
        # Equal values are added up here: matplotlib's compress=True takes the first weight alone.
        distinct, at = np.unique(value.cpu().numpy(), return_inverse=True)
        total = np.bincount(at, None if weight is None else weight.cpu().numpy())
        axes.ecdf(distinct, total, complementary=True, **options)
    axes.set_xlabel(label)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    finish(axes, title, "share with at least this")


def draw_log_z(axes: Axes, data: ReportData) -> None:
    """Draw the learned log Z, bounds where they are measured, and the true one where known."""
    true = data.trainer.fit.log_z
    if true is not None:
        axes.axhline(true, color=GREY, linestyle=":", linewidth=2, label=f"true: {true:.3f}")
    learnt = data._replace(rows=data.rows[1:] or data.rows)  # before training, it is any number
    _draw_curves(axes, learnt, LOG_Z, "log Z", "nats")


def chosen_panels(data: ReportData) -> list[Callable[[Axes, ReportData], None]]:
    """Return the panels that have something to show."""
    is_measured, fit = data.has("total_variation"), data.trainer.fit
    distances = "Distance from policy to target", f"distance ({fit.method})"
    agreement = "Agreement of policy and target", "1 for an exact policy"
    losses = f"Loss ({data.trainer.config.loss})", "mean since the last point"
    chosen = [
        (draw_modes, data.has("modes_found", above=0.0)),
        (_curves(TOP, "Best 100 found", "mean score"), not is_measured),
        (draw_rewards, True),
        (_curves(DISTANCES, *distances), is_measured),
        (_curves(AGREEMENT, *agreement), any(data.has(each.key) for each in AGREEMENT)),
        (_curves(LOSSES, *losses), data.has("loss")),
        (draw_log_z, True),
    ]
    return [panel for panel, is_shown in chosen if is_shown]


def expected_modes(
    mass: Float64[Tensor, "modes"], n_draws: Float64[np.ndarray, "k"]
) -> Float64[np.ndarray, "k"]:
    r"""Return how many modes n independent draws are expected to reach, sum_m 1 - (1 - p_m)^n."""
    # In logarithms: 1 - p is 1 to all digits for most modes of a large target.
    log_miss = np.log1p(-mass.cpu().numpy())
    return -np.expm1(n_draws[:, None] * log_miss).sum(1)


def column(rows: Sequence[Row], key: str) -> Float64[np.ndarray, "k"]:
    """Return a column as numbers, NaN where there is none."""
    return np.array([row.get(key) for row in rows], dtype=np.float64)


def _curves(*described: Any) -> Callable[[Axes, ReportData], None]:
    return lambda axes, data: _draw_curves(axes, data, *described)


def _draw_curves(
    axes: Axes,
    data: ReportData,
    curves: Sequence[Curve],
    title: str,
    ylabel: str,
    number: str = "{:.3f}",
) -> None:
    """Draw columns against reward calls, as far as they were measured."""
    calls = column(data.rows, "reward_calls")
    for curve in curves:
        if data.has(curve.key):
            values = column(data.rows, curve.key)
            label = f"{curve.label}: {number.format(values[-1])}"
            axes.plot(calls, values, curve.style, color=curve.color, linewidth=2.4, label=label)
    axes.set_xlabel("reward calls")
    axes.set_xlim(0, 1.03 * max(axes.dataLim.x1, 1))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    if curves is LOSSES and 0 < 10 * axes.dataLim.y0 < axes.dataLim.y1:
        axes.set_yscale("log")  # positive, over more than a decade
    elif curves is DISTANCES:
        axes.set_ylim(bottom=0)
    elif curves is AGREEMENT:
        axes.axhline(1, color=GREY, linestyle=":")
    finish(axes, title, ylabel)


def _mode_mass(fit: ExactFit) -> Float64[Tensor, "modes"]:
    """Return the target's probability of each mode."""
    env = fit.env
    mode, target = env.mode_index(env.terminating_states()), fit.target.exp()
    mass = target.new_zeros(env.n_modes + 1)  # no mode is -1, the last place
    return mass.index_put_((mode,), target, accumulate=True)[:-1]


def write_report(path: Path, data: ReportData) -> None:
    """Draw the report of a run and write it as PNG; the file appears when it is complete."""
    write_figure(path, draw_report(data))


def draw_report(data: ReportData) -> Figure:
    """Return the report of a run."""
    panels = chosen_panels(data)
    figure, each = panel_grid(len(panels), _headline(data))
    for axes, draw in zip(each, panels, strict=True):
        draw(axes, data)
        axes.legend(loc="best", frameon=False)
    return figure


def _headline(data: ReportData) -> str:
    trainer, others = data.trainer, data.others
    config = trainer.config
    replay = f"{config.replay_ratio:g} replayed per fresh" if config.n_replayed else "no replay"
    ranks = "" if others is None else f" on each of {others.n_ranks} ranks"
    without = trainer.env.n_modes != 0 and not data.has("modes_found", above=0.0)
    return (
        f"{config.env}, {trainer.steps_done:,} steps of {config.batch_size}{ranks}, {replay}, "
        f"seed {config.seed}{', no mode found yet' if without else ''}"
    )
