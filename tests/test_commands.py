"""The commands in README.md and docs/ exist, and take the options that they are given there.

Nothing is run: ``gfn-rb`` parses its own lines, whatever starts it; of the others it is seen what
they lead to. A line of a ``bash`` block that is of no known kind fails, unless its block says in
a title that it is not run here. What ``mine`` holds is run whole (tests/test_readme.py).
"""

import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from test_readme import ELSEWHERE, FENCE, PAGES, ROOT

from gfn_rb.errors import ArgumentError
from gfn_rb.training.cli.commands import parse

LAUNCHERS = ("gfn-rb", "mpiexec", "srun", "torchrun")
SHARED = ROOT / "benchmarks" / "timing.py"  # options that benchmarks have in common


def commands(markdown: str) -> list[str]:
    """The lines of the blocks fenced as ``bash``, without comments."""
    blocks = [
        match["body"]
        for match in FENCE.finditer(markdown)
        if match["info"].split()[:1] == ["bash"] and not ELSEWHERE.search(match["info"])
    ]
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [shlex.join(words) for words in lines if words]


def check(command: str) -> None:
    """Raise unless a command would find what it names."""
    words = shlex.split(command)
    program, *rest = words
    own = command.replace("-m gfn_rb", "gfn-rb").partition("gfn-rb")[2]
    if program in LAUNCHERS and own:
        parsed(own)
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[:2] == ["pip", "install"]:
        (extra,) = re.findall(r"\[(\w+)\]", command) or [""]
        project = (ROOT / "pyproject.toml").read_text()
        assert not extra or re.search(rf"^{extra} = \[", project, re.MULTILINE)
    elif "python" in words:
        check_program(words[words.index("python") + 1 :])
    else:
        raise AssertionError(f"nobody knows how to check: {command}")


@cache
def parsed(own: str) -> None:
    parse(shlex.split(own))  # some tenths of a second


def check_program(words: list[str]) -> None:
    if words[:2] == ["-m", "mpi4py"]:
        words = words[2:]
    if words[0] == "-m":
        spec = importlib.util.find_spec(words[1])
        assert spec is not None
        assert spec.origin is not None
        file = Path(spec.origin)
    else:
        file = ROOT / words[0] if "/" in words[0] else ROOT / "examples" / words[0]  # saved as this
    options = {word for word in words[1:] if word.startswith("--")}
    sources = [*file.parent.glob("*.py")] if file.name == "__init__.py" else [file, SHARED]
    known = "".join(source.read_text() for source in sources)
    assert not [option for option in options if f'"{option}"' not in known]


LINES = sorted({line for page in PAGES for line in commands(page.read_text())})


@pytest.mark.parametrize("command", [line for line in LINES if " mine:" not in line])
def test_a_documented_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(command)


def test_the_lines_are_found() -> None:
    assert {"make test", "gfn-rb resume runs/grid"} <= set(LINES)
    assert commands('```bash title="not run here: it asks"\nrm -r /\n```\n') == []


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "pip install '.[nothing]'",
        "python -m benchmarks.learning --nothing",
        "gfn-rb train nothing",
        "mpiexec -n 2 gfn-rb train tfbind8 --nothing",
        "sudo make test",
    ],
)
def test_a_command_that_leads_nowhere_is_found(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ArgumentError, AssertionError, OSError, SystemExit)):
        check(command)
