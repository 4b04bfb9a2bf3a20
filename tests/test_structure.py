"""How the package is built: the measures of ``tools/``, each seen to find what is planted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs import Transform

import gfn_rb
from tools.private_names import adapted, adapter_files, private_uses, private_uses_in
from tools.structure import (
    CLOSURES,
    COMPUTED,
    circles,
    closures,
    comment_share,
    import_graph,
    imports,
    modules,
    n_lines,
    named_once,
    top_folder,
    top_folders,
)

ROOT = Path(gfn_rb.__file__).parent
# In order; the modules of one entry may import each other. "" is gfn_rb/__init__.py, which may
# import all and be imported by none.
LAYERS = (
    ("arguments", "errors", "gone", "keys", "lazy", "shapes", "start_method", "stopwatch"),
    ("kernels",),
    ("numerics",),
    ("torchrl_compat",),
    ("containers",),
    ("storages",),
    ("writers",),
    ("samplers",),
    ("buffers",),
    # The core ends here. What follows attaches to it.
    ("codec",),
    ("checkpoint",),
    ("envs",),
    ("page",),
    ("rollout",),
    ("policies",),
    ("losses",),
    ("transports",),
    ("remote",),
    ("interop",),
    ("training",),
    ("__main__",),
    ("",),
)  # fmt: skip
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}
# Packages that only some layers may import, in any way.
ONLY_IN = {
    "llvmlite": {"kernels"},
    "numba": {"kernels"},
    "jaxtyping": {"shapes"},
    "beartype": set(),
    "mpi4py": {"transports"},
    "gfn": {"interop"},
    "RNA": {"envs"},
    "bokeh": {"page"},
}
# Numerics is tensor mathematics and nothing else.
IN_NUMERICS = {
    "__future__", "abc", "collections", "functools", "gfn_rb", "itertools", "math", "numpy",
    "torch", "typing",
}  # fmt: skip
# What these import is in the type-checking imports of packages, or is of their own folder.
LAZY = {"gfn_rb.lazy", "gfn_rb.losses"}
COMMENTED = ("kernels", "writers", "remote", "checkpoint")  # whose code is subtle
CORE = {
    *("buffers", "containers", "kernels", "numerics", "samplers", "storages", "torchrl_compat"),
    "writers",
}


def is_allowed(here: str, target: str) -> bool:
    """Whether a layer may import a dotted name."""
    top, layer = target.split(".")[0], top_folder(target)
    if top == "gfn_rb":
        return LEVEL[layer if layer in LEVEL else ""] <= LEVEL[here]
    return here in ONLY_IN.get(top, {here}) and (here != "numerics" or top in IN_NUMERICS)


def violations(package: Path) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, path in modules(package).items()
        for target in sorted(imports(path, name))
        if not is_allowed(top_folder(name), target) or (target == COMPUTED and name not in LAZY)
    ]


@pytest.fixture
def plant(tmp_path: Path):
    """What writes modules of a package by name, and returns its folder."""

    def write(**sources: str) -> Path:
        for name, source in {"__init__": "", **sources}.items():
            path = tmp_path / "gfn_rb" / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return tmp_path / "gfn_rb"

    return write


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []
    assert {top_folder(name) for name in modules(ROOT)} == LEVEL.keys()


@pytest.mark.parametrize(
    ("module", "source", "target"),
    [
        ("writers.reward", "from gfn_rb.buffers.presets import f", "gfn_rb.buffers.presets.f"),
        ("writers.reward", "from .. import samplers", "gfn_rb.samplers"),
        ("checkpoint.atomic", "def f():\n    from gfn_rb.envs import GFNEnv", "gfn_rb.envs.GFNEnv"),
        ("errors", "if TYPE_CHECKING:\n    import gfn_rb.training.cli", "gfn_rb.training.cli"),
        ("remote.manager", "importlib.import_module('gfn_rb.training')", "gfn_rb.training"),
        ("training.cli", "importlib.import_module(name)", COMPUTED),
        ("remote.manager", "import math, mpi4py.MPI", "mpi4py.MPI"),
        ("numerics.flat", "from torchrl.data import Storage", "torchrl.data.Storage"),
        ("writers.__init__", "from .reward import W", None),
        ("numerics.flat", "from gfn_rb import keys", None),
        ("transports.mpi", "from mpi4py import MPI", None),
        ("writers.reward", "import gfnx", None),
    ],
)
def test_a_planted_import_that_runs_back_is_found(
    plant, module: str, source: str, target: str | None
) -> None:
    found = violations(plant(**{module: source}))
    assert found == ([] if target is None else [f"gfn_rb.{module} imports {target}"])


def test_modules_import_in_no_circle(plant) -> None:
    graph = import_graph(ROOT)
    assert circles(graph) == circles(top_folders(graph)) == []
    sources = {  # a lazy and a type-checking import close circles
        "__init__": "from gfn_rb.b import B",
        "a": "def f():\n    from gfn_rb.b import B",
        "b": "from gfn_rb.room import c",
        "room.__init__": "",
        "room.c": "if TYPE_CHECKING:\n    from ..a import f",
        "room.d": "from . import c",
    }
    graph = import_graph(plant(**sources))
    assert circles(graph) == [["gfn_rb.a", "gfn_rb.b", "gfn_rb.room.c"]]
    assert circles(top_folders(graph)) == [["a", "b", "room"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_comments_and_functions_that_are_named_once_are_counted(plant) -> None:
    source = (
        '"""No comment: # 1."""\n# One.\ndef f():\n    """Say it.\n\n    # No.\n    """\n'
        "    _g()  # Two.\n    return [_h(),\n        _h()]\n\ndef _g(): ...\ndef _h(): ...\n"
    )
    package = plant(a=source)
    assert comment_share([package / "a.py"]) == pytest.approx(100 * 2 / 6)
    assert named_once(package) == ["_g"]
    folders = {name: comment_share((ROOT / name).rglob("*.py")) for name in COMMENTED}
    assert {name: share for name, share in folders.items() if not 7 <= share <= 15} == {}
    assert len(named_once(ROOT)) <= 155


