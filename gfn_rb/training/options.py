"""The options of every training run. Options that belong together form a group, a dataclass.

The first field of a group is given by the group's own name, the others by both names: ``--search 4
--search.back-ratio 0.25``, ``--draw softmax --draw.temperature 2``. A group whose first field is 0,
None, empty or "none" is off.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import tyro

from gfn_rb.training import rules


def loss_names() -> list[str]:
    """Return the names of losses: those of gfn_rb.losses, and those of modules loaded so far."""
    # Read from the sources: gfn_rb.losses loads torch, without which options are parsed, and a file
    # that is added there is all that a loss needs.
    sources = sorted((Path(__file__).parents[1] / "losses").glob("*.py"))
    shipped = re.findall(
        r'^    name = "(\w+)"', "".join(e.read_text() for e in sources), re.MULTILINE
    )
    loaded = getattr(sys.modules.get("gfn_rb.losses.base"), "LOSSES", ())
    return [*dict.fromkeys([*shipped, *loaded])]


LossName = Annotated[str, loss_names, tyro.conf.arg(metavar=f"{{{','.join(loss_names())}}}")]
ReplayName = Literal["auto", "trajectories", "transitions", "states", "terminal"]
CompactName = Literal["none", "narrow", "rebuild"]
FeedName = Literal["none", "top", "softmax", "newest"]
SendName = Literal["awaited", "deferred", "nonblocking"]
BaselineName = Literal["min", "percentile", "ema", "none"]
TransportName = Literal["auto", "mpi", "tcp", "gloo", "local"]  # gloo: the name of tcp before
GradientSum = Literal["ranks", "tree"]
RegressionName = Literal["auto", "squared", "linex"]
MetricName = Literal["distances", "elbo", "eubo", "accuracy", "correlation"]

Metrics = Annotated[
    tuple[MetricName, ...],
    rules.Rule(lambda v: len({*v}) == len(v), "names that are all different"),
]


T = TypeVar("T")
_Own = Annotated[T, tyro.conf.arg(name="")]  # given by the name of the group
_DrawKind = Annotated[
    T,
    tyro.conf.arg(
        name="",
        metavar="{softmax,rank,quantile,priority,teacher,uniform}",
        help="How replayed items are drawn: by exp(log reward / temperature), by rank, a share "
        "from the best, by the last residual, by the adaptive teacher's reward of that residual, "
        "or uniformly. --draw softmax --help lists the options of softmax.",
    ),
]
_KeepKind = Annotated[
    T,
    tyro.conf.arg(
        name="",
        metavar="{top,diverse,recent}",
        help="Which items the buffer keeps: those of highest reward, those of highest reward "
        "that end far apart, or the most recent. --keep diverse --help lists the options of "
        "diverse.",
    ),
]


# How replayed items are drawn.


@dataclass(frozen=True, kw_only=True)
class SoftmaxDraw:
    """Draw items in proportion to exp(log reward / temperature)."""

    kind: _DrawKind[Literal["softmax"]] = "softmax"
    temperature: rules.PositiveFloat = 1.0
    """Temperature of the draw. 1 draws in proportion to the reward; higher values are flatter."""
    temperature_end: rules.PositiveFloat | None = None
    """Final value of the temperature. Default: no annealing."""


@dataclass(frozen=True, kw_only=True)
class RankDraw:
    """Draw items by their rank in reward."""

    kind: _DrawKind[Literal["rank"]] = "rank"
    k: rules.PositiveFloat = 0.001
    """Flatness of the draw: the item of rank r among N has the weight 1 / (k N + r)."""


@dataclass(frozen=True, kw_only=True)
class QuantileDraw:
    """Draw a fixed share of the items from those of highest reward."""

    kind: _DrawKind[Literal["quantile"]] = "quantile"
    top_fraction: rules.ProperShare = 0.1
    """Fraction of the items that count as the best."""
    top_share: rules.Share = 0.5
    """Share of the draws that come from the best items."""


@dataclass(frozen=True, kw_only=True)
class PriorityDraw:
    """Draw items by the size of their residual when they were last replayed."""

    kind: _DrawKind[Literal["priority", "teacher"]] = "priority"
    alpha: rules.NonNegativeFloat = 0.6
    """Exponent of the priorities; 0 draws uniformly."""


@dataclass(frozen=True, kw_only=True)
class TeacherDraw(PriorityDraw):
    """Draw items by the adaptive teacher's reward of their residual when last replayed."""

    kind: _DrawKind[Literal["priority", "teacher"]] = "teacher"
    c: rules.NonNegativeFloat = 19.0
    """Additional weight of the square of a residual where the flow is too small."""


