"""The configuration of a training run: one dataclass, and a few fields more per environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_origin, get_type_hints

from gfn_rb.errors import ArgumentError
from gfn_rb.training import options, rules
from gfn_rb.training.import_path import load, path_of

# The command line parses words into these classes without torch, which takes seconds to load.
# Methods that need torch, as those that make the parts of a run do, import it themselves.
if TYPE_CHECKING:
    import tensordict
    import torch
    import torchrl

    import gfn_rb.envs
    import gfn_rb.numerics.near.neighbours
    import gfn_rb.policies

FormName = Literal["append", "prepend_append", "non_autoregressive"]
ModesName = Literal["top", "published"]
RNAModesName = Literal["threshold", "published"]

FORMAT = 2  # of config.json; 1 had all options in one table
_WHERE = {"out", "transport"}  # where a run is this time, which may be elsewhere the next

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(options.GeneralOptions):
    """All options of a training run. The command line shows these fields.

    A configuration of your own is a frozen dataclass with the options of its environment and a
    ``make_env``. ``gfn-rb train mypackage.module:MyConfig`` trains on it.

    Attributes:
        env: short name of the environment in names of folders and in titles. Default: the name of
            the class.
        every_state_terminates: whether every state of the environment is terminating.
        distance_p: exponent of the norm by which diverse buffers compare states; 0 counts the
            places that differ.

    Examples:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class MyConfig(TrainConfig):
        ...     size: int = 8
        ...
        ...     def make_env(self):
        ...         return MyEnv(self.size, device=self.device)
    """

    env: ClassVar[str]
    env_type: ClassVar[str]  # a class of gfn_rb.envs
    every_state_terminates: ClassVar[bool] = False
    distance_p: ClassVar[float] = 0.0

    def __init_subclass__(cls) -> None:
        if "env" not in vars(cls):
            cls.env = cls.__name__

    def validate(self) -> None:
        """Check the type of every field, and fields that exclude each other.

        It does not run at construction, because tyro would report the error as one of its parsing.

        Raises:
            ArgumentError: a field is out of range, two fields exclude each other, or a field that
                differs from its default has no effect.
        """
        rules.check_options(self)
        values = flat(self._values())
        for name, value in values.items():
            rules.check_plain(name, value)
        values["replay"] = self.replay_name
        for name, fits, allowed in self._demands():
            if not fits:
                raise ArgumentError(f"{name} must be {allowed}, got {values[name]!r}")
        ends = {"epsilon": (self.epsilon, self.epsilon_end)}
        if isinstance(self.draw, options.SoftmaxDraw):
            ends["draw.temperature"] = (self.draw.temperature, self.draw.temperature_end)
        for name, (start, end) in ends.items():
            if self.anneal.by == "exponential" and end is not None and not start * end > 0:
                raise ArgumentError(
                    f"{name} and {name}_end must be above 0 with anneal exponential, got {start} "
                    f"and {end}"
                )
        default, usual = type(self)(), flat(asdict(options.GeneralOptions()))
        for name, needed in self.without_effect():
            value = attrgetter(name)(self)
            if value not in (attrgetter(name)(default), usual.get(name)):
                raise ArgumentError(f"{name} has no effect unless {needed}, got {value!r}")
        if self.metrics.names:
            from gfn_rb.training.metrics import check_metrics

            check_metrics(self.metrics.names, self.make_env())

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield the options that have no effect with the others, and the condition they need."""
        from gfn_rb.training.replay import LOSSES, REPLAY, Trajectories

        for group in (f.name for f in fields(self) if is_dataclass(getattr(self, f.name))):
            switch, *others = (f.name for f in fields(getattr(self, group)))
            if getattr(getattr(self, group), switch) in (0, None, (), "none"):
                yield from ((f"{group}.{other}", f"{group} is given") for other in others)

        def using(*networks: str) -> list[str]:
            return [name for name, loss in LOSSES.items() if {*networks} & {*loss.networks}]

        heeded = {"backward": using("backward_policy")}
        if not self.teacher.share:
            heeded |= {"lr_log_z": using("log_z"), "log_z": using("log_z", "state_flow")}
        for name, loss in LOSSES.items():
            for option in filter(partial(hasattr, self), loss.options):
                heeded.setdefault(option, []).append(name)
        for option, losses in heeded.items():
            if self.loss not in losses:
                yield option, f"loss is {' or '.join(losses)}"
        if (
            not isinstance(self.keep, options.KeepDiverse)
            and REPLAY[self.replay_name].gives is not Trajectories
        ):
            yield "keep.unique", "replay is trajectories or terminal"
        if "correlation" not in self.metrics.names:
            yield "metrics.backward", "metrics has correlation"
        if {"elbo", "eubo", "accuracy"}.isdisjoint(self.metrics.names):
            yield "metrics.samples", "metrics has elbo, eubo or accuracy"
        flows = "state_flow" in LOSSES[self.loss].networks
        if not flows and (self.backward == "uniform" or self.loss == "fm"):
            yield "share_trunk", "backward is learned, or loss is db or subtb"
        if not self.replay_ratio:
            yield from ((name, "replay_ratio is above 0") for name in ("draw", "max_age"))
        if self.epsilon_end is self.draw_temperature_end is None:
            yield "anneal.by", "epsilon_end or draw.temperature_end is given"
            if self.lr_end is None:
                yield "anneal.steps", "epsilon_end, draw.temperature_end or lr_end is given"

    def _demands(self) -> Iterator[tuple[str, bool, str]]:
        """Yield options, whether the others allow their values, and which values they allow."""
        from gfn_rb.training.replay import CONTAINERS, LOSSES, REPLAY, Trajectories

        loss, stored = LOSSES[self.loss], self.replay_name
        gives, share = REPLAY[stored].gives, self.teacher.share
        others = ", ".join(name for name, each in LOSSES.items() if not each.every_state_terminates)
        why = f"with {self.env}, where not every state is terminating"
        fits = self.every_state_terminates or not loss.every_state_terminates
        yield "loss", fits, f"one of {others} {why}"
        readable = CONTAINERS[: CONTAINERS.index(loss.reads) + 1]
        kinds = ", ".join(n for n, each in REPLAY.items() if each.gives in readable)
        why = f"with loss {self.loss}, which reads {loss.reads.__name__.lower()}"
        yield "replay", gives in readable, f"one of {kinds} {why}"
        why = f"with replay {stored}, whose episodes pass through the same states"
        fits = gives is Trajectories or self.keep.kind != "diverse"
        yield "keep", fits, f"one of top, recent {why}"
        why = f"with replay {stored}, which stores no actions to rebuild states from"
        fits = stored == "trajectories" or self.compact != "rebuild"
        yield "compact", fits, f"one of none, narrow {why}"
        if not loss.is_signed:
            why = (
                f"with loss {self.loss}, whose residuals do not tell too little flow from too much"
            )
            yield "regression", self.regression != "linex", f"auto or squared {why}"
            yield "draw", self.draw.kind != "teacher", f"another than teacher {why}"
            yield "teacher", not share, f"0 {why}"
        yield "teacher", gives is Trajectories or not share, f"0 with replay {stored}"
        if self.feed.kind != "none":
            why = f"with feed {self.feed.kind}"
            yield "managers", self.managers.n >= 1, f"at least 1 {why}"
            yield "replay", stored == "trajectories", f"trajectories {why}"
            fits = not isinstance(self.draw, options.PriorityDraw)
            yield "draw", fits, f"another than priority and teacher {why}"
            yield "draw.temperature_end", self.draw_temperature_end is None, f"None {why}"

    @property
    def replay_name(self) -> str:
        """Name of what is stored: what auto stands for, if it is that."""
        if self.replay != "auto":
            return self.replay
        is_stored = self.feed.kind != "none" or self.compact == "rebuild"
        return "trajectories" if is_stored else "terminal"

    @property
    def draw_temperature_end(self) -> float | None:
        """Final temperature of the softmax draw; None without annealing."""
        return self.draw.temperature_end if isinstance(self.draw, options.SoftmaxDraw) else None

    @property
    def anneal_steps(self) -> int:
        """Number of steps until annealed options have their final values."""
        return self.anneal.steps or self.steps

    def annealed(self, start: float, end: float | None, step: int) -> float:
        """Return the value of an annealed option.

        Args:
            start: value before the first step.
            end: final value; None without annealing.
            step: number of steps taken.
        """
        if end is None:
            return float(start)
        part = min(1.0, step / self.anneal_steps)
        if self.anneal.by == "linear":
            return float(start + part * (end - start))
        return float(start * (end / start) ** part)

    def is_measured(self, step: int) -> bool:
        """Return whether metrics are recorded after a step."""
        every = self.eval_every
        while step > 8 * every:
            every *= 2
        return step % every == 0

    def with_steps(self, steps: int) -> TrainConfig:
        """Return the configuration with another number of steps and the same annealing schedule."""
        ends = self.epsilon_end, self.draw_temperature_end, self.lr_end
        if any(end is not None for end in ends):
            anneal = replace(self.anneal, steps=self.anneal_steps)
            return replace(self, steps=steps, anneal=anneal)
        return replace(self, steps=steps)

    def make_env(self) -> gfn_rb.envs.GFNEnv:
        """Return the environment, on the configured device."""
        # Further options, of a subclass of this one, are not the environment's.
        shipped = next(cls for cls in type(self).__mro__ if "env_type" in vars(cls))
        general = {f.name for f in fields(TrainConfig)}
        own = [f for f in fields(shipped) if f.name not in general]
        arguments: dict[str, Any] = {
            f.metadata.get("argument", f.name): getattr(self, f.name) for f in own
        }
        import gfn_rb.envs

        return getattr(gfn_rb.envs, self.env_type)(**arguments, device=self.device)

    def make_priority_rule(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that turns residuals into priorities. A subclass may return any.

        It receives residuals in nats, [m], above 0 where there is too much flow, and returns finite
        priorities of at least 0, [m].
        """
        if isinstance(self.draw, options.TeacherDraw):
            from gfn_rb.training.replay import TeacherReward

            return TeacherReward(self.draw.c)
        import torch

        return torch.abs

    def make_networks(self, env: gfn_rb.envs.GFNEnv) -> gfn_rb.policies.Networks:
        """Return your own modules to train; by default none, and all are created.

        Args:
            env: the environment. Weights come from torch's generator, seeded by the run.
        """
        from gfn_rb.policies import Networks

        return Networks()

    def make_distance(self) -> float | gfn_rb.numerics.near.neighbours.Distance:
        """Return the distance between two states for diverse buffers: p of a norm, or a callable.

        A callable receives two batches of states as rows, [n, d] and [m, d], with conditions
        appended if there are any, and returns [n, m].
        """
        return self.distance_p

    def make_buffer(
        self,
        env: gfn_rb.envs.GFNEnv,
        generator: torch.Generator,
        regenerate: Callable[[tensordict.TensorDictBase], tensordict.TensorDictBase] | None = None,
        **more: Any,
    ) -> torchrl.data.TensorDictReplayBuffer:
        """Return the replay buffer.

        Args:
            env: environment of the trajectories.
            generator: ``torch.Generator`` of the draws.
            regenerate: callable that samples trajectories to stored terminating states.
            **more: options of the preset.
        """
        from gfn_rb.keys import EPISODE_LOG_REWARD, LOG_REWARD
        from gfn_rb.training.replay import REPLAY, Trajectories, make_sampler, make_writer

        kind = REPLAY[self.replay_name]
        if self.replay_name == "trajectories":
            more["max_length"] = env.max_length
        elif self.replay_name == "terminal":
            more["regenerate"] = regenerate
        # The reward of an episode stands in its last step alone: steps are ranked by a copy of it.
        are_objects = kind.gives is Trajectories
        key = LOG_REWARD if are_objects else EPISODE_LOG_REWARD
        distance = self.make_distance()
        return kind.preset(
            self.capacity,
            writer=make_writer(self.keep, key, are_objects, distance, self.max_age),
            sampler=make_sampler(self.draw, key),
            compact=None if self.compact == "none" else self.compact,
            env=env,
            device=self.device,
            generator=generator,
            statistics=True,
            max_age=self.max_age,
            **more,
        )

    @property
    def n_replayed(self) -> int:
        """Number of trajectories replayed for each batch of fresh ones."""
        return round(self.replay_ratio * self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, without ``out``, because a run folder may move."""
        shipped = CONFIGS.get(self.env) is type(self)
        env = self.env if shipped else path_of(type(self))
        return {"format": FORMAT, "env": env, **json.loads(json.dumps(self._values(), default=str))}

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _WHERE}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration that ``to_dict`` turned into ``values``.

        Raises:
            ArgumentError: the format is another, the class cannot be imported, or a field is
                missing, unknown or out of range.
        """
        rest = dict(values)
        if (version := rest.pop("format", 1)) != FORMAT:
            raise ArgumentError(f"format of a configuration must be {FORMAT}, got {version!r}")
        return _made(find_config(rest.pop("env", None)), rest)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``to_dict`` in one table, named as on the command line."""
    table: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            first, *_ = value
            table |= {name if k == first else f"{name}.{k}": v for k, v in value.items()}
        else:
            table[name] = value
    return table


