"""The plots and the table of a page, as Bokeh models; Bokeh must be installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from bokeh import models
from bokeh.events import Reset, SelectionGeometry
from bokeh.palettes import Cividis256
from bokeh.plotting import figure

from gfn_rb.page.content import BufferContent
from gfn_rb.page.curves import AGE, CALLS, Columns, plots_of

# Distinct with any kind of colour vision (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#767676"
_BINS = 40
_N_TICKS = 20  # at most one for each place
_N_POINTS = 200  # of a mean over several runs, or of the concentration of draws
# Of the table: heading, lowest width in pixels, format of numbers.
_TABLE = {
    "words": ("object", 150, None),
    "reward": ("", 100, "{0,0.000}"),  # the heading is that of the rows
    "age": ("age, steps", 90, "{0,0}"),
    "draws": ("batches of 1,000", 150, "{0,0.0}"),
}
_STYLE = ":host { font-size: 13px; } .slick-header-column { font-weight: 600; }"
_SELECT = "Drag to select rows in both plots and in the table."
_DASHES = "solid", "dashed", "dotted", "dotdash", "dashdot"


class Section(NamedTuple):
    """A part of a page: a Bokeh model, or None where there is nothing to show, and a text."""

    name: str
    title: str
    text: str
    model: Any = None


def plot_objects(content: BufferContent) -> tuple[list[Section], list[models.CustomJS]]:
    """Return map, ages and table of rows, which share a selection, and scripts to start with."""
    columns, row = content.columns, content.row.numpy()
    points: dict[str, Any] = {"words": content.words}
    color: Any = COLORS[0]
    if columns.log_reward is not None:
        reward = points["reward"] = columns.log_reward.numpy()[row]
        # A few very low rewards must not leave one colour to all others.
        finite = reward[np.isfinite(reward)] if np.isfinite(reward).any() else [0.0]
        low, high = np.quantile(finite, [0.05, 1.0])
        scale = models.LinearColorMapper(palette=Cividis256, low=low, high=high)
        color = {"field": "reward", "transform": scale}
    if columns.age is not None:
        points["age"] = columns.age.numpy()[row].astype(np.int32)
    if content.draws is not None:
        points["draws"] = content.draws.numpy()[row] * 1000
    of_reward = content.reward_title
    listed = {name: column for name, column in _TABLE.items() if name in points}
    if "reward" in listed:
        listed["reward"] = of_reward, *_TABLE["reward"][1:]
    if content.position is not None:
        points["x"], points["y"] = content.position.numpy().astype(np.float32).T
    source = models.ColumnDataSource(points)
    listing = models.ColumnDataSource({name: [] for name in listed})  # by the selection
    fill = _script("fillTable", points=source, shown=listing, names=[*listed])
    listing.selected.js_on_change("indices", _script("markRows", points=source, shown=listing))

    def scatter(x: str, y: str, *titles: str) -> Any:
        plot = _plot(*titles, tools="box_select,lasso_select,tap,pan,wheel_zoom,reset,save")
        plot.toolbar.active_drag = plot.select_one(models.BoxSelectTool)
        tips = [(title, f"@{name}{form or ''}") for name, (title, _, form) in listed.items()]
        plot.add_tools(models.HoverTool(tooltips=tips))
        plot.scatter(
            x, y, source=source, size=5, fill_color=color, line_color=None, fill_alpha=0.8,
            nonselection_fill_alpha=0.06,
        )  # fmt: skip
        for event in (SelectionGeometry, Reset):
            plot.js_on_event(event, fill)
        return plot

    parts = []
    if "x" in points:
        places = scatter("x", "y", *content.axes)
        if "reward" in points:
            places.add_layout(models.ColorBar(color_mapper=scale, width=10), "right")
        colour = f"Colour is {of_reward}. " * ("reward" in points)
        text = f"Rows with similar features are near each other. {colour}{_SELECT}"
        parts.append(Section("map", "Map of objects", text, places))
    if "reward" not in points:
        parts.append(Section("", "", f"No rewards recorded: rows have no {content.reward_key}."))
    elif "age" not in points:
        parts.append(Section("", "", "No ages recorded: rows have no policy_version."))
    else:
        ages = scatter("age", "reward", AGE, content.reward_axis)
        text = f"Rows at the right are old. {_SELECT}"
        parts.append(Section("ages", "Age and reward", text, ages))
    table = models.DataTable(
        source=listing, columns=[_column(name, *listed[name], content.words) for name in listed],
        index_position=None, height=380, sizing_mode="stretch_width", autosize_mode="none",
        reorderable=False, stylesheets=[models.InlineStyleSheet(css=_STYLE)],
    )  # fmt: skip
    start = _script("start", plots=[part.model for part in parts if part.model], table=table)
    n = content.batch_size
    text = f"The last column tells how many of 1,000 batches of {n:,} rows contain the object."
    parts.append(Section("table", "Objects", f"A click on a heading sorts. {text}", table))
    return parts, [start, fill]


def plot_logos(content: BufferContent) -> Iterator[Section]:
    """Yield the letters of the best objects by place, as stacked bars of one scale."""
    top = max((logo.bits.sum(1).max() for logo in content.logos.values()), default=0.0)
    for i, (name, logo) in enumerate(content.logos.items()):
        order = logo.bits.argsort(1, kind="stable")  # the most frequent letter is at the top
        height = np.take_along_axis(logo.bits, order, 1)
        end = height.cumsum(1)
        place = np.arange(1, len(height) + 1)[:, None].repeat(height.shape[1], 1)
        bars = {
            "x": place, "bottom": end - height, "top": end, "middle": end - height / 2,
            "letter": np.array(logo.letters)[order],
            "color": np.array([*islice(cycle(COLORS), len(logo.letters))])[order],
        }  # fmt: skip
        seen = height > top / 100
        source = models.ColumnDataSource({key: each[seen] for key, each in bars.items()})
        legible = models.CDSView(filter=models.BooleanFilter((height > top / 15)[seen].tolist()))
        plot = _plot("place", "information, bits", y_range=(0, max(1.05 * top, 1e-3)))
        plot.vbar("x", 0.9, "top", "bottom", source=source, color="color", line_color="white")
        plot.text(
            "x", "middle", "letter", source=source, view=legible, text_align="center",
            text_baseline="middle", text_color="white", text_font_style="bold",
        )  # fmt: skip
        if len(height) <= _N_TICKS:
            plot.xaxis.ticker = models.SingleIntervalTicker(interval=1)
        text = (
            f"Of {logo.n:,} different objects. Where a bar is high, their letters agree; its parts "
            "are the shares of the letters."
        )
        place_on_page = f"logo_{i}" if len(content.logos) > 1 else "logo"
        yield Section(place_on_page, f"Letters of the {name}", text, plot)


def plot_draws(content: BufferContent) -> Iterator[Section]:
    """Yield the rewards of kept and of drawn rows, and how draws concentrate on few rows."""
    columns = content.columns
    if columns.log_prob is None:
        yield Section("", "", "No draws: the sampler cannot tell probabilities.")
        return
    share = columns.log_prob.exp().numpy()
    if columns.log_reward is not None and (finite := np.isfinite(columns.log_reward.numpy())).any():
        reward, uniform = columns.log_reward.numpy()[finite], np.full(len(share), 1 / len(share))
        ends = np.quantile(reward, [0.005, 1.0])
        plot = _plot(content.reward_axis, "share of rows or of draws")
        for name, weight, color in (
            ("kept rows", uniform, _GREY), ("drawn rows", share, COLORS[0])
        ):  # fmt: skip
            top, edge = np.histogram(reward.clip(*ends), _BINS, ends, weights=weight[finite])
            x, y = edge.repeat(2), np.pad(top.repeat(2), 1)
            plot.varea(x, 0 * y, y, fill_color=color, fill_alpha=0.25)
            plot.line(x, y, color=color, line_width=2, legend_label=name)
        plot.yaxis.formatter = models.NumeralTickFormatter(format="0.[0]%")
        yield Section("rewards", "Rewards of kept and drawn rows", (
            "Draws that favour high rewards move the blue curve to the right. The first bar "
            "includes the lowest 0.5% of rows."), _with_legend(plot))  # fmt: skip
    n = np.unique(np.geomspace(1, len(share), _N_POINTS).round().astype(int))
    plot = _plot("rows, most drawn first", "share of all draws", x_axis_type="log")
    for name, y, color, dash in (
        ("this buffer", np.sort(share)[::-1].cumsum()[n - 1], COLORS[0], "solid"),
        ("uniform draws", n / len(share), _GREY, "dashed"),
    ):
        plot.line(n, y, color=color, line_dash=dash, line_width=2.5, legend_label=name)
    plot.yaxis.formatter = models.NumeralTickFormatter(format="0%")
    plot.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    yield Section("shares", "Concentration of draws", (
        "Where the curve is high at the left, few rows get most draws. The effective number of "
        "rows drawn is 1 / sum p², where p is the probability of a row."),
        _with_legend(plot))  # fmt: skip


def plot_curves(curves: Mapping[str, Sequence[Columns]]) -> Iterator[Section]:
    """Yield what was measured over reward calls, with a colour for each configuration.

    Of columns that are not usual and have no finite number, only that is said.
    """
    several = any(len(runs) > 1 for runs in curves.values())
    spread = " Lines are means over runs, bands their range." if several else ""
    for name, (title, axis, text, lines) in plots_of(curves).items():
        known = [
            (kind if len(curves) == 1 else f"{group}, {kind}", color, dash, measured)
            for (group, runs), color in zip(curves.items(), COLORS * len(curves), strict=False)
            for (column, kind), dash in zip(lines.items(), _DASHES, strict=False)
            if (measured := [each for run in runs if len((each := _measured(run, column))[0])])
        ]
        if not known:
            if name.startswith("own_"):
                yield Section("", "", f"No curve of {title}: it has no finite number.")
            continue
        lowest = min(y.min() for *_, measured in known for _, y in measured)
        scale = "log" if name == "losses" and lowest > 0 else "linear"
        plot = _plot("reward calls", axis, y_axis_type=scale)
        for label, color, dash, measured in known:
            x, y = measured[0]
            if len(measured) > 1:
                ends = max(x[0] for x, _ in measured), min(x[-1] for x, _ in measured)
                x = np.linspace(*ends, _N_POINTS)
                values = np.array([np.interp(x, *one) for one in measured])
                plot.varea(x, values.min(0), values.max(0), fill_color=color, fill_alpha=0.2)
                y = values.mean(0)
            label = f"{label}: {y[-1]:,.4g}"
            plot.line(x, y, color=color, line_dash=dash, line_width=2.5, legend_label=label)
            if len(x) == 1:  # of which a line shows nothing
                plot.scatter(x, y, color=color, size=7)
        plot.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
        yield Section(name, title, text + spread, _with_legend(plot))


def _measured(run: Columns, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return reward calls and values where a column was measured."""
    calls = run[CALLS]
    value = run.get(column, np.full(len(calls), np.nan))
    known = np.isfinite(value) & np.isfinite(calls)
    return calls[known], value[known]


