"""Private names of others are used in one module, which names them."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import gfn_rb
from gfn_rb import torchrl_compat
from tools.private_names import adapted, private_uses, private_uses_in

ROOT = Path(gfn_rb.__file__).parent
FOREIGN = adapted(ast.parse(inspect.getsource(torchrl_compat)))


def names(source: str, own: set[str] = frozenset()) -> list[str]:
    return [use.name for use in private_uses(ast.parse(source), FOREIGN, own)]


def test_private_names_are_used_where_they_belong() -> None:
    found = private_uses_in(ROOT)
    assert len(found) > 50
    uses = [f"{path}:{use}" for path, each in found.items() for use in each]
    assert not uses, "\n".join(uses)


def test_each_function_of_the_adapter_names_what_it_wraps() -> None:
    functions = [
        function
        for _, function in inspect.getmembers(torchrl_compat, inspect.isfunction)
        if function.__module__ == torchrl_compat.__name__
    ]
    assert len(functions) > 20
    silent = [f.__name__ for f in functions if not re.search("``.+``|:func:", f.__doc__ or "")]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("storage._len = 3", ["_len"]),
        ("class W:\n    def __init__(self):\n        self._len = 0\n    def f(self, s):\n"
         "        return s._len", ["_len"]),
        ("from torch.utils._pytree import tree_map", ["_pytree"]),
        ("from torchrl.data import _Private", ["_Private"]),
        ("getattr(storage, '_storage', None)", ["_storage"]),
        ("rb.writer._cursor", ["_cursor"]),
    ],
)  # fmt: skip
def test_a_planted_use_is_found(source: str, found: list[str]) -> None:
    assert names(source) == found


@pytest.mark.parametrize(
    "source",
    [
        "self._storage",
        "super()._sample(3)",
        "os._exit(1)",
        "row._replace(a=1)",
        "class A:\n    __slots__ = ('_name',)\n    def f(self, other):\n        other._name",
        "class A:\n    def _go(self): ...\ndef f(a):\n    a._go()",
        "from __future__ import annotations",
    ],
)
def test_what_is_ones_own_may_be_used(source: str) -> None:
    assert names(source) == []


def test_a_secret_of_another_module_is_not_foreign() -> None:
    [use] = private_uses(ast.parse("a.b._go()"), FOREIGN, own={"_go"})
    assert not use.is_foreign
    assert str(use) == "1: a.b._go"
