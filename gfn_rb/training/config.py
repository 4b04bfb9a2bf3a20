"""The configuration of a training run: one dataclass, and a few fields more per environment.

Pure data: the tables of what each name stands for lie beside the implementations, above this
module, and a test compares their names with the literals here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from gfn_rb.envs import (
    BitSequence,
    ConditionalHyperGrid,
    GFNEnv,
    HyperGrid,
    RNABinding,
    TFBind8,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.training.rules import (
    Device,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    OptionalFiniteFloat,
    OptionalFloat,
    OptionalInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ProperShare,
    Seed,
    Share,
    Widths,
    Words,
    check_fields,
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
FormName = Literal["append", "prepend_append"]

# Which container each loss reads, and which each kind of replay gives. Rows of one can be turned
# into rows of any that comes after it in this order.
CONTAINERS = ("trajectories", "transitions", "states")
READS: dict[LossName, str] = {
    "tb": "trajectories",
    "subtb": "trajectories",
    "db": "transitions",
    "mdb": "transitions",
    "fm": "states",
}
GIVES: dict[ReplayName, str] = {
    "trajectories": "trajectories",
    "transitions": "transitions",
    "states": "states",
    "terminal": "trajectories",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that a training run depends on. The command line shows these fields.

    The defaults did best on TFBind8 at 16,000 reward calls, where drawing by rank finds most modes
    whatever is kept, and are level with the best on a grid and on RNA binding;
    ``python -m benchmarks.learning`` compares others, ``python -m benchmarks.distributed_learning``
    what ranks give each other.
    """

    env: ClassVar[str]
    env_type: ClassVar[type[GFNEnv]]
    every_state_terminates: ClassVar[bool] = False
    distance_p: ClassVar[float] = 0.0  # between states; 0 counts the places that differ

    steps: PositiveInt = 1000
    """Training steps. Each samples one fresh batch, which takes batch-size reward calls, and as
    many again for each loop of local search."""
    seed: Seed = 0
    """Seed of all random numbers. The same seed gives the same numbers."""
    out: Path | None = field(default=None, compare=False)
    """Run folder to make. By default the next free runs/ENV-seedS-NNN."""
    batch_size: PositiveInt = 32
    """Fresh trajectories per step."""
    loss: LossName = "tb"
    """Trajectory balance, sub-trajectory balance, detailed balance, its modified form (where every
    state is terminating), or flow matching."""
    subtb_lambda: PositiveFloat = 0.9
    """Sub-trajectory balance weighs a piece of k steps by this to the power of k."""
    replay_ratio: NonNegativeFloat = 1.0
    """Replayed items per fresh one; 0 turns replay off. What a manager feeds counts as fresh."""
    replay: ReplayName = "trajectories"
    """What is stored: trajectories; their transitions (for db, mdb, fm) or states (for fm) one by
    one; or terminating states, to which the backward policy regenerates trajectories."""
    capacity: PositiveInt = 100_000
    """Items the buffer keeps."""
    compact: CompactName = "none"
    """How they are stored: whole, in the smallest integers that the environment needs, or, of
    trajectories, by their actions alone, from which states are made again when they are drawn."""
    keep: KeepName = "top"
    """Which items it keeps: those of highest reward, of these only such as end far apart, or the
    most recent."""
    unique: bool = False
    """Keep one item per object, the newest, where diverse buffers keep the best: an object is a
    terminating state and its condition. Off, for the published tables were made without."""
    cutoff: FiniteFloat = 0.0
    """Items of a diverse buffer end further apart than this, in places that differ or in steps on
    a grid. 0 rules out duplicates."""
    draw: DrawName = "rank"
    """How replayed items are drawn: by exp(log reward / temperature), by rank, a share from the
    best, by how badly they were fitted when last replayed, or all alike."""
    temperature: PositiveFloat = 1.0
    """Temperature of the softmax draw. 1 draws in proportion to the reward; above 1 is flatter."""
    rank_k: PositiveFloat = 0.01
    """The rank draw weighs the item of rank r among N by 1 / (k N + r)."""
    top_fraction: ProperShare = 0.1
    """Which part of the items the quantile draw takes for the best."""
    top_share: Share = 0.5
    """Which part of its draws come from these."""
    priority_alpha: NonNegativeFloat = 0.6
    """The priority draw weighs an item by its residual to this power; 0 is uniform."""
    epsilon: Share = 0.0
    """Share of uniformly random actions when sampling fresh trajectories."""
    local_search: NonNegativeInt = 0
    """Loops of local search around each fresh trajectory: undo its last moves, make new ones, go
    on from the better one. Each loop takes batch-size reward calls."""
    back_ratio: PositiveShare = 0.5
    """Share of a trajectory's moves that a search undoes."""
    workers: NonNegativeInt = 0
    """Processes that sample fresh trajectories; 0 samples in the main process."""
    backward: BackwardName = "learned"
    """Backward policy. Flow matching learns none and always has the uniform one."""
    hidden: Widths = (128, 128)
    """Widths of the hidden layers of each policy."""
    lr: PositiveFloat = 3e-3
    """Adam's learning rate for the networks."""
    lr_log_z: PositiveFloat = 0.1
    """Adam's learning rate for log Z, where it is a number of its own."""
    log_z: OptionalFiniteFloat = None
    """Initial log Z, in nats, of tb, subtb and db. By default what fits the first fresh batch."""
    device: Device = "cpu"
    """cpu, cuda or cuda:N."""
    threads: PositiveInt = 1
    """CPU threads. More than one is slower for networks of the default size."""
    eval_every: PositiveInt = 25
    """Steps between rows of metrics.csv. They have the exact distance to the target where the
    environment can be enumerated."""
    checkpoint_every: PositiveInt = 200
    """Steps between checkpoints."""
    logger: LoggerName = "none"
    """TorchRL logger that is given the rows of metrics.csv as well."""
    managers: NonNegativeInt = 0
    """Ranks that keep the best of everyone instead of training. Under mpiexec or srun they are
    among the ranks started; otherwise they run beside training, in this process."""
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
    average_gradients: bool = False
    """Average gradients over the ranks that train, which then all have the same weights, and learn
    as one process would from batches as large as theirs together: make them smaller. Otherwise each
    trains its own. When a rank is lost, the others go on averaging; when rank 0 is, each goes on
    alone."""
    patience: PositiveFloat = 120.0
    """Seconds of silence after which another rank counts as lost; among ranks that train, and may
    have to wait for a manager themselves, twice as many."""

    def validate(self) -> None:
        """Check every field that is not the environment's own.

        Not done at construction, where tyro would take the error for one in its own parsing.

        Raises:
            ArgumentError: a field is out of its range, or two do not go together.
        """
        check_fields(type(self), vars(self))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.loss == "mdb" and not self.every_state_terminates:
            others = ", ".join(name for name in READS if name != "mdb")
            raise ArgumentError(
                f"loss must be one of {others} with {self.env}, where not every state is "
                f"terminating, got 'mdb'"
            )
        reads = READS[self.loss]
        given_by = CONTAINERS[: CONTAINERS.index(reads) + 1]
        fitting = [name for name, gives in GIVES.items() if gives in given_by]
        if self.replay not in fitting:
            raise ArgumentError(
                f"replay must be one of {', '.join(fitting)} with loss {self.loss}, which reads "
                f"{reads}, got {self.replay!r}"
            )
        if self.keep == "diverse" and self.replay in ("transitions", "states"):
            raise ArgumentError(
                f"keep must be one of top, recent with replay {self.replay}, whose episodes pass "
                f"through the same states, got 'diverse'"
            )
        if self.unique and self.replay in ("transitions", "states"):
            raise ArgumentError(
                f"unique must be False with replay {self.replay}, whose items stand for no object "
                "of their own, got True"
            )
        if self.compact == "rebuild" and self.replay != "trajectories":
            raise ArgumentError(
                f"compact must be one of none, narrow with replay {self.replay}, which stores no "
                f"actions to rebuild states from, got 'rebuild'"
            )
        if self.feed != "none":
            self._check_feed()

    def _check_feed(self) -> None:
        if self.managers < 1:
            raise ArgumentError(f"managers must be at least 1 with feed {self.feed}, got 0")
        if self.replay != "trajectories":
            raise ArgumentError(
                f"replay must be trajectories with feed {self.feed}, got {self.replay!r}"
            )
        if self.draw == "priority":
            raise ArgumentError(
                f"draw must be another than priority with feed {self.feed}, got 'priority'"
            )

    def make_env(self) -> GFNEnv:
        """Return the environment, on the configured device."""
        general = {f.name for f in fields(TrainConfig)}
        own = [f for f in fields(self) if f.name not in general]
        options: dict[str, Any] = {
            f.metadata.get("argument", f.name): getattr(self, f.name) for f in own
        }
        return self.env_type(**options, device=self.device)

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
        check_fields(CONFIGS[env], rest)  # a value of another type makes no configuration
        return CONFIGS[env](**rest)


