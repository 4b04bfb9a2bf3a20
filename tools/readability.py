"""Measure the sentences of pages and docstrings: ``python tools/readability.py [ROOT ...]``.

It needs textstat. For each checkout it prints, of the prose of README.md and docs/ and of all
docstrings of the package: the number of sentences, their mean length in words, the share of those
above 25 words, the share that opens in the passive ("Rows are stored ..."), and the Flesch reading
ease. Code, tables, headings and lists of arguments are left out.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import textstat

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NOT_PROSE = re.compile(r"^ *(\||#|:::|--8<--|!\[|>>>|- |\* |\d+\. |\w+: |\.\.\. )")
ENDS = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"])")
PASSIVE = re.compile(
    r"^(?:[\w`'-]+ ){1,5}?(?:is|are|was|were|be|been) (?:\w+ly )?(?:\w+ed|kept|made|drawn|written"
    r"|read|sent|taken|given|built|held|found|lost|left|chosen|known|shown|put|set|cut|run)\b"
)


def pages(root: Path) -> Iterator[str]:
    """Yield the prose of each page."""
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        yield FENCE.sub("", path.read_text())


def docstrings(root: Path) -> Iterator[str]:
    """Yield each docstring of the package up to its first section."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for path in sorted((root / "gfn_rb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield re.split(r"^[A-Z][a-z]+:$", inspect.cleandoc(text), flags=re.MULTILINE)[0]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, without links and marks."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not NOT_PROSE.match(line)]
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines))
        plain = re.sub(r":\w+:`~?([^`]*)`|``?([^`]*)``?", r"\1\2", plain)
        yield from (each.strip() for each in ENDS.split(plain) if len(each.split()) > 2)


def report(name: str, texts: Iterator[str]) -> str:
    """Return one line of figures about some texts."""
    found = [sentence for text in texts for sentence in sentences(text)]
    length = [len(sentence.split()) for sentence in found]
    share = sum(n > 25 for n in length) / len(found)
    passive = sum(bool(PASSIVE.match(sentence)) for sentence in found) / len(found)
    ease = textstat.flesch_reading_ease(" ".join(s.rstrip(".:;") + "." for s in found))
    return (
        f"{name}: {len(found)} sentences of {sum(length) / len(found):.1f} words, {share:.1%} "
        f"above 25, {passive:.1%} open in the passive, Flesch reading ease {ease:.0f}"
    )


if __name__ == "__main__":
    for root in map(Path, sys.argv[1:] or [Path(__file__).parents[1]]):
        print(report(f"{root} pages", pages(root)))
        print(report(f"{root} docstrings", docstrings(root)))
