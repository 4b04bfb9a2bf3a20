"""Imports point one way: each layer of the package knows only the layers before it."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gfn_rb

# In order; the modules of one entry may import each other. "" is gfn_rb/__init__.py, which may
# import all and be imported by none.
LAYERS = (
    ("arguments", "errors", "keys", "lazy", "shapes", "stopwatch"),
    ("kernels",),
    ("numerics",),
    ("torchrl_compat",),
    ("containers",),
    ("buffer_state", "column", "memmaps", "ragged", "sharing", "state_folder", "storages"),
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
)
LEVEL = {module: level for level, layer in enumerate(LAYERS) for module in layer}

# Packages that only some layers may import, in any way.
ONLY_IN = {
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

COMPUTED = {"gfn_rb.lazy", "gfn_rb.losses"}

ROOT = Path(gfn_rb.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


class Import(NamedTuple):
    line: int
    target: str  # dotted and absolute; "a.b" for "from a import b"


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """Every import of a source text, at any depth, relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, is_package)
            yield from (Import(node.lineno, f"{base}.{alias.name}") for alias in node.names)
        # What gfn_rb.lazy imports for a package stands in its type-checking imports, and
        # gfn_rb.losses imports its own modules.
        elif isinstance(node, ast.Call) and _is_dynamic(node.func) and module not in COMPUTED:
            for argument in node.args[:1]:
                assert isinstance(argument, ast.Constant), f"line {node.lineno}: computed import"
                yield Import(node.lineno, str(argument.value))


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    above = parents[: len(parents) - (node.level - 1)]
    return ".".join([*above, *([node.module] if node.module else [])])


def _is_dynamic(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def layer_of(target: str) -> str:
    """The layer that an absolute name inside the package lies in; a plain name is the root's."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else ""


def allowed(here: str, target: str) -> bool:
    """Whether a layer may import that name."""
    top = target.split(".")[0]
    if top == "gfn_rb":
        return LEVEL[layer_of(target)] <= LEVEL[here]
    if here == "numerics" and top not in IN_NUMERICS:
        return False
    return here in ONLY_IN.get(top, {here})


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    found = imports(source, module, is_package)
    return [
        f"{module}:{line} imports {target}"
        for line, target in found
        if not allowed(layer_of(module), target)
    ]


def unlisted(root: Path) -> set[str]:
    """What lies under the package's root but in no layer."""
    packages = {path.parent.name for path in root.glob("*/*.py")}
    return (packages | {path.stem for path in root.glob("*.py")}) - set(LEVEL) - {"__init__"}


@pytest.mark.parametrize("path", FILES, ids=[module_name(path) for path in FILES])
def test_no_import_runs_back(path: Path) -> None:
    found = violations(path.read_text(), module_name(path), path.name == "__init__.py")
    assert not found, "\n".join(found)


def test_types_are_checked_function_by_function() -> None:
    """beartype refuses ``Self`` where it does not see the class; a type variable says the same."""
    assert [str(path) for path in FILES if "import Self" in path.read_text()] == []


def test_every_module_has_a_layer() -> None:
    assert unlisted(ROOT) == set()
    assert {"gfn_rb", "gfn_rb.errors", "gfn_rb.numerics"} <= {module_name(path) for path in FILES}


@pytest.mark.parametrize(
    ("source", "module", "lines"),
    [
        ("from gfn_rb.buffers.presets import f", "gfn_rb.writers.reward", [1]),
        ("import torch\nimport math, gfn_rb.training.cli", "gfn_rb.interop.objectrl", [2]),
        ("from gfn_rb import buffers", "gfn_rb.writers.reward", [1]),
        ("import gfn_rb", "gfn_rb.training.cli", [1]),
        ("from ..samplers import base", "gfn_rb.writers.reward", [1]),
        ("from .. import samplers", "gfn_rb.writers.reward", [1]),
        ("def f():\n    from gfn_rb.envs import GFNEnv", "gfn_rb.checkpoint.atomic", [2]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gfn_rb.training.cli",
            "gfn_rb.errors",
            [3],
        ),
        ("try:\n    import gfn_rb.remote\nexcept ImportError:\n    pass", "gfn_rb.envs.base", [2]),
        ("importlib.import_module('gfn_rb.training')", "gfn_rb.remote.manager", [1]),
        ("from gfn_rb.numerics import A\nfrom gfn_rb.numerics import B", "gfn_rb.keys", [1, 2]),
        ("from jaxtyping import Float", "gfn_rb.numerics.flat", [1]),
        ("from mpi4py import MPI", "gfn_rb.remote.manager", [1]),
        ("from torchrl.data import Storage", "gfn_rb.numerics.flat", [1]),
    ],
)
def test_the_check_fails_on_a_planted_import(source: str, module: str, lines: list[int]) -> None:
    found = violations(source, module)
    assert [int(text.split(":")[1].split(" ")[0]) for text in found] == lines


@pytest.mark.parametrize(
    ("source", "module", "is_package"),
    [
        ("from gfn_rb.writers.rows import check", "gfn_rb.writers.reward", False),
        ("from .rows import check", "gfn_rb.writers.reward", False),
        ("from .reward import W", "gfn_rb.writers", True),
        ("from gfn_rb import keys", "gfn_rb.numerics.flat", False),
        ("from gfn_rb.training.cli import main", "gfn_rb", True),
        ("from gfn_rb.training.cli import main", "gfn_rb.__main__", False),
        ("from mpi4py import MPI", "gfn_rb.transports.mpi", False),
        ("import gfnx", "gfn_rb.writers.reward", False),
    ],
)
def test_the_check_lets_forward_imports_pass(source: str, module: str, is_package: bool) -> None:
    assert violations(source, module, is_package) == []


def test_an_unlisted_module_is_found(tmp_path: Path) -> None:
    for name in ("__init__.py", "errors.py", "helpers.py", "numerics/a.py", "extras/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert unlisted(tmp_path) == {"helpers", "extras"}


def test_a_computed_import_is_refused() -> None:
    with pytest.raises(AssertionError, match="line 1: computed import"):
        violations("importlib.import_module(name)", "gfn_rb.training.cli")