def _made(kind: type[T], values: dict[str, Any], group: str = "") -> T:
    """Return a dataclass made of its fields by name; those that are groups are dictionaries."""
    known = {f.name for f in fields(kind)} - _WHERE  # type: ignore[arg-type]
    if wrong := sorted(known ^ values.keys()):
        state = "unknown" if wrong[0] in values else "missing"
        of = f" of {kind.env}" if issubclass(kind, TrainConfig) else ""
        raise ArgumentError(
            f"{rules.option_name(kind, wrong[0], group)} is {state} in a configuration{of}"
        )
    hints = get_type_hints(kind, include_extras=True)
    made: dict[str, Any] = {}
    for name, given in values.items():
        value = tuple(given) if isinstance(given, list) else given
        if (groups := rules.groups_of(hints[name])) and isinstance(value, dict):
            made[name] = _made(group_named(name, groups, value.get("kind")), value, name)
        else:
            rules.check_value(rules.option_name(kind, name, group), value, hints[name])
            made[name] = value
    return kind(**made)


def group_named(name: str, groups: Sequence[type], kind: Any) -> type:
    """Return the one among several groups whose first field is ``kind`` by default."""
    if len(groups) == 1:
        return groups[0]
    known = {getattr(group, "kind", ""): group for group in groups}
    rules.check_name(name, kind, known)
    return known[kind]


