"""Every public module has a page in the reference, and every page is in the menu.

That each page has every name of ``__all__`` is seen by ``make docs`` (tools/docs_hooks.py).
"""

import re

from test_imports import public_packages
from test_readme import ROOT

PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
MORE = ("gfn_rb.envs.conformance", "gfn_rb.errors", "gfn_rb.interop.torchgfn")


def test_every_public_module_has_a_page() -> None:
    public = {module.__name__ for module in public_packages() if module.__all__}
    assert {*public, *MORE} <= set(PAGES)


def test_a_page_shows_all_of_its_module() -> None:
    for name, text in PAGES.items():
        assert re.search(rf"^::: {re.escape(name)}$", text, re.MULTILINE)
        assert "members:" not in text


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    pages = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    assert [page for page in map(str, pages) if f": {page}\n" not in menu] == []
