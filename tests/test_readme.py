"""The code blocks of README.md and of docs/ run, and print what the pages say they print.

A block fenced as ``python`` runs in a fresh namespace, one fenced as ``python title="continued"``
in that of the block before it. A block fenced as ``text`` that directly follows is its whole
output, in a notebook but for its numbers. One line ``--8<-- "FILE"`` stands for a file, as MkDocs
reads it. The lines of a ``bash`` block are parsed (tests/test_commands.py). What cannot run here
says so in a title that readers see.
"""

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gfn_rb.training.cli import main
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics
from tools.notebooks import as_markdown

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs").rglob("*.ipynb"))
OWN = ROOT / "docs" / "tutorials" / "own_network.md"
NEEDED = {"docs/torchgfn.md": "gfn.gym"}  # by a page: what is installed for few versions of Python

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r'--8<-- "([^"\n]+)"\n')
ELSEWHERE = re.compile(r' title="not run here: [^"]+"$')


@dataclass
class Block:
    line: int  # of the first line of code, from 1
    code: str
    output: str | None = None


Example = list[Block]  # which share a namespace


def parse(markdown: str) -> list[Example]:
    examples: list[Example] = []
    end = None  # where the python block ended that output may follow
    for match in FENCE.finditer(markdown):
        info, body = match["info"].split(), match["body"]
        gap = markdown[end : match.start()] if end is not None else "no block before"
        if ELSEWHERE.search(match["info"]):
            info = []
        if file := INCLUDED.fullmatch(body):
            body = (ROOT / file[1]).read_text()
        end = None
        if info == ["python"] or info == ["python", 'title="continued"']:
            if len(info) == 1:
                examples.append([])
            line = markdown.count("\n", 0, match.start("body")) + 1
            assert examples, f"line {line}: nothing to continue"
            examples[-1].append(Block(line, body))
            end = match.end()
        elif info == ["text"] and not gap.strip():
            examples[-1][-1].output = body
        else:
            assert info[:1] != ["python"], f"unknown fence {match['info']!r}"
    return examples


