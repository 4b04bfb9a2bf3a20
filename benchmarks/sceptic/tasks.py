"""The six tasks as configurations with the default options of ``gfn-rb train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from benchmarks.sceptic.envs import ConditionalWords, Expressions, Graphs, Kind, Sequences
from gfn_rb.training import TrainConfig


@dataclass(frozen=True, kw_only=True)
class SequencesConfig(TrainConfig):
    """Sample one of three landscapes of sequences.

    Attributes:
        kind: which of them.
        task_seed: of its random numbers.
    """

    env: ClassVar[str] = "sequences"

    kind: Kind = "nk"
    task_seed: int = 1

    def make_env(self) -> Sequences:
        """Return the environment."""
        return Sequences(self.kind, self.task_seed, self.device)


@dataclass(frozen=True, kw_only=True)
class ConditionalWordsConfig(TrainConfig):
    """Sample 12 bits under 8 conditions.

    Attributes:
        task_seed: of the words.
    """

    env: ClassVar[str] = "conditional_words"

    task_seed: int = 1

    def make_env(self) -> ConditionalWords:
        """Return the environment."""
        return ConditionalWords(self.task_seed, self.device)


@dataclass(frozen=True, kw_only=True)
class GraphsConfig(TrainConfig):
    """Sample graphs of 6 nodes."""

    env: ClassVar[str] = "graphs"
    every_state_terminates: ClassVar[bool] = True

    def make_env(self) -> Graphs:
        """Return the environment."""
        return Graphs(self.device)


@dataclass(frozen=True, kw_only=True)
class ExpressionsConfig(TrainConfig):
    """Sample expressions of 3 levels."""

    env: ClassVar[str] = "expressions"

    def make_env(self) -> Expressions:
        """Return the environment."""
        return Expressions(self.device)


class Task(NamedTuple):
    """A task: what it is called, its configuration, and how many modes there are."""

    title: str
    config: TrainConfig
    n_modes: int


TASKS = {
    "nk": Task("NK landscape, 9 of 3 letters (30 modes)", SequencesConfig(kind="nk"), 30),
    "knapsack": Task("knapsack of 16 items (100 modes)", SequencesConfig(kind="knapsack"), 100),
    "graphs": Task("graphs of 6 nodes (70 modes)", GraphsConfig(), 70),
    "expressions": Task("expressions of 3 levels (4 modes)", ExpressionsConfig(), 4),
    "ising": Task("Ising model, 14 spins (20 modes)", SequencesConfig(kind="ising"), 20),
    "conditional": Task("12 bits under 8 conditions", ConditionalWordsConfig(), 0),
}
"""By name. No default was chosen on them. Some were on an Ising model of 12 spins, and on a grid
with conditions."""
