"""Write the figures of README.md and docs/ from stored results: ``python -m benchmarks.pages``.

A table between ``<!-- figures: BENCHMARK PART [SUFFIX] -->`` and ``<!-- end -->`` is that of a part
of ``benchmarks/results/BENCHMARK.json``, of the rows whose names end in SUFFIX. Of
``learning``, PART is an environment; of ``sceptic``, a table of ``benchmarks.sceptic.page``; of
``index``, "all". Tables of ``many_ranks`` have times, that of ``figures`` what ``make figures``
found, of ``training`` CPU times of steps. Of ``diffusion``, PART is a share of the paper's
iterations. A part that is not stored keeps its table, which must say that it is older than the
code, or that it is not measured. A file that cannot be read, or is of a newer format, is named in a
line, and no page is written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import diffusion, index, make_train
from benchmarks.index import NOT_MEASURED
from benchmarks.published.defaults import DEFAULTS
from benchmarks.published.page import PEERS
from benchmarks.published.runs import Result, load, modes_at, spread
from benchmarks.published.sceptic import SCEPTIC
from benchmarks.records import RESULTS, ROOT, RecordError, age, read
from benchmarks.sceptic import page as sceptic

OLD = "Measured before results were stored: older than the code."
QUIET = 2.5  # load of the machine
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
_RESULTS = re.compile(
    r"(<!-- --8<-- \[start:results\] -->\n)(.*?)(<!-- --8<-- \[end:results\])", re.S
)


_COMPARISON = re.compile(
    r"(<!-- --8<-- \[start:comparison\] -->\n)(.*?)(<!-- --8<-- \[end:comparison\])", re.DOTALL
)


def main() -> None:
    """Write every page whose figures have changed; none if a file of results cannot be read."""
    unreadable = [*_unreadable(RESULTS)]
    if unreadable:
        sys.exit("\n".join(unreadable))
    for page in PAGES:
        text = page.read_text()
        if (new := rendered(text)) != text:
            page.write_text(new)
            print(f"wrote {page.relative_to(ROOT)}")


def _unreadable(folder: Path) -> Iterator[str]:
    """Yield a line for each file of results that cannot be read."""
    for path in sorted(folder.glob("*.json")):
        try:
            read(path)
        except RecordError as error:
            yield str(error)


def rendered(text: str) -> str:
    """Return the text of a page with the figures that are stored."""

    def block(match: re.Match[str]) -> str:
        benchmark, part, *suffix = match[2].split(maxsplit=2)
        return f"{match[1]}{table_of(benchmark, part, *suffix) or match[3]}{match[4]}"

    text = index.BLOCK.sub(block, text)
    text = _COMPARISON.sub(lambda m: f"{m[1]}{comparison()}\n{m[3]}", text)
    return _RESULTS.sub(lambda m: f"{m[1]}\n{readme_table()}\n{m[3]}", text)


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the names and the content of the blocks of a page."""
    return [(match[2], match[3]) for match in index.BLOCK.finditer(text)]


def table_of(benchmark: str, part: str, suffix: str = "", folder: Path = RESULTS) -> str:
    """Return the table of a part of a benchmark, empty if it is not stored.

    Args:
        benchmark: its name.
        part: one of its parts.
        suffix: end of the names of the rows to show, which is left out.
        folder: where the results lie.
    """
    if benchmark == "index":
        return index.table(PAGES, folder)
    if benchmark == "sceptic":
        return sceptic.table_of(part, folder)
    if benchmark == "learning":
        return _learning_table(read(folder / f"learning_{part}.json"))
    report = read(folder / f"{benchmark}.json") or {"parts": {}}
    if benchmark == "diffusion":
        return _diffusion_table(part, report["parts"])
    if part == "all":
        return _list_of_ratios(report["parts"])
    stored = report["parts"].get(part)
    if stored is None:
        return ""
    if benchmark in _TABLES:
        return _TABLES[benchmark](stored)
    rows: dict[str, dict[int, float]] = {}
    bounds: dict[str, list[float]] = {}
    for each in stored["results"]:
        if each["name"].endswith(suffix):
            name = each["name"].removesuffix(suffix).rstrip(", ")
            rows.setdefault(name, {})[each["capacity"]] = each["ratio"]
            if each["bound"] is not None:
                bounds.setdefault(name, []).append(each["bound"])
    sizes = sorted({size for row in rows.values() for size in row})
    head = f"| | {' | '.join(f'{size:,}' for size in sizes)} | target |"
    lines = [head, "| --- " * (2 + len(sizes)) + "|"]
    for name, row in rows.items():
        cells = " | ".join(ratio(row[size]) if size in row else "" for size in sizes)
        target = ", ".join(map(ratio, dict.fromkeys(bounds.get(name, []))))
        lines.append(f"| {name} | {cells} | {target} |")
    return "\n".join([*lines, "", age(stored["measured"]) + _beside(stored["measured"])])


