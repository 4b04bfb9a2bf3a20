"""The page of results: ours beside what was published."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import StrMethodFormatter

from benchmarks.published.defaults import CHOSEN_ON, DEFAULTS, TUNED
from benchmarks.published.rows import ROWS, Row
from benchmarks.published.runs import Result, is_met, load, modes_at, typical

DOCS = Path(__file__).parent.parent.parent / "docs"
RESULTS, PROTOCOLS = DOCS / "published.md", DOCS / "published_protocols.md"
BEGIN, END = "<!-- made by benchmarks.published -->", "<!-- end -->"
PICTURE = "published.png"
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
    lines += ["", *_measured(folder / PEERS, known)]
    lines += ["", *_by_default(folder)]
    _insert(RESULTS, lines)
    _insert(PROTOCOLS, _protocols())
    _draw(folder / PICTURE, {row: results for row, results in known.items() if row.n_modes})


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
    lines = [
        "### Default options",
        "",
        "| `python -m benchmarks.published` | task | calls | figure | defaults | tuned | seeds | |",
        "| --- " * 8 + "|",
    ]
    for task, results in known.items():
        row, figure = DEFAULTS[task], DEFAULTS[task].figures[0]
        tuned = load(folder, TUNED[task]) if task in TUNED else []
        lines.append(
            f"| {row.name} | {row.title} | {row.calls:,} | {figure.title} | "
            f"{typical(figure, results)} | "
            f"{typical(figure, tuned) if tuned else ''} | {len(results)} | "
            f"{'chosen on' if task in CHOSEN_ON else 'reported on'} |"
        )
    return lines


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


def _draw(path: Path, known: dict[Row, list[Result]]) -> None:
    """Draw modes found against reward calls, a panel for each row: mean and range of its runs."""
    columns = max(1, min(2, len(known)))
    shape = (-(-len(known) // columns) or 1, columns)
    picture = Picture(figsize=(6.5 * shape[1], 4 * shape[0]), dpi=110, layout="constrained")
    panels = list(picture.subplots(*shape, squeeze=False).flat)
    for axes in panels[len(known) :]:
        axes.remove()
    for axes, (row, results) in zip(panels, known.items(), strict=False):
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
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(picture).print_png(str(path))
