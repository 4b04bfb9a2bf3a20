"""The defaults' tasks with a buffer of fifty lines instead of the library's, in the same loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from benchmarks.fifty_lines import FiftyLines
from benchmarks.published.defaults import DEFAULTS
from benchmarks.published.rows import Row
from gfn_rb.envs import GFNEnv
from gfn_rb.training import Hooks

TASKS = ("grid_4d_16", "grid_3d", "tfbind8", "qm9", "words")
"""Those whose runs take at most 90 CPU seconds, of those that the defaults were chosen on."""
ARMS = {
    "uniform": ("stored trajectories, uniform", "uniform", "trajectories"),
    "rank": ("stored trajectories, rank", "rank", "trajectories"),
    "walked": ("terminating states, rank", "rank", "terminal"),
}
"""What the fifty lines do: in words, their draw, and what is stored."""
_OBJECT = "state"  # what fifty lines tell rows apart by


class FiftyReplay:
    """Replays from fifty lines instead of the buffer of a run, whose transforms it uses.

    Args:
        draw: how rows are drawn.
        capacity: number of rows kept.
    """

    def __init__(self, draw: Literal["uniform", "rank"], capacity: int = 100_000) -> None:
        self._rows = FiftyLines(capacity, "newest" if draw == "uniform" else "best", draw, k=1e-3)
        self._rb: Any = None

    def over(self, rb: ReplayBuffer, env: GFNEnv) -> Any:
        """Take the place of a buffer."""
        self._rb = rb
        return self

    def store(self, rb: ReplayBuffer, items: TensorDictBase) -> None:
        """Store a batch of fresh trajectories."""
        x = items["state"][torch.arange(len(items)), items["length"] - 1]
        condition = items.get("condition", None)
        if condition is not None:  # under another one the same state is another object
            x = torch.cat([x.flatten(1).float(), condition.flatten(1).float()], 1)
        rows = {str(name): value for name, value in rb.transform.inv(items.copy()).items()}
        self._rows.extend({**{f"row {name}": value for name, value in rows.items()},
                           "log_reward": items["log_reward"], _OBJECT: x})  # fmt: skip

    def sample(self, n: int) -> TensorDictBase:
        """Draw rows, some of them several times while there are fewer."""
        drawn = self._rows.sample(min(n, len(self._rows)))
        at = torch.arange(n) % len(drawn["log_reward"])
        rows = {name[4:]: value[at] for name, value in drawn.items() if name.startswith("row ")}
        result: TensorDictBase = self._rb.transform(TensorDict(rows, [n]))
        return result


def hooks(draw: Literal["uniform", "rank"], capacity: int = 100_000) -> Hooks:
    """Return the hooks that put fifty lines in the place of the buffer."""
    replay = FiftyReplay(draw, capacity)
    return Hooks(replayed=replay.over, store=replay.store)


def _row(task: str, arm: str) -> Row:
    row = DEFAULTS[task]
    _, draw, stored = ARMS[arm]
    return replace(
        row,
        name=f"fifty_lines_{arm}_{task}",
        config=replace(row.config, replay=stored),
        hooks=partial(hooks, draw),
    )


SCEPTIC = {(task, arm): _row(task, arm) for task in TASKS for arm in ARMS}
"""Rows by task and arm."""
