"""Types of configuration fields, with the ranges of their values as metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch

from gfn_rb.errors import ArgumentError


class Rule(NamedTuple):
    """What the values of a field have in common.

    Attributes:
        holds: returns whether a value is one of them; may raise TypeError or RuntimeError if not.
        expected: says which they are, after "must be".
    """

    holds: Callable[[Any], bool]
    expected: str


def check_fields(config: type, values: Mapping[str, Any]) -> None:
    """Check each value by the annotation of its field.

    Args:
        config: a dataclass.
        values: by field, of some or all.

    Raises:
        ArgumentError: a value is of another type, or out of its range.
    """
    hints = get_type_hints(config, include_extras=True)
    for name in (f.name for f in fields(config) if f.name in values):
        for rule in _rules(hints[name]):
            check_value(name, values[name], rule)


def _rules(hint: Any) -> tuple[Rule, ...]:
    """Return the rules of a type: its own, where it has one, then those it is annotated with."""
    if get_origin(hint) is Annotated:
        return *_rules(hint.__origin__), *hint.__metadata__
    if get_origin(hint) is Literal:
        names = get_args(hint)
        return (Rule(lambda value: value in names, f"one of {', '.join(names)}"),)
    return (_TYPES[hint],) if hint in _TYPES else ()


def check_value(name: str, value: Any, rule: Rule) -> None:
    """Check a value of a field by one rule.

    Raises:
        ArgumentError: the rule does not hold.
    """
    try:
        holds = rule.holds(value)
    except (TypeError, RuntimeError):  # of another type; no name of a device
        holds = False
    if not holds:
        raise ArgumentError(f"{name} must be {rule.expected}, got {value!r}")


def _is_plain(value: Any) -> bool:
    kinds = {type(each) for each in value} if type(value) is tuple else {type(value)}
    return kinds <= {int, float, bool, str, type(None)}


def _is_device(value: str) -> bool:
    device = torch.device(value)
    if device.type != "cuda":
        return value == "cpu"
    return (device.index or 0) < torch.cuda.device_count()


# Compared by type, for True is no number of steps, and a number no name.
_TYPES: dict[Any, Rule] = {
    int: Rule(lambda v: type(v) is int, "a whole number"),
    float: Rule(lambda v: type(v) in (int, float), "a number"),
    bool: Rule(lambda v: type(v) is bool, "true or false"),
    str: Rule(lambda v: type(v) is str, "a word"),
}

# What config.json holds, and gives back as it was.
PLAIN = Rule(_is_plain, "a number, a word, true, false or None, or a tuple of such")

PositiveInt = Annotated[int, Rule(lambda v: v >= 1, "at least 1")]
NonNegativeInt = Annotated[int, Rule(lambda v: v >= 0, "at least 0")]
Seed = Annotated[int, Rule(lambda v: 0 <= v < 2**63, "in [0, 2^63)")]
OptionalInt = Annotated[int | None, Rule(lambda v: v is None or type(v) is int, "a whole number")]
OptionalCount = Annotated[
    int | None, Rule(lambda v: v is None or (type(v) is int and v >= 0), "at least 0")
]
OptionalWord = Annotated[str | None, Rule(lambda v: v is None or type(v) is str, "a word")]

FiniteFloat = Annotated[float, Rule(math.isfinite, "finite")]
PositiveFloat = Annotated[float, Rule(lambda v: 0 < v < math.inf, "positive and finite")]
NonNegativeFloat = Annotated[float, Rule(lambda v: 0 <= v < math.inf, "at least 0 and finite")]
Share = Annotated[float, Rule(lambda v: 0 <= v <= 1, "in [0, 1]")]
PositiveShare = Annotated[float, Rule(lambda v: 0 < v <= 1, "in (0, 1]")]
ProperShare = Annotated[float, Rule(lambda v: 0 < v < 1, "above 0 and below 1")]
OptionalFloat = Annotated[
    float | None, Rule(lambda v: v is None or type(v) in (int, float), "a number")
]
OptionalFiniteFloat = Annotated[
    float | None, Rule(lambda v: v is None or math.isfinite(v), "a finite number")
]
OptionalPositiveFloat = Annotated[
    float | None,
    Rule(lambda v: v is None or 0 < v < math.inf, "positive and finite"),
]
OptionalShare = Annotated[float | None, Rule(lambda v: v is None or 0 <= v <= 1, "in [0, 1]")]

Widths = Annotated[
    tuple[int, ...],
    Rule(
        lambda v: len(v) > 0 and all(type(width) is int and width >= 1 for width in v),
        "at least one width of at least 1",
    ),
]
Floats = Annotated[
    tuple[float, ...],
    Rule(
        lambda v: type(v) is tuple and all(type(each) in (int, float) for each in v),
        "a list of numbers",
    ),
]
Words = Annotated[
    tuple[str, ...],
    Rule(lambda v: type(v) is tuple and all(type(word) is str for word in v), "a list of words"),
]
Device = Annotated[str, Rule(_is_device, "cpu, or cuda where torch finds such a device")]