def _plot(x: str, y: str, *, tools: str = "", **options: Any) -> Any:
    """Return an empty figure, as wide as the page allows."""
    plot = figure(
        x_axis_label=x, y_axis_label=y, height=360, sizing_mode="stretch_width",
        tools=tools, toolbar_location="above" if tools else None, **options,
    )  # fmt: skip
    plot.toolbar.logo = None
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    return plot


def _with_legend(plot: Any) -> Any:
    """Move the legend of a plot above it, where it covers nothing."""
    plot.add_layout(plot.legend[0], "above")
    plot.legend[0].update(location="top_left", border_line_color=None, padding=0)
    return plot


def _column(
    name: str, title: str, width: int, form: str | None, words: Sequence[str]
) -> models.TableColumn:
    if form is None:
        longest = max(map(len, words), default=0)
        return models.TableColumn(field=name, title=title, width=max(width, min(8 * longest, 600)))
    number = models.NumberFormatter(format=form[1:-1])
    return models.TableColumn(
        field=name, title=title, width=width, formatter=number, default_sort="descending"
    )


def _script(function: str, **arguments: Any) -> models.CustomJS:
    """Return a call of a function of the page, with its arguments in order."""
    return models.CustomJS(args=arguments, code=f"{function}({', '.join(arguments)})")
