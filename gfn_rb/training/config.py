"""The configuration of a training run: one dataclass, and a few fields more per environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from gfn_rb.envs import (
    BitSequence,
    ConditionalHyperGrid,
    GFNEnv,
    HyperGrid,
    RNABinding,
    TFBind8,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.training.exchange import BASELINE, FEED, SEND
from gfn_rb.training.losses import LOSSES
from gfn_rb.training.objectives import BACKWARD
from gfn_rb.training.replay import DRAW, KEEP, REPLAY
from gfn_rb.training.rules import check_fields, check_together

if TYPE_CHECKING:  # for a type checker names in a table are strings, for the command line choices
    LossName = str
    Keep = str
    Draw = str
    Replay = str
    Backward = str
    Feed = str
    Send = str
    BaselineName = str
else:
    LossName, Keep, Draw = Literal[tuple(LOSSES)], Literal[tuple(KEEP)], Literal[tuple(DRAW)]
    Replay, Backward = Literal[tuple(REPLAY)], Literal[tuple(BACKWARD)]
    Feed, Send, BaselineName = Literal[FEED], Literal[tuple(SEND)], Literal[tuple(BASELINE)]

Form = Literal["append", "prepend_append"]
LoggerName = Literal["none", "csv", "tensorboard", "wandb"]

CHOICES: dict[str, Iterable[str]] = {
    "loss": LOSSES,
    "replay": REPLAY,
    "keep": KEEP,
    "draw": DRAW,
    "backward": BACKWARD,
    "logger": get_args(LoggerName),
    "feed": FEED,
    "send": SEND,
    "baseline": BASELINE,
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ABC):
    """Everything that a training run depends on. The command line shows these fields.

    The defaults did best on TFBind8 at 16,000 reward calls, where drawing by rank finds most modes
    whatever is kept, and are level with the best on a grid and on RNA binding;
    ``python -m benchmarks.learning`` compares others, ``python -m benchmarks.distributed_learning``
    what ranks give each other.
    """

    env: ClassVar[str]
    every_state_terminates: ClassVar[bool] = False
    distance_p: ClassVar[float] = 0.0  # between states; 0 counts the places that differ

    steps: int = 1000
    """Training steps. Each samples one fresh batch, which takes batch-size reward calls, and as
    many again for each loop of local search."""
    seed: int = 0
    """Seed of all random numbers. The same seed gives the same numbers."""
    out: Path | None = field(default=None, compare=False)
    """Run folder to make. By default the next free runs/ENV-seedS-NNN."""
    batch_size: int = 32
    """Fresh trajectories per step."""
    loss: LossName = "tb"
    """Trajectory balance, sub-trajectory balance, detailed balance, its modified form (where every
    state is terminating), or flow matching."""
    subtb_lambda: float = 0.9
    """Sub-trajectory balance weighs a piece of k steps by this to the power of k."""
    replay_ratio: float = 1.0
    """Replayed items per fresh one; 0 turns replay off. What a manager feeds counts as fresh."""
    replay: Replay = "trajectories"
    """What is stored: trajectories; their transitions (for db, mdb, fm) or states (for fm) one by
    one; or terminating states, to which the backward policy regenerates trajectories."""
    capacity: int = 100_000
    """Items the buffer keeps."""
    keep: Keep = "top"
    """Which items it keeps: those of highest reward, of these only such as end far apart, or the
    most recent."""
    cutoff: float = 0.0
    """Items of a diverse buffer end further apart than this, in places that differ or in steps on
    a grid. 0 rules out duplicates."""
    draw: Draw = "rank"
    """How replayed items are drawn: by exp(log reward / temperature), by rank, a share from the
    best, by how badly they were fitted when last replayed, or all alike."""
    temperature: float = 1.0
    """Temperature of the softmax draw. 1 draws in proportion to the reward; above 1 is flatter."""
    rank_k: float = 0.01
    """The rank draw weighs the item of rank r among N by 1 / (k N + r)."""
    top_fraction: float = 0.1
    """Which part of the items the quantile draw takes for the best."""
    top_share: float = 0.5
    """Which part of its draws come from these."""
    priority_alpha: float = 0.6
    """The priority draw weighs an item by its residual to this power; 0 is uniform."""
    epsilon: float = 0.0
    """Share of uniformly random actions when sampling fresh trajectories."""
    local_search: int = 0
    """Loops of local search around each fresh trajectory: undo its last moves, make new ones, go
    on from the better one. Each loop takes batch-size reward calls."""
    back_ratio: float = 0.5
    """Share of a trajectory's moves that a search undoes."""
    workers: int = 0
    """Processes that sample fresh trajectories; 0 samples in the main process."""
    backward: Backward = "learned"
    """Backward policy. Flow matching learns none and always has the uniform one."""
    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers of each policy."""
    lr: float = 3e-3
    """Adam's learning rate for the networks."""
    lr_log_z: float = 0.1
    """Adam's learning rate for log Z, where it is a number of its own."""
    log_z: float | None = None
    """Initial log Z, in nats, of tb, subtb and db. By default what fits the first fresh batch."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    threads: int = 1
    """CPU threads. More than one is slower for networks of the default size."""
    eval_every: int = 25
    """Steps between rows of metrics.csv. They have the exact distance to the target where the
    environment can be enumerated."""
    checkpoint_every: int = 200
    """Steps between checkpoints."""
    logger: LoggerName = "none"
    """TorchRL logger that is given the rows of metrics.csv as well."""
    managers: int = 0
    """Ranks that keep the best of everyone instead of training. Under mpiexec or srun they are
    among the ranks started; otherwise they run beside training, in this process."""
    feed: Feed = "none"
    """Which of the items that others found come back from a manager: those of highest reward,
    diverse ones out of these, drawn by reward, or the newest. Each is learnt from like a fresh one
    when it comes, and replayed with one's own from then on; where gradients are averaged, and so
    are those of everybody's items already, it is only replayed."""
    feed_quota: int = 64
    """How many of them come with each reply, at most. What all others find, batch-size per step
    each, teaches most; fewer save time."""
    send: Send = "deferred"
    """How to send to a manager: wait for the reply, look for it at the next step, or never wait
    and leave out what it cannot take."""
    send_every: int = 1
    """Steps between sendings."""
    baseline: BaselineName = "none"
    """Not to be sent are items below a manager's lowest, a low percentile of its items, or a
    running mean of the lowest of each batch, which stands for the others until its buffer is full.
    With none, all are sent: what has little reward teaches those who are fed, too."""
    average_gradients: bool = False
    """Average gradients over the ranks that train, which then all have the same weights, and learn
    as one process would from batches as large as theirs together: make them smaller. Otherwise each
    trains its own. When a rank is lost, the others go on averaging; when rank 0 is, each goes on
    alone."""
    patience: float = 120.0
    """Seconds of silence after which another rank counts as lost; among ranks that train, and may
    have to wait for a manager themselves, twice as many."""

    def validate(self) -> None:
        """Check every field that is not the environment's own.

        Not done at construction, where tyro would take the error for one in its own parsing.

        Raises:
            ArgumentError: a field is out of its range, or two do not go together.
        """
        check_fields(type(self), vars(self), CHOICES)
        check_together(self)

    @abstractmethod
    def make_env(self) -> GFNEnv:
        """Return the environment, on the configured device."""

    @property
    def n_replayed(self) -> int:
        """Trajectories replayed per batch of fresh ones."""
        return round(self.replay_ratio * self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them, without ``out``: a run may be moved."""
        values = {name: list(v) if type(v) is tuple else v for name, v in asdict(self).items()}
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
        rest = {name: tuple(v) if type(v) is list else v for name, v in rest.items()}
        check_fields(CONFIGS[env], rest, CHOICES)
        return CONFIGS[env](**rest)

    def with_steps(self, steps: int) -> TrainConfig:
        """Return the same configuration with another number of steps."""
        return replace(self, steps=steps)

    def on_cpu(self) -> TrainConfig:
        """Return the same configuration with everything on the CPU."""
        return replace(self, device="cpu")


@dataclass(frozen=True, kw_only=True)
class TFBind8Config(TrainConfig):
    """Design DNA 8-mers that the transcription factor SIX6 binds."""

    env: ClassVar[str] = "tfbind8"

    form: Form = "append"
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
    every_state_terminates: ClassVar[bool] = True
    distance_p: ClassVar[float] = 1.0

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


@dataclass(frozen=True, kw_only=True)
class ConditionalHyperGridConfig(TrainConfig):
    """Find the rewarded corners of a grid at any temperature that the policy is told."""

    env: ClassVar[str] = "conditional_hypergrid"
    every_state_terminates: ClassVar[bool] = True
    distance_p: ClassVar[float] = 1.0

    ndim: int = 2
    """Coordinates."""
    height: int = 8
    """Grid points per coordinate."""
    r0: float = 0.1
    """Reward everywhere."""
    r1: float = 0.5
    """Reward added in the outer bands."""
    r2: float = 2.0
    """Reward added in the inner bands."""
    min_beta: float = 0.5
    """Lowest exponent of the reward (inverse temperature)."""
    max_beta: float = 2.0
    """Highest exponent of the reward."""

    def make_env(self) -> ConditionalHyperGrid:
        """Return the environment, on the configured device."""
        return ConditionalHyperGrid(
            self.ndim,
            self.height,
            self.r0,
            self.r1,
            self.r2,
            self.min_beta,
            self.max_beta,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True)
class BitSequenceConfig(TrainConfig):
    """Write long bit strings that come close to hidden ones."""

    env: ClassVar[str] = "bit_sequence"

    n_bits: int = 120
    """Bits in a string."""
    word_bits: int = 8
    """Bits written at a time."""
    form: Form = "append"
    """Write words at the right end, or at both ends."""
    modes: int = 60
    """Hidden strings."""
    beta: float | None = None
    """Exponent of the reward; twice the bits by default, 2 nats per bit astray."""
    delta: int | None = None
    """A mode is found by any string within this many bits; 28/120 of the bits by default."""
    lr: float = 1e-3
    """Adam's learning rate for the networks."""

    def make_env(self) -> BitSequence:
        """Return the environment, on the configured device."""
        return BitSequence(
            self.n_bits,
            self.word_bits,
            self.form,
            self.modes,
            self.beta,
            self.delta,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True)
class RNABindingConfig(TrainConfig):
    """Design RNA that binds to given RNA, by ViennaRNA's thermodynamic model."""

    env: ClassVar[str] = "rna_binding"

    targets: tuple[str, ...] = ("RNA1",)
    """RNA to bind: names among RNA1 to RNA4, or sequences of ACGU; the score is the mean."""
    length: int = 14
    """Letters to write."""
    form: Form = "append"
    """Write letters at the right end, or at both ends."""
    beta: float = 8.0
    """Exponent of the reward."""
    threshold: float = 0.8
    """Sequences that score this much are counted as modes."""

    def make_env(self) -> RNABinding:
        """Return the environment, on the configured device."""
        return RNABinding(
            self.targets,
            self.length,
            self.form,
            self.beta,
            threshold=self.threshold,
            device=self.device,
        )


CONFIGS: dict[str, type[TrainConfig]] = {
    config.env: config
    for config in (
        TFBind8Config,
        HyperGridConfig,
        ConditionalHyperGridConfig,
        BitSequenceConfig,
        RNABindingConfig,
    )
}
