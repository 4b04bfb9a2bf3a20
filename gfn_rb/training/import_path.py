"""Classes by import path, such as "mypackage.module:MyConfig": how a run names the user's own."""

from __future__ import annotations

import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gfn_rb.errors import ArgumentError


def path_of(cls: type) -> str:
    """Return the import path of a class, also of one in the script that runs."""
    return f"{_module_of(cls)}:{cls.__qualname__}"


def check_importable(cls: type) -> None:
    """Check that another process could import a class."""
    name = _module_of(cls)
    is_there = name != "__main__" and (name in sys.modules or find_spec(name) is not None)
    if "<" in cls.__qualname__ or not is_there:
        raise ArgumentError(
            f"config must be of a class that can be imported, got {path_of(cls)}: resuming it, "
            "and other processes of the run, need it at the top of a module"
        )


def load(path: str) -> Any:
    """Return what an import path leads to. The current folder is searched, as by ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        is_theirs = not frame.filename.startswith("<") and frame.filename != pkgutil.__file__
        at = f" ({frame.filename}, line {frame.lineno})" if is_theirs else ""
        first_line = str(error).partition("\n")[0]
        raise ArgumentError(
            f"{path} cannot be imported from {os.getcwd()}: {type(error).__name__}: "
            f"{first_line}{at}"
        ) from error


@contextmanager
def imports_outside(folder: Path) -> Iterator[None]:
    """Refuse to import anything from within a folder, such as a run that a stranger made."""
    inside = folder.resolve()

    def refuse(name: str, path: Sequence[str] | None, target: object = None) -> None:
        """Leave modules from elsewhere to the finders after this one."""
        if (spec := PathFinder.find_spec(name, path)) is not None:
            for place in (spec.origin, *(spec.submodule_search_locations or ())):
                if place is not None and Path(place).resolve().is_relative_to(inside):
                    raise ArgumentError(f"{name} must not be imported from {inside}")

    finder: Any = SimpleNamespace(find_spec=refuse)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _module_of(cls: type) -> str:
    if cls.__module__ != "__main__":
        return cls.__module__
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else Path(file).stem if file else "__main__"