def _list_of_ratios(parts: Mapping[str, Any]) -> str:
    """Return the ratios of all parts of a benchmark that has one size."""
    lines = ["| | time relative to it |", "| --- | --- |"]
    ages: dict[str, None] = {}
    for stored in parts.values():
        lines += [f"| {each['name']} | {ratio(each['ratio'])} |" for each in stored["results"]]
        ages[age(stored["measured"]) + _beside(stored["measured"])] = None
    return "\n".join([*lines, "", *ages]) if parts else ""


def _beside(record: Mapping[str, Any]) -> str:
    """Return a sentence about other programs, which slow both sides of a ratio, if there were some.

    One process of one thread makes a load of 1.
    """
    load = record.get("load", 0)
    return f" Other programs ran beside (load {load:.0f})." if load >= QUIET else ""


def _train_table(stored: Mapping[str, Any]) -> str:
    """Return what ``make train`` finds, over its seeds."""
    cells = [
        spread([each[name] for each in stored["results"]], digits)
        for name, digits in make_train.FIGURES.items()
    ]
    lines = [
        "| modes found | total variation | error of log Z | CPU s | seeds |",
        "| --- " * 5 + "|",
        f"| {' | '.join(cells)} | {len(stored['results'])} |",
    ]
    return "\n".join([*lines, "", age(stored["measured"])])


def _times_table(stored: Mapping[str, Any]) -> str:
    """Return the times of calls, a column for each number of ranks."""
    rows: dict[str, dict[int, str]] = {}
    for each in stored["results"]:
        rows.setdefault(each["name"], {})[each["capacity"]] = duration(each["ours"])
    sizes = sorted({size for row in rows.values() for size in row})
    lines = [f"| | {' | '.join(f'{size:,} ranks' for size in sizes)} |"]
    lines.append("| --- " * (1 + len(sizes)) + "|")
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(row.get(size, '') for size in sizes)} |")
    return "\n".join([*lines, "", age(stored["measured"])])


def _steps_table(stored: Mapping[str, Any]) -> str:
    """Return the CPU time of 1,000 training steps of each library, and ours relative to theirs."""
    lines = ["| task | replay | gfn_rb | torchgfn | gfnx |", "| --- " * 5 + "|"]
    for each in stored["results"]:
        rates = each["steps_per_cpu_second"]
        cells = [f"{1e3 / rates['ours']:.1f}"]
        for peer in ("torchgfn", "gfnx"):
            cells.append(
                f"{1e3 / rates[peer]:.1f} ({ratio(rates[peer] / rates['ours'])})"
                if peer in rates
                else NOT_MEASURED
            )
        lines.append(
            f"| {each['task']} | {'yes' if each['replay'] else 'no'} | {' | '.join(cells)} |"
        )
    return "\n".join([*lines, "", age(stored["measured"]) + _beside(stored["measured"])])


