"""The options of every training run. Options that belong together form a group, a dataclass.

The first field of a group is given by the group's own name, the others by both names: ``--search 4
--search.back-ratio 0.25``, ``--draw softmax --draw.temperature 2``. A group whose first field is 0,
None, empty or "none" is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
import tyro
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.samplers import Sampler as ItemSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.buffers.presets import (
    recent_writer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.containers.base import Container
from gfn_rb.losses import LOSSES
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)
from gfn_rb.training.priority_rules import PriorityRule, TeacherReward
from gfn_rb.training.rules import (
    Device,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ProperShare,
    Rule,
    Seed,
    Share,
    Widths,
)
from gfn_rb.writers import DiversityWriter, RewardPrioritizedWriter

# Not a Literal: a loss that somebody defines is one of them.
LossName = Annotated[
    str, OneOf(LOSSES), tyro.conf.arg(constructor_factory=lambda: Literal[tuple(LOSSES)])
]
ReplayName = Literal["auto", "trajectories", "transitions", "states", "terminal"]
CompactName = Literal["none", "narrow", "rebuild"]
BackwardName = Literal["learned", "uniform"]
LoggerName = Literal["none", "csv", "tensorboard", "wandb"]
FeedName = Literal["none", "top", "diverse", "softmax", "newest"]
SendName = Literal["awaited", "deferred", "nonblocking"]
BaselineName = Literal["min", "percentile", "ema", "none"]
TransportName = Literal["auto", "mpi", "gloo", "local"]
RegressionName = Literal["auto", "squared", "linex"]
AnnealName = Literal["linear", "exponential"]
MetricName = Literal["distances", "elbo", "eubo", "accuracy", "correlation"]

Metrics = Annotated[
    tuple[MetricName, ...], Rule(lambda v: len({*v}) == len(v), "names that are all different")
]

T = TypeVar("T")
_Own = Annotated[T, tyro.conf.arg(name="")]  # given by the name of the group
_DrawKind = Annotated[
    T,
    tyro.conf.arg(
        name="",
        metavar="{softmax,rank,quantile,priority,teacher,uniform}",
        help="Draw replayed items by exp(log reward / temperature), by rank, a share from the "
        "best, by their residual when last replayed, by the adaptive teacher's reward of that "
        "residual, or uniformly. Each has options of its own: see --draw softmax --help.",
    ),
]
_KeepKind = Annotated[
    T,
    tyro.conf.arg(
        name="",
        metavar="{top,diverse,recent}",
        help="Keep the items of highest reward, of these only such as end far apart, or the most "
        "recent. Each has options of its own: see --keep diverse --help.",
    ),
]


# How replayed items are drawn.


@dataclass(frozen=True, kw_only=True)
class SoftmaxDraw:
    """Draw items in proportion to exp(log reward / temperature)."""

    kind: _DrawKind[Literal["softmax"]] = "softmax"
    temperature: PositiveFloat = 1.0
    """1 draws in proportion to the reward; above 1 is flatter."""
    temperature_end: PositiveFloat | None = None
    """Final value of the temperature, when it is annealed."""

    def make(self, key: Any) -> ItemSampler:
        """Return the sampler, given the key of the log-rewards."""
        return SoftmaxRewardSampler(key, self.temperature)


@dataclass(frozen=True, kw_only=True)
class RankDraw:
    """Draw items by their rank in reward."""

    kind: _DrawKind[Literal["rank"]] = "rank"
    k: PositiveFloat = 0.001
    """The item of rank r among N has the weight 1 / (k N + r)."""

    def make(self, key: Any) -> ItemSampler:
        """Return the sampler, given the key of the log-rewards."""
        return RankRewardSampler(key, self.k)


@dataclass(frozen=True, kw_only=True)
class QuantileDraw:
    """Draw a fixed share of the items from those of highest reward."""

    kind: _DrawKind[Literal["quantile"]] = "quantile"
    top_fraction: ProperShare = 0.1
    """Fraction of the items that count as the best."""
    top_share: Share = 0.5
    """Share of the draws that come from these."""

    def make(self, key: Any) -> ItemSampler:
        """Return the sampler, given the key of the log-rewards."""
        return QuantileRewardSampler(key, self.top_fraction, self.top_share)


@dataclass(frozen=True, kw_only=True)
class PriorityDraw:
    """Draw items by the size of their residual when they were last replayed."""

    kind: _DrawKind[Literal["priority", "teacher"]] = "priority"
    alpha: NonNegativeFloat = 0.6
    """Items have the weight of their priority to this power; 0 is uniform."""

    def make(self, key: Any) -> ItemSampler:
        """Return the sampler, which needs no key."""
        return PrioritySampler(alpha=self.alpha)

    def make_rule(self) -> PriorityRule:
        """Return the function that turns residuals into priorities."""
        return torch.abs


@dataclass(frozen=True, kw_only=True)
class TeacherDraw(PriorityDraw):
    """Draw items by the adaptive teacher's reward of their residual when last replayed."""

    kind: _DrawKind[Literal["priority", "teacher"]] = "teacher"
    c: NonNegativeFloat = 19.0
    """The square of a residual counts this many times more where the flow is too small."""

    def make_rule(self) -> PriorityRule:
        """Return the function that turns residuals into priorities."""
        return TeacherReward(self.c)


