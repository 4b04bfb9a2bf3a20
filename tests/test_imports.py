"""What ``import gfn_rb`` loads, needs and offers."""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pytest

import gfn_rb
from tools.structure import COMPUTED, imports, modules

# Import names of the optional dependencies and of what only the tests use.
HEAVY = ("matplotlib", "bokeh", "mpi4py", "tyro", "tqdm", "gfn", "scipy", "RNA")
CHECKERS = ("jaxtyping", "beartype")
BLOCKED = ("beartype", "json")
# Modules whose business an optional dependency is.
OPTIONAL = tuple(
    f"gfn_rb.{layer}"
    for layer in ("interop", "page.plots", "training", "transports.mpi", "__main__")
)

# Of a module that is named differently.
DISTRIBUTION = {"RNA": "ViennaRNA", "gfn": "torchgfn"}
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
MODULES = modules(Path(gfn_rb.__file__).parent)

# Runs each program of a list in a fork of one fresh interpreter, where no import hook of this test
# run is at work. torch is imported first, for what it loads by itself (tqdm, where installed) is
# not our doing.
FORKS = """
import json, os, sys, traceback, warnings
warnings.simplefilter("error", ImportWarning)
import torch
for program in json.loads(sys.argv[1]):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.dup2(writing, 1)
        try:
            exec(program, {})
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    print(json.dumps(open(reading).read().strip()), flush=True)
    os.wait()
"""
LOADED = """
import sys
before = set(sys.modules)
{statement}
print(*(name for name in {heavy} if name in set(sys.modules) - before))
"""
WITHOUT = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] in {names}]:
    del sys.modules[name]
for name in {names}:
    sys.modules[name] = None  # importing it now raises ModuleNotFoundError
{statement}
"""


def core_program() -> str:
    names = ("Bool", "Float", "Float64", "Int", "Int64", "Shaped")
    shapes = f"assert all(getattr(gfn_rb.shapes, n)[int, 'n'] is int for n in {names})"
    statement = f"import {', '.join(core_modules())}\n{shapes}"
    return WITHOUT.format(names=HEAVY + CHECKERS, statement=statement)


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """What each program printed."""
    programs = {
        "import gfn_rb": LOADED.format(statement="import gfn_rb", heavy=HEAVY),
        "import scipy": LOADED.format(statement="import scipy", heavy=HEAVY),
        "the core": core_program(),
        "modules": f"from gfn_rb import {', '.join(top_modules())}",
        **{name: WITHOUT.format(names=(name,), statement=f"import {name}") for name in BLOCKED},
    }
    command = [sys.executable, "-c", FORKS, json.dumps([*programs.values()])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(zip(programs, map(json.loads, done.stdout.splitlines()), strict=True))


def core_modules() -> list[str]:
    """Every module but those whose business an optional dependency is."""
    return [name for name in MODULES if not name.startswith(OPTIONAL)]


def top_modules() -> list[str]:
    """The modules and packages directly below the package, some of which have the name of another
    export nearly.
    """
    return [info.name for info in pkgutil.iter_modules(gfn_rb.__path__) if info.name[0] != "_"]


def public_packages() -> list[ModuleType]:
    """The package and those directly below it, but for the one that is of no user."""
    names = [info.name for info in pkgutil.iter_modules(gfn_rb.__path__) if info.ispkg]
    names.remove("torchrl_compat")
    return [gfn_rb, *(importlib.import_module(f"gfn_rb.{name}") for name in names)]


def undescribed(module: ModuleType) -> list[str]:
    """Public names without a docstring of their own, and arguments that it does not describe."""
    found = []
    for name in getattr(module, "__all__", ["__all__"]):
        value = getattr(module, name, None)
        is_class = isinstance(value, type)
        own = vars(value).get("__doc__") if is_class else inspect.getdoc(value)
        if value is None or (callable(value) and not (own or "").strip()):
            found.append(name)
        call = vars(value).get("__init__") if is_class else value
        if inspect.isfunction(call) and not is_dataclass(value):  # whose fields have texts
            texts = [each.__doc__ or "" for each in (value.__mro__ if is_class else [value])]
            lines = re.findall(r"^ *([\w*, ]+):", "\n".join(texts), re.MULTILINE)
            names = inspect.signature(call).parameters.keys() - {"self"}
            names -= {each.strip("*") for line in lines for each in line.split(", ")}
            names -= {"_ray_trace_ctx"}  # Ray adds it to classes that it has made actors of
            found += [f"{name}.{each}" for each in sorted(names)]
            found += [name] * bool(re.search(r"(keywords|options|arguments) of :", texts[0]))
    return found


def declared() -> set[str]:
    """The distributions that the package and its extras ask for."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = [project["dependencies"], *project["optional-dependencies"].values()]
    return {re.split(r"[<>=\[]", each)[0] for extra in extras for each in extra}


def undeclared(files: dict[str, Path]) -> list[str]:
    """Third-party packages that modules import and that no list of dependencies has."""
    known = {*declared(), *sys.stdlib_module_names, "gfn_rb", "", COMPUTED}
    names = (
        (name, target.split(".")[0]) for name, p in files.items() for target in imports(p, name)
    )
    return sorted(
        f"{name}: {top}" for name, top in names if DISTRIBUTION.get(top, top) not in known
    )


def test_import_loads_nothing_heavy_and_the_core_needs_little(outputs: dict[str, str]) -> None:
    assert outputs["import gfn_rb"] == outputs["the core"] == ""


def test_modules_are_imported_from_the_package_as_its_exports_are(outputs: dict[str, str]) -> None:
    assert outputs["modules"] == ""


def test_a_heavy_import_and_a_missing_dependency_would_be_seen(outputs: dict[str, str]) -> None:
    assert outputs["import scipy"] == "scipy"
    for name in BLOCKED:
        assert outputs[name].startswith(f"ModuleNotFoundError: import of {name} halted")


def test_public_names_and_their_arguments_are_described() -> None:
    found = {module.__name__: undescribed(module) for module in public_packages()}
    assert found == {name: [] for name in found}


def test_what_is_not_described_would_be_seen() -> None:
    def told(each: int, other: int) -> None:
        """Say each of them.\n\nArgs:\n    other: what is said of it."""

    planted = ModuleType("planted")
    planted.__all__, planted.told = ["absent", "plain", "told"], told
    planted.plain = type("Plain", (BaseException,), {})
    assert undescribed(planted) == ["absent", "plain", "told.each"]


@pytest.mark.slow
def test_what_is_imported_is_declared(tmp_path: Path) -> None:
    assert undeclared(MODULES) == []
    (tmp_path / "a.py").write_text("import torch, RNA\ndef f():\n    from psutil import Process")
    assert undeclared({"a": tmp_path / "a.py"}) == ["a: psutil"]


def test_every_dependency_is_documented() -> None:
    page = (PYPROJECT.parent / "docs" / "versions.md").read_text()
    names = declared() - {"gfn_rb"}
    assert {"torch", "ViennaRNA", "tyro", "mkdocs"} <= names
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []
