"""The configuration of a training run: its options, checks between them, and what they make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_origin, get_type_hints

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

FORMAT = 2  # of config.json; 1 had all options in one table
_WHERE = {"out", "transport"}  # where a run is this time, which may be elsewhere the next

T = TypeVar("T")

CONFIGS: dict[str, type[TrainConfig]] = {}
"""The configurations of shipped environments, by name: those of ``gfn_rb.training.config``."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(options.GeneralOptions):
    """All options of a training run. The command line shows these fields.

    A configuration of your own is a frozen dataclass with the options of its environment and a
    ``make_env``. ``gfn-rb train mypackage.module:MyConfig`` trains on it. The keyword ``defaults``
    of a subclass gives inherited options other defaults.

    Attributes:
        env: short name of the environment in names of folders and in titles. Default: the name of
            the class.
        every_state_terminates: whether the exit action is legal in every state of the environment.
            Assign True in the class of your configuration for modified detailed balance, which
            needs it; the environment is then checked for it. Default: False.
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
    every_state_terminates: ClassVar[bool] = False
    distance_p: ClassVar[float] = 0.0

    def __init_subclass__(cls, defaults: Mapping[str, Any] | None = None) -> None:
        hints = get_type_hints(cls.__mro__[1], include_extras=True)
        for name, value in (defaults or {}).items():  # @dataclass then makes fields of them
            rules.check_name("defaults", name, hints)
            cls.__annotations__[name] = hints[name]
            setattr(cls, name, value)
        if "env" not in vars(cls):
            cls.env = cls.__name__
        elif cls.__module__ == "gfn_rb.training.config":
            CONFIGS[cls.env] = cls

    def __post_init__(self) -> None:
        """Take any sequence, such as Hydra's lists, where a field is a tuple."""
        groups = [value for value in vars(self).values() if is_dataclass(value)]
        for options_ in (self, *groups):
            for name, value in list(vars(options_).items()):
                if rules.is_listed(value):
                    object.__setattr__(options_, name, tuple(value))

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
            rules.check_value(name, value, rules.Plain)
        values["replay"] = self.replay_name
        for name, fits, allowed in self._demands():
            if not fits:
                raise ArgumentError(f"{name} must be {allowed}, got {values[name]!r}")
        default, usual = type(self)(), flat(asdict(options.GeneralOptions()))
        for name, needed in self.without_effect():
            value = attrgetter(name)(self)
            if value not in (attrgetter(name)(default), usual.get(name)):
                raise ArgumentError(f"{name} has no effect unless {needed}, got {values[name]!r}")
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
            for name in ("draw", "max_age", "offline_data"):
                yield name, "replay_ratio is above 0"
        if not self.average_gradients:
            yield "gradient_sum", "average_gradients is given"
        if self.offline_data is None:
            yield "offline_share", "offline_data is given"
        if self.managers.n != "node":
            for name in ("exchange_every", "exchange_quota"):
                yield f"managers.{name}", "managers is node"
        if self.epsilon_end is self.draw_temperature_end is self.lr_end is None:
            yield "anneal_steps", "epsilon_end, draw.temperature_end or lr_end is given"

    def _demands(self) -> Iterator[tuple[str, bool, str]]:
        """Yield options, whether the others allow their values, and which values they allow."""
        from gfn_rb.training.replay import CONTAINERS, LOSSES, REPLAY, Trajectories

        loss, stored = LOSSES[self.loss], self.replay_name
        gives, share = REPLAY[stored].gives, self.teacher.share
        others = ", ".join(name for name, each in LOSSES.items() if not each.every_state_terminates)
        why = f"with {self.env}, whose configuration has every_state_terminates = False"
        fits = self.every_state_terminates or not loss.every_state_terminates
        yield "loss", fits, f"one of {others} {why}"
        fits = self.loss != "vargrad" or self.batch_size > 1
        yield "batch_size", fits, "at least 2 with loss vargrad, which compares rows"
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
        is_fixed = not isinstance(self.draw, options.PriorityDraw)
        if self.offline_data is not None:
            why = "with offline_data, whose objects have no steps, managers or priorities"
            yield "replay", gives is Trajectories, f"one of trajectories, terminal {why}"
            yield "managers", not self.managers.n, f"0 {why}"
            yield "draw", is_fixed, f"another than priority and teacher {why}"
        if self.managers.n == "node":
            fits, why = (
                self.managers.exchange_every <= self.patience,
                f"patience, {self.patience:g}",
            )
            yield "managers.exchange_every", fits, f"at most {why}"
        if self.feed.kind != "none":
            why = f"with feed {self.feed.kind}"
            yield "managers", bool(self.managers.n), f"at least 1 {why}"
            yield "replay", stored == "trajectories", f"trajectories {why}"
            yield "draw", is_fixed, f"another than priority and teacher {why}"
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
    def n_anneal_steps(self) -> int:
        """Number of steps until annealed options have their final values."""
        return self.anneal_steps or self.steps

    def annealed(self, start: float, end: float | None, step: int) -> float:
        """Return an option's value after ``step`` steps: ``start`` at first, in the end ``end``."""
        if end is None:
            return float(start)
        return float(start + min(1.0, step / self.n_anneal_steps) * (end - start))

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
            return replace(self, steps=steps, anneal_steps=self.n_anneal_steps)
        return replace(self, steps=steps)

    def make_env(self) -> gfn_rb.envs.GFNEnv:
        """Return the environment, on the configured device.

        That of a shipped class has its name, without Config.
        """
        # Further options, of a subclass of this one, are not the environment's.
        shipped = next(cls for cls in type(self).__mro__ if cls in CONFIGS.values())
        general = {f.name for f in fields(TrainConfig)}
        own = [f for f in fields(shipped) if f.name not in general]
        arguments: dict[str, Any] = {
            f.metadata.get("argument", f.name): getattr(self, f.name) for f in own
        }
        import gfn_rb.envs

        kind = getattr(gfn_rb.envs, shipped.__name__.removesuffix("Config"))
        return kind(**arguments, device=self.device)

    def make_networks(self, env: gfn_rb.envs.GFNEnv) -> gfn_rb.policies.Networks:
        """Return your own modules to train; by default none, and all are created.

        Weights come from torch's generator, which the run has seeded.
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
    ) -> torchrl.data.TensorDictReplayBuffer:
        """Return the replay buffer.

        Args:
            env: environment of the trajectories.
            generator: ``torch.Generator`` of the draws.
            regenerate: callable that samples trajectories to stored terminating states.
        """
        from gfn_rb.keys import EPISODE_LOG_REWARD, LOG_REWARD
        from gfn_rb.training.replay import REPLAY, Trajectories, make_sampler, make_writer

        kind, more = REPLAY[self.replay_name], dict[str, Any]()
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


def _made(kind: type[T], values: Mapping[str, Any], group: str = "") -> T:
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
        value = tuple(given) if rules.is_listed(given) else given
        if (groups := rules.groups_of(hints[name])) and isinstance(value, Mapping):
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
    is_shipped = any(cls in CONFIGS.values() for cls in found.__mro__)
    if found.make_env is TrainConfig.make_env and not is_shipped:
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
