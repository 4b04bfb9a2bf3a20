"""The configuration of a training run: one dataclass, and a few fields more per environment."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch

from gfn_rb.envs import EnumerableEnv, HyperGrid, TFBind8
from gfn_rb.errors import ArgumentError
from gfn_rb.training.replay import DRAW, KEEP, REPLAY

if TYPE_CHECKING:  # for a type checker names in a table are strings, for the command line choices
    Keep = str
    Draw = str
    Replay = str
else:
    Keep, Draw, Replay = Literal[tuple(KEEP)], Literal[tuple(DRAW)], Literal[tuple(REPLAY)]

Backward = Literal["learned", "uniform"]
LoggerName = Literal["none", "csv", "tensorboard", "wandb"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ABC):
    """Everything that a training run depends on. The command line shows these fields.

    The defaults are what did best on TFBind8 at 16,000 and 32,000 reward calls, with and without
    replay; ``python -m benchmarks.learning`` compares others.
    """

    env: ClassVar[str]

    steps: int = 1000
    """Training steps. Each samples one fresh batch, which takes batch-size reward calls."""
    seed: int = 0
    """Seed of all random numbers. The same seed gives the same numbers."""
    out: Path | None = field(default=None, compare=False)
    """Run folder to make. By default the next free runs/ENV-seedS-NNN."""
    batch_size: int = 32
    """Fresh trajectories per step."""
    replay_ratio: float = 1.0
    """Replayed trajectories per fresh one; 0 turns replay off."""
    replay: Replay = "trajectories"
    """Replay stored trajectories, or store terminating states and have the backward policy
    regenerate trajectories to them."""
    capacity: int = 100_000
    """Items the buffer keeps."""
    keep: Keep = "top"
    """Which items it keeps: those of highest reward, or the most recent."""
    draw: Draw = "softmax"
    """How replayed items are drawn: by exp(log reward / temperature), or all alike."""
    temperature: float = 1.0
    """Temperature of the softmax draw. 1 draws in proportion to the reward; above 1 is flatter."""
    epsilon: float = 0.0
    """Share of uniformly random actions when sampling fresh trajectories."""
    backward: Backward = "learned"
    """Backward policy."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of each policy."""
    lr: float = 3e-3
    """Adam's learning rate for the policies."""
    lr_log_z: float = 0.1
    """Adam's learning rate for log Z."""
    log_z: float | None = None
    """Initial log Z, in nats. By default the value that fits the first fresh batch best."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int = 1
    """CPU threads. More than one is slower for networks of the default size."""
    eval_every: int = 25
    """Steps between rows of metrics.csv, each with the exact distance to the target."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    logger: LoggerName = "none"
    """TorchRL logger that is given the rows of metrics.csv as well."""

    def validate(self) -> None:
        """Check every field that is not the environment's own.

        Not done at construction, where tyro would take the error for one in its own parsing.

        Raises:
            ArgumentError: a field is out of its range.
        """
        _check_fields(type(self), vars(self))

    @abstractmethod
    def make_env(self) -> EnumerableEnv:
        """Return the environment, on the configured device."""

    @property
    def n_replayed(self) -> int:
        """Trajectories replayed per step."""
        return round(self.replay_ratio * self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them, without ``out``: a run may be moved."""
        values = {**asdict(self), "hidden": list(self.hidden)}
        del values["out"]
        return {"env": self.env, **values}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TrainConfig:
        """Return the configuration that ``to_dict`` turned into ``values``.

        Raises:
            ArgumentError: a field is missing, unknown or out of its range.
        """
        rest = dict(values)
        env = rest.pop("env", None)
        if env not in CONFIGS:
            raise ArgumentError(f"env must be one of {sorted(CONFIGS)}, got {env!r}")
        known = {f.name for f in fields(CONFIGS[env])} - {"out"}
        if wrong := sorted(known ^ rest.keys()):
            state = "unknown" if wrong[0] in rest else "missing"
            raise ArgumentError(f"{wrong[0]} is {state} in a configuration of {env}")
        if isinstance(rest["hidden"], list):
            rest["hidden"] = tuple(rest["hidden"])
        _check_fields(CONFIGS[env], rest)
        return CONFIGS[env](**rest)

    def with_steps(self, steps: int) -> TrainConfig:
        """Return the same configuration with another number of steps."""
        return replace(self, steps=steps)


@dataclass(frozen=True, kw_only=True)
class TFBind8Config(TrainConfig):
    """Design DNA 8-mers that the transcription factor SIX6 binds."""

    env: ClassVar[str] = "tfbind8"

    form: Literal["append", "prepend_append"] = "append"
    """Write letters at the right end, or at both ends."""
    beta: float = 3.0
    """Exponent of the reward."""
    backward: Backward = "uniform"
    """Backward policy. With form append there is one way back only, and both are the same."""

    def make_env(self) -> TFBind8:
        """Return the environment, on the configured device."""
        return TFBind8(self.form, self.beta, device=self.device)


@dataclass(frozen=True, kw_only=True)
class HyperGridConfig(TrainConfig):
    """Find the rewarded corners of a grid."""

    env: ClassVar[str] = "hypergrid"

    ndim: int = 4
    """Coordinates."""
    height: int = 8
    """Grid points per coordinate."""
    r0: float = 0.1
    """Reward everywhere."""
    r1: float = 0.5
    """Reward added in the outer bands."""
    r2: float = 2.0
    """Reward added in the inner bands."""

    def make_env(self) -> HyperGrid:
        """Return the environment, on the configured device."""
        return HyperGrid(self.ndim, self.height, self.r0, self.r1, self.r2, device=self.device)


CONFIGS: dict[str, type[TrainConfig]] = {
    config.env: config for config in (TFBind8Config, HyperGridConfig)
}


# Rules of the fields. The ranges of an environment's own fields are the environment's business.

Rule = tuple[Callable[[Any], bool], str]


def _is_device(value: str) -> bool:
    device = torch.device(value)
    if device.type != "cuda":
        return value == "cpu"
    return (device.index or 0) < torch.cuda.device_count()


def _one_of(names: Iterable[str]) -> Rule:
    return lambda value: value in names, f"one of {', '.join(names)}"


_TYPE_RULES: dict[type, Rule] = {
    int: (lambda v: type(v) is int, "a whole number"),
    float: (lambda v: type(v) in (int, float), "a number"),
    str: (lambda v: type(v) is str, "a word"),
}
_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("steps", "batch_size", "capacity", "threads", "eval_every", "checkpoint_every"),
        (lambda v: v >= 1, "at least 1"),
    ),
    **dict.fromkeys(
        ("temperature", "lr", "lr_log_z"), (lambda v: 0 < v < math.inf, "positive and finite")
    ),
    "seed": (lambda v: 0 <= v < 2**63, "in [0, 2^63)"),
    "replay_ratio": (lambda v: 0 <= v < math.inf, "at least 0 and finite"),
    "epsilon": (lambda v: 0 <= v <= 1, "in [0, 1]"),
    "hidden": (
        lambda v: len(v) > 0 and all(type(width) is int and width >= 1 for width in v),
        "at least one width of at least 1",
    ),
    "log_z": (lambda v: v is None or math.isfinite(v), "a finite number"),
    "replay": _one_of(REPLAY),
    "keep": _one_of(KEEP),
    "draw": _one_of(DRAW),
    "backward": _one_of(get_args(Backward)),
    "logger": _one_of(get_args(LoggerName)),
    "device": (_is_device, "cpu, or cuda where torch finds such a device"),
}


def _check_fields(config: type[TrainConfig], values: Mapping[str, Any]) -> None:
    for f in fields(config):
        if type(f.default) in _TYPE_RULES:
            _check(f.name, values[f.name], *_TYPE_RULES[type(f.default)])
    for name, rule in _RULES.items():
        _check(name, values[name], *rule)


def _check(name: str, value: Any, rule: Callable[[Any], bool], expected: str) -> None:
    try:
        holds = rule(value)
    except (TypeError, RuntimeError):  # of another type; no name of a device
        holds = False
    if not holds:
        raise ArgumentError(f"{name} must be {expected}, got {value!r}")
