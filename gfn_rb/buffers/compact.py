"""Rows stored in as few bytes as their environment allows, and whole again when they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from gfn_rb import keys
from gfn_rb.arguments import KeepsArguments, require_choice
from gfn_rb.buffers.options import Environment, StateForm
from gfn_rb.containers import Trajectories, convert
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, KeyMismatchError, ShapeError
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Shaped
from gfn_rb.torchrl_compat import new_tensordict
from gfn_rb.writers import DiversityWriter, RewardPrioritizedWriter
from gfn_rb.writers.features import Features, ObjectColumns

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_WORDS = (torch.int64, torch.int32, torch.int16)
_WIDEST = 8  # times the bytes that numbers are stored in, when they are whole
_CHUNK = 1024  # rows made whole at a time where many are read: rebuilt states are large


class CompactRows(KeepsArguments, Transform):
    """Buffer transform that stores rows in as few bytes as an environment allows.

    Drawn rows equal added ones. "narrow" stores states, actions and lengths in the smallest integer
    type that holds all values of the environment, padding included. "rebuild" also omits the states
    of trajectories; ``env.states_of`` computes them again from the actions. All other entries are
    unchanged.

    The transform must be the last one when rows are added, which is the first one of the buffer.
    Writers, samplers and checkpoints then work on compact rows. A writer that measures distances or
    tells objects apart needs :meth:`measure`. A checkpoint records the form of its rows, and a
    buffer of another form or environment refuses it.

    Args:
        env: environment of the rows.
        states: "narrow" for trajectories, transitions or states; "rebuild" for trajectories alone,
            because a single step or state does not determine its history.

    Raises:
        ArgumentError: ``states`` has another value, ``env`` is not an environment of gfn_rb, or its
            transitions are random, so that states cannot be computed again.

    Examples:
        >>> rb = fifo_buffer(100_000, max_length=env.max_length, compact="rebuild", env=env)
    """

    def __init__(self, env: Environment, states: StateForm = "narrow") -> None:
        require_choice("states", states, get_args(StateForm))
        if not isinstance(env, Environment):
            raise ArgumentError(f"env must be a GFNEnv, got {type(env)}")
        if states == "rebuild" and not env.is_deterministic:
            raise ArgumentError(
                f"env must have deterministic transitions to make states again, those of "
                f"{type(env).__name__} are random: expected states='narrow' for it"
            )
        super().__init__()
        self.states = states
        # In a tuple, for the environment is no submodule: its tensors are not the buffer's state.
        self._env = (env,)
        is_kept = states == "narrow"
        self._columns = [each for each in _columns(env) if is_kept or each.key != keys.STATE]

    def __repr__(self) -> str:
        env = self._env[0]
        return (
            f"{type(self).__name__}(states={self.states!r}) of {type(env).__name__} with states "
            f"{list(env.state_shape)} in {env.state_range}, {env.n_actions} actions, at most "
            f"{env.max_length} of them"
        )

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        return None if tensordict is None else self.packed(tensordict)

    def packed(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Make rows, batch size [n] or [], compact; raise unless they are the environment's.

        The argument is not changed.
        """
        batch_dims, entries = tensordict.ndim, _entries(tensordict)
        columns = [each for each in self._columns if each.key in entries]
        bounds = _bounds([entries[each.key] for each in columns])
        for column, (lowest, highest) in zip(columns, bounds, strict=True):
            value = entries.pop(column.key)
            entries[column.held_as] = column.narrowed(value, batch_dims, lowest, highest)
        if self.states == "rebuild":
            self._require_rebuildable(tensordict if batch_dims else tensordict.unsqueeze(0))
            del entries[keys.STATE]
        return _rows(entries, tensordict)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Make stored rows, batch size [n] or [], whole again; the argument is not changed."""
        entries = _entries(tensordict)
        for column in self._columns:
            if column.held_as in entries:
                entries[column.key] = column.restored(entries.pop(column.held_as))
        rows = _rows(entries, tensordict)
        if self.states == "rebuild":
            state = self._rebuilt(rows if rows.ndim else rows.unsqueeze(0))
            rows.set(keys.STATE, state if rows.ndim else state[0])
        return rows

    def check_size(self, tensordict: TensorDictBase, max_nbytes: int) -> None:
        """Raise unless stored rows [n] have at most a number of bytes once they are whole."""
        nbytes, action = 0, tensordict.get(keys.ACTION, None)
        if self.states == "rebuild" and action is not None and action.ndim > 1:
            nbytes = action.shape[0] * (action.shape[1] + 1) * self._env[0].source_state.nbytes
        if nbytes <= max_nbytes < nbytes + _WIDEST * tensordict.bytes() and len(tensordict):
            # All rows have the size of the first.
            nbytes = len(tensordict) * self.forward(tensordict[:1]).bytes()
        if nbytes > max_nbytes:
            raise ArgumentError(f"rows have {nbytes} bytes whole, expected {max_nbytes} at most")

    def measure(self, writer: Writer) -> None:
        """Have a writer that was made for whole rows read compact ones.

        Args:
            writer: the writer. Distances, objects and groups remain those of whole rows.
        """
        if isinstance(writer, DiversityWriter):
            if writer.features != keys.CONDITION:  # which is stored as it is
                writer.measure(partial(self._features_of, writer.features))
        elif isinstance(writer, RewardPrioritizedWriter) and writer.unique is not None:
            writer.identify(partial(self._features_of, ObjectColumns(writer.unique)))
        if isinstance(writer, RewardPrioritizedWriter) and writer.group is not None:
            writer.group_by(partial(self._features_of, ObjectColumns(writer.group)))

    def get_extra_state(self) -> str:
        """Return what the stored rows can be read with."""
        return repr(self)

    def set_extra_state(self, state: str) -> None:
        """Raise unless loaded rows were stored in this form and for this environment."""
        if state != repr(self):
            raise CheckpointMismatchError(f"rows are stored as {state}, expected {self!r}")

    def _require_rebuildable(self, rows: TensorDictBase) -> None:
        """Raise unless states are what comes of the actions, or they would come back changed."""
        if not {keys.STATE, keys.ACTION, keys.LENGTH} <= set(rows.keys()):
            raise KeyMismatchError(
                f"rows must be trajectories for states='rebuild', with {keys.STATE!r}, "
                f"{keys.ACTION!r} and {keys.LENGTH!r}, got {sorted(map(str, rows.keys()))}: a "
                "single step or state does not tell how it was come to, states='narrow' stores it"
            )
        trajectories = Trajectories.from_tensordict(rows)
        (env,), state, action = self._env, trajectories.state, trajectories.action
        env.check_state(state.flatten(0, 1))
        if action.shape[2:] != env.action_shape:
            expected = ", ".join(["n", "T", *map(str, env.action_shape)])
            raise ShapeError(f"'action' must have shape [{expected}], got {list(action.shape)}")
        rebuilt = self._rebuilt(rows)
        if not torch.equal(rebuilt, state):
            row, step = (state != rebuilt)[..., None].flatten(2).any(2).nonzero()[0].tolist()
            raise ArgumentError(
                f"{keys.STATE!r} must be what the actions lead to, as they alone are stored, got "
                f"{state[row, step].tolist()} at step {step} of row {row}, expected "
                f"{rebuilt[row, step].tolist()}: nothing was written"
            )

    def _rebuilt(self, rows: TensorDictBase) -> Shaped[Tensor, "n T1 *S"]:
        """Return the states of trajectories, from actions and lengths of 64 bits."""
        env = self._env[0]
        action, length = rows.get(keys.ACTION), rows.get(keys.LENGTH)
        is_backward = rows.get(keys.IS_BACKWARD, None)
        turn = is_backward is not None
        if turn and is_backward.is_cpu:  # a device is not waited for
            turn = bool(is_backward.any())
        if turn:
            action = convert.flipped(action, length, is_backward)
        device = env.source_state.device
        state = env.states_of(action.to(device), length.to(device)).to(action.device)
        return convert.flipped(state, length + 1, is_backward) if turn else state

    def _features_of(self, source: Any, data: TensorDictBase) -> Shaped[Tensor, "n d"]:
        chunks = [self.forward(chunk) for chunk in data.split(_CHUNK) or (data,)]
        if callable(source):
            return torch.cat([source(whole) for whole in chunks])
        # The writer appends the condition itself.
        read = Features(source)
        return torch.cat([read(whole.exclude(keys.CONDITION)) for whole in chunks])


def compact_rows_of(rb: ReplayBuffer | None) -> CompactRows | None:
    """Return what stores the rows of a buffer compactly, None if they are stored as they come."""
    transforms = () if rb is None else rb.transform.modules()
    return next((each for each in transforms if isinstance(each, CompactRows)), None)


class _Column:
    """One column of integers: where it lies, what it may hold, and the type it is stored in.

    Writing and drawing copy number by number, so that bytes are no faster than words. States are
    therefore stored flat, in the largest words that a row of them divides into, and under another
    key: what reads states from a storage shall not find words instead.
    """

    def __init__(
        self,
        key: NestedKey,
        held_as: NestedKey,
        dtype: torch.dtype,
        bounds: tuple[int, int],
        shape: torch.Size | None = None,  # of one state; None for columns stored as they are
    ) -> None:
        self.key, self.held_as, self.dtype, self.shape = key, held_as, dtype, shape
        self.low, self.high = low, high = bounds
        fits = (d for d in _INTEGERS if torch.iinfo(d).min <= low and high <= torch.iinfo(d).max)
        self.stored = next(fits)

    def narrowed(self, value: Tensor, batch_dims: int, lowest: int, highest: int) -> Tensor:
        """Return numbers, of these lowest and highest, as they are stored, or raise."""
        shape = () if self.shape is None else self.shape
        if value.dtype != self.dtype or value.shape[value.ndim - len(shape) :] != shape:
            raise ShapeError(
                f"{self.key!r} must be {self.dtype} of shape {['...', *shape]}, as the environment "
                f"has it, got {value.dtype} of shape {list(value.shape)}: nothing was written"
            )
        if value.numel() and (lowest < self.low or highest > self.high):
            wrong = value[(value < self.low) | (value > self.high)]
            raise ArgumentError(
                f"{self.key!r} must be in [{self.low}, {self.high}], as the environment has it, to "
                f"be stored as {self.stored}, got {int(wrong[0])}: nothing was written"
            )
        narrow = value.to(self.stored, memory_format=torch.contiguous_format)
        if self.shape is None:
            return narrow
        size = value.shape[batch_dims:].numel()
        fits = (word for word in _WORDS if size * self.stored.itemsize % word.itemsize == 0)
        return narrow.reshape(*value.shape[:batch_dims], size).view(next(fits, self.stored))

    def restored(self, value: Tensor) -> Tensor:
        """Return the numbers as they came."""
        if self.shape is None:
            return value.to(self.dtype)
        value = value.view(self.stored).to(self.dtype)
        # The states of trajectories are two at least: their steps need not be told.
        n_steps = value.shape[-1] // self.shape.numel()
        steps = () if n_steps == 1 else (n_steps,)
        return value.reshape(*value.shape[:-1], *steps, *self.shape)


def _bounds(values: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Return the lowest and the highest of each tensor's numbers, fetched in one transfer."""
    # One pass: two of NumPy's take longer to read memory. Of nothing there is no minimum.
    pairs = [torch.aminmax(each) if each.numel() else each.new_zeros(2) for each in values]
    ends = map(int, on_host(*chain.from_iterable(pairs)))
    return zip(ends, ends, strict=True)