@pytest.mark.slow
def test_a_name_executes_few_lines_of_the_core_alone() -> None:
    for statement, files in closures(ROOT.parent, CLOSURES).items():
        assert 50 < sum(map(n_lines, files)) <= CLOSURES[statement]
        folders = {path.relative_to(ROOT).parts[0] for path in files if path.parent != ROOT}
        assert folders <= CORE


# Private names of others are used in one folder, which names them.

FOREIGN = set().union(*(adapted(ast.parse(path.read_text())) for path in adapter_files(ROOT)))


def test_private_names_are_used_where_they_belong() -> None:
    found = private_uses_in(ROOT)
    assert len(found) > 50
    assert [f"{path}:{use}" for path, each in found.items() for use in each] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("storage._len = 3", ["_len"]),
        ("class W:\n    def __init__(self):\n        self._len = 0\n    def f(self, s):\n"
         "        return s._len", ["_len"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("getattr(storage, '_storage', None)", ["_storage"]),
        ("self._storage", []),
        ("os._exit(1)", []),
        ("row._replace(a=1)", []),
        ("class A:\n    __slots__ = ('_name',)\n    def f(self, other):\n        other._name", []),
        ("class A:\n    def _go(self): ...\ndef f(a):\n    a._go()", []),
    ],
)  # fmt: skip
def test_a_private_name_of_another_is_found(source: str, found: list[str]) -> None:
    assert [use.name for use in private_uses(ast.parse(source), FOREIGN)] == found


def test_a_secret_of_another_module_is_not_foreign() -> None:
    [use] = private_uses(ast.parse("a.b._go()"), FOREIGN, own={"_go"})
    assert (use.is_foreign, str(use)) == (False, "1: a.b._go")


def test_the_glossary_names_things_where_they_are() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    table = text.partition("\n## Words\n")[2].partition("\n## ")[0]
    places = re.findall(r"^\|[^|]+\|[^|]+\| `(\w+)`, (\S+) \|$", table, re.MULTILINE)
    assert 20 < len(places) == table.count("\n|") - 2 <= 30
    for name, file in places:
        source = (Path(gfn_rb.__file__).parent / file).read_text()
        defined = rf"^ *(?:class |def )?{name}\b(?: *[:=(]|\()"
        assert re.search(defined, source, re.MULTILINE), f"{name} is not defined in {file}"


MADE_BY = {
    "GFNReplayBuffer": "fifo_buffer",
    "BufferSummary": ".summary(",
    "ReplayStatistics": ".stats()",
    "ReplayBufferManager": "managed(",
}


def test_each_class_of_buffers_has_a_file_of_laws() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
    table = text.partition("\n## Tests as a specification\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (`.*) \| (`.*) \|$", table, re.MULTILINE))
    named = {name: laws for names, laws in rows.items() for name in re.findall(r"`(\w+)`", names)}
    bases = (ReplayBuffer, Sampler, Storage, Transform, Writer)
    classes = {value for name in gfn_rb.__all__ if isinstance(value := getattr(gfn_rb, name), type)}
    kept = {each.__name__ for each in classes if issubclass(each, bases)}
    assert len(kept) > 10
    assert kept - {"ExperienceMemory"} <= named.keys()
    for name, laws in named.items():
        files = re.findall(r"`(\S+\.py)`", laws)
        assert files
        sources = [(Path(__file__).parent / file).read_text() for file in files]
        assert any(MADE_BY.get(name, name) in source for source in sources), name
