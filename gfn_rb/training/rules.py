"""Types of options with the ranges of their values, and the check of values against them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from gfn_rb.errors import ArgumentError


class Rule(NamedTuple):
    """A condition that the values of an option meet, and in words that follow "must be"."""

    holds: Callable[[Any], bool]
    expected: str


def is_listed(value: Any) -> bool:
    """Return whether a value is a sequence that is no text: a list, or one of OmegaConf."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple))


def check_options(options: Any, group: str = "") -> None:
    """Check the fields of a dataclass, and of groups in these, against their annotations."""
    hints = get_type_hints(type(options), include_extras=True)
    for each in fields(options):
        check_value(
            option_name(options, each.name, group), getattr(options, each.name), hints[each.name]
        )


def check_value(name: str, value: Any, hint: Any) -> None:
    """Check a value against an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check_value(name, value, args[0])
        for rule in args[1:]:
            if isinstance(rule, Rule):
                _check(name, value, rule)
            elif isinstance(rule, FunctionType):  # returns the names there are by now
                check_name(name, value, rule())
    elif groups := groups_of(hint):
        kinds = [group.__name__ for group in groups]
        _check(name, value, Rule(lambda v: type(v) in groups, f"a {' or a '.join(kinds)}"))
        check_options(value, name)
    elif origin in (Union, UnionType) and NoneType in args and len(args) == 2:
        if value is not None:
            check_value(name, value, next(arg for arg in args if arg is not NoneType))
    elif origin is Literal:
        check_name(name, value, args)
    elif origin is tuple and args[1:] == (...,):
        _check(name, value, Rule(lambda v: type(v) is tuple, "a list"))
        for each in value:
            check_value(name, each, args[0])
    elif hint in _TYPES:
        _check(name, value, _TYPES[hint])


def check_name(name: str, value: Any, known: Collection[str]) -> None:
    """Check that a value is among known names; the error tells which one is near."""
    if not isinstance(value, str) or value not in known:
        hint = suggestion(value, known)
        raise ArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r:.80}{hint}")


def suggestion(value: Any, known: Collection[str]) -> str:
    """Return the end of a message: the known name that is most like a wrong one, if any is."""
    plain = {name.lower().replace("-", "_"): name for name in known}
    near = get_close_matches(str(value)[:80].lower().replace("-", "_"), plain, 1)
    return f": did you mean {plain[near[0]]}?" if near else ""


def option_name(options: Any, name: str, group: str) -> str:
    """Return the name of a field as on the command line."""
    if not group:
        return name
    return group if name == fields(options)[0].name else f"{group}.{name}"


def groups_of(hint: Any) -> list[type]:
    """Return the dataclasses that an annotation allows: itself, or the members of a union."""
    args = get_args(hint) or (hint,)
    return [each for each in args if isinstance(each, type) and is_dataclass(each)]


def _check(name: str, value: Any, rule: Rule) -> None:
    try:
        holds = rule.holds(value)
    except (TypeError, RuntimeError):  # another type, or not the name of a device
        holds = False
    if not holds:
        raise ArgumentError(f"{name} must be {rule.expected}, got {value!r:.200}")


def _is_plain(value: Any) -> bool:  # config.json can hold it, and give it back unchanged
    kinds = {type(each) for each in value} if type(value) in (tuple, list) else {type(value)}
    return kinds <= {int, float, bool, str, NoneType}


def _is_device(value: str) -> bool:
    if value == "cpu":
        return True
    import torch  # not above: it takes seconds, and options are parsed without it

    device = torch.device(value)
    return device.type == "cuda" and (device.index or 0) < torch.cuda.device_count()


def _is_short(value: int) -> bool:
    return abs(value) < 2**64  # others become no float and no tensor


# Compared by type, since True is not a number of steps.
_TYPES: dict[Any, Rule] = {
    int: Rule(lambda v: type(v) is int and _is_short(v), "a whole number"),
    float: Rule(lambda v: type(v) is float or (type(v) is int and _is_short(v)), "a number"),
    bool: Rule(lambda v: type(v) is bool, "true or false"),
    str: Rule(lambda v: type(v) is str, "a word"),
    Path: Rule(lambda v: isinstance(v, Path), "a path"),
}

PositiveInt = Annotated[int, Rule(lambda v: v >= 1, "at least 1")]
NonNegativeInt = Annotated[int, Rule(lambda v: v >= 0, "at least 0")]
NumberOrNode = Annotated[
    int | Literal["node"],
    Rule(lambda v: v == "node" or (type(v) is int and 0 <= v < 2**64), "at least 0, or node"),
]
Seed = Annotated[int, Rule(lambda v: 0 <= v < 2**63, "in [0, 2^63)")]
FiniteFloat = Annotated[float, Rule(math.isfinite, "a finite number")]
PositiveFloat = Annotated[float, Rule(lambda v: 0 < v < math.inf, "positive and finite")]
NonNegativeFloat = Annotated[float, Rule(lambda v: 0 <= v < math.inf, "at least 0 and finite")]
Share = Annotated[float, Rule(lambda v: 0 <= v <= 1, "in [0, 1]")]
PositiveShare = Annotated[float, Rule(lambda v: 0 < v <= 1, "in (0, 1]")]
ProperShare = Annotated[float, Rule(lambda v: 0 < v < 1, "above 0 and below 1")]
Width = Annotated[int, Rule(lambda v: 1 <= v <= 2**16, "in [1, 65536]")]
Widths = Annotated[tuple[Width, ...], Rule(lambda v: 1 <= len(v) <= 64, "1 to 64 widths")]
Plain = Annotated[Any, Rule(_is_plain, "a number, a word, true, false or None, or a list of such")]
Device = Annotated[str, Rule(_is_device, "cpu, or cuda where torch finds such a device")]
