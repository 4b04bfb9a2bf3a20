"""The page of results: ours beside what was published."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import StrMethodFormatter

from benchmarks.published.defaults import CHOSEN_ON, DEFAULTS, TOO_COSTLY, TUNED
from benchmarks.published.rows import ROWS, Figure, Row
from benchmarks.published.runs import Result, ages, is_met, load, modes_at, typical
from benchmarks.published.sceptic import ARMS, SCEPTIC, TASKS

DOCS = Path(__file__).parent.parent.parent / "docs"
RESULTS, PROTOCOLS = DOCS / "published.md", DOCS / "published_protocols.md"
BEGIN, END = "<!-- made by benchmarks.published -->", "<!-- end -->"
PICTURE, CURVES = "published.png", "published_defaults.png"
PEERS = "published_peers.json"  # runs of others' code on the same machine, entered by hand


def write_page(folder: Path) -> None:
    """Write the table of results, its picture and the protocols into docs/.

    Args:
        folder: where the results lie.
    """
    known = {row: results for row in ROWS.values() if (results := load(folder, row))}
    lines = ["| task | figure | target | here | seeds | CPU s per run | |", "| --- " * 7 + "|"]
    for row in ROWS.values():
        lines += _lines(row, known.get(row, []))
    lines += ["", f"![modes found against reward calls](../benchmarks/results/{PICTURE})"]
    lines += ["", *_ages(known)]
    lines += ["", *_measured(folder / PEERS, known)]
    lines += ["", *_by_default(folder), "", *_beside_fifty_lines(folder)]
    _insert(RESULTS, lines)
    _insert(PROTOCOLS, _protocols())
    _draw(folder / PICTURE, {row: results for row, results in known.items() if row.n_modes})
    _draw_defaults(folder)


def _insert(page: Path, lines: list[str]) -> None:
    """Replace what lies between the two markers of a page."""
    before, *_, after = re.split(f"({BEGIN}|{END})", page.read_text())
    page.write_text("\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"]))


def _lines(row: Row, results: list[Result]) -> list[str]:
    """Return a line of the table for each figure of a row."""
    if not results:
        return [f"| {row.title} | {f.title} | {f.asked} | not run | | | |" for f in row.figures]
    seconds = f"{mean(result.cpu_seconds for result in results):,.0f}"
    lines = []
    title = row.title
    for figure in row.figures:
        verdict = ""
        if figure.bound is not None:
            verdict = "better" if is_met(figure, results) else "not reached"
        lines.append(
            f"| {title} | {figure.title} | {figure.asked} | {typical(figure, results)} | "
            f"{len(results)} | {seconds} | {verdict} |"
        )
        title = ""  # in the first line of the row alone
    return lines


def _ages(known: Mapping[Row, list[Result]]) -> list[str]:
    """Return when rows were measured, and which results are older than the code."""
    of: dict[str, list[str]] = {}
    for row, results in known.items():
        for age in ages(results):
            of.setdefault(age, []).append(f"`{row.name}`")
    if len(of) == 1:
        return [f"{next(iter(of))} That is true of all rows above."]
    return [f"- {', '.join(names)}: {age[0].lower()}{age[1:]}" for age, names in of.items()]


def _measured(path: Path, known: Mapping[Row, list[Result]]) -> list[str]:
    """Return a table of others' code, run on this machine, beside ours at equal calls."""
    if not path.exists():
        return []
    lines = [
        "The published code, run on the same machine at the same number of calls:",
        "",
        "| row | code and command | runs | calls | modes found | CPU s | here | CPU s |",
        "| --- " * 8 + "|",
    ]
    for peer in json.loads(path.read_text()):
        results = known.get(ROWS[peer["row"]], [])
        modes, seconds = (mean(run[key] for run in peer["runs"]) for key in ("modes", "seconds"))
        ours = "not run | "
        if results:
            found = mean(modes_at(result.curve, peer["calls"]) for result in results)
            spent = mean(result.cpu_seconds * peer["calls"] / result.calls for result in results)
            ours = f"{found:.1f} | {spent:,.0f}"
        lines.append(
            f"| {peer['row']} | {peer['code']} | {len(peer['runs'])} | {peer['calls']:,} | "
            f"{modes:.1f} | {seconds:,.0f} | {ours} |"
        )
    return lines


def _by_default(folder: Path) -> list[str]:
    """Return a table of what the default options reach, beside tuned ones at equal calls."""
    known = {task: found for task, row in DEFAULTS.items() if (found := load(folder, row))}
    if not known:
        return []
    titles = [figure.title for figure in DEFAULTS["tfbind8"].figures]
    lines = [
        "### Default options",
        "",
        "`python -m benchmarks.published defaults_TASK`; figures with tuned options in brackets, "
        "where the published rows have some. Those of "
        f"{', '.join(f'`{task}`' for task in TOO_COSTLY)} take over seven CPU minutes a run, and "
        "are not measured at these calls.",
        "",
        f"| TASK | task | calls | {' | '.join(titles)} | seeds | CPU s per run | |",
        "| --- " * 9 + "|",
    ]
    for task, results in known.items():
        row, tuned = DEFAULTS[task], load(folder, TUNED[task]) if task in TUNED else []
        cells = []
        for figure in row.figures:
            ours, others = (_cell(figure, each) for each in (results, tuned))
            cells.append(f"{ours} ({others})" if others else ours)
        seconds = mean(result.cpu_seconds for result in results)
        lines.append(
            f"| {task} | {row.title} | {row.calls:,} | {' | '.join(cells)} | {len(results)} | "
            f"{seconds:,.0f} | {'chosen on' if task in CHOSEN_ON else 'reported on'} |"
        )
    ages = _ages({DEFAULTS[task]: results for task, results in known.items()})
    picture = f"![curves of the default options](../benchmarks/results/{CURVES})"
    return [*lines, "", picture, "", *ages]


