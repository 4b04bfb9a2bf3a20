"""What ``import gfn_rb`` loads, needs and offers."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_layers import FILES, imports, module_name

import gfn_rb

# Import names of the optional dependencies and of what only the tests use.
HEAVY = ("matplotlib", "mpi4py", "tyro", "tqdm", "rich", "gfn", "scipy", "RNA")
CHECKERS = ("jaxtyping", "beartype")
# Modules whose business an optional dependency is.
OPTIONAL = tuple(
    f"gfn_rb.{layer}" for layer in ("interop", "training", "transports.mpi", "cli", "__main__")
)

# Of a module that is named differently.
DISTRIBUTION = {"RNA": "ViennaRNA"}
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"

# torch is imported first, for what it loads by itself (tqdm, where installed) is not our doing.
LOADED = """
import sys, torch
before = set(sys.modules)
{statement}
print(*(name for name in {heavy} if name in set(sys.modules) - before))
"""
WITHOUT = """
import sys
for name in {names}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
{statement}
"""


def python(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a fresh interpreter, where no import hook of this test run is at work."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def loaded_by(statement: str) -> set[str]:
    done = python(LOADED.format(statement=statement, heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def without(names: tuple[str, ...], statement: str) -> "subprocess.CompletedProcess[str]":
    return python(WITHOUT.format(names=names, statement=statement))


def core_modules() -> list[str]:
    """Every module but those whose business an optional dependency is."""
    found = [info.name for info in pkgutil.walk_packages(gfn_rb.__path__, "gfn_rb.")]
    return ["gfn_rb", *(name for name in found if not name.startswith(OPTIONAL))]


def public_packages() -> list[ModuleType]:
    """The package and those directly below it."""
    names = [f"gfn_rb.{info.name}" for info in pkgutil.iter_modules(gfn_rb.__path__) if info.ispkg]
    return [gfn_rb, *map(importlib.import_module, names)]


def undocumented(module: ModuleType) -> list[str]:
    """The public names of a module that are missing, or have no docstring of their own."""
    return [
        name
        for name in getattr(module, "__all__", ["__all__"])
        if not hasattr(module, name) or not _is_documented(getattr(module, name))
    ]


def _is_documented(value: object) -> bool:
    if isinstance(value, type):  # where inspect.getdoc would find the base's docstring
        return bool((vars(value).get("__doc__") or "").strip())
    return not callable(value) or bool(inspect.getdoc(value))


def declared() -> set[str]:
    """The distributions that the package and its extras ask for."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[<>=\[]", each)[0] for extra in extras for each in extra}


def undeclared(sources: dict[str, str]) -> list[str]:
    """Third-party packages that modules import and that no list of dependencies has."""
    known = {*declared(), *sys.stdlib_module_names, "gfn_rb", ""}
    names = (
        (module, found.line, found.target.split(".")[0])
        for module, source in sources.items()
        for found in imports(source, module, is_package=False)
    )
    return [
        f"{module}:{line} imports {name}"
        for module, line, name in names
        if DISTRIBUTION.get(name, name) not in known
    ]


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import gfn_rb") == set()


def test_a_heavy_import_would_be_seen() -> None:
    assert loaded_by("import scipy") == {"scipy"}


def test_core_needs_only_torch_torchrl_tensordict_and_numpy() -> None:
    program = (
        f"import {', '.join(core_modules())}\n"
        "assert all(getattr(gfn_rb.shapes, n)[int, 'n'] is int for n in gfn_rb.shapes.__all__)"
    )
    done = without(HEAVY + CHECKERS, program)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["beartype", "json"])
def test_a_missing_dependency_would_be_seen(name: str) -> None:
    done = without((name,), f"import {name}")
    assert done.returncode == 1
    assert f"import of {name} halted" in done.stderr


def test_public_names_exist_and_are_documented() -> None:
    found = {module.__name__: undocumented(module) for module in public_packages()}
    assert found == {name: [] for name in found}


def test_public_names_hold_the_parts() -> None:
    assert {"RewardPrioritizedWriter", "SoftmaxRewardSampler"} <= set(gfn_rb.__all__)


def test_an_undocumented_name_would_be_seen() -> None:
    class Base:
        """Say something."""

    class Bare(Base):
        pass

    module = ModuleType("planted")
    module.__all__ = ["Base", "Bare", "absent", "plain", "said"]
    module.Base, module.Bare = Base, Bare
    module.plain, module.said = lambda: None, inspect.getdoc
    assert undocumented(module) == ["Bare", "absent", "plain"]
    assert undocumented(ModuleType("silent")) == ["__all__"]


def test_what_is_imported_is_declared() -> None:
    sources = {module_name(path): path.read_text() for path in FILES}
    assert undeclared(sources) == []


def test_an_undeclared_import_would_be_seen() -> None:
    sources = {"a": "import torch\ndef f():\n    from psutil import Process", "b": "import RNA, os"}
    assert undeclared(sources) == ["a:3 imports psutil"]
