"""Checks of the arguments of constructors, whose errors name the argument."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from reprlib import Repr
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gfn_rb.errors import ArgumentError
from gfn_rb.gone import NamesGoneOptions

_MOST = 2**63 - 1
_TEXT = Repr()  # of an object whose own repr raises, its class and address
_TEXT.maxother = _MOST


class KeepsArguments(NamesGoneOptions):
    """Keeps the arguments of its constructor, from which an equal object can be made.

    Attributes:
        constructor_arguments: positional arguments, and others by name.
    """

    constructor_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    if not TYPE_CHECKING:  # or checkers would take its signature for that of every constructor
        # Not in ``__init__``: classes of users need not call that of this class, or may call it
        # with arguments of their own.
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an object that keeps its arguments."""
            made = super().__new__(cls, *args, **kwargs)
            made.__dict__["constructor_arguments"] = (args, kwargs)  # before nn.Module is set up
            return made


def shown(value: Any) -> str:
    """Return a value's text on one line, at most 80 characters."""
    return " ".join(_TEXT.repr_instance(value, 0).split())[:80]


def kind_of(value: Any) -> str:
    """Return what a value is: its class and its text, or the name of a class itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}: {shown(value)}"


def name_of(source: Any) -> str:
    """Return what states recognise a source by, which of a callable is not its name."""
    return "a callable" if callable(source) else str(source)


def require_key(name: str, value: Any) -> None:
    """Raise unless a value can be the key of an entry: a string, or a tuple of them."""
    parts = value if isinstance(value, tuple) else (value,)
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise ArgumentError(
            f"{name} must be a key, a string or a tuple of them, got {shown(value)}"
        )


def is_listed(value: Any) -> bool:
    """Return whether a value lists several: any sequence, but a string or a tuple (a key)."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple))


def as_keys(value: Any) -> Any:
    """Return a sequence of keys, as Hydra reads it from a file, as a list; others as they are.

    Keys of nested entries, tuples, are lists in such a file.
    """
    if not is_listed(value):
        return value
    return [tuple(key) if is_listed(key) else key for key in value]


def require_flag(name: str, value: Any) -> None:
    """Raise unless a value is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {shown(value)}")


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise unless a value is one of several."""
    if not any(value is each or (type(value) is str and value == each) for each in choices):
        *others, last = (repr(each) for each in choices)
        raise ArgumentError(f"{name} must be {', '.join(others)} or {last}, got {shown(value)}")


def as_count(name: str, value: Any, least: int = 1) -> int:
    """Return a value as a number of things."""
    try:
        count = operator.index(value)
    except (TypeError, RuntimeError):
        raise ArgumentError(f"{name} must be an integer, got {shown(value)}") from None
    if isinstance(value, bool) or count > _MOST:
        raise ArgumentError(f"{name} must be an integer below 2^63, got {shown(value)}")
    if count < least:
        raise ArgumentError(f"{name} must be at least {least}, got {count}")
    return count


def require_kind(
    name: str, value: Any, kind: type, but: Callable[[Any], bool] | None = None
) -> None:
    """Raise unless a value is of a class, or is something else that will do."""
    if not isinstance(value, kind) and (but is None or not but(value)):
        raise ArgumentError(f"{name} must be a {kind.__name__}, got {kind_of(value)}")


def require_optional(name: str, value: Any, kind: type) -> None:
    """Raise unless a value is None or of a class."""
    if value is not None:
        require_kind(name, value, kind)


def require_number(name: str, value: Any) -> None:
    """Raise unless a value is a number."""
    if not isinstance(value, (int, float, np.number)):
        raise ArgumentError(f"{name} must be a number, got {kind_of(value)}")


def require_device_of(generator: torch.Generator, device: torch.device, what: str = "rows") -> None:
    """Raise unless a generator of random numbers is on the device of what it draws from."""
    if generator.device.type != device.type:
        raise ArgumentError(
            f"generator must be on {device}, as the {what} are, got one on {generator.device}"
        )


def as_device(name: str, value: Any) -> torch.device:
    """Return a value as a device, or raise unless this machine has it."""
    try:
        device = torch.device(value)
    except (TypeError, RuntimeError):
        raise ArgumentError(f"{name} must name a device of torch, got {shown(value)}") from None
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ArgumentError(
            f"{name} must be cpu, or cuda where torch finds such a device, got {shown(value)}: "
            f"it finds {count}"
        )
    return device