@dataclass(frozen=True, kw_only=True)
class UniformDraw:
    """Draw all items with the same probability."""

    kind: _DrawKind[Literal["uniform"]] = "uniform"

    def make(self, key: Any) -> ItemSampler:
        """Return the sampler, which needs no key."""
        return RandomSampler()


Draw = SoftmaxDraw | RankDraw | QuantileDraw | PriorityDraw | TeacherDraw | UniformDraw
DRAW: dict[str, Callable[..., Draw]] = {
    "softmax": SoftmaxDraw,
    "rank": RankDraw,
    "quantile": QuantileDraw,
    "priority": PriorityDraw,
    "teacher": TeacherDraw,
    "uniform": UniformDraw,
}
"""The options of how items are drawn, by kind."""


# Which items a buffer keeps. An object is a terminating state with its condition.


@dataclass(frozen=True, kw_only=True)
class KeepTop:
    """Keep the items of highest reward."""

    kind: _KeepKind[Literal["top"]] = "top"
    unique: bool = True
    """Keep one item per object, the newest. Single transitions and states stand for no object."""

    def make(
        self, key: Any, are_objects: bool, distance: float | Distance, max_age: int | None
    ) -> Writer:
        """Return the writer.

        Args:
            key: of the log-rewards.
            are_objects: whether each item stands for an object.
            distance: between two states, p of a norm or a callable.
            max_age: maximum age of the items in steps, None for any.
        """
        return RewardPrioritizedWriter(key, unique="state" if self.unique and are_objects else None)


@dataclass(frozen=True, kw_only=True)
class KeepDiverse:
    """Keep items of high reward that end far apart."""

    kind: _KeepKind[Literal["diverse"]] = "diverse"
    cutoff: FiniteFloat = 0.0
    """Items end further apart than this, in places that differ or in steps on a grid. 0 rules out
    duplicates, of which the best is kept."""

    def make(
        self, key: Any, are_objects: bool, distance: float | Distance, max_age: int | None
    ) -> Writer:
        """Return the writer, see :class:`KeepTop`."""
        if callable(distance):
            return DiversityWriter(key, cutoff_distance=self.cutoff, distance=distance)
        return DiversityWriter(key, cutoff_distance=self.cutoff, p=distance)


@dataclass(frozen=True, kw_only=True)
class KeepRecent:
    """Keep the most recent items."""

    kind: _KeepKind[Literal["recent"]] = "recent"
    unique: bool = True
    """Keep one item per object, the newest. Single transitions and states stand for no object."""

    def make(
        self, key: Any, are_objects: bool, distance: float | Distance, max_age: int | None
    ) -> Writer:
        """Return the writer, see :class:`KeepTop`."""
        return recent_writer("state" if self.unique and are_objects else None, max_age=max_age)


Keep = KeepTop | KeepDiverse | KeepRecent
KEEP: dict[str, Callable[..., Keep]] = {
    "top": KeepTop,
    "diverse": KeepDiverse,
    "recent": KeepRecent,
}
"""The options of which items a buffer keeps, by kind."""


# What a buffer stores. Rows of a container can be turned into rows of those after it.

CONTAINERS: tuple[type[Container], ...] = (Trajectories, Transitions, States)


class ReplayKind(NamedTuple):
    """The container that drawn rows fit into, and the preset of the buffer."""

    gives: type[Container]
    preset: Callable[..., TensorDictReplayBuffer]

    def n_items(self, fresh: Trajectories) -> int:
        """Return how many items some trajectories are: themselves, or their steps."""
        return len(fresh) if self.gives is Trajectories else int(fresh.length.sum())


