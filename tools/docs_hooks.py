"""What ``make docs`` has MkDocs do besides: pictures of results, roles in docstrings, a check."""

from __future__ import annotations

import ast
import re
import zlib
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
# What Sphinx would read in docstrings, and Markdown shows as it is.
SPHINX = (
    (re.compile(r":(?:class|func|meth|mod|attr|data|math):<code>~?"), "<code>"),
    (re.compile(r"<p>\.\. math:: (.*?)</p>", re.DOTALL), r"<p><code>\1</code></p>"),
    (re.compile(r"::</p>"), ":</p>"),
)


class Decorated(griffe.Extension):
    """Show presets with the docstring that ``with_options`` gives them."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the docstring by the one that the function has once it is imported."""
        if any(each.callable_path.endswith("with_options") for each in func.decorators):
            import gfn_rb

            func.docstring.value = getattr(gfn_rb, func.name).__doc__


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures that benchmarks draw, which lie beside their figures."""
    for path in sorted((ROOT / RESULTS).glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite the links of pages to these pictures, which hold on GitHub as they are."""
    return markdown.replace(f"](../{RESULTS}/", "](results/").replace(
        f"](../../{RESULTS}/", "](../results/"
    )


def on_page_content(html: str, **_: Any) -> str:
    """Show names and equations in docstrings as code, and blocks of code as such."""
    for pattern, replacement in SPHINX:
        html = pattern.sub(replacement, html)
    return html


def on_post_build(config: Any) -> None:
    """Raise unless every public name has a place in the reference."""
    inventory = (Path(config["site_dir"]) / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split(" ")[0] for line in zlib.decompress(inventory).decode().splitlines()}
    missing = [
        f"{page.stem}.{name}"
        for page in sorted((ROOT / "docs" / "api").glob("*.md"))
        for name in public_names(page.stem)
        if f"{page.stem}.{name}" not in known and not _has(page, name)
    ]
    if missing:
        raise PluginError(f"the reference lacks {', '.join(missing)}")


def _has(page: Path, name: str) -> bool:
    """Tell whether a page asks for a name by where it is defined, as a module has it as well."""
    return re.search(rf"^::: {page.stem}\.\S+\.{name}$", page.read_text(), re.MULTILINE) is not None


def public_names(module: str) -> list[str]:
    """Return the ``__all__`` of a module, read from its source; nothing where it has none."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []
