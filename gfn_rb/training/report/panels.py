"""The panels of a report: each shows one thing that a task may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float64
from gfn_rb.training.metrics import ExactFit
from gfn_rb.training.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    finish,
    number_calls,
    scale_if_wide,
    several_colors,
)
from gfn_rb.training.trainer import Row, Trainer

Table = Sequence[Mapping[str, Any]]


class OtherRanks(NamedTuple):
    """What the other ranks of a run did.

    Attributes:
        rows: what each measured on the way, by rank; numbers may be text, as in a table.
        modes_found: by all ranks together.
        lost: how many ranks were lost.
    """

    rows: Mapping[int, Table]
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

    @property
    def ranks(self) -> dict[int, Table]:
        """What each rank measured on the way."""
        return {0: self.rows, **({} if self.others is None else self.others.rows)}

    @property
    def rank_colors(self) -> dict[int, str]:
        """The colour of each rank; none where there is one alone."""
        ranks = {} if self.others is None else self.ranks
        return dict(zip(ranks, several_colors(len(ranks)), strict=True))

    def trained(self) -> ReportData:
        """Leave out what was measured before training, if there is more."""
        others = self.others
        if others is not None:
            others = others._replace(rows={rank: rows[1:] for rank, rows in others.rows.items()})
        return self if len(self.rows) < 2 else self._replace(rows=self.rows[1:], others=others)

    def has(self, key: str, above: float = -np.inf) -> bool:
        """Whether some rank measured a number larger than this."""
        return any((column(rows, key) > above).any() for rows in self.ranks.values())


class Curve(NamedTuple):
    """A line of a panel.

    Attributes:
        key: the column that it shows.
        label: what it is called.
        color: where there is one rank; lines of several have the ranks' colours.
        style: solid, dashed and so on.
    """

    key: str
    label: str
    color: str
    style: str = "-"


MODES = (
    Curve("modes_found", "modes", BLUE),
    Curve("separated_modes", "modes by distance", GREEN, "-."),
)
DISTANCES = (
    Curve("total_variation", "total variation", BLUE),
    Curve("jensen_shannon_distance", "Jensen-Shannon", ORANGE, "--"),
)
AGREEMENT = (
    Curve("spearman", "Spearman", BLUE),
    Curve("pearson", "Pearson", ORANGE, "--"),
    Curve("accuracy", "accuracy", GREEN, "-."),
)
LOSSES = (Curve("loss", "fresh", BLUE), Curve("replay_loss", "replayed", ORANGE, "--"))
LOG_Z = (
    Curve("log_z", "learned", BLUE),
    Curve("log_z_importance", "importance", PINK, ":"),
    Curve("elbo", "ELBO", GREEN, "-."),
    Curve("eubo", "EUBO", ORANGE, "--"),
)


def draw_modes(axes: Axes, data: ReportData) -> None:
    """Draw modes found against reward calls, how many there are, and what the target would find."""
    env, fit = data.trainer.env, data.trainer.fit
    if isinstance(fit, ExactFit):
        calls = np.linspace(0, column(data.rows, "reward_calls")[-1], 200)
        expected = expected_modes(_mode_mass(fit), calls)
        axes.plot(calls, expected, color=GREY, linestyle="--", label="draws from the target")
    if env.n_modes:
        axes.axhline(env.n_modes, color=GREY, linestyle=":", label=f"all {env.n_modes:,}")
    if data.others is not None:
        together = data.others.modes_found
        axes.axhline(together, color="black", linestyle="--", label=f"all ranks: {together:,}")
    _draw_lines(axes, data, MODES, "{:,.0f}")
    axes.set_ylim(bottom=0)
    finish(axes, "Modes found", "modes")


def draw_top(axes: Axes, data: ReportData) -> None:
    """Draw the mean score of the best 100 distinct states against reward calls."""
    _draw_lines(axes, data, [Curve("top_100_score", "best 100", BLUE)])
    finish(axes, "Best 100 found", "mean score")


def draw_rewards(axes: Axes, data: ReportData) -> None:
    """Draw how much of the target, of the policy and of the buffer has at least some reward."""
    trainer, fit = data.trainer, data.trainer.fit
    assert isinstance(fit, ExactFit)
    reward = fit.env.log_reward(fit.env.terminating_states()).double().exp()
    stored = _stored(trainer).exp()
    for value, weight, style in (
        (reward, fit.target.exp(), {"color": GREY, "linewidth": 4, "label": "target"}),
        (stored, None, {"color": ORANGE, "linestyle": "--", "label": _name_of_buffer(trainer)}),
        (reward, fit.policy_log_prob().exp(), {"color": BLUE, "label": "policy (exact)"}),
    ):
        axes.plot(*share_at_least(value, weight), drawstyle="steps-pre", **style)
    _finish_shares(axes, "Rewards sampled and stored", "reward R(x)")


def draw_stored(axes: Axes, data: ReportData) -> None:
    """Draw how much of the buffer has at least some log-reward."""
    share = share_at_least(_stored(data.trainer))
    name = _name_of_buffer(data.trainer)
    axes.plot(*share, drawstyle="steps-pre", color=ORANGE, linewidth=2, label=name)
    _finish_shares(axes, "Log-rewards stored", "log-reward log R(x), nats")


def draw_distance(axes: Axes, data: ReportData) -> None:
    """Draw the exact distances between policy and target against reward calls."""
    _draw_lines(axes, data, DISTANCES)
    axes.set_ylim(bottom=0)
    finish(axes, "Distance from policy to target", f"distance ({data.trainer.fit.method})")


def draw_agreement(axes: Axes, data: ReportData) -> None:
    """Draw correlations of log P(x) with log R(x), and accuracy, against reward calls."""
    _draw_lines(axes, data, AGREEMENT)
    finish(axes, "Agreement of policy and target", "1 for an exact policy")


def draw_loss(axes: Axes, data: ReportData) -> None:
    """Draw the loss of fresh and of replayed batches against reward calls."""
    _draw_lines(axes, data, LOSSES)
    scale_if_wide(axes)
    finish(axes, f"Loss ({data.trainer.config.loss})", "mean since the last point")


def draw_log_z(axes: Axes, data: ReportData) -> None:
    """Draw the learned log Z, bounds where they are measured, and the true one where known."""
    true = data.trainer.fit.log_z
    if true is not None:
        axes.axhline(true, color=GREY, linestyle=":", linewidth=2, label=f"true: {true:.3f}")
    _draw_lines(axes, data.trained(), LOG_Z)  # before, log Z is just any number
    finish(axes, "log Z", "nats")


Panel = Callable[[Axes, ReportData], None]


def chosen_panels(data: ReportData) -> list[Panel]:
    """Return the panels that have something to show."""
    is_exact = isinstance(data.trainer.fit, ExactFit)
    chosen: dict[Panel, bool] = {
        draw_modes: any(data.has(line.key, above=0.0) for line in MODES),
        draw_top: not data.has("total_variation"),
        draw_rewards: is_exact,
        draw_stored: not is_exact,
        draw_distance: data.has("total_variation"),
        draw_agreement: any(data.has(line.key) for line in AGREEMENT),
        draw_loss: data.has("loss"),
        draw_log_z: True,
    }
    return [panel for panel, is_shown in chosen.items() if is_shown]


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


def share_at_least(
    value: Float64[Tensor, "n"], weight: Float64[Tensor, "n"] | None = None
) -> tuple[Float64[np.ndarray, "m"], Float64[np.ndarray, "m"]]:
    """Return the distinct values in ascending order, and the share that is at least as large.

    The last value comes again, with a share of 0. It takes no bins, of which some would be empty
    where values lie on a grid.

    Args:
        value: numbers.
        weight: of each, summing to 1; all alike if None.
    """
    distinct, at = value.unique(return_inverse=True)
    weight = value.new_full(value.shape, 1 / max(len(value), 1)) if weight is None else weight
    share = torch.zeros_like(distinct).index_add_(0, at, weight).flip(0).cumsum(0).flip(0)
    x, y = distinct.cpu().numpy(), share.cpu().numpy()
    return np.append(x, x[-1:]), np.append(y, np.zeros_like(y[-1:]))


def column(rows: Table, key: str) -> Float64[np.ndarray, "k"]:
    """Return a column as numbers, NaN where there is none."""
    values = [row.get(key) for row in rows]
    return np.array([np.nan if v in (None, "") else float(v) for v in values], dtype=np.float64)


def _draw_lines(
    axes: Axes, data: ReportData, lines: Sequence[Curve], number: str = "{:.3f}"
) -> None:
    """Draw columns against reward calls, each rank against its own."""
    shown = [line for line in lines if data.has(line.key)]  # what is NaN is above nothing
    for rank, rows in reversed(data.ranks.items()):  # the first rank on top
        for line in shown:
            calls, values = column(rows, "reward_calls"), column(rows, line.key)
            color = data.rank_colors.get(rank, line.color)
            (drawn,) = axes.plot(calls, values, color=color, linestyle=line.style)
            drawn.set_gid(f"rank {rank}")
            drawn.set_linewidth(1.2 if rank else 2.4)
            if not rank:
                last = "" if data.others else f": {number.format(values[-1])}"
                drawn.set_label(line.label + last)
    number_calls(axes, "reward calls" if data.others is None else "reward calls of each rank")


def _mode_mass(fit: ExactFit) -> Float64[Tensor, "modes"]:
    """Return the target's probability of each mode."""
    env = fit.env
    mode, target = env.mode_index(env.terminating_states()), fit.target.exp()
    mass = target.new_zeros(env.n_modes + 1)  # no mode is -1, the last place
    return mass.index_put_((mode,), target, accumulate=True)[:-1]


def _stored(trainer: Trainer) -> Float64[Tensor, "n"]:
    """Return the log-rewards in the buffer, those of terminating rows where it holds others."""
    log_reward = trainer.rb.storage[:].get(LOG_REWARD).double()
    return log_reward[log_reward.isfinite()]


def _name_of_buffer(trainer: Trainer) -> str:
    return f"buffer ({len(trainer.rb):,} items)"


def _finish_shares(axes: Axes, title: str, xlabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    finish(axes, title, "share with at least this")