@dataclass(frozen=True, kw_only=True)
class UniformDraw:
    """Draw all items with the same probability."""

    kind: _DrawKind[Literal["uniform"]] = "uniform"


Draw = SoftmaxDraw | RankDraw | QuantileDraw | PriorityDraw | TeacherDraw | UniformDraw
DRAW: dict[str, Callable[..., Draw]] = {kind().kind: kind for kind in get_args(Draw)}
"""The options of how items are drawn, by kind."""


# Which items a buffer keeps. An object is a terminating state with its condition.


@dataclass(frozen=True, kw_only=True)
class KeepTop:
    """Keep the items of highest reward."""

    kind: _KeepKind[Literal["top"]] = "top"
    unique: bool = True
    """Keep one item per object, the newest. It has no effect on single transitions and states."""


@dataclass(frozen=True, kw_only=True)
class KeepDiverse:
    """Keep items of high reward that end far apart."""

    kind: _KeepKind[Literal["diverse"]] = "diverse"
    cutoff: rules.NonNegativeFloat = 0.0
    """Minimum distance of the ends of items, in different places or in steps on a grid. 0 removes
    duplicates and keeps the best of them."""


@dataclass(frozen=True, kw_only=True)
class KeepRecent:
    """Keep the most recent items."""

    kind: _KeepKind[Literal["recent"]] = "recent"
    unique: bool = True
    """Keep one item per object, the newest. It has no effect on single transitions and states."""


Keep = KeepTop | KeepDiverse | KeepRecent
KEEP: dict[str, Callable[..., Keep]] = {kind().kind: kind for kind in get_args(Keep)}
"""The options of which items a buffer keeps, by kind."""


# Groups that are off by default.


@dataclass(frozen=True)
class SearchOptions:
    """Local search: undo the last moves of a trajectory, sample new ones, keep the better."""

    loops: _Own[rules.NonNegativeInt] = 0
    """Loops of local search around each fresh trajectory. Each takes batch-size reward calls."""
    back_ratio: rules.PositiveShare = 0.5
    """Share of a trajectory's moves that a search undoes."""


@dataclass(frozen=True)
class TeacherOptions:
    """Adaptive teacher: a second policy, trained to sample what the first one fits badly."""

    share: _Own[rules.Share] = 0.0
    """Share of the fresh batches that the teacher samples. It needs replay of trajectories or
    terminating states."""
    c: rules.NonNegativeFloat = 19.0
    """Additional weight of the square of a residual in the teacher's reward, log(1 + residual^2),
    where the flow is too small."""
    alpha: rules.NonNegativeFloat = 0.0
    """Exponent of the reward that multiplies the teacher's reward."""


@dataclass(frozen=True)
class MetricsOptions:
    """Further columns of metrics.csv. All take time."""

    names: _Own[Metrics] = ()
    """Metrics to add. elbo and eubo: evidence bounds and an importance estimate of log Z. accuracy:
    mean score over the target's. correlation: of estimated log P(x) with log R(x).
    distances: exact, for any number of states."""
    samples: rules.PositiveInt = 1000
    """Number of additional trajectories that elbo, eubo and accuracy sample."""
    backward: rules.PositiveInt = 10
    """Backward trajectories per test state, to estimate its log P(x)."""


@dataclass(frozen=True)
class ManagersOptions:
    """Ranks that keep the best items of all ranks instead of training."""

    n: _Own[rules.NumberOrNode] = 0
    """Number of managers. Under mpiexec, srun or torchrun they are some of the started ranks.
    Otherwise they are threads of this process. node makes the last rank of each node the manager of
    its other ranks."""
    send: SendName = "deferred"
    """How to send to a manager. awaited waits for the reply, deferred reads it at the next step,
    and nonblocking skips items that a manager cannot take. All wait before a checkpoint."""
    send_every: rules.PositiveInt = 1
    """Steps between messages to a manager."""
    baseline: BaselineName = "none"
    """Log-reward below which items are not sent: the lowest one that a manager keeps (min), a low
    percentile of them, or a running mean of the lowest one of each batch (ema). Until its buffer is
    full, a manager uses ema. none sends all items: items of low reward teach fed workers too."""
    journal: bool = False
    """Managers sync each row to disk before they reply, so that none is lost when a machine fails.
    Without it, none is lost when a process is killed."""
    exchange_every: rules.PositiveFloat = 10.0
    """Seconds between two exchanges of rows between the managers of nodes, at most patience."""
    exchange_quota: Annotated[
        rules.PositiveInt, rules.Rule(lambda v: v <= 4096, "at most 4096")
    ] = 1024
    """Maximum number of rows that the manager of a node sends each other one at a time. They are
    those of feed, or of highest reward without it."""


