"""Forms of functions, numbers and checks that several environments share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import shown
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Int64, Integers, Shaped

_TAKES_ARRAYS = "takes_arrays"

HostFunction = Callable[..., np.ndarray]
Method = TypeVar("Method", bound=Callable[..., Any])

EitherBatch: TypeAlias = Int64[Any, "n *state"]
"""States in a tensor or in a NumPy array."""
EitherIntegers: TypeAlias = Int64[Any, "n"]
"""One integer per row in a tensor or in a NumPy array."""


def passes_on(attribute: str) -> Callable[[Method], Method]:
    """Mark a method that only calls the one of its name of an attribute, which takes arrays."""

    def mark(method: Method) -> Method:
        setattr(method, _TAKES_ARRAYS, attribute)
        return method

    return mark


takes_arrays = passes_on("")
"""Mark a method of an environment that takes NumPy arrays as well as tensors.

Rollouts on the CPU call it with arrays: on few rows it takes a third of the time. A method that
overrides this one is without the mark, until given its own.
"""


def host_form(method: Any) -> HostFunction:
    """Return a bound method of an environment as a function of NumPy arrays."""
    if attribute := getattr(method, _TAKES_ARRAYS, None):
        return getattr(getattr(method.__self__, attribute), method.__name__)  # a call less
    if attribute is not None:
        return method
    return lambda *arrays: method(*map(torch.from_numpy, arrays)).numpy()


def states_of_writes(
    place: Int64[Tensor, "n T"],
    value: Int64[Tensor, "n T"],
    length: Integers,
    n_places: int,
    empty: int,
    sink: int,
) -> Int64[Tensor, "n T1 places"]:
    """Return the states of trajectories whose moves each write a value at an empty place.

    Places and values may be anything from the exit action, the last of ``length``, on.
    """
    step = torch.arange(place.shape[1] + 1, device=place.device)
    is_move = step[1:] < length[:, None]
    place = place.where(is_move, n_places)  # other actions write at an additional place
    blank = place.new_full((len(place), n_places + 1), len(step))
    written = blank.scatter(1, place, step[1:].expand_as(place))[:, None, :-1]
    content = blank.scatter(1, place, value)[:, None, :-1]
    state = content.where(written <= step[:, None], empty)
    return state.masked_fill_((step >= length[:, None])[:, :, None], sink)


def check_positive(**arguments: float) -> None:
    """Raise ArgumentError unless every argument is positive and finite."""
    for name, value in arguments.items():
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ArgumentError(f"{name} must be positive and finite, got {shown(value)}")


def check_power(beta: float, min_reward: float) -> None:
    """Raise ArgumentError unless beta log max(r, min_reward) is a log-reward of r up to 1."""
    check_positive(beta=beta)
    if not 0 < min_reward <= 1:
        raise ArgumentError(f"min_reward must be in (0, 1], got {min_reward}")


def from_digits(digit: Int64[Tensor, "*n digits"], base: int) -> Int64[Tensor, "*n"]:
    """Read digits as numbers in a base, the most significant digit first."""
    powers = base ** torch.arange(digit.shape[-1] - 1, -1, -1, device=digit.device)
    return (digit * powers).sum(-1)


def to_digits(number: Int64[Tensor, "*n"], base: int, n_digits: int) -> Int64[Tensor, "*n digits"]:
    """Write numbers in a base, the most significant digit first."""
    powers = base ** torch.arange(n_digits - 1, -1, -1, device=number.device)
    return number[..., None] // powers % base


def numbers_of(words: Sequence[str], width: int, dtype: torch.dtype) -> Shaped[Tensor, "n width"]:
    """Return what ``numbers_in_words`` was given, so many numbers in each row."""
    is_float = dtype.is_floating_point
    kind, info = (float, torch.finfo(dtype)) if is_float else (int, torch.iinfo(dtype))
    rows = []
    for text in words:
        try:
            rows.append([kind(number) for number in text.strip().strip("()").split(",")])
        except ValueError:
            rows.append([])
        if len(rows[-1]) != width or not all(info.min <= each <= info.max for each in rows[-1]):
            raise ArgumentError(
                f"words must be {width} finite {dtype} numbers, as (3, 0), got {text!r:.80}"
            )
    return torch.tensor(rows, dtype=dtype).reshape(-1, width)