def _beside_fifty_lines(folder: Path) -> list[str]:
    """Return a table of runs whose buffer is fifty lines, beside those with the library's."""
    titles = ["the defaults", *(title for title, _, _ in ARMS.values())]
    lines = [
        "### Fifty lines of code",
        "",
        "The same loop and options, with `benchmarks/fifty_lines.py` as the buffer "
        "(`python -m benchmarks.published fifty_lines_ARM_TASK`): what it stores and draws. "
        "Tasks are some of those that the defaults were chosen on, whose runs take at most 90 CPU "
        "seconds.",
        "",
        f"| task | figure | {' | '.join(titles)} |",
        "| --- " * (2 + len(titles)) + "|",
    ]
    for task in TASKS:
        rows = [DEFAULTS[task], *(SCEPTIC[task, arm] for arm in ARMS)]
        found = [load(folder, row) for row in rows]
        n = min(map(len, found))  # the same seeds of all
        if not n:
            missing = [row.name for row, results in zip(rows, found, strict=True) if not results]
            lines.append(f"| {task} | not measured: {', '.join(missing)} {'| ' * len(titles)}|")
        for figure in DEFAULTS[task].figures[:2] if n else ():
            cells = [_cell(figure, results[:n]) for results in found]
            lines.append(f"| {task}, {n} seeds | {figure.title} | {' | '.join(cells)} |")
    return lines


def _cell(figure: Figure, results: list[Result]) -> str:
    """Return a figure of some runs; nothing where it was not measured."""
    measured = results and all(figure.key in result.figures for result in results)
    return typical(figure, results) if measured else ""


def _protocols() -> list[str]:
    """Return for each row what was published, its protocol, and what differs here."""
    lines: list[str] = []
    before = ""
    for row in ROWS.values():
        protocol = "the same" if row.protocol == before else row.protocol
        lines += [f"### `{row.name}`: {row.title}", ""]
        lines += [f"- Published: {row.published}", f"- Protocol: {protocol}"]
        lines += [f"- Here: {row.settings}", ""]
        before = row.protocol
    return lines[:-1]


def _draw_defaults(folder: Path) -> None:
    """Draw the first run of each task with default options: share of modes, total variation."""
    first = {row: found[0] for row in DEFAULTS.values() if (found := load(folder, row))}
    known = {row: run for row, run in first.items() if run.curve or run.fit}
    panels = panels_of(len(known), columns=4, size=(3.4, 2.5))
    for axes, (row, run) in zip(panels, known.items(), strict=True):
        axes.set_title(row.title.partition(" (")[0], loc="left", fontsize=9)
        if row.n_modes and run.curve:
            calls, modes = np.array(run.curve).T
            axes.plot(calls, modes / row.n_modes, color="#0072B2", label="share of modes found")
        if run.fit:
            axes.plot(*np.array(run.fit).T, color="#D55E00", label="total variation")
        axes.set_xlim(0, row.calls)
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:,.0f}k" if x else "0")
    if panels:
        panels[0].figure.supxlabel("reward calls", fontsize=10)
        lines = {line.get_label(): line for axes in panels for line in axes.lines}
        panels[0].figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=2)
        print_panels(panels, folder / CURVES)


def panels_of(n: int, columns: int, size: tuple[float, float]) -> list[Axes]:
    """Return so many panels of a new picture, in rows of some columns."""
    columns = max(1, min(columns, n))
    shape = (-(-n // columns) or 1, columns)
    picture = Picture(
        figsize=(size[0] * columns, size[1] * shape[0]), dpi=110, layout="constrained"
    )
    panels = list(picture.subplots(*shape, squeeze=False).flat)
    for axes in panels[n:]:
        axes.remove()
    for axes in panels[:n]:
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    return panels[:n]


def print_panels(panels: list[Axes], path: Path) -> None:
    """Write a picture."""
    FigureCanvasAgg(panels[0].figure).print_png(str(path))


def _draw(path: Path, known: dict[Row, list[Result]]) -> None:
    """Draw modes found against reward calls, a panel for each row: mean and range of its runs."""
    panels = panels_of(len(known), columns=2, size=(6.5, 4))
    for axes, (row, results) in zip(panels, known.items(), strict=True):
        length = min(len(result.curve) for result in results)
        curves = np.array([result.curve[:length] for result in results])
        calls, modes = curves[0, :, 0], curves[:, :, 1]
        axes.fill_between(calls, modes.min(0), modes.max(0), color="#0072B2", alpha=0.15, lw=0)
        axes.plot(calls, modes.mean(0), color="#0072B2", lw=2)
        for figure in row.figures:
            if figure.key == "modes_found" and figure.bound is not None:
                axes.axhline(figure.bound, color="#767676", lw=1, ls="--")
        axes.set_title(row.title, loc="left", fontsize=11)
        axes.set_xlabel("reward calls")
        axes.set_ylabel(f"modes found, of {row.n_modes:,}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if panels:
        print_panels(panels, path)