def _diffusion_table(share: str, parts: Mapping[str, Any]) -> str:
    """Return errors and distances of diffusion samplers, beside those of the paper.

    Args:
        share: of the paper's iterations.
        parts: what is stored, by task, run and iterations.
    """
    n = round(float(share) * diffusion.ITERATIONS)
    of = {run: f"{run}, {n} iterations" for run in ("published", "ours")}
    lines = [
        "| task | run | log Z - ELBO | log Z - importance | 2-Wasserstein | CPU s | seeds |",
        "| --- " * 7 + "|",
    ]
    ages: dict[str, None] = {}
    for task, theirs in diffusion.PUBLISHED.items():
        lines.append(f"| {task} | paper, {diffusion.ITERATIONS:,} | {' | '.join(theirs)} | | 5 |")
        for run, name in of.items():
            stored = parts.get(f"{task}, {name}")
            cells = [NOT_MEASURED, *[""] * 4]
            if stored is not None:
                found = stored["results"]
                cells = [spread([each[key] for each in found], 2) for key in diffusion.FIGURES]
                cells += [f"{found[0]['cpu_seconds']:.0f}", f"{len(found)}"]
                ages[age(stored["measured"])] = None
            lines.append(f"| | {run}, {n:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *ages]) if ages else ""


def _last_run(stored: Mapping[str, Any]) -> str:
    """Return what ``make figures`` compared the last time, and what was not in its range."""
    head = ["command", "figures compared", "left their range", "quicker", "CPU s"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    named = []
    for each in stored["results"]:
        left, quicker = each["left"], each.get("quicker", [])  # results before it have none
        numbers = [each["compared"], len(left), len(quicker), each["cpu_seconds"]]
        lines.append(f"| `{each['name']}` | {' | '.join(map(str, numbers))} |")
        named += [f"- {line}" for line in [*left, *quicker]]
    facts = age(stored["measured"]) + _beside(stored["measured"])
    return "\n".join([*lines, "", *named, *[""] * bool(named), facts])


def duration(microseconds: float) -> str:
    """Return a time with two digits and its unit."""
    for unit in ("us", "ms", "s"):
        if microseconds < 999.5 or unit == "s":
            break
        microseconds /= 1e3
    return f"{float(f'{microseconds:.2g}'):g} {unit}"


LEARNED = {"total_variation": "total variation", "top_100_score": "best 100, mean score"}
"""What a table of learning has beside modes: the first of them that was measured."""


def _learning_table(report: Mapping[str, Any] | None) -> str:
    """Return modes and a second figure of each arm after some reward calls."""
    if report is None:
        return ""
    second = next(key for key in LEARNED if key in report["results"][0])
    of: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for each in report["results"]:
        of.setdefault((each["reward_calls"], each["arm"]), []).append(each)
    lines = [f"| reward calls | | modes found | {LEARNED[second]} | seeds |", "| --- " * 5 + "|"]
    for (calls, arm), runs in of.items():
        modes = spread([run["modes_found"] for run in runs])
        other = spread([run[second] for run in runs], 4)
        lines.append(f"| {calls:,} | {arm} | {modes} | {other} | {len(runs)} |")
    return "\n".join([*lines, "", age(report.get("measured"))])


def ratio(value: float) -> str:
    """Return a ratio as the pages write it: up to a tenth as 1/n."""
    if value > 0.1:
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return f"1/{1 / value:.0f}"


_TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "make_train": _train_table,
    "many_ranks": _times_table,
    "figures": _last_run,
    "training": _steps_table,
}
"""Of benchmarks whose results are no ratios alone."""


# README.


def readme_table(folder: Path = RESULTS) -> str:
    """Return the results of README.md."""
    head = ["| measure | compared with | gfn_rb | command |", "| --- " * 4 + "|"]
    made = (row(folder) for row in README_ROWS)
    rows = [f"| {' | '.join(cells)} |" for cells in made]
    return "\n".join([*head, *rows]) + "\n"


CALLS = 16_000
ARMS = {"same": "no replay", "steps": "no replay, as many steps", "ours": "top, rank"}


def comparison(folder: Path = RESULTS) -> str:
    """Return what README.md begins with: what replay does on TFBind8, in a sentence."""
    of = _modes_by_arm(folder)
    found = {name: f"{mean(of[arm]):.0f}" if arm in of else "?" for name, arm in ARMS.items()}
    return (
        f"With replay, a GFlowNet finds {found['ours']} of the 327 modes of TFBind8 in {CALLS:,} "
        f"reward calls. Without replay it finds {found['same']},\nand {found['steps']} if it takes "
        "as many optimizer steps (`python -m benchmarks.learning`)."
    )


def _modes_by_arm(folder: Path) -> dict[str, list[float]]:
    report = read(folder / "learning_tfbind8.json")
    of: dict[str, list[float]] = {}
    for each in report["results"] if report else ():
        if each["reward_calls"] == CALLS:
            of.setdefault(each["arm"], []).append(each["modes_found"])
    return of


def _learning(folder: Path) -> Sequence[str]:
    of = _modes_by_arm(folder)
    cell = {name: spread(of[arm]) if arm in of else NOT_MEASURED for name, arm in ARMS.items()}
    return (
        f"modes of TFBind8 after {CALLS:,} reward calls, {len(of.get(ARMS['ours'], ()))} seeds",
        f"no replay: {cell['same']}; no replay, as many optimizer steps: {cell['steps']}",
        f"**{cell['ours']}**",
        "`python -m benchmarks.learning`",
    )


def _grid(folder: Path) -> Sequence[str]:
    results = load(folder, DEFAULTS["grid_4d_16"])
    (peer,) = (each for each in read(folder / PEERS) or () if each["row"] == "grid_4d_16")
    calls, theirs = peer["calls"], [run["modes"] for run in peer["runs"]]
    ours = [modes_at(result.curve, calls) for result in results]
    return (
        f"goals of 81 on a 4-d deceptive grid after {calls:,} calls; options were chosen on it",
        f"prioritized replay, published code, {len(theirs)} run: {spread(theirs, 0)}",
        f"**{spread(ours)}**" if ours else NOT_MEASURED,
        "`python -m benchmarks.published defaults_grid_4d_16 --seeds 5`",
    )


def _sceptic(folder: Path) -> Sequence[str]:
    ours, theirs = load(folder, DEFAULTS["tfbind8"]), load(folder, SCEPTIC["tfbind8", "walked"])
    n = min(len(ours), len(theirs))
    mine, its = _better_in_bold(_modes(ours[:n]), _modes(theirs[:n]))
    return (
        f"modes of TFBind8 after 32,000 calls, {n} seeds",
        f"the same draw in fifty lines of Python: {its}",
        mine,
        "`python -m benchmarks.published defaults_tfbind8 fifty_lines_walked_tfbind8 --seeds 5`",
    )


def _better_in_bold(*found: Sequence[float]) -> list[str]:
    """Return two figures, the higher one bold if it is so by more than both spreads."""
    if not all(found):
        return [NOT_MEASURED] * 2
    first, second = found
    apart = mean(first) - mean(second)
    is_clear = abs(apart) > max(stdev(each) if len(each) > 1 else 0.0 for each in found)
    is_best = [is_clear and apart > 0, is_clear and apart < 0]
    return [
        f"**{spread(f)}**" if bold else spread(f) for f, bold in zip(found, is_best, strict=True)
    ]


def _load(folder: Path) -> Sequence[str]:
    name = "load_checkpoint, against torch.load"
    found = _ratio_of(folder, "checkpoint", "load into a new buffer", name)
    command = "`python -m benchmarks.checkpoint`"
    return "time to load 1 GB, checksums verified", "`torch.load`: 1", found, command


def _interop(folder: Path) -> Sequence[str]:
    found = _ratio_of(folder, "interop", "best", "add, by reward", 100_000)
    measure = "time to add 128 trajectories to 100,000, best kept, by torchgfn's interface"
    return measure, "torchgfn 2.4.1: 1", found, "`python -m benchmarks.interop`"


README_ROWS: Iterable[Callable[[Path], Sequence[str]]] = (
    *(_learning, _grid, _sceptic, _load, _interop),
)


def _modes(results: Sequence[Result]) -> list[float]:
    return [result.figures["modes_found"] for result in results]


def _ratio_of(
    folder: Path, benchmark: str, part: str, name: str, capacity: int | None = None
) -> str:
    report: Mapping[str, Any] = read(folder / f"{benchmark}.json") or {"parts": {}}
    for each in report["parts"].get(part, {"results": []})["results"]:
        if each["name"] == name and capacity in (None, each["capacity"]):
            return f"**{ratio(each['ratio'])}**" if each["high"] < 1 else ratio(each["ratio"])
    return NOT_MEASURED


if __name__ == "__main__":
    main()
