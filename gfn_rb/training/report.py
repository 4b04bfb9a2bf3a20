"""The report of a run, as a picture: a panel for everything that its task has to show."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from gfn_rb.checkpoint.atomic import published
from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float64
from gfn_rb.training.metrics import ExactFit
from gfn_rb.training.trainer import Row, Trainer

# Distinct with any kind of colour vision (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#767676"

_COLUMNS = {1: 1, 2: 2, 4: 2, 7: 4, 8: 4}  # of panels, by their number; 3 for others
_WIDTH, _HEIGHT = 5.4, 4.5  # of a panel, inches
_LINE = 0.3  # height of a line of the headline, inches


class OtherRanks(NamedTuple):
    """What the ranks of a run did together."""

    n_ranks: int
    modes_found: int
    lost: int = 0


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
    _finish(axes, title, "share with at least this")


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
    _finish(axes, title, ylabel)


def _mode_mass(fit: ExactFit) -> Float64[Tensor, "modes"]:
    """Return the target's probability of each mode."""
    env = fit.env
    mode, target = env.mode_index(env.terminating_states()), fit.target.exp()
    mass = target.new_zeros(env.n_modes + 1)  # no mode is -1, the last place
    return mass.index_put_((mode,), target, accumulate=True)[:-1]


def write_report(path: Path, data: ReportData) -> None:
    """Draw the report of a run and write it as PNG; the file appears when it is complete."""
    # Glyphs without hinting take less time, and look the same at this size.
    with published(path) as stream, rc_context({"text.hinting": "none"}):
        # Half of the time, for a tenth of the size.
        draw_report(data).savefig(stream, format="png", pil_kwargs={"compress_level": 1})


def draw_report(data: ReportData) -> Figure:
    """Return the report of a run."""
    panels = chosen_panels(data)
    figure, each = _panel_grid(len(panels), _headline(data))
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
        ranks = f" on each of {others.n_ranks} ranks{lost}"
    without = trainer.env.n_modes != 0 and not data.has("modes_found", above=0.0)
    return (
        f"{config.env}, {trainer.steps_done:,} steps of {config.batch_size}{ranks}, {replay}, "
        f"seed {config.seed}{', no mode found yet' if without else ''}"
    )


def _panel_grid(n: int, headline: str) -> tuple[Figure, list[Axes]]:
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


def _finish(axes: Axes, title: str, ylabel: str) -> None:
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