@dataclass(frozen=True)
class FeedOptions:
    """Items of other ranks that a manager feeds."""

    kind: _Own[FeedName] = "none"
    """Which items of other ranks are fed: those of highest reward, drawn by reward, or the newest.
    A rank trains on a fed item as on a fresh one when it arrives, and replays it from then on. With
    averaged gradients it is only replayed."""
    quota: rules.PositiveInt = 64
    """Maximum number of items in each reply. batch-size times the number of other ranks feeds all
    items; fewer items save time."""


# Everything else.


@dataclass(frozen=True, kw_only=True)
class GeneralOptions:
    """Options that belong to no group."""

    steps: rules.PositiveInt = 1000
    """Training steps. Each step samples one fresh batch, which takes batch-size reward calls. Each
    loop of local search takes as many again."""
    seed: rules.Seed = 0
    """Seed of all random numbers. The same seed gives the same numbers."""
    out: Path | None = field(default=None, compare=False)
    """Run folder to create. Default: the next free runs/ENV-seedS-NNN."""
    checkpoint_every: rules.PositiveInt = 200
    """Steps between checkpoints."""
    eval_every: rules.PositiveInt = 50
    """Steps between the first 8 rows of metrics.csv. The interval then doubles each time the number
    of steps does. Rows contain exact distances to the target if the environment has at most 200,000
    states."""
    logger: Literal["none", "csv", "tensorboard", "wandb"] = "none"
    """TorchRL logger that also receives the rows of metrics.csv, and statistics of the buffer as
    replay/NAME, with histograms of its keys and ages."""
    device: rules.Device = "cpu"
    """Device: cpu, cuda or cuda:N."""
    threads: rules.PositiveInt = 1
    """CPU threads. More than one is slower for networks of the default size."""

    batch_size: rules.PositiveInt = 32
    """Fresh trajectories per step."""
    epsilon: rules.Share = 0.0
    """Share of uniformly random actions when sampling fresh trajectories."""
    epsilon_end: rules.Share | None = None
    """Final value of epsilon. Default: no annealing."""
    temperature: rules.PositiveFloat | None = None
    """Divisor of the policy's logits when sampling fresh trajectories: above 1 they get flatter.
    Default: 1 for every other batch, and 0.5 to 2 for the others, adapted so that half of the fresh
    objects are new; 1 for all with continuous states."""

    loss: LossName = "tb"
    """Trajectory balance, VarGrad (which estimates log Z from each batch), sub-trajectory balance,
    detailed balance, its modified form (where every state is terminating), or flow matching."""
    regression: RegressionName = "auto"
    """Cost of a residual: its square, or Linex, steeper where the flow is too small than where it
    is too large, which finds rare objects sooner. auto is squared with fm, whose residuals have no
    sign, else linex."""
    linex_alpha: rules.PositiveFloat = 0.5
    """Asymmetry of Linex. Near 0 it approaches half the square; 1 finds rare objects sooner still,
    and fits the target later."""
    min_log_reward: rules.FiniteFloat | None = None
    """Lower bound of log-rewards in losses, in nats. Default: none, and a trajectory to an object
    of reward 0 ends the run with an error."""
    subtb_lambda: rules.PositiveFloat = 0.9
    """Weight of each further step in sub-trajectory balance: a part of k steps has this number to
    the power of k."""
    clip_grad_norm: rules.PositiveFloat | None = None
    """Maximum norm of the gradient of all parameters together. None: ten times its usual norm,
    an average of its logarithm over about 100 batches."""
    backward: Literal["learned", "uniform"] = "uniform"
    """Backward policy. Flow matching learns none and always has the uniform one."""
    hidden: rules.Widths = (256, 256)
    """Widths of the hidden layers of each policy."""
    share_trunk: bool = False
    """Use the same hidden layers for the forward policy, a learned backward policy and state flows.
    Learning takes about half of the time per step."""
    lr: rules.PositiveFloat = 1e-3
    """Adam's learning rate for the networks."""
    lr_log_z: rules.PositiveFloat = 0.02
    """Adam's learning rate for log Z, if log Z is a separate parameter."""
    lr_end: rules.Share | None = None
    """Final value of both learning rates, as a share of the initial values, to which they fall
    linearly. None: they fall once nothing new is found and the loss no longer falls."""
    anneal_steps: rules.PositiveInt | None = None
    """Steps in which epsilon, the temperature of the draw and the learning rates change linearly to
    their final values. Default: the steps of the run."""
    log_z: rules.FiniteFloat | None = None
    """Initial log Z, in nats, of tb, subtb and db. None: what the first fresh batch estimates,
    which moves with a constant added to log R, so that the constant changes nothing else."""

    replay_ratio: rules.NonNegativeFloat = 2.0
    """Replayed items per fresh one; 0 turns replay off. Items fed by a manager count as fresh."""
    replay: ReplayName = "auto"
    """Items to store: trajectories; their transitions (for db, mdb, fm) or states (for fm) one by
    one; or terminating states, to which the backward policy regenerates trajectories. auto is
    trajectories with feed or compact rebuild, else terminal."""
    capacity: rules.PositiveInt = 100_000
    """Number of items that the buffer keeps."""
    compact: CompactName = "narrow"
    """How items are stored: none stores them as they are, narrow uses the smallest integers that
    the environment needs, and rebuild stores the actions of trajectories alone and computes their
    states again when they are drawn."""
    max_age: rules.NonNegativeInt | None = None
    """Maximum age of items in steps. Older items are dropped. Default: no limit."""
    offline_data: str | None = None
    """Table of known objects, a .csv or .parquet file with the columns object and log_reward (or
    reward), such as gfn-rb inspect --export writes. A part of the replayed items is drawn from it:
    the backward policy samples their trajectories. They cost no reward calls. Default: none."""
    offline_share: rules.Share = 0.3
    """Expected share of the replayed items that are drawn from offline-data."""

    transport: TransportName = field(default="auto", compare=False)
    """Connection of the ranks. auto takes MPI under mpiexec and under srun with PMI, and tcp
    (sockets) under torchrun and under srun without PMI. gloo is the former name of tcp. local
    trains in this process alone, whatever launcher started it."""
    average_gradients: bool = False
    """Average gradients over the ranks that train. All ranks then have the same weights, and train
    as one process with their batches joined: choose a smaller batch-size. Otherwise each rank
    trains its own weights."""
    gradient_sum: GradientSum = "ranks"
    """How averaged gradients are added up: by rank 0 in the order of the ranks, or along a tree, in
    which a rank takes three messages at most, however many ranks there are. Sums of a tree may
    differ in the last digit."""
    patience: rules.PositiveFloat = 120.0
    """Seconds of silence after which another rank counts as lost, which ends the run: gfn-rb resume
    continues it. With managers, ranks that train have twice as long, as they may wait for one."""
    metrics_port: rules.NonNegativeInt = 0
    """Serve metrics of managers and workers over HTTP for Prometheus, each rank on this port plus
    its rank. 0 serves none. Needs the extra metrics."""
    metrics_address: str = "127.0.0.1"
    """Address of this machine on which metrics are served. The default serves this machine alone.
    Anybody who reaches another address can read them."""

    draw: Draw = RankDraw()
    """How replayed items are drawn."""
    keep: Keep = KeepTop()
    """Which items the buffer keeps."""
    search: SearchOptions = SearchOptions()
    teacher: TeacherOptions = TeacherOptions()
    metrics: MetricsOptions = MetricsOptions()
    managers: ManagersOptions = ManagersOptions()
    feed: FeedOptions = FeedOptions()


MAIN_OPTIONS = {
    *("steps", "seed", "out", "batch_size", "loss", "lr", "replay_ratio", "capacity"),
    *("draw", "keep", "search"),
}
"""The options that ``--help`` shows besides those of the environment; ``--help-all`` shows all."""
