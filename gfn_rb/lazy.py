"""Exports of a package that are imported when they are first asked for."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gfn_rb.gone import refuse_name


def lazy_exports(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return a package's ``__getattr__`` and its ``__all__``.

    Args:
        package: its ``__name__``. It exports what its source imports ``if TYPE_CHECKING``.
    """
    # The source is the only list. Type checkers and editors read the same statements, and a second
    # list of names beside them could differ.
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
            refuse_name(package, name)
            hint = _hint(module, name, sorted(where))
            # `from package import name` replaces the text of an AttributeError by its own. Before
            # that, importlib asks here, and then imports a module of that name.
            is_from = sys._getframe(1).f_code.co_name == "_handle_fromlist"
            if hint and is_from and find_spec(f"{package}.{name}") is None:
                raise ImportError(f"cannot import name {name!r} from {package!r}{hint}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        value = getattr(import_module(str(where[name])), name)
        setattr(module, name, value)  # from now on without this function
        return value

    return __getattr__, sorted(where)


def _hint(module: Any, name: str, exported: list[str]) -> str:
    """Return which package inside a package exports a name, or which name is near it."""
    if name.startswith("_"):
        return ""
    for source in sorted(Path(module.__file__).parent.glob("*/__init__.py")):
        if re.search(rf"(?:import|,|\()\s*{re.escape(name)}\b", source.read_text()):
            return f": it is in {module.__name__}.{source.parent.name}"
    near = get_close_matches(name, exported, 1)
    return f": did you mean {near[0]!r}?" if near else ""
