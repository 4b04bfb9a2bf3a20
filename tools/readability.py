"""Measure the sentences of pages and docstrings: ``python tools/readability.py [ROOT ...]``.

It needs textstat 0.7.3 with setuptools below 81. Of each checkout it reads the prose of README.md
and docs/, and of the docstrings of public names. Code, tables, headings and lists are left out.
"""

import ast
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
    r"|^There (?:is|are)\b"
)
PRONOUN = re.compile(r"^(?:It|This|That|They|These|Those) (?:\w+s|are|have|do|can|may|must)\b")


def pages(root: Path) -> Iterator[str]:
    """Yield the prose of each page."""
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        yield FENCE.sub("", path.read_text())


def docstrings(root: Path) -> Iterator[str]:
    """Yield the docstring of each public name, up to its first section."""
    for path in sorted((root / "gfn_rb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = ast.Module, ast.ClassDef, ast.FunctionDef
            if isinstance(node, kinds) and not getattr(node, "name", "").startswith("_"):
                yield re.split(r"(?m)^[A-Z][a-z]+:$", ast.get_docstring(node) or "")[0]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, without links and marks."""
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if not NOT_PROSE.match(line)]
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines))
        plain = re.sub(r":\w+:`~?([^`]*)`|``?([^`]*)``?", r"\1\2", plain)
        yield from (each.strip() for each in ENDS.split(plain) if len(each.split()) > 2)


for root in map(Path, sys.argv[1:] or [Path(__file__).parents[1]]):
    for texts in pages, docstrings:
        found = [sentence for text in texts(root) for sentence in sentences(text)]
        n, words = len(found), sorted(len(sentence.split()) for sentence in found)
        shares = [sum(bool(p.match(s)) for s in found) / n for p in (PASSIVE, PRONOUN)]
        ease = textstat.flesch_reading_ease(" ".join(s.rstrip(".:;") + "." for s in found))
        print(f"{root} {texts.__name__}: {n} sentences, mean {sum(words) / n:.1f} words, 95% up to")
        print(f"  {words[n * 95 // 100]} words, above 25 {sum(w > 25 for w in words) / n:.1%},")
        print(f"  passive {shares[0]:.1%}, pronoun {shares[1]:.1%}, Flesch reading ease {ease:.0f}")