REPLAY: dict[str, ReplayKind] = {
    "trajectories": ReplayKind(Trajectories, reward_prioritized_buffer),
    "transitions": ReplayKind(Transitions, transition_buffer),
    "states": ReplayKind(States, state_buffer),
    "terminal": ReplayKind(Trajectories, terminating_state_buffer),
}
"""What is stored, by name."""


# Groups that are off by default.


@dataclass(frozen=True)
class SearchOptions:
    """Local search: undo the last moves of a trajectory, make new ones, go on from the better."""

    loops: _Own[NonNegativeInt] = 0
    """Loops of local search around each fresh trajectory. Each takes batch-size reward calls."""
    back_ratio: PositiveShare = 0.5
    """Share of a trajectory's moves that a search undoes."""


@dataclass(frozen=True)
class TeacherOptions:
    """Adaptive teacher: a second policy, trained to sample what the first one fits badly."""

    share: _Own[Share] = 0.0
    """Share of the fresh batches that the teacher samples. For replay of trajectories or terminal
    states."""
    c: NonNegativeFloat = 19.0
    """The teacher's reward, log(1 + residual^2), counts a residual's square this many times more
    where the flow is too small."""
    alpha: NonNegativeFloat = 0.0
    """The teacher's reward is multiplied by the reward to this power."""


@dataclass(frozen=True)
class MetricsOptions:
    """Further columns of metrics.csv. All take time."""

    names: _Own[Metrics] = ()
    """elbo, eubo (evidence bounds, and an importance estimate of log Z), accuracy (mean score, as a
    share of the target's), correlation (of estimated log P(x) with log R(x)) and distances (exact,
    however many states there are)."""
    samples: PositiveInt = 1000
    """Trajectories by which elbo, eubo and accuracy are measured, beside training."""
    backward: PositiveInt = 10
    """Backward trajectories per test state, which estimate its log P(x)."""


@dataclass(frozen=True)
class SeparatedModesOptions:
    """Modes counted by distance: objects of a high score, and far from each other."""

    score: _Own[FiniteFloat | None] = None
    """Lowest score of such a mode."""
    cutoff: NonNegativeFloat = 0.0
    """Modes are further apart than this, in places that differ or in steps on a grid."""


@dataclass(frozen=True)
class ManagersOptions:
    """Ranks that keep the best items of everyone instead of training."""

    n: _Own[NonNegativeInt] = 0
    """Number of managers. Under mpiexec, srun or torchrun they are among the ranks started;
    otherwise they run beside training, in this process."""
    send: SendName = "deferred"
    """How to send to a manager: wait for the reply, look for it at the next step, or never wait
    and leave out what it cannot take."""
    send_every: PositiveInt = 1
    """Steps between sendings."""
    baseline: BaselineName = "none"
    """Not to be sent are items below a manager's lowest, a low percentile of its items, or a
    running mean of the lowest of each batch, which stands for the others until its buffer is full.
    With none, all are sent: what has little reward teaches those who are fed, too."""
    journal: bool = False
    """Managers have each row on disk before they answer for it, beside their checkpoints, and lose
    none when they are killed."""


@dataclass(frozen=True)
class FeedOptions:
    """Items of other ranks, which come back from a manager."""

    kind: _Own[FeedName] = "none"
    """Which of the items that others found come back: those of highest reward, diverse ones out of
    these, drawn by reward, or the newest. Each is learnt from like a fresh one when it comes, and
    replayed with the rank's own from then on; where gradients are averaged, it is only replayed."""
    quota: PositiveInt = 64
    """Maximum number of them in each reply. What all others find, batch-size per step each,
    teaches most; fewer save time."""


@dataclass(frozen=True, kw_only=True)
class AnnealOptions:
    """How epsilon, the temperature and the learning rates reach their final values."""

    by: _Own[AnnealName] = "linear"
    """Anneal epsilon and the temperature by equal differences, or by equal factors."""
    steps: PositiveInt | None = None
    """Steps until all are at their final values; by default those of the run."""


# Everything else.


