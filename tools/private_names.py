"""Which modules use the private names of objects that are not theirs.

A name with a leading underscore may be used on ``self``, ``cls`` and ``super()``, for that is the
interface of inheritance, and on objects of the classes of the same file. Used on anything else it
is a finding: foreign if torch, tensordict or torchrl define it, else a secret of another module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ADAPTER = "torchrl_compat"  # a folder; before, a file
NUMBA_ADAPTER = "kernels/cache.py"
# Documented by the standard library, underscore and all.
_DOCUMENTED = {"_replace", "_make", "_asdict", "_fields", "_field_defaults", "_exit", "_getframe"}
_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


class PrivateUse(NamedTuple):
    """A private name where it is used."""

    line: int
    name: str
    code: str
    is_foreign: bool

    def __str__(self) -> str:
        return f"{self.line}: {self.code}"


def private_uses(tree: ast.AST, foreign: set[str], own: set[str] = frozenset()) -> list[PrivateUse]:
    """Return the private names that a module uses on objects that are not its own.

    Args:
        tree: of the module.
        foreign: names known to be foreign, whatever the module itself defines.
        own: private names that the package defines anywhere.
    """
    here = defined(tree) - foreign
    return [
        PrivateUse(node.lineno, name, ast.unparse(node), name in foreign or name not in own)
        for node, name in _accesses(tree)
        if name not in here
    ]


def defined(tree: ast.AST) -> set[str]:
    """Return the private names that a module and its classes define."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            names |= set(_in_body(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_me(node):
            names.add(node.attr)
    return {name for name in names if _is_private(name)}


def adapted(tree: ast.AST) -> set[str]:
    """Return the foreign names that an adapter wraps."""
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    named = {text for text in strings if isinstance(text, str) and text.isidentifier()}
    return {name for _, name in _accesses(tree)} | {name for name in named if _is_private(name)}


def adapter_files(package: Path) -> list[Path]:
    """Return the files of a package that may use foreign private names."""
    adapter = package / ADAPTER
    return sorted(adapter.glob("*.py")) if adapter.is_dir() else [adapter.with_suffix(".py")]


def _in_body(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            stored = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            names = {node.id for node in stored if isinstance(node.ctx, ast.Store)}
            yield from names
            if "__slots__" in names:
                yield from ast.literal_eval(statement.value)


def _accesses(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield each private name used on something that is not ``self``, ``cls`` or ``super()``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_me(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _BY_NAME:
            names = [getattr(node.args[1], "value", "")] if not _is_me_name(node.args[0]) else []
        else:
            continue
        yield from ((node, name) for name in names if isinstance(name, str) and _is_private(name))


def _is_me(node: ast.Attribute) -> bool:
    return _is_me_name(node.value) or (
        isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
    )


def _is_me_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _DOCUMENTED


def private_uses_in(package: Path, known: Path | None = None) -> dict[Path, list[PrivateUse]]:
    """Return the findings of each file of a package, but for its adapters.

    Args:
        package: its folder.
        known: the package whose adapter tells the foreign names, by default this one.
    """
    files = adapter_files(package if known is None else known)
    foreign = set().union(*(adapted(ast.parse(path.read_text())) for path in files))
    adapters = {*adapter_files(package), package / NUMBA_ADAPTER}
    paths = [path for path in sorted(package.rglob("*.py")) if path not in adapters]
    trees = {path: ast.parse(path.read_text()) for path in paths}
    own = set().union(*map(defined, trees.values()))
    return {path: private_uses(tree, foreign, own) for path, tree in trees.items()}
