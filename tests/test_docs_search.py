"""The search of the documentation works in pages that are opened from disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from page.chromium import BROWSER, DRIVER, browser
from test_readme import ROOT

PAGES = {
    "index.md": "# Start here\n\nA first page.\n",
    "journals.md": "# Journals\n\nA journal survives a kill: quicksilver.\n",
}
TYPE = """
document.querySelector("label[for=__search]").click();
const input = document.querySelector("input[name=query]");
input.focus();
input.value = "quicksilver";
input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
input.dispatchEvent(new InputEvent("input", {bubbles: true}));
"""
FOUND = """
return [...document.querySelectorAll(".md-search-result__item a")].map((each) => each.href);
"""


def built(folder: Path) -> Path:
    """A small site with the theme, plugins and scripts of the documentation."""
    config = pytest.importorskip("mkdocs.config", reason="mkdocs is not installed")
    build = pytest.importorskip("mkdocs.commands.build")
    sources = folder / "docs"
    shutil.copytree(ROOT / "docs" / "theme", sources / "theme")
    for name, text in PAGES.items():
        (sources / name).write_text(text)
    options = {"docs_dir": str(sources), "site_dir": str(folder / "site"), "nav": None, "hooks": []}
    options["plugins"] = ["search", "offline"]
    settings = config.load_config(str(ROOT / "mkdocs.yml"), **options)
    settings.plugins.on_startup(command="build", dirty=False)
    build.build(settings)
    return folder / "site" / "index.html"


@pytest.mark.slow
@pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs Chromium and its chromedriver")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_search_finds_pages_over_file_addresses(tmp_path: Path) -> None:
    page = built(tmp_path)
    with browser(tmp_path / "profile") as window:
        window.open(page, 1400)
        window.run(TYPE)
        deadline, found = time.monotonic() + 20, []
        while not found and time.monotonic() < deadline:
            time.sleep(0.1)
            found = window.run(FOUND)
        assert [url.partition("?")[0] for url in found][:1] == [
            (tmp_path / "site" / "journals.html").as_uri()
        ]
        assert {url.partition(":")[0] for url in window.requests()} <= {
            *("file", "data", "about", "blob", "chrome", "chrome-untrusted")
        }