def find_config(env: Any) -> type[TrainConfig]:
    """Return the class of configurations of an environment, by name or by import path."""
    if not isinstance(env, str) or ":" not in env:
        rules.check_name("env", env, CONFIGS)
        return CONFIGS[env]
    found = load(env)
    if not (isinstance(found, type) and issubclass(found, TrainConfig)):
        raise ArgumentError(
            f"{env} must be a subclass of gfn_rb.training.TrainConfig, got {found!r}"
        )
    if found.make_env is TrainConfig.make_env and not hasattr(found, "env_type"):
        raise ArgumentError(f"{env} must have a method make_env(self), got none")
    try:
        hints = get_type_hints(found)
    except NameError as error:
        raise ArgumentError(f"{env} must have annotations that can be read: {error}") from error
    own = {name for name, hint in hints.items() if ClassVar not in (hint, get_origin(hint))}
    if bare := sorted(own - {f.name for f in fields(found)}):
        raise ArgumentError(
            f"{env} must be decorated with @dataclass(frozen=True, kw_only=True), got a class "
            f"whose {bare[0]} is no field"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class TFBind8Config(TrainConfig):
    """Design DNA 8-mers that the transcription factor SIX6 binds."""

    env: ClassVar[str] = "tfbind8"
    env_type: ClassVar[str] = "TFBind8"

    form: FormName = "append"
    """Write letters at the right end, at both ends, or at any place."""
    beta: float = 3.0
    """Exponent of the reward."""
    modes: ModesName = "top"
    """Which 8-mers count as modes: the 327 of highest score, or the 328 published ones, of high
    score and no two within one letter of each other."""


@dataclass(frozen=True, kw_only=True)
class QM9StringsConfig(TrainConfig):
    """Design molecules of five building blocks with a wide HOMO-LUMO gap."""

    env: ClassVar[str] = "qm9_strings"
    env_type: ClassVar[str] = "QM9Strings"

    form: FormName = "prepend_append"
    """Write blocks at the right end, at both ends, or at any place."""
    beta: float = 20.0
    """Exponent of the reward."""


@dataclass(frozen=True, kw_only=True)
class HyperGridConfig(TrainConfig):
    """Find the rewarded corners of a grid."""

    env: ClassVar[str] = "hypergrid"
    env_type: ClassVar[str] = "HyperGrid"
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
    regression: options.RegressionName = "squared"
    """Cost of a residual: its square, which fits this target sooner, as no state has next to no
    reward; linex, or auto for the default of other environments."""


@dataclass(frozen=True, kw_only=True)
class ConditionalHyperGridConfig(HyperGridConfig):
    """Find the rewarded corners of a grid at any temperature that the policy is told."""

    env: ClassVar[str] = "conditional_hypergrid"
    env_type: ClassVar[str] = "ConditionalHyperGrid"

    ndim: int = 2
    """Coordinates."""
    min_beta: float = 0.5
    """Lowest exponent of the reward (inverse temperature)."""
    max_beta: float = 2.0
    """Highest exponent of the reward."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield the options that have no effect with the others, and the condition they need."""
        yield from super().without_effect()
        yield "lr_log_z", "the environment has no conditions, where log Z is a network"


@dataclass(frozen=True, kw_only=True)
class DeceptiveGridConfig(TrainConfig):
    """Find the goals of a grid that are surrounded by almost no reward (Kim et al. 2024)."""

    env: ClassVar[str] = "deceptive_grid"
    env_type: ClassVar[str] = "DeceptiveGrid"
    every_state_terminates: ClassVar[bool] = True
    distance_p: ClassVar[float] = 1.0

    ndim: int = 4
    """Coordinates."""
    height: int = 16
    """Grid points per coordinate."""


_ONE_WORD = options.SearchOptions(31, back_ratio=0.06)


@dataclass(frozen=True, kw_only=True)
class BitSequenceConfig(TrainConfig):
    """Write long bit strings that come close to hidden ones."""

    env: ClassVar[str] = "bit_sequence"
    env_type: ClassVar[str] = "BitSequence"

    n_bits: int = 120
    """Bits in a string."""
    word_bits: int = 8
    """Bits written at a time."""
    form: FormName = "append"
    """Write words at the right end, at both ends, or at any place."""
    modes: int = field(default=60, metadata={"argument": "n_modes"})
    """Hidden strings."""
    beta: float | None = None
    """Exponent of the reward; twice the bits by default, 2 nats per bit astray."""
    delta: int | None = None
    """A mode is found by any string within this many bits; 28/120 of the bits by default."""
    steps: rules.PositiveInt = 100
    """Training steps of (1 + search) * batch-size reward calls each."""
    log_z: rules.FiniteFloat | None = 0.0
    """Initial log Z, in nats, of tb, subtb and db. None is what the first fresh batch estimates."""
    search: options.SearchOptions = _ONE_WORD
    """Local search that rewrites one word of up to 16 at a time; without it few modes are found."""


@dataclass(frozen=True, kw_only=True)
class RNABindingConfig(TrainConfig):
    """Design RNA that binds to given RNA, by ViennaRNA's thermodynamic model."""

    env: ClassVar[str] = "rna_binding"
    env_type: ClassVar[str] = "RNABinding"

    targets: tuple[str, ...] = ("RNA1",)
    """RNA to bind: names among RNA1 to RNA4, or sequences of ACGU; the score is the mean."""
    length: int = 14
    """Letters to write."""
    form: FormName = "append"
    """Write letters at the right end, at both ends, or at any place."""
    beta: float = 8.0
    """Exponent of the reward."""
    threshold: float = 0.8
    """Sequences that score this much are counted as modes."""
    modes: RNAModesName = "threshold"
    """Count sequences of at least the threshold as modes, or the published ones of one of RNA1 to
    RNA3."""


@dataclass(frozen=True, kw_only=True)
class BayesianDAGConfig(TrainConfig):
    """Draw structures of Bayesian networks by how well they explain data (Deleu et al. 2022)."""

    env: ClassVar[str] = "bayesian_dag"
    env_type: ClassVar[str] = "BayesianDAG"
    every_state_terminates: ClassVar[bool] = True

    n_nodes: int | None = None
    """Nodes of the network; by default the columns of the data, or 5."""
    data: str | None = None
    """A .npy or .csv file with a row per sample and a column per node. By default samples are drawn
    from a random linear-Gaussian network."""
    n_samples: rules.PositiveInt = 100
    """Samples to draw where no data is given."""
    data_seed: rules.Seed = field(default=0, metadata={"argument": "seed"})
    """Seed of the network and its samples."""
    regression: options.RegressionName = "squared"
    """Cost of a residual: its square, which fits this target sooner, as every graph has some
    reward; linex, or auto for the default of other environments."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """Yield the options that have no effect with the others, and the condition they need."""
        yield from super().without_effect()
        if self.data is not None:
            yield from ((name, "data is not given") for name in ("n_samples", "data_seed"))


@dataclass(frozen=True, kw_only=True)
class ContinuousConfig(TrainConfig):
    """Defaults of environments whose moves have parameters."""

    distance_p: ClassVar[float] = 1.0

    compact: options.CompactName = "none"
    """How items are stored: whole, or, of trajectories, by their actions alone. Real numbers
    are not made narrow."""
    hidden: rules.Widths = (128, 128)
    """Widths of the hidden layers of each policy."""
    lr: rules.PositiveFloat = 3e-3
    """Adam's learning rate for the networks."""
    linex_alpha: rules.PositiveFloat = 1.0
    """Asymmetry of the Linex cost of a residual. First walks may end where the reward is next to
    nothing, by hundreds of nats, of which Linex makes less than the square; with 1, fresh
    trajectories leave no bias in log Z."""


@dataclass(frozen=True, kw_only=True)
class LineConfig(ContinuousConfig):
    """Walk to where a mixture of normal distributions is dense (Lahlou et al. 2023)."""

    env: ClassVar[str] = "line"
    env_type: ClassVar[str] = "Line"

    means: tuple[float, ...] = (-1.5, 1.5)
    """Means of the normal distributions."""
    scales: tuple[float, ...] = (0.5, 0.5)
    """Their standard deviations."""
    n_steps: rules.PositiveInt = 5
    """Moves of a walk."""
    replay: options.ReplayName = "trajectories"
    """Items to store: trajectories, or terminating states."""
    replay_ratio: rules.NonNegativeFloat = 1.0
    """Replayed items per fresh one."""


@dataclass(frozen=True, kw_only=True)
class BoxConfig(ContinuousConfig):
    """Step over the unit square to its rewarded corners (Lahlou et al. 2023)."""

    env: ClassVar[str] = "box"
    env_type: ClassVar[str] = "Box"

    delta: rules.PositiveFloat = 0.25
    """Length of a step."""
    r0: float = 0.1
    """Reward everywhere."""
    r1: float = 0.5
    """Reward added in the outer bands."""
    r2: float = 2.0
    """Reward added in the inner bands."""
    replay_ratio: rules.NonNegativeFloat = 0.0
    """Replayed items per fresh one, none by default: some walks have far too little flow, and
    replayed they drive log Z up."""
    lr_end: rules.Share | None = 0.05
    """Final value of both learning rates, as a share of the first."""
    clip_grad_norm: rules.PositiveFloat | None = 5.0
    """Gradients longer than this, as single walks give with linex, are shortened to it."""


_RECENT, _FLATTER = options.KeepRecent(), options.RankDraw(k=0.01)


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig(ContinuousConfig):
    """Defaults of diffusion samplers (Sendera et al. 2024)."""

    steps: rules.PositiveInt = 2500
    """Training steps. Each step samples one fresh batch, which takes batch-size reward calls."""
    batch_size: rules.PositiveInt = 128
    """Fresh trajectories per step."""
    hidden: rules.Widths = (64, 64)
    """Widths of the hidden layers of each policy."""
    lr: rules.PositiveFloat = 1e-3
    """Adam's learning rate for the networks."""
    regression: options.RegressionName = "squared"
    """Cost of a residual: its square, or linex; auto for the default of other environments."""
    lr_log_z: rules.PositiveFloat = 0.1
    """Adam's learning rate for log Z, if log Z is a separate parameter."""
    replay_ratio: rules.NonNegativeFloat = 1.0
    """Replayed items per fresh one: terminating states, from which walks lead back to the start."""
    keep: options.Keep = _RECENT
    """Which items the buffer keeps. The densest points would all be centres of modes."""
    draw: options.Draw = _FLATTER
    """How replayed items are drawn."""


@dataclass(frozen=True, kw_only=True)
class Gaussians25Config(DiffusionConfig):
    """Sample a mixture of 25 normal distributions in the plane (Sendera et al. 2024)."""

    env: ClassVar[str] = "gaussians25"
    env_type: ClassVar[str] = "Gaussians25"

    n_steps: rules.PositiveInt = 100
    """Moves of a walk."""
    sigma: rules.PositiveFloat = 5**0.5
    """Standard deviation of the end of the reference walk."""


@dataclass(frozen=True, kw_only=True)
class FunnelConfig(DiffusionConfig):
    """Sample Neal's funnel in ten dimensions (Sendera et al. 2024)."""

    env: ClassVar[str] = "funnel"
    env_type: ClassVar[str] = "Funnel"

    ndim: int = 10
    """Coordinates."""
    n_steps: rules.PositiveInt = 100
    """Moves of a walk."""
    sigma: rules.PositiveFloat = 1.0
    """Standard deviation of the end of the reference walk."""


@dataclass(frozen=True, kw_only=True)
class ManywellConfig(FunnelConfig):
    """Sample a product of double wells in 32 dimensions (Sendera et al. 2024)."""

    env: ClassVar[str] = "manywell"
    env_type: ClassVar[str] = "Manywell"

    ndim: int = 32
    """Coordinates, an even number."""


CONFIGS: dict[str, type[TrainConfig]] = {
    config.env: config
    for config in [*vars().values()]
    if isinstance(config, type) and issubclass(config, TrainConfig) and "env_type" in vars(config)
}
