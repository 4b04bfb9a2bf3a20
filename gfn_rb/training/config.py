"""The configuration of a training run: one dataclass, and a few fields more per environment.

Pure data: the tables of what each name stands for lie beside the implementations, above this
module, and a test compares their names with the literals of the options.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_origin, get_type_hints

from gfn_rb.envs import (
    BayesianDAG,
    BitSequence,
    Box,
    ConditionalHyperGrid,
    DeceptiveGrid,
    GFNEnv,
    HyperGrid,
    Line,
    RNABinding,
    TFBind8,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.near.distances import Distance
from gfn_rb.policies.networks import Networks
from gfn_rb.training.import_path import load, path_of
from gfn_rb.training.metrics import check_metrics
from gfn_rb.training.options import (
    ABSENT,
    NEEDS,
    BackwardName,
    CompactName,
    LearningOptions,
    LossName,
    MeasuringOptions,
    Needs,
    RanksOptions,
    RegressionName,
    ReplayName,
    ReplayOptions,
    RunOptions,
    SamplingOptions,
)
from gfn_rb.training.priority_rules import PRIORITY, PriorityRule
from gfn_rb.training.rules import (
    PLAIN,
    Floats,
    NonNegativeFloat,
    OptionalFiniteFloat,
    OptionalFloat,
    OptionalInt,
    OptionalPositiveFloat,
    OptionalShare,
    OptionalWord,
    PositiveFloat,
    PositiveInt,
    Seed,
    Words,
    check_fields,
    check_value,
)

FormName = Literal["append", "prepend_append", "non_autoregressive"]
ModesName = Literal["top", "published"]

_WHERE = {"out", "transport"}  # where a run is this time, which may be elsewhere the next

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
class TrainConfig(
    RanksOptions,
    ReplayOptions,
    LearningOptions,
    SamplingOptions,
    MeasuringOptions,
    RunOptions,
):
    """Everything that a training run depends on. The command line shows these fields.

    A configuration of one's own is a frozen dataclass that adds the options of its environment, and
    makes it of them; ``gfn-rb train mypackage.module:MyConfig`` trains on it.

    The defaults did best on TFBind8 at 16,000 reward calls, where drawing by rank finds most modes
    whatever is kept, and are level with the best on a grid and on RNA binding;
    ``python -m benchmarks.learning`` compares others, ``python -m benchmarks.distributed_learning``
    what ranks give each other.

    Attributes:
        env: short name of the environment, in the names of folders and in titles; the name of the
            class where it gives none.
        every_state_terminates: whether every state of the environment is a terminating one.
        needs: what each option has no effect without, see ``NEEDS``.
        distance_p: p of the norm by which diverse buffers compare states; 0 counts the places that
            differ.

    Examples:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class MyConfig(TrainConfig):
        ...     size: int = 8
        ...
        ...     def make_env(self):
        ...         return MyEnv(self.size, device=self.device)
    """

    env: ClassVar[str]
    env_type: ClassVar[type[GFNEnv]]
    every_state_terminates: ClassVar[bool] = False
    needs: ClassVar[Needs] = NEEDS
    distance_p: ClassVar[float] = 0.0

    def __init_subclass__(cls) -> None:
        if "env" not in vars(cls):
            cls.env = cls.__name__

    def validate(self) -> None:
        """Check every field by its type, and what does not go together.

        Not done at construction, where tyro would take the error for one in its own parsing.

        Raises:
            ArgumentError: a field is out of its range, two do not go together, or one that differs
                from its default has no effect with the others.
        """
        check_fields(type(self), vars(self))
        for name, value in self.to_dict().items():
            check_value(name, tuple(value) if isinstance(value, list) else value, PLAIN)
        self._check_combinations()
        self._check_effects()
        if self.metrics:
            check_metrics(self.metrics, self.make_env())

    def _check_effects(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for name, others in self.needs:
            met = any(rule.holds(getattr(self, other)) for other, rule in others.items())
            value = getattr(self, name)
            if not met and value != defaults[name]:
                needed = " or ".join(f"{o} is {rule.expected}" for o, rule in others.items())
                given = ", ".join(f"{other} {getattr(self, other)!r}" for other in others)
                raise ArgumentError(
                    f"{name} has no effect unless {needed}, got {value!r} with {given}"
                )

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
        if self.compact == "rebuild" and self.replay != "trajectories":
            raise ArgumentError(
                f"compact must be one of none, narrow with replay {self.replay}, which stores no "
                f"actions to rebuild states from, got 'rebuild'"
            )
        self._check_learning()
        if self.feed != "none":
            self._check_feed()

    def _check_learning(self) -> None:
        if self.regression == "linex" and self.loss == "fm":
            raise ArgumentError(f"regression must be squared with loss fm, got {self.regression!r}")
        if self.loss == "fm" and self.priority_rule == "teacher":
            raise ArgumentError(
                "priority_rule must be residual with loss fm, whose residuals do not tell too "
                "little flow from too much, got 'teacher'"
            )
        if self.teacher_share and (self.loss == "fm" or GIVES[self.replay] != "trajectories"):
            raise ArgumentError(
                "teacher_share must be 0 with loss fm, and with replay of transitions or states, "
                f"got {self.teacher_share} with loss {self.loss}, replay {self.replay}"
            )
        if self.epsilon_end is not None and self.workers:
            raise ArgumentError(f"workers must be 0 with epsilon_end, got {self.workers}")
        for name in ("epsilon", "temperature"):
            start, end = getattr(self, name), getattr(self, f"{name}_end")
            if self.anneal == "exponential" and end is not None and not start * end > 0:
                raise ArgumentError(
                    f"{name} and {name}_end must be above 0 with anneal exponential, got {start} "
                    f"and {end}"
                )

    def annealed(self, name: str, step: int) -> float:
        """Return the value of a field that may be annealed.

        Args:
            name: of a field with another of the same name and "_end".
            step: steps taken so far.
        """
        start, end = getattr(self, name), getattr(self, f"{name}_end")
        if end is None:
            return float(start)
        part = min(1.0, step / self.anneal_steps)
        if self.anneal == "linear":
            return float(start + part * (end - start))
        return float(start * (end / start) ** part)

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
        if self.temperature_end is not None:
            raise ArgumentError(
                f"temperature_end must be None with feed {self.feed}, got {self.temperature_end}"
            )

    def make_env(self) -> GFNEnv:
        """Return the environment, on the configured device."""
        # Further options, of a subclass of this one, are not the environment's.
        shipped = next(cls for cls in type(self).__mro__ if "env_type" in vars(cls))
        general = {f.name for f in fields(TrainConfig)}
        own = [f for f in fields(shipped) if f.name not in general]
        options: dict[str, Any] = {
            f.metadata.get("argument", f.name): getattr(self, f.name) for f in own
        }
        return self.env_type(**options, device=self.device)

    def make_priority_rule(self) -> PriorityRule:
        """Return how residuals become priorities. One's own configuration may return any other."""
        return PRIORITY[self.priority_rule](self.teacher_c)

    def make_networks(self, env: GFNEnv) -> Networks:
        """Return modules of one's own to train; by default there are none, and all are made.

        Args:
            env: the environment. Weights are drawn by torch's generator, from the seed of the run.
        """
        return Networks()

    def make_distance(self) -> float | Distance:
        """Return what lies between two states: p of a norm, or a callable, for diverse buffers.

        A callable takes two batches of states as rows, [n, d] and [m, d], with the condition's
        numbers at the end where there are conditions, and returns [n, m].
        """
        return self.distance_p

    @property
    def n_replayed(self) -> int:
        """Trajectories replayed per batch of fresh ones."""
        return round(self.replay_ratio * self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON knows them, without where this time: a run may be moved."""
        values = {name: list(v) if type(v) is tuple else v for name, v in asdict(self).items()}
        for name in _WHERE:
            del values[name]
        shipped = CONFIGS.get(self.env) is type(self)
        return {"env": self.env if shipped else path_of(type(self)), **values}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> TrainConfig:
        """Return the configuration that ``to_dict`` turned into ``values``.

        Raises:
            ArgumentError: its class cannot be imported, or a field is missing, unknown or out of
                its range.
        """
        rest = dict(values)
        env = rest.pop("env", None)
        config = find_config(env)
        known = {f.name for f in fields(config)} - _WHERE
        if wrong := sorted(known ^ rest.keys()):
            state = "unknown" if wrong[0] in rest else "missing"
            raise ArgumentError(f"{wrong[0]} is {state} in a configuration of {env}")
        rest = {name: tuple(v) if type(v) is list else v for name, v in rest.items()}
        check_fields(config, rest)  # a value of another type makes no configuration
        return config(**rest)


def find_config(env: Any) -> type[TrainConfig]:
    """Return the class of configurations of an environment, by name or by import path.

    Raises:
        ArgumentError: there is none, or it is none that can be trained.
    """
    if not isinstance(env, str) or ":" not in env:
        if env not in CONFIGS:
            raise ArgumentError(f"env must be one of {sorted(CONFIGS)}, got {env!r}")
        return CONFIGS[env]
    found = load(env)
    if not (isinstance(found, type) and issubclass(found, TrainConfig)):
        raise ArgumentError(
            f"{env} must be a subclass of gfn_rb.training.TrainConfig, got {found!r}"
        )
    if found.make_env is TrainConfig.make_env and not hasattr(found, "env_type"):
        raise ArgumentError(f"{env} must have a method make_env(self), got none")
    _check_fields_of(found, env)
    return found


def _check_fields_of(config: type[TrainConfig], env: str) -> None:
    try:
        hints = get_type_hints(config)
    except NameError as error:
        raise ArgumentError(f"{env} must have annotations that can be read: {error}") from error
    own = {name for name, hint in hints.items() if ClassVar not in (hint, get_origin(hint))}
    if bare := sorted(own - {f.name for f in fields(config)}):
        raise ArgumentError(
            f"{env} must be decorated with @dataclass(frozen=True, kw_only=True), got a class "
            f"whose {bare[0]} is no field"
        )


@dataclass(frozen=True, kw_only=True)
class TFBind8Config(TrainConfig):
    """Design DNA 8-mers that the transcription factor SIX6 binds."""

    env: ClassVar[str] = "tfbind8"
    env_type: ClassVar[type[GFNEnv]] = TFBind8

    form: FormName = "append"
    """Write letters at the right end, at both ends, or at any place."""
    beta: float = 3.0
    """Exponent of the reward."""
    modes: ModesName = "top"
    """Which 8-mers count as modes: the 327 of highest score, or the 328 published ones, of high
    score and no two within one letter of each other."""
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
class DeceptiveGridConfig(TrainConfig):
    """Find the goals of a grid that are surrounded by almost no reward (Kim et al. 2024)."""

    env: ClassVar[str] = "deceptive_grid"
    env_type: ClassVar[type[GFNEnv]] = DeceptiveGrid
    every_state_terminates: ClassVar[bool] = True
    distance_p: ClassVar[float] = 1.0

    ndim: int = 4
    """Coordinates."""
    height: int = 16
    """Grid points per coordinate."""


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
    """Write words at the right end, at both ends, or at any place."""
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
    """Write letters at the right end, at both ends, or at any place."""
    beta: float = 8.0
    """Exponent of the reward."""
    threshold: float = 0.8
    """Sequences that score this much are counted as modes."""


@dataclass(frozen=True, kw_only=True)
class BayesianDAGConfig(TrainConfig):
    """Draw structures of Bayesian networks by how well they explain data (Deleu et al. 2022)."""

    env: ClassVar[str] = "bayesian_dag"
    env_type: ClassVar[type[GFNEnv]] = BayesianDAG
    every_state_terminates: ClassVar[bool] = True
    needs: ClassVar[Needs] = (
        *NEEDS,
        ("n_samples", {"data": ABSENT}),
        ("data_seed", {"data": ABSENT}),
    )

    n_nodes: OptionalInt = None
    """Nodes of the network; by default the columns of the data, or 5."""
    data: OptionalWord = None
    """A .npy or .csv file with a row per sample and a column per node. By default samples are drawn
    from a random linear-Gaussian network."""
    n_samples: PositiveInt = 100
    """Samples to draw where no data is given."""
    data_seed: Seed = field(default=0, metadata={"argument": "seed"})
    """Seed of the network and its samples."""


@dataclass(frozen=True, kw_only=True)
class LineConfig(TrainConfig):
    """Walk to where a mixture of normal distributions is dense (Lahlou et al. 2023)."""

    env: ClassVar[str] = "line"
    env_type: ClassVar[type[GFNEnv]] = Line
    distance_p: ClassVar[float] = 1.0

    means: Floats = (-1.5, 1.5)
    """Means of the normal distributions."""
    scales: Floats = (0.5, 0.5)
    """Their standard deviations."""
    n_steps: PositiveInt = 5
    """Moves of a walk."""
    compact: CompactName = "none"
    """How items are stored: whole, or, of trajectories, by their actions alone. Real numbers
    are not made narrow."""
    backward: BackwardName = "uniform"
    """Backward policy: learned, or (uniform) the bridge of a random walk."""
    regression: RegressionName = "linex"
    """What residuals cost, squared or linex. First walks end where the reward is next to
    nothing, by hundreds of nats, of which linex makes less."""
    log_z: OptionalFiniteFloat = 0.0
    """Initial log Z, in nats. None fits the first batch, whose ends are all but the target."""
    lr_log_z: PositiveFloat = 0.02
    """Adam's learning rate for log Z."""


@dataclass(frozen=True, kw_only=True)
class BoxConfig(TrainConfig):
    """Step over the unit square to its rewarded corners (Lahlou et al. 2023)."""

    env: ClassVar[str] = "box"
    env_type: ClassVar[type[GFNEnv]] = Box
    distance_p: ClassVar[float] = 1.0

    delta: PositiveFloat = 0.25
    """Length of a step."""
    r0: float = 0.1
    """Reward everywhere."""
    r1: float = 0.5
    """Reward added in the outer bands."""
    r2: float = 2.0
    """Reward added in the inner bands."""
    compact: CompactName = "none"
    """How items are stored: whole, or, of trajectories, by their actions alone. Real numbers
    are not made narrow."""
    backward: BackwardName = "uniform"
    """Backward policy: learned, or (uniform) equal density of all angles."""
    regression: RegressionName = "linex"
    """What residuals cost, squared or linex, of which fresh trajectories leave no bias in log Z."""
    replay_ratio: NonNegativeFloat = 0.0
    """Replayed items per fresh one, none by default: some walks have far too little flow, and
    replayed they drive log Z up."""
    log_z: OptionalFiniteFloat = 0.0
    """Initial log Z, in nats; None fits the first batch."""
    lr_log_z: PositiveFloat = 0.02
    """Adam's learning rate for log Z."""
    lr_end: OptionalShare = 0.05
    """What is left of both learning rates after anneal-steps steps, as a share."""
    clip_grad_norm: OptionalPositiveFloat = 5.0
    """Gradients longer than this, as single walks give with linex, are shortened to it."""


CONFIGS: dict[str, type[TrainConfig]] = {
    config.env: config
    for config in (
        TFBind8Config,
        HyperGridConfig,
        ConditionalHyperGridConfig,
        DeceptiveGridConfig,
        BitSequenceConfig,
        RNABindingConfig,
        BayesianDAGConfig,
        LineConfig,
        BoxConfig,
    )
}
