"""Run tests of another library twice, with its parts and with ours, and compare what passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Outcomes = dict[str, tuple[str, str]]
"""Outcome of each test, and why it failed or was skipped."""
Run = Callable[[bool, Sequence[str]], Outcomes]
"""Runs tests, with our parts if the first argument is true."""


class Record:
    """What became of each test."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take down a test that was run, or failed before or after."""
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr or "")
            self.outcomes[report.nodeid] = report.outcome, why


def compare(library: str, run: Run, arguments: Sequence[str]) -> None:
    """Run tests with the library's parts and with ours, each in a process, and print a table.

    Args:
        library: name of the library, as a column of the table.
        run: runs the tests, with our parts if its first argument is true.
        arguments: of the script, which are passed to ``run``.
    """
    parts = (library, "gfn_rb")
    if arguments[0] in parts:  # in a process of its own
        Path(arguments[1]).write_text(json.dumps(run(arguments[0] == parts[1], arguments[2:])))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for name in parts:
            into = Path(folder, f"{name}.json")
            subprocess.run([sys.executable, sys.argv[0], name, str(into), *arguments], check=True)
            found.append(json.loads(into.read_text()))
    print(table(library, *found))


def outcomes_of(arguments: Sequence[str]) -> Outcomes:
    """Run pytest in this process and return what became of each test."""
    import pytest

    record = Record()
    pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *arguments], plugins=[record])
    return record.outcomes


def table(library: str, theirs: Outcomes, ours: Outcomes) -> str:
    """Return, in Markdown, how many tests pass, by class; and the reasons of our failures."""
    count: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for parts, outcomes in ((library, theirs), ("gfn_rb", ours)):
        for test, (outcome, _) in outcomes.items():
            count[_class_of(test)][parts, outcome] += 1
    columns = [
        (parts, what) for parts in (library, "gfn_rb") for what in ("passed", "skipped", "failed")
    ]
    lines = [
        f"| tests | {' | '.join(' '.join(column) for column in columns)} |",
        f"| --- {'| --- ' * len(columns)}|",
    ]
    for name, n in [*sorted(count.items()), ("all", sum(count.values(), Counter()))]:
        if any(n[library, what] for what in ("passed", "failed")):
            lines.append(f"| {name} | {' | '.join(str(n[column]) for column in columns)} |")
    return "\n".join([*lines, *_reasons(theirs, ours)])


def _reasons(theirs: Outcomes, ours: Outcomes) -> list[str]:
    reasons: dict[str, list[str]] = defaultdict(list)
    for test, (outcome, why) in ours.items():
        if outcome == "failed":
            also = " (fails with both)" if theirs.get(test, ("",))[0] == "failed" else ""
            line = re.sub(r"0x\w+|\d+", "#", why.split("\n")[0])[:140]
            reasons[line + also].append(test.split("::", 1)[-1].split("[")[0])
    lines = ["", "| failures | of | why |", "| --- | --- | --- |"]
    for why, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {len(tests)} | {', '.join(sorted(set(tests)))} | {why} |")
    return lines


def _class_of(test: str) -> str:
    file, *within = test.split("[")[0].split("::")
    return "::".join([Path(file).stem, *within[:-1]])
