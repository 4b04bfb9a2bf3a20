"""The options of a configuration as tyro shows them: in groups, the environment's own first."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, get_type_hints

import tyro

from gfn_rb.training.config import TrainConfig
from gfn_rb.training.options import (
    LearningOptions,
    MeasuringOptions,
    RanksOptions,
    ReplayOptions,
    RunOptions,
    SamplingOptions,
)

GROUPS = {
    "run": RunOptions,
    "measuring": MeasuringOptions,
    "sampling": SamplingOptions,
    "learning": LearningOptions,
    "replay": ReplayOptions,
    "ranks": RanksOptions,
}


def grouped(config: type[TrainConfig]) -> type:
    """Return a dataclass with a dataclass for each group of a configuration's options.

    The groups have the fields, with their defaults in this configuration. tyro shows the fields of
    a dataclass within another as a group.

    Args:
        config: the configuration. Its docstring becomes that of the dataclass.
    """
    general = {f.name for f in fields(TrainConfig)}
    own = [f.name for f in fields(config) if f.name not in general]
    groups = {name: [f.name for f in fields(group)] for name, group in GROUPS.items()}
    named = {config.env: own, **groups} if own else groups
    members = [
        (f"group_{i}", Annotated[_group(config, names), tyro.conf.arg(name=title, help="")])
        for i, (title, names) in enumerate(named.items())
    ]
    return make_dataclass(
        config.__name__,
        members,
        namespace={"config": config, "__doc__": inspect.getdoc(config)},
        kw_only=True,
    )


def ungrouped(groups: Any) -> TrainConfig:
    """Return the configuration that an instance of a dataclass from ``grouped`` stands for."""
    values: dict[str, Any] = {}
    for group in fields(groups):
        values |= vars(getattr(groups, group.name))
    config: TrainConfig = groups.config(**values)
    return config


def _group(config: type[TrainConfig], names: Iterable[str]) -> type:
    by_name = {f.name: f for f in fields(config)}
    hints, docs = get_type_hints(config, include_extras=True), _docs(config)
    return make_dataclass(
        "Group",
        [
            (
                name,
                Annotated[hints[name], tyro.conf.arg(help=docs.get(name))],
                field(**_defaults(by_name[name])),
            )
            for name in names
        ],
        kw_only=True,
    )


def _defaults(of: Field[Any]) -> dict[str, Any]:
    return {"default": of.default, "default_factory": of.default_factory}  # MISSING for none


def _docs(config: type) -> dict[str, str]:
    classes = filter(is_dataclass, reversed(config.__mro__))
    return {name: doc for cls in classes for name, doc in _own_docs(cls).items()}


@functools.cache
def _own_docs(cls: type) -> dict[str, str]:
    """Return the text that follows each field in the source of a class."""
    try:
        (tree,) = ast.parse(dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}  # made in no file: there is nothing to read
    docs = {}
    for statement, after in pairwise(getattr(tree, "body", [])):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                docs[name] = " ".join(text.split())  # wrapped anew, where it is shown
    return docs
