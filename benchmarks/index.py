"""A table of all published figures: where they are, their command, commit, and if they hold now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.published.defaults import DEFAULTS, TUNED
from benchmarks.published.rows import ROWS
from benchmarks.published.runs import Result, load
from benchmarks.published.sceptic import SCEPTIC
from benchmarks.records import RESULTS, ROOT, is_current, read
from benchmarks.sceptic.loss_guided import LOSS_GUIDED
from benchmarks.sceptic.questions import QUESTIONS
from benchmarks.sceptic.rows import FROZEN

BLOCK = re.compile(r"(<!-- figures: ([^\n]+) -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)
BY_HAND = re.compile(r"Measured by hand on or before (\d{4}-\d\d-\d\d), commit\s(\w+):\s`([^`]+)`")
REPEATED = "igures from the pages of these benchmarks"
NOT_MEASURED = "not measured"
_SETTINGS = {"default", "options", "python"}  # in the first line of a table of no figures
_NUMBER = re.compile(r"\d\.\d|±|\b1/\d")
PAGES = {
    "frozen tasks": "[sceptic](sceptic.md)",
    "questions": "[experiments](experiments.md)",
    "loss-guided": "[experiments](experiments.md)",
}
"""Of rows that are not in docs/published.md."""
SETS: dict[str, Mapping[Any, Any]] = {
    "published protocols": ROWS,
    "default options": DEFAULTS,
    "tuned options": TUNED,
    "fifty lines": SCEPTIC,
    "frozen tasks": FROZEN,
    "questions": QUESTIONS,
    "loss-guided": LOSS_GUIDED,
}


class Entry(NamedTuple):
    """Where figures are, what measures them, its commits, and whether they hold now."""

    page: str
    figures: str
    command: str
    commits: str
    holds: str


def table(pages: Iterable[Path], folder: Path = RESULTS) -> str:
    """Return the table of all figures.

    Args:
        pages: pages of the documentation, README.md among them.
        folder: where the results lie.
    """
    head = "| page | figures | command | commit | holds now |"
    found = [*_of_readme(folder), *_of_pages(pages, folder), *_of_rows(folder)]
    return "\n".join([head, "| --- " * 5 + "|", *(f"| {' | '.join(e)} |" for e in found)])


def without_source(text: str) -> list[str]:
    """Return the first line of each table with three rows of figures that says no source.

    A source is a block of stored figures around the table, a link around the figure, or a sentence
    in the section: :data:`BY_HAND`, or :data:`REPEATED` for figures of other pages.
    """
    bare = re.sub(r"(<!-- made by|--8<-- \[start:results).*?(<!-- end -->|\[end:results)", "", text,
                  flags=re.DOTALL)  # fmt: skip
    bare = re.sub(r"\[[^\]]*\]\([^)]*\)", "", BLOCK.sub("", bare))  # a link leads to the source
    found = []
    for section in re.split(r"^#+ ", bare, flags=re.MULTILINE):
        if BY_HAND.search(section) or REPEATED in section:
            continue
        for each in re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE):
            lines = each.splitlines()
            are_settings = not _SETTINGS.isdisjoint(lines[0].lower().split())
            if not are_settings and sum(bool(_NUMBER.search(line)) for line in lines) >= 3:
                found.append(lines[0])
    return found


def _of_readme(folder: Path) -> Iterator[Entry]:
    """Yield the results of README.md, of the first screen and of its table."""
    rows = {
        "modes of TFBind8, 16,000 calls": ("learning", _records(folder, "learning", "tfbind8")),
        "time to load 1 GB": (
            "checkpoint",
            _records(folder, "checkpoint", "load into a new buffer"),
        ),
        "time to add 128 trajectories": ("interop", _records(folder, "interop", "best")),
    }
    for figures, (module, records) in rows.items():
        yield _entry("README", figures, f"benchmarks.{module}", records)
    for figures, known in {
        "goals of a 4-d grid": [DEFAULTS["grid_4d_16"]],
        "modes of TFBind8, 32,000 calls": [DEFAULTS["tfbind8"], SCEPTIC["tfbind8", "walked"]],
    }.items():
        results = [load(folder, row) for row in known]
        names = " ".join(row.name for row in known)
        yield Entry(
            "README",
            figures,
            f"`benchmarks.published {names}`",
            _commits(each.measured for runs in results for each in runs),
            "; ".join(dict.fromkeys(map(_state, results))),
        )


def _of_pages(pages: Iterable[Path], folder: Path) -> Iterator[Entry]:
    for page in pages:
        text, name = page.read_text(), _link(page)
        for match in BLOCK.finditer(text):
            benchmark, part, *_ = match[2].split(maxsplit=2)
            if benchmark not in ("index", "sceptic"):
                records = _records(folder, benchmark, part)
                if records == [None] and NOT_MEASURED in match[3].lower():
                    command = f"`benchmarks.{benchmark}`"
                    yield Entry(name, f"{benchmark}, {part}", command, "", NOT_MEASURED)
                    continue
                yield _entry(name, f"{benchmark}, {part}", f"benchmarks.{benchmark}", records)
        for date, commit, command in BY_HAND.findall(text):
            command = command.removeprefix("python -m ")
            yield Entry(name, "by hand", f"`{command}`", f"{commit}, {date}", "not known")


def _of_rows(folder: Path) -> Iterator[Entry]:
    """Yield the rows of ``benchmarks.published``, of each kind together those of one state."""
    for kind, rows in SETS.items():
        of: dict[str, list[tuple[str, list[Result]]]] = {}
        for row in rows.values():
            results = load(folder, row)
            of.setdefault(_state(results), []).append((row.name, results))
        for state, found in of.items():
            names = _short([name for name, _ in found])
            commits = _commits(each.measured for _, results in found for each in results)
            page = PAGES.get(kind, "[published](../published.md)")
            yield Entry(page, f"{kind}: {names}", "`benchmarks.published ROW`", commits, state)


def _state(results: Sequence[Result]) -> str:
    """Return whether the results of a row hold now."""
    if not results:
        return NOT_MEASURED
    again = [each.confirmed for each in results if each.confirmed and is_current(each.confirmed)]
    state = _holds([each.measured for each in results])
    if again and state != "yes":
        return f"yes: one seed repeated on {again[0]['date']}, {again[0]['commit']}"
    return state


def _short(names: Sequence[str]) -> str:
    """Return up to three names, and the number of the others."""
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _records(folder: Path, benchmark: str, part: str) -> list[Mapping[str, Any] | None]:
    if benchmark == "learning":
        return [(read(folder / f"learning_{part}.json") or {}).get("measured")]
    parts = (read(folder / f"{benchmark}.json") or {"parts": {}})["parts"]
    if part == "all" or benchmark == "diffusion":
        return [each["measured"] for each in parts.values()] or [None]
    return [parts[part]["measured"] if part in parts else None]


def _entry(
    page: str, figures: str, module: str, records: Sequence[Mapping[str, Any] | None]
) -> Entry:
    return Entry(page, figures, f"`{module}`", _commits(records), _holds(records))


def _commits(records: Iterable[Mapping[str, Any] | None]) -> str:
    known = [f"{each['commit']}, {each['date']}" if each else "not recorded" for each in records]
    return "; ".join(dict.fromkeys(known))


def _holds(records: Sequence[Mapping[str, Any] | None]) -> str:
    if all(each and is_current(each) for each in records):
        return "yes"
    return "older than the code"


def _link(page: Path) -> str:
    if page.name == "README.md":
        return "README"
    return f"[{page.stem}](../{page.relative_to(ROOT / 'docs')})"
