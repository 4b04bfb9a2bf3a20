"""Eight ways to train on each of the six tasks, most of them at equal reward calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.published.defaults import FIGURES, figures_of
from benchmarks.published.rows import Row
from benchmarks.published.sceptic import hooks
from benchmarks.sceptic.tasks import TASKS, Task
from gfn_rb.training import Hooks, Trainer

CALLS = 16_000
SEEDS = 5


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Args:
        title: what it is called.
        options: what differs from the defaults.
        hooks: returns new hooks of a run.
        trainer: returns what trains, given the configuration and the hooks.
        calls: reward calls of a run.
        not_measured: why it cannot do a task, by task.
    """

    title: str
    options: dict[str, Any] = field(default_factory=dict)
    hooks: Callable[[], Hooks] = Hooks
    trainer: Callable[..., Any] = Trainer
    calls: int = CALLS
    not_measured: dict[str, str] = field(default_factory=dict)


def _torchgfn(config: Any, hooks: Hooks) -> Any:
    from benchmarks.sceptic.peer import TorchGFNScript  # where torchgfn is installed

    return TorchGFNScript(config)


ARMS = {
    "defaults": Arm("defaults"),
    "no_replay": Arm("no replay", {"replay_ratio": 0.0}),
    # The defaults take three steps per 32 calls: batches of 10 take as many and a few more.
    "equal_steps": Arm("no replay, as many steps", {"replay_ratio": 0.0, "batch_size": 10}),
    # Added after the first seed: about the CPU time of the defaults.
    "equal_time": Arm("no replay, 40,000 calls", {"replay_ratio": 0.0}, calls=40_000),
    "fifty_trajectories": Arm(
        "fifty lines, trajectories", {"replay": "trajectories"}, partial(hooks, "rank")
    ),
    "fifty_objects": Arm(
        "fifty lines, terminating states", {"replay": "terminal"}, partial(hooks, "rank")
    ),
    "torchgfn": Arm(
        "torchgfn's script",
        {"batch_size": 16},
        trainer=_torchgfn,
        not_measured={"conditional": "the script has no conditions"},
    ),
    "square": Arm("defaults, square", {"regression": "squared"}),
}
"""By name. The last one answers which cost to choose, not whether to replay."""


def _row(name: str, task: Task, arm: str) -> Row:
    way = ARMS[arm]
    return Row(
        name=f"sceptic_{name}_{arm}",
        title=f"{task.title}: {way.title}",
        protocol="",
        published="",
        settings="",
        config=replace(task.config, **way.options),
        calls=way.calls,
        figures=FIGURES,
        measure=figures_of,
        n_modes=task.n_modes,
        hooks=way.hooks,
        trainer=way.trainer,
    )


FROZEN = {
    (name, arm): _row(name, task, arm)
    for name, task in TASKS.items()
    for arm in ARMS
    if name not in ARMS[arm].not_measured
}
"""Rows by task and arm."""
