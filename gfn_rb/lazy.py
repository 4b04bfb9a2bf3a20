"""Exports of a package that are imported when they are first asked for."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return a package's ``__getattr__`` and its ``__all__``.

    Args:
        package: its ``__name__``. It exports what its source imports ``if TYPE_CHECKING``.
    """
    module = sys.modules[package]
    where = {
        alias.name: statement.module
        for block in ast.parse(inspect.getsource(module)).body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def __getattr__(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(str(where[name])), name)
        setattr(module, name, value)  # from now on without this function
        return value

    return __getattr__, sorted(where)