@dataclass(frozen=True, kw_only=True)
class GeneralOptions:
    """Options that stand for themselves."""

    steps: PositiveInt = 1000
    """Training steps. Each samples one fresh batch, which takes batch-size reward calls, and as
    many again for each loop of local search."""
    seed: Seed = 0
    """Seed of all random numbers. The same seed gives the same numbers."""
    out: Path | None = field(default=None, compare=False)
    """Run folder to make. By default the next free runs/ENV-seedS-NNN."""
    checkpoint_every: PositiveInt = 200
    """Steps between checkpoints."""
    eval_every: PositiveInt = 25
    """Steps between rows of metrics.csv. They have exact distances to the target where the
    environment has 200,000 states at most."""
    logger: LoggerName = "none"
    """TorchRL logger that is given the rows of metrics.csv as well."""
    device: Device = "cpu"
    """cpu, cuda or cuda:N."""
    threads: PositiveInt = 1
    """CPU threads. More than one is slower for networks of the default size."""

    batch_size: PositiveInt = 32
    """Fresh trajectories per step."""
    epsilon: Share = 0.0
    """Share of uniformly random actions when sampling fresh trajectories."""
    epsilon_end: Share | None = None
    """Final value of epsilon, when it is annealed."""
    workers: NonNegativeInt = 0
    """Processes that sample fresh trajectories; 0 samples in the main process."""

    loss: LossName = "tb"
    """Trajectory balance, sub-trajectory balance, detailed balance, its modified form (where every
    state is terminating), or flow matching."""
    regression: RegressionName = "auto"
    """Cost of a residual: its square, or Linex, exponential where the flow is too small and linear
    where it is too large. auto is squared for fm, whose residuals have no sign, else linex."""
    subtb_lambda: PositiveFloat = 0.9
    """Sub-trajectory balance weighs a piece of k steps by this to the power of k."""
    clip_grad_norm: PositiveFloat | None = None
    """Gradients longer than this, of all parameters together, are shortened to it."""
    backward: BackwardName = "uniform"
    """Backward policy. Flow matching learns none and always has the uniform one."""
    hidden: Widths = (256, 256)
    """Widths of the hidden layers of each policy."""
    lr: PositiveFloat = 1e-3
    """Adam's learning rate for the networks."""
    lr_log_z: PositiveFloat = 0.02
    """Adam's learning rate for log Z, where it is a number of its own."""
    lr_end: Share | None = None
    """Final value of both learning rates, as a share of the first: they fall by equal
    differences."""
    log_z: FiniteFloat | None = 0.0
    """Initial log Z, in nats, of tb, subtb and db. None is what fits the first fresh batch."""

    replay_ratio: NonNegativeFloat = 2.0
    """Replayed items per fresh one; 0 turns replay off. What a manager feeds counts as fresh."""
    replay: ReplayName = "auto"
    """Items to store: trajectories; their transitions (for db, mdb, fm) or states (for fm) one by
    one; or terminating states, to which the backward policy regenerates trajectories. auto is
    trajectories with feed or compact rebuild, else terminal."""
    capacity: PositiveInt = 100_000
    """Items the buffer keeps."""
    compact: CompactName = "narrow"
    """How they are stored: whole, in the smallest integers that the environment needs, or, of
    trajectories, by their actions alone, from which states are made again when they are drawn."""
    max_age: NonNegativeInt | None = None
    """Items that were sampled more than so many steps ago are dropped."""

    transport: TransportName = field(default="auto", compare=False)
    """Connection of the ranks started: MPI under mpiexec, and under srun where it speaks PMI; Gloo
    under srun otherwise, and under torchrun. local trains in this process alone, whatever started
    it."""
    average_gradients: bool = False
    """Average gradients over the ranks that train, which then all have the same weights, and learn
    as one process would from batches as large as theirs together: make them smaller. Otherwise each
    trains its own. When a rank is lost, all stop with status 1; gfn-rb resume continues from the
    newest step that all have saved."""
    patience: PositiveFloat = 120.0
    """Seconds of silence after which another rank counts as lost; among ranks that train, and may
    have to wait for a manager themselves, twice as many."""

    draw: Draw = RankDraw()
    """How replayed items are drawn."""
    keep: Keep = KeepTop()
    """Which items the buffer keeps."""
    search: SearchOptions = SearchOptions()
    """Local search around fresh trajectories."""
    teacher: TeacherOptions = TeacherOptions()
    """Adaptive teacher."""
    anneal: AnnealOptions = AnnealOptions()
    """Annealing."""
    metrics: MetricsOptions = MetricsOptions()
    """Further columns of metrics.csv."""
    separated_modes: SeparatedModesOptions = SeparatedModesOptions()
    """Modes counted by distance."""
    managers: ManagersOptions = ManagersOptions()
    """Ranks that keep the best items of everyone."""
    feed: FeedOptions = FeedOptions()
    """Items of other ranks."""
