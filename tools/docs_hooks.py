"""What ``make docs`` has MkDocs do besides: tables of names, links, pictures of results, checks."""

from __future__ import annotations

import re
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # MkDocs does not look there
from tools.notebooks import as_markdown  # noqa: E402

RESULTS = "benchmarks/results"
LINKED = "parts.md"  # the page on which every public name is a link
NAME = re.compile(r"`(\w+)(\([^`]*\))?`")
# What Sphinx would read in docstrings, and Markdown shows as it is.
SPHINX = (
    (re.compile(r":(?:class|func|meth|mod|attr|data|math):<code>~?"), "<code>"),
    (re.compile(r"<p>\.\. math:: (.*?)</p>", re.DOTALL), r"<p><code>\1</code></p>"),
    (re.compile(r"::</p>"), ":</p>"),
)
# Elements by which a page would load something from another host.
ELSEWHERE = re.compile(
    r'<(?:script|img|iframe)[^>]+src="(?:https?:)?//[^"]+|<link[^>]+stylesheet[^>]+//[^"]+'
)


class Decorated(griffe.Extension):
    """Show presets with the docstring that ``with_options`` gives them."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the docstring by the one that the function has once it is imported."""
        if any(each.callable_path.endswith("with_options") for each in func.decorators):
            import gfn_rb

            func.docstring.value = getattr(gfn_rb, func.name).__doc__


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures that benchmarks draw, which lie beside their figures, and notebooks."""
    for path in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        page = path.relative_to(ROOT / "docs").with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=as_markdown(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that hold on GitHub as they are, and add what is generated."""
    source = page.file.src_uri
    if source.startswith("api/"):
        module = Path(source).stem
        return markdown.replace(f"::: {module}\n", reference(module))
    if source == LINKED:
        return re.sub(NAME, linked, markdown)
    for there, here in (
        (f"](../{RESULTS}/", "](results/"),
        (f"](../../{RESULTS}/", "](../results/"),
        (".ipynb)", ".md)"),
    ):
        markdown = markdown.replace(there, here)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Show names and equations in docstrings as code, blocks of code as such, pictures as links."""
    html = re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
    for pattern, replacement in SPHINX:
        html = pattern.sub(replacement, html)
    return html


def on_post_build(config: Any) -> None:
    """Raise unless every public name has a place in the reference and no page loads from afar."""
    site = Path(config["site_dir"])
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = [place for place in places().values() if place not in known]
    if missing:
        raise PluginError(f"the reference lacks {', '.join(missing)}")
    for path in site.rglob("*.html"):
        if found := ELSEWHERE.search(path.read_text()):
            raise PluginError(f"{path.name} loads from another host: {found[0]}")


def reference(module: str) -> str:
    """Return the page of a module: its docstring, a table of its names, those described here."""
    names = public_names(module)
    lines = [f"::: {module}", "    options:", "      members: false"]
    lines += ["      show_root_toc_entry: false", "", "| name | what it is |", "| --- | --- |"]
    below = []
    for name in names:
        place = places()[_object(f"{module}.{name}").canonical_path]
        lines.append(f"| [`{name}`][{place}] | {_summary(module, name)} |")
        if place == f"{module}.{name}":
            below += ["", f"::: {place}", "    options:", "      show_root_heading: true"]
    return "\n".join([*lines, *below, ""])


def public_names(module: str) -> list[str]:
    """Return what a module exports, or defines if it exports nothing: presets before options."""
    found = _object(module)
    exported = [name for name, each in found.members.items() if each.is_alias and not each.runtime]
    names = (
        found.exports
        or (exported if found.is_init_module else None)
        or [name for name, each in found.members.items() if not each.is_alias and name[0] != "_"]
    )
    return sorted(
        map(str, names), key=lambda name: (name[-7:] != "_buffer", name[-7:] == "Options")
    )


@cache
def modules() -> list[str]:
    """Return the modules that have a page. The last module with a name documents that name."""
    names = (page.stem for page in (ROOT / "docs" / "api").glob("*.md"))
    return sorted(names, key=lambda name: (".interop." not in name, name))


@cache
def places() -> dict[str, str]:
    """Return where each public object is documented, by its path."""
    return {
        _object(f"{module}.{name}").canonical_path: f"{module}.{name}"
        for module in modules()
        for name in public_names(module)
    }


@cache
def places_by_name() -> dict[str, str]:
    """Return where what a public name stands for is documented."""
    return {
        name: places()[_object(f"{module}.{name}").canonical_path]
        for module in modules()
        for name in public_names(module)
    }


def linked(code: re.Match[str]) -> str:
    """Return a code span as a link if it is a public name."""
    place = places_by_name().get(code[1])
    return f"[{code[0]}][{place}]" if place else code[0]


def _summary(module: str, name: str) -> str:
    """Return the first sentence about a name, or the value of a constant without one."""
    found = _object(f"{module}.{name}")
    if found.docstring:
        return " ".join(found.docstring.value.split("\n\n")[0].split()).replace("|", "\\|")
    return f"`{found.value}`" if found.is_attribute else ""


def _object(path: str) -> Any:
    return _package()[path.removeprefix("gfn_rb.")] if path != "gfn_rb" else _package()


@cache
def _package() -> griffe.Module:
    return griffe.load("gfn_rb", search_paths=[str(ROOT)], resolve_aliases=True)
