"""What the fields of a training configuration may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from gfn_rb.errors import ArgumentError
from gfn_rb.training.losses import LOSSES
from gfn_rb.training.objectives import converts
from gfn_rb.training.replay import REPLAY

if TYPE_CHECKING:
    from gfn_rb.training.config import TrainConfig

Rule = tuple[Callable[[Any], bool], str]


def check_fields(
    config: type[TrainConfig], values: Mapping[str, Any], choices: Mapping[str, Iterable[str]]
) -> None:
    """Check each field by itself. Ranges of an environment's own fields are its own business.

    Args:
        config: the class of the configuration; the type of a field is that of its default.
        values: by field.
        choices: the names that a field may hold.

    Raises:
        ArgumentError: a value is of another type, or out of its range.
    """
    for f in fields(config):
        if type(f.default) in _TYPES:
            _check(f.name, values[f.name], *_TYPES[type(f.default)])
        elif f.name in _OWN:
            _check(f.name, values[f.name], *_OWN[f.name])
    for name, rule in _RULES.items():
        _check(name, values[name], *rule)
    for name, names in choices.items():
        _check(name, values[name], *_one_of(names))


def check_together(config: TrainConfig) -> None:
    """Check the fields that depend on each other.

    Raises:
        ArgumentError: two fields do not go together.
    """
    wanted = LOSSES[config.loss].reads
    if config.loss == "mdb" and not config.every_state_terminates:
        others = ", ".join(name for name in LOSSES if name != "mdb")
        raise ArgumentError(
            f"loss must be one of {others} with {config.env}, where not every state is "
            f"terminating, got 'mdb'"
        )
    fitting = [name for name, kind in REPLAY.items() if converts(kind.gives, wanted)]
    if config.replay not in fitting:
        raise ArgumentError(
            f"replay must be one of {', '.join(fitting)} with loss {config.loss}, which reads "
            f"{wanted.__name__.lower()}, got {config.replay!r}"
        )
    if config.keep == "diverse" and config.replay in ("transitions", "states"):
        raise ArgumentError(
            f"keep must be one of top, recent with replay {config.replay}, whose episodes pass "
            f"through the same states, got 'diverse'"
        )
    if config.feed != "none":
        _check_feed(config)


def _check_feed(config: TrainConfig) -> None:
    if config.managers < 1:
        raise ArgumentError(f"managers must be at least 1 with feed {config.feed}, got 0")
    if config.replay != "trajectories":
        raise ArgumentError(
            f"replay must be trajectories with feed {config.feed}, got {config.replay!r}"
        )
    if config.draw == "priority":
        raise ArgumentError(
            f"draw must be another than priority with feed {config.feed}, got 'priority'"
        )


def _check(name: str, value: Any, rule: Callable[[Any], bool], expected: str) -> None:
    try:
        holds = rule(value)
    except (TypeError, RuntimeError):  # of another type; no name of a device
        holds = False
    if not holds:
        raise ArgumentError(f"{name} must be {expected}, got {value!r}")


def _one_of(names: Iterable[str]) -> Rule:
    return lambda value: value in names, f"one of {', '.join(names)}"


def _is_device(value: str) -> bool:
    device = torch.device(value)
    if device.type != "cuda":
        return value == "cpu"
    return (device.index or 0) < torch.cuda.device_count()


_TYPES: dict[type, Rule] = {
    int: (lambda v: type(v) is int, "a whole number"),
    float: (lambda v: type(v) in (int, float), "a number"),
    bool: (lambda v: type(v) is bool, "true or false"),
    str: (lambda v: type(v) is str, "a word"),
}
# Of fields that not every configuration has, and whose default does not tell their type.
_OWN: dict[str, Rule] = {
    "beta": (lambda v: v is None or type(v) in (int, float), "a number"),
    "delta": (lambda v: v is None or type(v) is int, "a whole number"),
    "targets": (
        lambda v: type(v) is tuple and all(type(target) is str for target in v),
        "a list of words",
    ),
}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("steps", "batch_size", "capacity", "threads", "eval_every", "checkpoint_every"),
            *("feed_quota", "send_every"),
        ),
        (lambda v: v >= 1, "at least 1"),
    ),
    **dict.fromkeys(("local_search", "workers", "managers"), (lambda v: v >= 0, "at least 0")),
    **dict.fromkeys(
        ("temperature", "rank_k", "lr", "lr_log_z", "subtb_lambda", "patience"),
        (lambda v: 0 < v < math.inf, "positive and finite"),
    ),
    **dict.fromkeys(
        ("replay_ratio", "priority_alpha"), (lambda v: 0 <= v < math.inf, "at least 0 and finite")
    ),
    **dict.fromkeys(("epsilon", "top_share"), (lambda v: 0 <= v <= 1, "in [0, 1]")),
    "seed": (lambda v: 0 <= v < 2**63, "in [0, 2^63)"),
    "cutoff": (math.isfinite, "finite"),
    "top_fraction": (lambda v: 0 < v < 1, "above 0 and below 1"),
    "back_ratio": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "hidden": (
        lambda v: len(v) > 0 and all(type(width) is int and width >= 1 for width in v),
        "at least one width of at least 1",
    ),
    "log_z": (lambda v: v is None or math.isfinite(v), "a finite number"),
    "device": (_is_device, "cpu, or cuda where torch finds such a device"),
}
