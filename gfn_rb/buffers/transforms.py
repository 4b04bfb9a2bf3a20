"""Transforms of trajectories on their way into a buffer and out of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from gfn_rb import keys, torchrl_compat as compat
from gfn_rb.arguments import KeepsArguments, as_count, kind_of
from gfn_rb.containers import States, Trajectories, Transitions, convert
from gfn_rb.containers.base import Container
from gfn_rb.containers.objects import object_states
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError

_OF_PATHS = (
    *(keys.STATE, keys.ACTION, keys.LENGTH, keys.LOG_PROB, keys.ESTIMATOR_OUTPUT),
    *(keys.IS_BACKWARD, keys.IS_TERMINATING, keys.NEXT, keys.COLLECTOR),
)
_OF_DRAWS = keys.INDEX, keys.BUFFER_ID, keys.DRAW_LOG_PROB, keys.PRIORITY_WEIGHT
_NOT_OF_STATES = tuple(name for name in (*_OF_PATHS, *_OF_DRAWS) if name != keys.STATE)


class RowTransform(KeepsArguments, Transform):
    """A transform of rows on their way into a buffer, which leaves what is sampled as it is."""

    def stored(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Return what is stored of rows; as ``inv``, without what TorchRL does around it."""
        if tensordict is None:  # held back by a transform of the user
            return None
        if not isinstance(tensordict, TensorDictBase):
            raise ArgumentError(f"data must be a TensorDict, got {kind_of(tensordict)}")
        # Rows of different shapes cannot be asked together whether one has a gradient.
        if isinstance(tensordict, LazyStackedTensorDict) or tensordict.requires_grad:
            tensordict = tensordict.detach()
        if tensordict.ndim:
            return self._stored(tensordict)
        return self._stored(tensordict.unsqueeze(0))[0]

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        return self.stored(tensordict)

    @abstractmethod
    def _stored(self, rows: TensorDictBase) -> TensorDictBase:
        """Return what is stored of rows, batch size [n]."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what is sampled in a new container: a storage may hand out its own."""
        return self.drawn(tensordict.copy())

    def drawn(self, rows: TensorDictBase) -> TensorDictBase:
        """Return what is sampled of rows in a container that nobody else has."""
        return rows


class KeepItems(RowTransform):
    """Drops entries of rows on their way into a buffer, and pads trajectories to one length.

    A storage holds rows of one shape, and a batch of trajectories is only as wide as its longest.
    """

    def __init__(self, dropped: tuple[str, ...], max_length: int | None = None) -> None:
        super().__init__()
        self.dropped = dropped
        self.n_steps = None if max_length is None else as_count("max_length", max_length)

    def _stored(self, rows: TensorDictBase) -> TensorDictBase:
        rows = compat.without(rows, self.dropped)
        if self.n_steps is None or not are_trajectories(rows):
            return rows
        if rows.get(keys.ACTION).shape[1:2] == (self.n_steps,):
            return rows
        trajectories = Trajectories.from_tensordict(rows)
        if trajectories.n_steps > self.n_steps and len(rows):
            longest = int(trajectories.length.max())
            if longest > self.n_steps:
                raise ShapeError(
                    f"a trajectory of {longest} actions does not fit: the buffer holds at most "
                    f"max_length={self.n_steps}"
                )
        return convert.padded_to(rows, self.n_steps)