@dataclass(frozen=True, kw_only=True)
class TFBind8Config(TrainConfig):
    """Design DNA 8-mers that the transcription factor SIX6 binds."""

    env: ClassVar[str] = "tfbind8"
    env_type: ClassVar[type[GFNEnv]] = TFBind8

    form: FormName = "append"
    """Write letters at the right end, or at both ends."""
    beta: float = 3.0
    """Exponent of the reward."""
    backward: BackwardName = "uniform"
    """Backward policy. With form append there is one way back only, and both are the same."""


@dataclass(frozen=True, kw_only=True)
class HyperGridConfig(TrainConfig):
    """Find the rewarded corners of a grid."""

    env: ClassVar[str] = "hypergrid"
    env_type: ClassVar[type[GFNEnv]] = HyperGrid
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


@dataclass(frozen=True, kw_only=True)
class ConditionalHyperGridConfig(HyperGridConfig):
    """Find the rewarded corners of a grid at any temperature that the policy is told."""

    env: ClassVar[str] = "conditional_hypergrid"
    env_type: ClassVar[type[GFNEnv]] = ConditionalHyperGrid

    ndim: int = 2
    """Coordinates."""
    min_beta: float = 0.5
    """Lowest exponent of the reward (inverse temperature)."""
    max_beta: float = 2.0
    """Highest exponent of the reward."""