def mismatches(example: Example, name: str = "README.md") -> Iterator[str]:
    """Run the blocks of an example in order; yield where the output is not the one given."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in example:
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, name, "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        same = without_numbers if name.endswith(".ipynb") else str
        if block.output is not None and same(printed.getvalue()) != same(block.output):
            yield (
                f"{name}:{block.line} printed\n{printed.getvalue()}\nwhere it says\n{block.output}"
            )


def without_numbers(text: str) -> str:
    """Return the words alone: a notebook keeps the numbers of the run that was saved."""
    return re.sub(r"[\d.,]+", "0", text)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


TEXTS = {**{page: page.read_text() for page in PAGES}, **{n: as_markdown(n) for n in NOTEBOOKS}}
EXAMPLES = [(name_of(page), example) for page, text in TEXTS.items() for example in parse(text)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty folder, and leave torch's random state as it was."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize(
    ("page", "example"),
    [
        pytest.param(
            *(name, each),
            id=f"{name}:{each[0].line}",
            marks=[pytest.mark.slow] if "num_collectors" in each[-1].code else [],
        )
        for name, each in EXAMPLES
    ],
)
def test_an_example_prints_what_its_page_says(
    page: str, example: Example, request: pytest.FixtureRequest
) -> None:
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
    is_compiled = any("torch.compile(" in block.code for block in example)
    if is_compiled and request.config.getoption("--all"):
        pytest.skip("checks of types are no part of a graph")
    found = list(mismatches(example, page))
    assert not found, "\n".join(found)


def test_the_links_of_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[0].read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_of_a_notebook_which_is_one_example_words_are_compared_and_numbers_are_not() -> None:
    assert [len(each) for name, each in EXAMPLES if name.endswith("own_loop.ipynb")] == [4]
    (example,) = parse(RIGHT.replace("text\n2", "text\n30"))
    assert len(list(mismatches(example, "README.md"))) == 1
    assert list(mismatches(example, "a.ipynb")) == []
    (example,) = parse(RIGHT.replace("text\n2", "text\ntwo"))
    assert len(list(mismatches(example, "a.ipynb"))) == 1


def test_every_example_is_on_a_page() -> None:
    included = {file for page in PAGES for file in INCLUDED.findall(page.read_text())}
    scripts = {name_of(path) for path in (ROOT / "examples").glob("*.py")}
    assert {file for file in included if not file.startswith("README.md:")} == scripts


def check(markdown: str) -> list[str]:
    return [text for example in parse(markdown) for text in mismatches(example)]


def section(title: str) -> dict[str, str]:
    """Return the code under a heading, by language."""
    text = OWN.read_text().split(f"## {title}\n")[1].partition("\n## ")[0]
    return {match["info"]: match["body"] for match in FENCE.finditer(text)}


@pytest.mark.slow
def test_ones_own_from_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its module and its commands, which are run as they stand, but for how long and how often."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = section("Your own configuration")
    Path("mine.py").write_text(code["python"])
    lines = [shlex.split(line, comments=True) for line in code["bash"].splitlines()]
    (_, *explain), (_, *first), (_, *again), (_, *second), (_, *compare) = lines
    quick = ["--batch-size", "4", "--eval-every", "1", "--checkpoint-every", "1"]

    with pytest.raises(SystemExit) as ended:
        main(explain)
    assert not ended.value.code
    assert "Points along each side." in capsys.readouterr().out

    assert main([*first, *quick, "--steps", "2"]) == 0
    at = again.index("--steps") + 1
    assert main([*again[:at], "4", *again[at + 1 :]]) == 0
    assert main([*second, *quick, "--steps", "4"]) == 0
    for words in (first, second):
        rows = read_metrics(RunFolder(Path(words[words.index("--out") + 1])).metrics)
        assert [int(row["step"]) for row in rows] == [*range(5)]
    capsys.readouterr()
    assert main(compare) == 0
    table = capsys.readouterr().out
    assert re.search(r"^mine:MyConfig +2 ", table, re.MULTILINE), table


RIGHT = "Some words.\n\n```python\nx = 1 + 1\nprint(x)\n```\n\n```text\n2\n```\n"


@pytest.mark.parametrize("output", ["3\n", "", "2\n\n", " 2\n", "2\n2\n"])
def test_wrong_output_is_found(output: str) -> None:
    wrong = RIGHT.replace("text\n2\n", f"text\n{output}")
    found = check(RIGHT + wrong + RIGHT)
    assert found == [f"README.md:14 printed\n2\n\nwhere it says\n{output}"]


@pytest.mark.parametrize(
    ("page", "error"),
    [
        (RIGHT + '```python title="continued"\nprint(x + 1)\n```\n```text\n3\n```\n', None),
        (RIGHT.replace("```\n\n```text\n2", "```\nFor instance:\n```text\n3"), None),
        ("```text\n1\n```\n" + RIGHT, None),
        ('```python title="not run here: it asks"\n1 / 0\n```\n```text\n2\n```\n', None),
        ("```bash\nfalse\n```\n```\nplain\n```\n```json\n{}\n```\n", None),
        (RIGHT + "```python\nprint(x)\n```\n", NameError),
        ('```python title="continued"\nprint(1)\n```\n', AssertionError),
        ("```python skip\nprint(1)\n```\n", AssertionError),
    ],
)
def test_a_page_is_run_or_refused(page: str, error: type[Exception] | None) -> None:
    if error is None:
        assert check(page) == []
        return
    with pytest.raises(error):
        check(page)


def test_a_failing_block_names_its_line_and_a_file_stands_for_its_content() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        check("# Title\n\n```python\nx = 0\n1 / x\n```\n")
    last = caught.traceback[-1]
    assert (str(last.path).endswith("README.md"), last.lineno + 1) == (True, 5)
    ((block,),) = parse('```python\n--8<-- "examples/mlp.py"\n```\n')
    assert block.code == (ROOT / "examples" / "mlp.py").read_text()
