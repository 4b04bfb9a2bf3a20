"""Run TorchRL's own replay-buffer tests with its writers and samplers replaced by this package's.

``python tools/torchrl_tests.py CHECKOUT/test/rb [pytest options]`` runs them twice, with TorchRL's
parts and with ours, and prints a table: how many tests of each class pass, and why those fail that
fail with ours. The tests need pytest-mock beside TorchRL.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from torchrl.data.replay_buffers import replay_buffers as buffers

import gfn_rb

PARTS = ("torchrl", "gfn_rb")
_Outcomes = dict[str, tuple[str, str]]


class MaxValueWriter(gfn_rb.RewardPrioritizedWriter):
    """TorchRL's constructor of the writer that keeps the items of highest key."""

    def __init__(self, rank_key: Any = None, reduction: str = "sum", **options: Any) -> None:
        super().__init__(("next", "reward") if rank_key is None else rank_key)


class RoundRobin(gfn_rb.FIFOWriter):
    """TorchRL's constructor of the writer that keeps the newest items."""

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable=compilable, track_generations=track_generations)


class Prioritized(gfn_rb.PrioritySampler):
    """TorchRL's constructor of the sampler that draws by priority."""

    def __init__(
        self,
        max_capacity: int,
        alpha: Any,
        beta: Any,
        eps: float = 1e-8,
        dtype: Any = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(alpha=float(alpha), beta=float(beta), eps=eps)
        self.reduction = reduction


OURS = {
    "RoundRobinWriter": RoundRobin,
    "TensorDictRoundRobinWriter": RoundRobin,
    "TensorDictMaxValueWriter": MaxValueWriter,
    "PrioritizedSampler": Prioritized,
}
# Where tests look for parts, and where buffers look for those they are made of by default.
_PUBLIC = ["torchrl.data", "torchrl.data.replay_buffers"]
_PUBLIC += [f"torchrl.data.replay_buffers.{name}" for name in ("writers", "samplers")]
_DEFAULTS = {
    buffers.base: ("RoundRobinWriter",),
    buffers.tensordict: ("TensorDictRoundRobinWriter",),
    buffers.prioritized: ("PrioritizedSampler",),
    buffers.prioritized_tensordict: ("PrioritizedSampler", "TensorDictRoundRobinWriter"),
}


def swap() -> None:
    """Put our parts under TorchRL's names."""
    places: dict[Any, Any] = {sys.modules[name]: OURS for name in _PUBLIC}
    for module, names in {**places, **_DEFAULTS}.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, OURS[name])


class Record:
    """What became of each test."""

    def __init__(self) -> None:
        self.outcomes: _Outcomes = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take down a test that was run, or failed before or after."""
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr or "")
            self.outcomes[report.nodeid] = report.outcome, why


def run(parts: str, into: str, arguments: list[str]) -> None:
    """Run the tests in this process, with the parts of one of the two."""
    import pytest

    if parts == PARTS[1]:
        swap()
    record = Record()
    pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", *arguments], plugins=[record])
    Path(into).write_text(json.dumps(record.outcomes))


def table(theirs: _Outcomes, ours: _Outcomes) -> str:
    """Return, in Markdown, how many tests pass, by class; and the reasons of our failures."""
    count: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for parts, outcomes in zip(PARTS, (theirs, ours), strict=True):
        for test, (outcome, _) in outcomes.items():
            count[_class_of(test)][parts, outcome] += 1
    lines = [
        "| tests | TorchRL's parts pass | are skipped | ours pass | are skipped | ours fail |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, n in [*sorted(count.items()), ("all", sum(count.values(), Counter()))]:
        if n["torchrl", "passed"] + n["torchrl", "failed"]:
            cells = [n[parts, what] for parts in PARTS for what in ("passed", "skipped")]
            cells.append(n["gfn_rb", "failed"])
            lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    reasons: dict[str, list[str]] = defaultdict(list)
    for test, (outcome, why) in ours.items():
        if outcome == "failed":
            line = re.sub(r"0x\w+|\d+", "#", why.split("\n")[0])[:140]
            reasons[line].append(test.split("::", 1)[1].split("[")[0])
    lines += ["", "| failures | of | why |", "| --- | --- | --- |"]
    for why, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {len(tests)} | {', '.join(sorted(set(tests)))} | {why} |")
    return "\n".join(lines)


def _class_of(test: str) -> str:
    file, *within = test.split("[")[0].split("::")
    return "::".join([Path(file).stem, *within[:-1]])


if __name__ == "__main__":
    if sys.argv[1] in PARTS:
        run(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for parts in PARTS:
                into = f"{folder}/{parts}.json"
                subprocess.run([sys.executable, __file__, parts, into, *sys.argv[1:]], check=True)
                found.append(json.loads(Path(into).read_text()))
            print(table(*found))
