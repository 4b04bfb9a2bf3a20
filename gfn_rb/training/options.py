"""The options of every training run, in the groups that the command line shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from gfn_rb.training.rules import (
    Device,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalCount,
    OptionalFiniteFloat,
    OptionalPositiveFloat,
    OptionalShare,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ProperShare,
    Rule,
    Seed,
    Share,
    Widths,
)

LossName = Literal["tb", "subtb", "db", "mdb", "fm"]
ReplayName = Literal["trajectories", "transitions", "states", "terminal"]
KeepName = Literal["top", "diverse", "recent"]
DrawName = Literal["softmax", "rank", "quantile", "priority", "uniform"]
CompactName = Literal["none", "narrow", "rebuild"]
BackwardName = Literal["learned", "uniform"]
LoggerName = Literal["none", "csv", "tensorboard", "wandb"]
FeedName = Literal["none", "top", "diverse", "softmax", "newest"]
SendName = Literal["awaited", "deferred", "nonblocking"]
BaselineName = Literal["min", "percentile", "ema", "none"]
TransportName = Literal["auto", "mpi", "gloo", "local"]
RegressionName = Literal["squared", "linex"]
PriorityName = Literal["residual", "teacher"]
AnnealName = Literal["linear", "exponential"]
MetricName = Literal["distances", "elbo", "eubo", "accuracy", "correlation"]

_METRICS = get_args(MetricName)
Metrics = Annotated[
    tuple[MetricName, ...],
    Rule(
        lambda v: type(v) is tuple and len({*v}) == len(v) and {*v} <= {*_METRICS},
        f"different names among {', '.join(_METRICS)}",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How long a run takes, where it goes and what it writes."""

    steps: PositiveInt = 1000
    """Training steps. Each samples one fresh batch, which takes batch-size reward calls, and as
    many again for each loop of local search."""
    seed: Seed = 0
    """Seed of all random numbers. The same seed gives the same numbers."""
    out: Path | None = field(default=None, compare=False)
    """Run folder to make. By default the next free runs/ENV-seedS-NNN."""
    checkpoint_every: PositiveInt = 200
    """Steps between checkpoints."""
    logger: LoggerName = "none"
    """TorchRL logger that is given the rows of metrics.csv as well."""
    device: Device = "cpu"
    """cpu, cuda or cuda:N."""
    threads: PositiveInt = 1
    """CPU threads. More than one is slower for networks of the default size."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How fresh trajectories are sampled."""

    batch_size: PositiveInt = 32
    """Fresh trajectories per step."""
    epsilon: Share = 0.0
    """Share of uniformly random actions when sampling fresh trajectories."""
    epsilon_end: OptionalShare = None
    """What epsilon is annealed to."""
    anneal: AnnealName = "linear"
    """How that and the temperature are annealed: by equal differences, or by equal factors."""
    anneal_steps: PositiveInt = 1000
    """Steps until they, and the learning rates, are at their ends."""
    local_search: NonNegativeInt = 0
    """Loops of local search around each fresh trajectory: undo its last moves, make new ones, go
    on from the better one. Each loop takes batch-size reward calls."""
    back_ratio: PositiveShare = 0.5
    """Share of a trajectory's moves that a search undoes."""
    teacher_share: Share = 0.0
    """Share of the fresh batches that are sampled by an adaptive teacher: a second policy, trained
    to sample what the first one fits badly. For replay of trajectories or terminal states."""
    teacher_c: NonNegativeFloat = 19.0
    """The teacher's reward, log(1 + residual^2), counts a residual's square this many times more
    where the flow is too small."""
    teacher_alpha: NonNegativeFloat = 0.0
    """And is multiplied by the reward to this power."""
    workers: NonNegativeInt = 0
    """Processes that sample fresh trajectories; 0 samples in the main process."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """What is learnt, and how."""

    loss: LossName = "tb"
    """Trajectory balance, sub-trajectory balance, detailed balance, its modified form (where every
    state is terminating), or flow matching."""
    regression: RegressionName = "squared"
    """What a residual costs, but of fm: its square, or Linex, exponential where the flow is too
    small and linear where it is too large."""
    subtb_lambda: PositiveFloat = 0.9
    """Sub-trajectory balance weighs a piece of k steps by this to the power of k."""
    clip_grad_norm: OptionalPositiveFloat = None
    """Gradients longer than this, of all parameters together, are shortened to it."""
    backward: BackwardName = "learned"
    """Backward policy. Flow matching learns none and always has the uniform one."""
    hidden: Widths = (128, 128)
    """Widths of the hidden layers of each policy."""
    lr: PositiveFloat = 3e-3
    """Adam's learning rate for the networks."""
    lr_log_z: PositiveFloat = 0.1
    """Adam's learning rate for log Z, where it is a number of its own."""
    lr_end: OptionalShare = None
    """What is left of both learning rates after anneal-steps steps, as a share: they fall by equal
    differences."""
    log_z: OptionalFiniteFloat = None
    """Initial log Z, in nats, of tb, subtb and db. By default what fits the first fresh batch."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What is stored and what is drawn again."""

    replay_ratio: NonNegativeFloat = 1.0
    """Replayed items per fresh one; 0 turns replay off. What a manager feeds counts as fresh."""
    replay: ReplayName = "trajectories"
    """What is stored: trajectories; their transitions (for db, mdb, fm) or states (for fm) one by
    one; or terminating states, to which the backward policy regenerates trajectories."""
    capacity: PositiveInt = 100_000
    """Items the buffer keeps."""
    compact: CompactName = "narrow"
    """How they are stored: whole, in the smallest integers that the environment needs, or, of
    trajectories, by their actions alone, from which states are made again when they are drawn."""
    keep: KeepName = "top"
    """Which items it keeps: those of highest reward, of these only such as end far apart, or the
    most recent."""
    unique: bool = True
    """Keep one item per object, the newest, where diverse buffers keep the best: an object is a
    terminating state and its condition. Transitions and states stand for no object."""
    cutoff: FiniteFloat = 0.0
    """Items of a diverse buffer end further apart than this, in places that differ or in steps on
    a grid. 0 rules out duplicates."""
    draw: DrawName = "rank"
    """How replayed items are drawn: by exp(log reward / temperature), by rank, a share from the
    best, by how badly they were fitted when last replayed, or all alike."""
    temperature: PositiveFloat = 1.0
    """Temperature of the softmax draw. 1 draws in proportion to the reward; above 1 is flatter."""
    temperature_end: OptionalPositiveFloat = None
    """What the temperature of the softmax draw is annealed to."""
    rank_k: PositiveFloat = 0.01
    """The rank draw weighs the item of rank r among N by 1 / (k N + r)."""
    top_fraction: ProperShare = 0.1
    """Which part of the items the quantile draw takes for the best."""
    top_share: Share = 0.5
    """Which part of its draws come from these."""
    priority_alpha: NonNegativeFloat = 0.6
    """The priority draw weighs an item by its residual to this power; 0 is uniform."""
    max_age: OptionalCount = None
    """Items that were sampled more than so many steps ago are dropped."""
    priority_rule: PriorityName = "residual"
    """Priority of an item when it was learnt from: the size of its residual, or the teacher's
    reward."""


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """What is measured in the course of a run, and how often."""

    eval_every: PositiveInt = 25
    """Steps between rows of metrics.csv. They have exact distances to the target where the
    environment has 200,000 states at most."""
    metrics: Metrics = ()
    """Further columns: elbo, eubo (evidence bounds, and an importance estimate of log Z), accuracy
    (mean score, as a share of the target's), correlation (of estimated log P(x) with log R(x)) and
    distances (exact, however many states there are). All take time."""
    eval_samples: PositiveInt = 1000
    """Trajectories that elbo, eubo and accuracy are measured by, beside training."""
    eval_backward: PositiveInt = 10
    """Backward trajectories per test state, which estimate its log P(x)."""
    mode_score: OptionalFiniteFloat = None
    """Also count modes by distance: objects of at least this score, and far from each other."""
    mode_cutoff: NonNegativeFloat = 0.0
    """They are further than this from each other, in places that differ or in steps on a grid."""


