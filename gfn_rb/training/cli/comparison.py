"""The table that ``gfn-rb compare`` prints. Its import loads matplotlib, which takes a while."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from gfn_rb.training.cli.tables import aligned_lines
from gfn_rb.training.report.comparison import Comparison, Configuration


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with a row for each configuration, the best of each column in bold."""
    title, headings = _title(comparison), _headings(comparison)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(headings[0], overflow="fold")
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    best = [comparison.best(metric) for metric in comparison.metrics]
    for each, cells in zip(comparison.configurations, _rows(comparison), strict=True):
        bold = ["", "", *("bold" if each is one else "" for one in best), ""]
        table.add_row(*(Text(cell, style) for cell, style in zip(cells, bold, strict=True)))
    return table


def comparison_lines(comparison: Comparison) -> Iterable[str]:
    """Yield the same as aligned text, however wide."""
    yield _title(comparison)
    yield from aligned_lines([_headings(comparison), *_rows(comparison)])


def _title(comparison: Comparison) -> str:
    several = any(len(each.runs) > 1 for each in comparison.configurations)
    spread = ", mean ± standard deviation over seeds" if several else ""
    return f"{comparison.env} after {comparison.calls:,} reward calls{spread}"


def _headings(comparison: Comparison) -> list[str]:
    metrics = [metric.replace("_", " ") for metric in comparison.metrics]
    return ["configuration", "seeds", *metrics, "seconds"]


def _rows(comparison: Comparison) -> list[list[str]]:
    columns = [
        _column(comparison.configurations, metric, comparison.calls)
        for metric in (*comparison.metrics, "time_total")
    ]
    names = [[each.label, str(len(each.runs))] for each in comparison.configurations]
    return [[*name, *cells] for name, *cells in zip(names, *columns, strict=True)]


def _column(configurations: Iterable[Configuration], metric: str, calls: int) -> list[str]:
    """Return the cells of a column; counts and large numbers have fewer digits."""
    at = np.array([float(calls)])
    numbers = [tuple(float(value[0]) for value in each.at(metric, at)) for each in configurations]
    means = [mean for mean, _ in numbers if math.isfinite(mean)]
    is_count = metric in ("modes_found", "separated_modes", "distinct_reward_calls")
    largest = max(map(abs, means), default=0.0)
    digits = 1 if is_count or largest >= 100 else 2 if largest >= 10 else 4

    def cell(mean: float, spread: float) -> str:
        if math.isnan(mean):
            return "-"
        return f"{mean:,.{digits}f}" + ("" if math.isnan(spread) else f" ± {spread:,.{digits}f}")

    return [cell(*each) for each in numbers]
