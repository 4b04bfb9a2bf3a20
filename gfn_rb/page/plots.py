"""The plots and the table of a page, as Bokeh models; Bokeh must be installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.events import Reset, SelectionGeometry
from bokeh.models import (
    BoxSelectTool,
    ColorBar,
    ColumnDataSource,
    CustomJS,
    DataTable,
    InlineStyleSheet,
    LinearColorMapper,
    NumberFormatter,
    NumeralTickFormatter,
    TableColumn,
)
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from gfn_rb.buffers.summary import RowColumns
from gfn_rb.page.content import Content

Columns = Mapping[str, Any]
"""Numbers measured during a run by name, [k] each, ``reward_calls`` among them."""

# Distinct with any kind of colour vision (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#767676"
_BINS = 40
_N_POINTS = 200  # of a mean over several runs, or of the concentration of draws
_LOG_R, _AGE = "log-reward log R(x), nats", "age, policy versions (steps)"
# Of the table: heading, width in pixels, format of numbers.
_TABLE = {
    "words": ("object", 150, None),
    "reward": ("log R, nats", 100, "0,0.000"),
    "age": ("age, steps", 90, "0,0"),
    "draws": ("draws per 1,000 batches", 170, "0,0.0"),
    "mode": ("mode", 70, None),
}
_TOOLS = "box_select,lasso_select,tap,pan,wheel_zoom,reset,save"
_SELECT = "Drag to select rows in both plots and in the table."
_STYLE = ":host { font-size: 13px; } .slick-header-column { font-weight: 600; }"
# Of curves: title, label of the axis, text, and the lines by their keys.
_CURVES = {
    "losses": ("Loss", "mean loss", "Mean loss of fresh and replayed batches since the last point.",
               {"loss": "fresh", "replay_loss": "replayed"}),
    "modes": ("Modes found", "modes", "Distinct modes sampled so far.", {"modes_found": "modes"}),
    "drawn_ages": ("Age of drawn rows", _AGE, "Mean age of the rows drawn since the last point.",
                   {"mean_age": "mean age"}),
}  # fmt: skip


class Part(NamedTuple):
    """A part of a page: a Bokeh model, or None where there is nothing to show, and a text."""

    name: str
    title: str
    model: Any
    text: str


def plot_objects(content: Content) -> tuple[list[Part], list[CustomJS]]:
    """Return map, ages and table of rows, which share a selection, and scripts to start with."""
    columns, row = content.columns, content.row.numpy()
    points: dict[str, Any] = {"words": content.words}
    color: Any = COLORS[0]
    if columns.log_reward is not None:
        reward = points["reward"] = columns.log_reward.numpy()[row]
        if len(finite := reward[np.isfinite(reward)]):
            # A few very low rewards must not leave one colour to all others.
            low, high = np.quantile(finite, [0.05, 1.0])
            mapper = LinearColorMapper(palette=Cividis256, low=low, high=high)
            color = {"field": "reward", "transform": mapper}
    if columns.age is not None:
        points["age"] = columns.age.numpy()[row].astype(np.int32)
    if content.draws is not None:
        points["draws"] = content.draws.numpy()[row] * 1000
    if content.is_mode is not None:
        points["mode"] = np.where(content.is_mode.numpy(), "yes", "").tolist()
    listed = [name for name in _TABLE if name in points]
    if content.position is not None:
        points["x"], points["y"] = content.position.numpy().astype(np.float32).T
    linked = {
        "points": ColumnDataSource(points),
        "shown": ColumnDataSource({name: [] for name in listed}),
    }
    widest = max(map(len, content.words), default=0)
    table = DataTable(
        source=linked["shown"], index_position=None, height=380, sizing_mode="stretch_width",
        columns=[_table_column(name, 8 * widest) for name in listed], reorderable=False,
        autosize_mode="none", stylesheets=[InlineStyleSheet(css=_STYLE)],
    )  # fmt: skip
    fill = CustomJS(args={**linked, "names": listed}, code="fillTable(points, shown, names)")
    mark = CustomJS(args=linked, code="markRows(points, shown)")
    linked["shown"].selected.js_on_change("indices", mark)

    def scatter(x: str, y: str, *titles: str) -> Any:
        tips = [(_TABLE[name][0], f"@{name}") for name in listed]
        plot = _plot(*titles, tools=_TOOLS, tooltips=tips)
        plot.scatter(
            x, y, source=linked["points"], size=5, fill_color=color, line_color=None,
            fill_alpha=0.8, nonselection_fill_alpha=0.06,
        )  # fmt: skip
        for event in (SelectionGeometry, Reset):
            plot.js_on_event(event, fill)
        return plot

    places = None if content.position is None else scatter("x", "y", *content.axes)
    if places is not None and color is not COLORS[0]:
        places.add_layout(ColorBar(color_mapper=mapper, width=10), "right")
    missing = _missing(columns)
    ages = None if missing else scatter("age", "reward", _AGE, _LOG_R)
    text = "Rows with similar features are near each other. Colour is log R in nats."
    plots = [plot for plot in (places, ages) if plot is not None]
    start = CustomJS(args={"plots": plots, "table": table}, code="start(plots, table)")
    parts = [
        Part("map", "Map of objects", places, f"{text} {_SELECT}"),
        Part("ages", "Age and reward", ages, missing or f"Rows at the right are old. {_SELECT}"),
        Part("table", "Objects", table, (
            "A click on a heading sorts. Draws are the expected number in 1,000 batches of "
            f"{content.batch_size:,} rows.")),
    ]  # fmt: skip
    return parts, [start, fill]


def plot_draws(content: Content) -> Iterator[Part]:
    """Yield the rewards of kept and of drawn rows, and how draws concentrate on few rows."""
    columns = content.columns
    if columns.log_prob is None:
        yield Part("shares", "Draws", None, "No draws: the sampler does not tell probabilities.")
        return
    share = columns.log_prob.exp().numpy()
    if columns.log_reward is not None:
        reward = columns.log_reward.numpy()
        finite = np.isfinite(reward)
        ends = np.quantile(reward[finite], [0.005, 1.0]) if finite.any() else (0.0, 1.0)
        plot = _plot(_LOG_R, "share of rows or of draws")
        for name, weight, color in (
            ("kept rows", np.full(len(reward), 1 / len(reward)), _GREY),
            ("drawn rows", share, COLORS[0]),
        ):  # fmt: skip
            value = reward[finite].clip(*ends)
            top, edge = np.histogram(value, _BINS, ends, weights=weight[finite])
            x, y = np.repeat(edge, 2), np.concatenate([[0], np.repeat(top, 2), [0]])
            plot.varea(x, 0 * y, y, fill_color=color, fill_alpha=0.25)
            plot.line(x, y, color=color, line_width=2, legend_label=name)
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
        yield Part("rewards", "Rewards of kept and drawn rows", _with_legend(plot), (
            "Draws that favour high rewards move the blue curve to the right. The first bar "
            "includes the lowest 0.5% of rows."))  # fmt: skip
    n = np.unique(np.geomspace(1, len(share), _N_POINTS).round().astype(int))
    plot = _plot("rows, most drawn first", "share of all draws", x_axis_type="log")
    drawn = np.sort(share)[::-1].cumsum()[n - 1]
    plot.line(n, drawn, color=COLORS[0], line_width=2.5, legend_label="this buffer")
    uniform = n / len(share)
    plot.line(n, uniform, color=_GREY, line_dash="dashed", line_width=2, legend_label="uniform")
    plot.yaxis.formatter = NumeralTickFormatter(format="0%")
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    yield Part("shares", "Concentration of draws", _with_legend(plot), (
        "Where the curve is high at the left, few rows get most draws. The effective number of "
        "rows drawn is 1 / sum p², where p is the probability of a row."))  # fmt: skip


def plot_curves(curves: Mapping[str, Sequence[Columns]]) -> Iterator[Part]:
    """Yield losses, modes and ages over reward calls, with a colour for each configuration."""
    several = any(len(runs) > 1 for runs in curves.values())
    spread = " Lines are means over runs, bands their range." if several else ""
    for name, (title, axis, text, lines) in _CURVES.items():
        known = [
            (kind if len(curves) == 1 else f"{group}, {kind}", color, dash, measured)
            for (group, runs), color in zip(curves.items(), COLORS * len(curves), strict=False)
            for (key, kind), dash in zip(lines.items(), ("solid", "dashed"), strict=False)
            if (measured := _measured(runs, key))
        ]
        if not known:
            yield Part(name, title, None, f"No {title.lower()} recorded.")
            continue
        lowest = min(y.min() for *_, measured in known for _, y in measured)
        scale = "log" if name == "losses" and lowest > 0 else "linear"
        plot = _plot("reward calls", axis, y_axis_type=scale)
        for label, color, dash, measured in known:
            x, y = measured[0]
            if len(measured) > 1:
                ends = max(x[0] for x, _ in measured), min(x[-1] for x, _ in measured)
                x = np.linspace(*ends, _N_POINTS)
                each = np.array([np.interp(x, *one) for one in measured])
                plot.varea(x, each.min(0), each.max(0), fill_color=color, fill_alpha=0.2)
                y = each.mean(0)
            label = f"{label}: {y[-1]:,.4g}"
            plot.line(x, y, color=color, line_dash=dash, line_width=2.5, legend_label=label)
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        yield Part(name, title, _with_legend(plot), text + spread)


def _missing(columns: RowColumns) -> str:
    if columns.log_reward is None:
        return "No rewards recorded: rows have no log_reward."
    return "" if columns.age is not None else "No ages recorded: rows have no policy_version."


def _measured(runs: Sequence[Columns], key: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return reward calls and values of a curve for each run that measured it."""
    found = []
    for run in runs:
        calls = np.asarray(run["reward_calls"], np.float64)
        value = np.asarray(run.get(key, np.full(len(calls), np.nan)), np.float64)
        if (known := np.isfinite(value)).any():
            found.append((calls[known], value[known]))
    return found


def _plot(x: str, y: str, *, tools: str = "", **options: Any) -> Any:
    """Return an empty figure, as wide as the page allows."""
    plot = figure(
        x_axis_label=x, y_axis_label=y, height=360, sizing_mode="stretch_width",
        tools=tools, toolbar_location="above" if tools else None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    if tools:
        plot.toolbar.active_drag = plot.select_one(BoxSelectTool)
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot


def _with_legend(plot: Any) -> Any:
    """Move the legend of a plot above it, where it covers nothing."""
    plot.add_layout(plot.legend[0], "above")
    plot.legend.location = "top_left"
    plot.legend.border_line_color = None
    plot.legend.padding = 0
    return plot


def _table_column(name: str, widest: int) -> TableColumn:
    title, width, digits = _TABLE[name]
    width = min(max(width, widest), 600) if name == "words" else width
    if digits is None:
        return TableColumn(field=name, title=title, width=width)
    form = NumberFormatter(format=digits)
    return TableColumn(
        field=name, title=title, width=width, formatter=form, default_sort="descending"
    )
