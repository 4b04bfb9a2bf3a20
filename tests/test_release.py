"""What a release says of itself: links, addresses, badges, and the index of examples."""

import re
from pathlib import Path

import gfn_rb
from tools import release

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text()
URL = "https://example.org/group/gfn_rb/"


def test_links_of_a_published_page_are_absolute():
    page = release.with_absolute_links((ROOT / "README.md").read_text(), URL)
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "https://example.org/group/gfn_rb/raw/main/docs/view.png" in links
    assert "https://example.org/group/gfn_rb/blob/main/docs/index.md#install" in links


def test_links_of_readme_lead_to_files():
    links = re.findall(r"\]\((?!https?:|#)([^)\s#]+)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_addresses_of_the_project_are_in_its_metadata():
    text = release.with_urls(PYPROJECT, URL)
    assert text.count('[project.urls]\nSource = "https://example.org/group/gfn_rb"') == 1
    assert "/issues" in text
    assert release.with_urls(PYPROJECT, URL).count("[project.scripts]") == 1


def test_badges_say_what_the_metadata_says():
    python = re.search(r'requires-python = ">=([^"]+)"', PYPROJECT)[1]
    licence = re.search(r'license = "([^"]+)"', PYPROJECT)[1]
    for name, words in (
        ("python", f"python: {python} or newer"),
        ("licence", f"licence: {licence}"),
    ):
        assert f"<title>{words}</title>" in (ROOT / f"docs/badges/{name}.svg").read_text()


def test_the_wheel_that_readme_installs_is_of_this_version():
    wheels = re.findall(r"gfn_rb-([\d.]+)-py3-none-any.whl", (ROOT / "README.md").read_text())
    assert {*wheels} == {gfn_rb.__version__}


def test_every_example_is_in_the_index():
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (ROOT / "examples/README.md").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
