"""TorchRL rollouts and collector batches, read into trajectories and written from them."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers.convert import real_steps
from gfn_rb.containers.fields import FieldValues, Key, assemble
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.shapes import Bool, Int64, Shaped

_CARRIED = (keys.LOG_PROB, keys.ESTIMATOR_OUTPUT)
_REQUIRED = keys.STATE, keys.ACTION, keys.NEXT_STATE, keys.NEXT_DONE, keys.NEXT_LOG_REWARD
READ = (*_REQUIRED, *_CARRIED, keys.CONDITION, keys.NEXT_TERMINATED)  # all that may be there


def trajectories_of(
    rollout: TensorDictBase, source_state: Tensor | None = None
) -> tuple[FieldValues, Int64[Tensor, "k"]]:
    """Return the fields of :meth:`Trajectories.from_rollout`, in order of rows and of time.

    Where the episodes begin, in flat positions, comes with them.
    """
    require_rollout(rollout)
    starts, ends = _ends_of_episodes(rollout)
    state = _flat_steps(rollout, keys.STATE)
    first, last = _complete(starts, ends, state, source_state)
    length = last - first + 1
    steps = torch.arange(int(length.max()) if len(length) else 0, device=length.device)
    at = torch.minimum(first[:, None] + steps, last[:, None])
    past = steps >= length[:, None]
    sink = _flat_steps(rollout, keys.NEXT_STATE)[last][:, None]
    values: FieldValues = {
        keys.STATE: torch.cat([_fill(state[at], past, sink), sink], 1),
        keys.ACTION: _fill(_flat_steps(rollout, keys.ACTION)[at], past, -1),
        keys.LENGTH: length,
        keys.LOG_REWARD: _flag(rollout, keys.NEXT_LOG_REWARD).reshape(-1)[last],
    }
    for key in _CARRIED:
        if rollout.get(key, None) is not None:
            values[key] = _fill(_flat_steps(rollout, key)[at], past, 0)
    if rollout.get(keys.CONDITION, None) is not None:
        values[keys.CONDITION] = _flat_steps(rollout, keys.CONDITION)[first]
    return values, first


def rollout_of(td: TensorDictBase) -> TensorDict:
    """Lay forward trajectories out as TorchRL lays out a rollout split into episodes.

    Padded steps stay in the sink, are done, have reward 0, and are false in
    ``("collector", "mask")``. At the terminating step, ``("next", "reward")`` is exp(log_reward),
    which overflows to inf above 88 nats. ``("next", "log_reward")`` is exact.
    """
    is_real, state = real_steps(td), td.get(keys.STATE)
    n, n_steps = is_real.shape
    rows = torch.arange(n, device=is_real.device)
    steps = torch.arange(1, n_steps + 1, device=is_real.device)
    next_done = (steps >= td.get(keys.LENGTH)[:, None])[..., None]
    is_exit = next_done & is_real[..., None]
    log_reward = td.get(keys.LOG_REWARD)[:, None, None].expand(n, n_steps, 1)
    log_reward = log_reward.masked_fill(~is_exit, -torch.inf)
    values: FieldValues = {
        keys.STATE: state[:, :-1],
        keys.ACTION: td.get(keys.ACTION),
        keys.DONE: ~is_real[..., None],
        keys.TERMINATED: ~is_real[..., None],
        keys.NEXT_STATE: state[:, 1:],
        keys.NEXT_DONE: next_done,
        keys.NEXT_TERMINATED: next_done.clone(),
        keys.NEXT_LOG_REWARD: log_reward,
        keys.NEXT_REWARD: log_reward.exp(),
        (keys.COLLECTOR, keys.MASK): is_real,
        (keys.COLLECTOR, keys.TRAJ_IDS): rows[:, None].repeat(1, n_steps),
        **{key: td.get(key, None) for key in _CARRIED},
    }
    if td.get(keys.CONDITION, None) is not None:
        condition = td.get(keys.CONDITION)[:, None]
        values[keys.CONDITION] = condition.expand(n, n_steps, *condition.shape[2:])
    return assemble(values, (n, n_steps), td.device)


def require_rollout(rollout: TensorDictBase) -> None:
    """Check that a rollout or collector batch holds what is read of it."""
    if rollout.batch_dims < 1:
        raise ShapeError("rollout has an empty batch size; expected [*B, T], time last")
    for key in _REQUIRED:
        if rollout.get(key, None) is None:
            present_keys = sorted(map(str, rollout.keys(True, True)))
            raise KeyMismatchError(f"rollout has no {key!r}; got {present_keys}")
    for key in (keys.NEXT_DONE, keys.NEXT_TERMINATED, keys.NEXT_LOG_REWARD):
        value = rollout.get(key, None)
        if value is not None and value.shape not in (rollout.shape, (*rollout.shape, 1)):
            raise ShapeError(
                f"rollout: {key!r} has shape {list(value.shape)}; "
                f"expected {[*rollout.shape, 1]}, one per step"
            )


def _ends_of_episodes(rollout: TensorDictBase) -> tuple[Int64[Tensor, "e"], Int64[Tensor, "f"]]:
    """Find the flat positions where episodes start, and where they terminate."""
    done = _flag(rollout, keys.NEXT_DONE)
    mask, ids = _collected(rollout, keys.MASK), _collected(rollout, keys.TRAJ_IDS)
    if mask is None:
        mask = torch.ones_like(done) if ids is not None else ~_frozen(rollout, done)
    is_start = (done | ~mask).roll(1, 1)
    is_start[:, :1] = True
    if ids is not None:
        is_start[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    has_terminated = rollout.get(keys.NEXT_TERMINATED, None) is not None
    is_end = done & _flag(rollout, keys.NEXT_TERMINATED) if has_terminated else done
    starts, ends = ((each & mask).reshape(-1).nonzero().squeeze(1) for each in (is_start, is_end))
    return starts, ends


def _complete(
    starts: Int64[Tensor, "e"],
    ends: Int64[Tensor, "f"],
    state: Shaped[Tensor, "N *S"],
    source_state: Tensor | None,
) -> tuple[Int64[Tensor, "k"], Int64[Tensor, "k"]]:
    """Pair each terminating step with the start of its episode; check where that is."""
    if source_state is not None and source_state.shape != state.shape[1:]:
        raise ShapeError(
            f"source_state has shape {list(source_state.shape)}; expected {list(state.shape[1:])}"
        )
    # The last start at or before it: steps of an episode lie together, in time.
    first = starts[torch.searchsorted(starts, ends, right=True) - 1]
    source = state[first[:1]] if source_state is None else source_state
    at_source = flat_rows(state[first] == source).all(1)
    if source_state is None and not bool(at_source.all()):
        raise ArgumentError(
            f"rollout: {int((~at_source).sum())} of {len(first)} finished episodes do not start "
            "where the first one does; give source_state to drop those that began before this batch"
        )
    return first[at_source], ends[at_source]


def _frozen(rollout: TensorDictBase, done: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Mark the copies of its last step that fill up a row which was done before the others."""
    # The first step copies none, whatever stands here: nothing was done before it.
    is_copy = done & done.roll(1, 1)
    for key in (keys.STATE, keys.ACTION, keys.NEXT_STATE):
        value = flat_rows(_flat_steps(rollout, key)).unflatten(0, done.shape)
        is_copy[:, 1:] &= (value[:, 1:] == value[:, :-1]).all(2)
    was_done = (done.cumsum(1) - done.long()) > 0
    # Where episodes follow each other, a row is not copies to its end.
    return was_done & (is_copy | ~was_done).all(1, keepdim=True)


def _collected(rollout: TensorDictBase, name: str) -> Shaped[Tensor, "B T"] | None:
    for key in ((keys.COLLECTOR, name), name):
        value = rollout.get(key, None)
        if value is not None and value.shape == rollout.shape:  # an env can have its own "mask"
            return value.reshape(rollout.shape[:-1].numel(), rollout.shape[-1])
    return None


def _flag(rollout: TensorDictBase, key: Key) -> Shaped[Tensor, "B T"]:
    return rollout.get(key).reshape(rollout.shape[:-1].numel(), rollout.shape[-1])


def _flat_steps(rollout: TensorDictBase, key: Key) -> Tensor:
    value = rollout.get(key)
    return value.reshape(rollout.shape.numel(), *value.shape[rollout.batch_dims :])


def _fill(value: Tensor, past: Bool[Tensor, "k T"], fill: Tensor | int) -> Tensor:
    mask = past.reshape(*past.shape, *(1,) * (value.ndim - 2))
    return torch.where(mask, fill, value)
