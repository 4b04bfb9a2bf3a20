"""Exports of a package that are imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str, **names: str) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports the modules that its names are in.

    Args:
        package: its ``__name__``.
        **names: for each module of the package, the names that it exports, by spaces.
    """
    where = {name: module for module, exported in names.items() for name in exported.split()}

    def __getattr__(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{where[name]}"), name)
        setattr(sys.modules[package], name, value)  # from now on without this function
        return value

    return __getattr__
