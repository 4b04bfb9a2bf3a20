"""Where uniqueness or groups may change what is learned, and steps on the buffer after the end.

``python -m benchmarks.published questions`` runs every row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer

from benchmarks.published.defaults import DEFAULTS, FIGURES, figures_of
from benchmarks.published.rows import Figure, Row
from benchmarks.published.sceptic import hooks
from benchmarks.sceptic.envs import ConditionalWords
from benchmarks.sceptic.rows import CALLS, Arm
from benchmarks.sceptic.tasks import TASKS, ConditionalWordsConfig, Task
from gfn_rb import GroupSampler
from gfn_rb.envs import GFNEnv
from gfn_rb.training import Trainer
from gfn_rb.training.options import KeepRecent, KeepTop, SoftmaxDraw

CAPACITY = 200
LOOKS = (50, 150, 300)  # steps after the last call
CHOSEN_ON = ("nk", "expressions", "ising")  # the others report


class UnequalWords(ConditionalWords):
    """Words whose reward depends on the condition's number i as well: log R(x | c_i) = ... - i."""

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R(x | c)."""
        log_reward = super().log_reward(state, condition)
        assert condition is not None
        return log_reward - condition.argmax(1).float()


@dataclass(frozen=True, kw_only=True)
class UnequalWordsConfig(ConditionalWordsConfig):
    """Sample 12 bits under 8 conditions of unequal rewards."""

    env: ClassVar[str] = "unequal_words"

    by_condition: bool = False
    """Whether each condition is drawn equally often."""

    def make_env(self) -> UnequalWords:
        """Return the environment."""
        return UnequalWords(self.task_seed, self.device)

    def make_buffer(
        self,
        env: GFNEnv,
        generator: torch.Generator,
        regenerate: Callable[[TensorDictBase], TensorDictBase] | None = None,
    ) -> TensorDictReplayBuffer:
        """Return the replay buffer."""
        rb = super().make_buffer(env, generator, regenerate)
        if self.by_condition:
            rb.set_sampler(GroupSampler("condition", num_groups=8))
        return rb


_SMALL = {"capacity": CAPACITY}
SMALL = {
    "unique": Arm("best, each once", _SMALL),
    "twins": Arm("best, duplicates kept", {**_SMALL, "keep": KeepTop(unique=False)}),
    "recent": Arm("most recent", {**_SMALL, "keep": KeepRecent(unique=False)}),
    "fifty": Arm("fifty lines, best, each once", _SMALL, partial(hooks, "rank", CAPACITY)),
}
"""Buffers of 200 rows, on tasks where thousands of objects are found."""
GROUPS = {
    "rank": Arm("rank, over all rows"),
    "softmax": Arm("softmax, over all rows", {"draw": SoftmaxDraw()}),
    "groups": Arm("softmax within conditions drawn equally", {"by_condition": True}),
    "fifty": Arm("fifty lines, rank", {}, partial(hooks, "rank")),
}
"""Draws under conditions of unequal rewards."""
UNEQUAL = Task("12 bits under 8 conditions of unequal rewards", UnequalWordsConfig(), 0)


def _row(name: str, task: Task, arm: Arm) -> Row:
    return Row(
        name=name,
        title=f"{task.title}: {arm.title}",
        protocol="",
        published="",
        settings="",
        config=replace(task.config, **arm.options),
        calls=CALLS,
        figures=FIGURES,
        measure=figures_of,
        n_modes=task.n_modes,
        hooks=arm.hooks,
    )


class Switched(Trainer):
    """Trains with Linex for the first half of the calls, then with the square."""

    def step(self) -> float:
        """Take one training step."""
        if self.steps_done * self.config.batch_size == CALLS // 2:
            self.loss.penalty = torch.square
        return super().step()


def after_steps(trainer: Trainer) -> dict[str, float]:
    """Return the figures, and those after more optimizer steps on the buffer alone."""
    figures = figures_of(trainer)
    size, taken = trainer.config.batch_size, 0
    for n in LOOKS:
        for _ in range(n - taken):  # three optimizer steps each, as many as with a fresh batch
            drawn = trainer.replay.gives.from_tensordict(trainer.replayed.sample(3 * size))
            for start in range(0, 3 * size, size):
                trainer._learn(drawn[start : start + size])
            trainer.average.update()
        taken = n
        for key, value in figures_of(trainer).items():
            figures[f"{key}_after_{n}"] = value
    return figures


_AFTER = tuple(
    Figure(f"total variation, {n} steps more", f"total_variation_after_{n}", None, digits=4)
    for n in LOOKS
)
DISTILLED: dict[str, Row] = {
    name: replace(
        _row(f"distilled_{name}", task, Arm("steps on the buffer after the end")),
        measure=after_steps,
        figures=(*FIGURES, *_AFTER),
    )
    for name, task in TASKS.items()
}
"""By task."""

SWITCHED: dict[str, Row] = {
    name: replace(_row(f"switched_{name}", task, Arm("Linex, then the square")), trainer=Switched)
    for name, task in TASKS.items()
}
"""By task."""
QUESTIONS: dict[str, Row] = {
    **{
        f"unexplored_{task}": replace(
            DEFAULTS[task],
            name=f"unexplored_{task}",
            title=f"{DEFAULTS[task].title}: no batch explores",
            config=replace(DEFAULTS[task].config, temperature=1.0),
        )
        for task in ("qm9", "tfbind8", "words")
    },
    **{
        f"small_{task}_{arm}": _row(f"small_{task}_{arm}", TASKS[task], way)
        for task in ("nk", "graphs")
        for arm, way in SMALL.items()
    },
    **{f"unequal_{arm}": _row(f"unequal_{arm}", UNEQUAL, way) for arm, way in GROUPS.items()},
    **{row.name: row for row in DISTILLED.values()},
    **{row.name: row for row in SWITCHED.values()},
}
"""By name."""