def _columns(env: Environment) -> Iterator[_Column]:
    """Yield the columns that an environment bounds."""
    if not env.action_shape:
        yield _Column(keys.ACTION, keys.ACTION, torch.int64, (env.dummy_action, env.exit_action))
    yield _Column(keys.LENGTH, keys.LENGTH, torch.int64, (1, env.max_length))
    if env.state_range is not None:
        like = env.state_dtype, env.state_range, env.state_shape
        yield _Column(keys.STATE, keys.PACKED_STATE, *like)
        yield _Column(keys.NEXT_STATE, keys.NEXT_PACKED_STATE, *like)


def _entries(rows: TensorDictBase) -> dict[NestedKey, Any]:
    """Return the entries of rows, those of what follows a step by two names."""
    entries: dict[NestedKey, Any] = dict(rows.items())
    if keys.NEXT in entries:
        entries |= {(keys.NEXT, name): each for name, each in entries.pop(keys.NEXT).items()}
    return entries


def _rows(entries: dict[NestedKey, Any], like: TensorDictBase) -> TensorDictBase:
    """Return rows of what :func:`_entries` returns, with the batch size of others."""
    plain = {key: value for key, value in entries.items() if isinstance(key, str)}
    if len(plain) < len(entries):
        after = {key[1]: value for key, value in entries.items() if isinstance(key, tuple)}
        plain[keys.NEXT] = new_tensordict(after, like.batch_size, like.device)
    return new_tensordict(plain, like.batch_size, like.device)
