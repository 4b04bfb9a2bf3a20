"""Every public module has a page in the reference, and every page is in the menu.

That each page has every name of ``__all__`` is seen by ``make docs`` (tools/docs_hooks.py).
"""

import re

import pytest
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
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    pages = (path.relative_to(ROOT / "docs").with_suffix(".md") for path in sources)
    assert [page for page in map(str, pages) if f": {page}\n" not in menu] == []


@pytest.mark.slow
def test_a_page_begins_with_a_table_of_names() -> None:
    hooks = pytest.importorskip("tools.docs_hooks", reason="mkdocs is not installed")
    page = hooks.reference("gfn_rb.buffers")
    assert page.index("`diverse_buffer`") < page.index("`BufferOptions`")
    assert page.index("`BufferOptions`") < page.index("::: gfn_rb.buffers.diverse_buffer")
    assert not re.search(r"[`.]_", page)
    assert "| [`STATE`][gfn_rb.keys.STATE] | `'state'` |" in hooks.reference("gfn_rb.keys")


def test_a_name_is_documented_once() -> None:
    hooks = pytest.importorskip("tools.docs_hooks", reason="mkdocs is not installed")
    top = hooks.reference("gfn_rb")
    assert "[`FIFOWriter`][gfn_rb.writers.FIFOWriter]" in top
    assert "::: gfn_rb.FIFOWriter" not in top
    assert "::: gfn_rb.RaggedStorage" in top


def test_names_become_links_on_the_page_of_parts() -> None:
    hooks = pytest.importorskip("tools.docs_hooks", reason="mkdocs is not installed")
    linked = re.sub(hooks.NAME, hooks.linked, "`Sampler`, `rb.extend`, `RateLimiter(1, 2)`")
    assert linked == (
        "[`Sampler`][gfn_rb.rollout.Sampler], `rb.extend`, "
        "[`RateLimiter(1, 2)`][gfn_rb.buffers.RateLimiter]"
    )
    assert hooks.places_by_name()["ReplayBufferManager"].startswith("gfn_rb.remote.")


@pytest.mark.parametrize(
    ("html", "found"),
    [
        ('<script src="https://unpkg.com/shim">', True),
        ('<link rel="stylesheet" href="https://fonts.googleapis.com/css">', True),
        ('<img src="//host/a.png">', True),
        ('<a href="https://arxiv.org">', False),
        ('<script src="../assets/a.js">', False),
        ('<link rel="stylesheet" href="assets/main.css">', False),
    ],
)
def test_what_a_page_loads_from_another_host_is_found(html: str, found: bool) -> None:
    hooks = pytest.importorskip("tools.docs_hooks", reason="mkdocs is not installed")
    assert bool(hooks.ELSEWHERE.search(html)) is found