@dataclass(frozen=True, kw_only=True)
class RanksOptions:
    """What several processes give each other."""

    managers: NonNegativeInt = 0
    """Ranks that keep the best of everyone instead of training. Under mpiexec, srun or torchrun
    they are among the ranks started; otherwise they run beside training, in this process."""
    transport: TransportName = field(default="auto", compare=False)
    """What joins the ranks started: MPI under mpiexec, and under srun where it speaks PMI; Gloo
    under srun otherwise, and under torchrun. local trains in this process alone, whatever started
    it."""
    feed: FeedName = "none"
    """Which of the items that others found come back from a manager: those of highest reward,
    diverse ones out of these, drawn by reward, or the newest. Each is learnt from like a fresh one
    when it comes, and replayed with one's own from then on; where gradients are averaged, and so
    are those of everybody's items already, it is only replayed."""
    feed_quota: PositiveInt = 64
    """How many of them come with each reply, at most. What all others find, batch-size per step
    each, teaches most; fewer save time."""
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
    average_gradients: bool = False
    """Average gradients over the ranks that train, which then all have the same weights, and learn
    as one process would from batches as large as theirs together: make them smaller. Otherwise each
    trains its own. When a rank is lost, the others go on averaging; when rank 0 is, each goes on
    alone."""
    patience: PositiveFloat = 120.0
    """Seconds of silence after which another rank counts as lost; among ranks that train, and may
    have to wait for a manager themselves, twice as many."""


