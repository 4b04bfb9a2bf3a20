"""The measures of ``tools/structure.py``, each seen to find what is planted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import gfn_rb
from tools.structure import (
    CLOSURES,
    circles,
    closures,
    draw,
    import_graph,
    n_lines,
    shared_class_names,
    top_folders,
)

ROOT = Path(gfn_rb.__file__).parent


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A package with a lazy and a type-checking import that close circles."""
    files = {
        "__init__": "from gfn_rb.b import B",
        "a": "def f():\n    from gfn_rb.b import B",
        "b": "from gfn_rb.room import c\nclass B: ...",
        "room/__init__": "",
        "room/c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..a import f\n"
        "class B: ...",
        "room/d": "from . import c\nclass C:\n    class B: ...",
    }
    for name, source in files.items():
        path = tmp_path / "gfn_rb" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path / "gfn_rb"


def test_no_folder_is_a_heap() -> None:
    folder, n_files = Counter(path.parent for path in ROOT.rglob("*.py")).most_common(1)[0]
    assert n_files <= 16, folder


def test_modules_import_in_no_circle() -> None:
    graph = import_graph(ROOT)
    assert len(graph) > 50
    assert circles(graph) == []
    assert circles(top_folders(graph)) == []


def test_planted_circles_are_found(planted: Path) -> None:
    graph = import_graph(planted)
    assert circles(graph) == [["gfn_rb.a", "gfn_rb.b", "gfn_rb.room.c"]]
    assert circles(top_folders(graph)) == [["a", "b", "room"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_planted_class_names_are_found(planted: Path) -> None:
    assert shared_class_names(planted) == ["B: gfn_rb.b, gfn_rb.room.c"]


def test_circles_cannot_be_drawn(planted: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="in circles"):
        draw(tmp_path, tmp_path / "picture.png")


CORE = {"buffers", "containers", "kernels", "numerics", "samplers", "writers"}


def test_a_name_executes_few_lines_of_the_core_alone() -> None:
    for statement, files in closures(ROOT.parent, CLOSURES).items():
        assert 50 < sum(map(n_lines, files)) <= CLOSURES[statement]
        folders = {path.relative_to(ROOT).parts[0] for path in files if path.parent != ROOT}
        assert folders <= CORE