@dataclass(frozen=True, kw_only=True)
class BitSequenceConfig(TrainConfig):
    """Write long bit strings that come close to hidden ones."""

    env: ClassVar[str] = "bit_sequence"
    env_type: ClassVar[type[GFNEnv]] = BitSequence

    n_bits: int = 120
    """Bits in a string."""
    word_bits: int = 8
    """Bits written at a time."""
    form: FormName = "append"
    """Write words at the right end, or at both ends."""
    modes: int = field(default=60, metadata={"argument": "n_modes"})
    """Hidden strings."""
    beta: OptionalFloat = None
    """Exponent of the reward; twice the bits by default, 2 nats per bit astray."""
    delta: OptionalInt = None
    """A mode is found by any string within this many bits; 28/120 of the bits by default."""
    lr: PositiveFloat = 1e-3
    """Adam's learning rate for the networks."""


@dataclass(frozen=True, kw_only=True)
class RNABindingConfig(TrainConfig):
    """Design RNA that binds to given RNA, by ViennaRNA's thermodynamic model."""

    env: ClassVar[str] = "rna_binding"
    env_type: ClassVar[type[GFNEnv]] = RNABinding

    targets: Words = ("RNA1",)
    """RNA to bind: names among RNA1 to RNA4, or sequences of ACGU; the score is the mean."""
    length: int = 14
    """Letters to write."""
    form: FormName = "append"
    """Write letters at the right end, or at both ends."""
    beta: float = 8.0
    """Exponent of the reward."""
    threshold: float = 0.8
    """Sequences that score this much are counted as modes."""


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