class PadTrajectories(KeepItems):
    """Pads trajectories to one length on their way into a buffer, as ``max_length=`` of presets.

    ``TensorDictReplayBuffer(..., transform=PadTrajectories(env.max_length))`` accepts batches of
    all lengths up to this one. Other rows pass as they are.

    Args:
        max_length: number of actions of the padded trajectories, at least 1.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__((), as_count("max_length", max_length))


class KeepTerminatingStates(RowTransform):
    """Replaces the fields of trajectories by their terminating state; other entries are kept.

    Rows that hold no actions are taken for terminating states already. On the way out, rows pass
    through ``regenerate`` if there is one.
    """

    def __init__(
        self, regenerate: Callable[[TensorDictBase], TensorDictBase] | None = None
    ) -> None:
        super().__init__()
        if regenerate is not None and not callable(regenerate):
            raise ArgumentError(f"regenerate must be a callable or None, got {regenerate!r:.80}")
        self.regenerate = regenerate
        self.constructor_arguments = (), {}  # no file can hold a rollout

    def _stored(self, rows: TensorDictBase) -> TensorDictBase:
        state = object_states(rows)
        if state is compat.entry_of(rows, keys.STATE):
            return compat.without(rows, _NOT_OF_STATES)
        return rows.exclude(*_OF_PATHS, *_OF_DRAWS).set(keys.STATE, state)

    def drawn(self, rows: TensorDictBase) -> TensorDictBase:
        """Return what is sampled, regenerated if so asked."""
        if self.regenerate is None:
            return rows
        if rows.ndim == 0:  # a single item, as rb[0]
            return self.drawn(rows.unsqueeze(0))[0]
        version, made = rows.get(keys.POLICY_VERSION, None), self.regenerate(rows)
        return made if version is None else made.set(keys.POLICY_VERSION, version)


class KeepTransitions(RowTransform):
    """Splits trajectories into one row per action, and stamps each row with its episode.

    Each row gets ``episode_log_reward``, the log R(x) of its trajectory, and ``episode``, the
    number of its trajectory. ``log_reward`` stays -inf in all rows but the terminating one, as
    losses expect. Writers and samplers use ``episode_log_reward``.

    Rows that have both stamps, such as drawn ones, keep them.

    Args:
        dropped: optional fields that are not stored.
    """

    n_episodes: Tensor  # the number of the next episode
    kind: type[Container] = Transitions

    def __init__(self, dropped: tuple[str, ...] = (keys.LOG_PROB,)) -> None:
        super().__init__()
        self.dropped = dropped
        self.register_buffer("n_episodes", torch.zeros((), dtype=torch.int64))

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is not None and tensordict.ndim == 0 and are_trajectories(tensordict):
            raise ArgumentError("add takes a single row, got a trajectory: use extend")
        return super()._inv_call(tensordict)

    def _stored(self, rows: TensorDictBase) -> TensorDictBase:
        rows, version = rows.exclude(*self.dropped), rows.get(keys.POLICY_VERSION, None)
        if are_trajectories(rows):
            trajectories = Trajectories.from_tensordict(rows)
            td, length = self._split(trajectories).to_tensordict(), trajectories.length
            number = torch.arange(len(length), device=length.device)
            episode = number.repeat_interleave(length, output_size=len(td))
            td.set(keys.EPISODE, episode + self.n_episodes.to(episode.device, non_blocking=True))
            td.set(keys.EPISODE_LOG_REWARD, trajectories.log_reward[episode])
            self.n_episodes += len(length)
            version = None if version is None else version[episode]
        else:
            stamps = keys.EPISODE, keys.EPISODE_LOG_REWARD
            if not {*stamps} <= set(rows.keys()):
                raise KeyMismatchError(
                    f"rows must be trajectories, or have {stamps[0]!r} and {stamps[1]!r}, got "
                    f"{sorted(map(str, rows.keys()))}"
                )
            td = self.kind.from_tensordict(rows).to_tensordict().update(rows.select(*stamps))
        return td if version is None else td.set(keys.POLICY_VERSION, version)

    def _split(self, trajectories: Trajectories) -> Container:
        return trajectories.to_transitions()


class KeepStates(KeepTransitions):
    """Stores a row per visited state of trajectories, with the stamps of their episodes."""

    kind: type[Container] = States

    def _split(self, trajectories: Trajectories) -> Container:
        return trajectories.to_states()


def are_trajectories(rows: TensorDictBase) -> bool:
    """Return whether rows are trajectories, by their keys."""
    return set(rows.keys()) >= {keys.ACTION, keys.LENGTH}