Needs = tuple[tuple[str, dict[str, Rule]], ...]


def _among(*names: str) -> Rule:
    return Rule(lambda value: value in names, " or ".join(names))


def _with_any(*names: str) -> Rule:
    return Rule(lambda values: any(name in values for name in names), f"with {' or '.join(names)}")


_ON = Rule(lambda value: value > 0, "above 0")
_GIVEN = Rule(lambda value: value is not None, "given")
ABSENT = Rule(lambda value: value is None, "not given")

# What each option has no effect without: any of some others, and their values.
NEEDS: Needs = (
    ("back_ratio", {"local_search": _ON}),
    ("anneal", {"epsilon_end": _GIVEN, "temperature_end": _GIVEN}),
    ("anneal_steps", {"epsilon_end": _GIVEN, "temperature_end": _GIVEN, "lr_end": _GIVEN}),
    ("teacher_c", {"teacher_share": _ON, "priority_rule": _among("teacher")}),
    ("teacher_alpha", {"teacher_share": _ON}),
    ("subtb_lambda", {"loss": _among("subtb")}),
    ("backward", {"loss": _among("tb", "subtb", "db", "mdb")}),
    ("lr_log_z", {"loss": _among("tb"), "teacher_share": _ON}),
    ("log_z", {"loss": _among("tb", "subtb", "db"), "teacher_share": _ON}),
    ("cutoff", {"keep": _among("diverse")}),
    ("draw", {"replay_ratio": _ON}),
    ("max_age", {"replay_ratio": _ON}),
    ("temperature", {"draw": _among("softmax")}),
    ("temperature_end", {"draw": _among("softmax")}),
    ("rank_k", {"draw": _among("rank")}),
    ("top_fraction", {"draw": _among("quantile")}),
    ("top_share", {"draw": _among("quantile")}),
    ("priority_alpha", {"draw": _among("priority")}),
    ("priority_rule", {"draw": _among("priority")}),
    ("eval_samples", {"metrics": _with_any("elbo", "eubo", "accuracy")}),
    ("eval_backward", {"metrics": _with_any("correlation")}),
    ("mode_cutoff", {"mode_score": _GIVEN}),
    ("feed", {"managers": _ON}),
    ("feed_quota", {"feed": _among("top", "diverse", "softmax", "newest")}),
    ("send", {"managers": _ON}),
    ("send_every", {"managers": _ON}),
    ("baseline", {"managers": _ON}),
    ("journal", {"managers": _ON}),
)
