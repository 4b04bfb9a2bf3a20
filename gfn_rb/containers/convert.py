"""Trajectories turned around, padded, joined, and split into transitions and states.

Every function is pure: TensorDict in, TensorDict out, without a loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, NonTensorStack, TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers.fields import FieldValues, assemble
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.numerics import flat
from gfn_rb.shapes import Bool, Int64, Rows, Shaped
from gfn_rb.torchrl_compat import assert_on_device, new_tensordict

_TRAJECTORY = {keys.STATE, keys.ACTION, keys.LENGTH}
_STEP_FILL = {keys.ACTION: -1, keys.LOG_PROB: 0, keys.ESTIMATOR_OUTPUT: 0}


def require_lengths(length: Int64[Tensor, "n"], n_steps: int) -> None:
    """Raise unless lengths are 1 to ``n_steps``; those on a device have it raise, unwaited for."""
    if not flat.is_readable(length):
        fits = ((length >= 1) & (length <= n_steps)).all()
        assert_on_device(fits, f"length must be 1 to {n_steps} in every row")
    elif len(length):
        shortest, longest = map(int, length.aminmax())
        if not 1 <= shortest <= longest <= n_steps:
            raise ArgumentError(
                f"length must be 1 to {n_steps} in every row, got {shortest} to {longest}"
            )


def real_steps(td: TensorDictBase) -> Bool[Tensor, "n T"]:
    """Tell real actions from padding."""
    steps = torch.arange(td.get(keys.ACTION).shape[1], device=td.get(keys.LENGTH).device)
    return steps < td.get(keys.LENGTH)[:, None]


def direction(td: Rows) -> Int64[Tensor, "n"]:
    """Give 1 for each backward row and 0 for each forward row."""
    length, is_backward = td.get(keys.LENGTH), td.get(keys.IS_BACKWARD, None)
    return torch.zeros_like(length) if is_backward is None else is_backward.long()


def exit_step(td: Rows) -> Int64[Tensor, "n"]:
    """Find the step between x and the sink: a row's last forward, its first backward."""
    return (td.get(keys.LENGTH) - 1) * (1 - direction(td))


def transitions_of(td: TensorDictBase) -> TensorDict:
    """Split the fields of ``Trajectories`` into one row per real action.

    ``estimator_output`` is left behind: transitions have no such field.
    """
    row, step = real_steps(td).nonzero(as_tuple=True)
    state, is_exit = td.get(keys.STATE), step == exit_step(td)[row]
    values: FieldValues = {
        keys.STATE: state[row, step],
        keys.ACTION: td.get(keys.ACTION)[row, step],
        keys.NEXT_STATE: state[row, step + 1],
        keys.NEXT_DONE: is_exit[:, None],
        keys.LOG_REWARD: td.get(keys.LOG_REWARD)[row].where(is_exit, -torch.inf),
        keys.LOG_PROB: _at(td, keys.LOG_PROB, row, step),
        keys.CONDITION: _at(td, keys.CONDITION, row),
        keys.IS_BACKWARD: _at(td, keys.IS_BACKWARD, row),
    }
    return assemble(values, (len(row),), td.device)


def states_of_transitions(td: TensorDictBase) -> TensorDict:
    """Give the end of each transition, from its fields, that is nearer the source."""
    state, is_backward = td.get(keys.STATE), td.get(keys.IS_BACKWARD, None)
    if is_backward is not None:
        turn = is_backward.reshape(-1, *(1,) * (state.ndim - 1))
        state = torch.where(turn, td.get(keys.NEXT_STATE), state)
    values: FieldValues = {
        keys.STATE: state,
        keys.IS_TERMINATING: td.get(keys.NEXT_DONE).squeeze(1),
        keys.LOG_REWARD: td.get(keys.LOG_REWARD),
        keys.CONDITION: td.get(keys.CONDITION, None),
    }
    return assemble(values, tuple(td.batch_size), td.device)


def turned(td: TensorDictBase, rows: Bool[Tensor, "n"]) -> TensorDict:
    """Turn some trajectories around: flip their length + 1 states and length actions in time."""
    length = td.get(keys.LENGTH)
    out = td.copy().set(keys.STATE, flipped(td.get(keys.STATE), length + 1, rows))
    for key in _STEP_FILL.keys() & td.keys():
        out.set(key, flipped(td.get(key), length, rows))
    return out.set(keys.IS_BACKWARD, direction(td).bool() ^ rows)


def flipped(
    value: Shaped[Tensor, "n m *F"], size: Int64[Tensor, "n"], rows: Bool[Tensor, "n"]
) -> Shaped[Tensor, "n m *F"]:
    """Flip the first ``size`` entries of some rows in time; what follows stays where it is."""
    places = torch.arange(value.shape[1], device=value.device)
    size = size[:, None]
    at = torch.where(rows[:, None] & (places < size), size - 1 - places, places)
    return value[torch.arange(len(rows), device=value.device)[:, None], at]


def padded_to(td: TensorDictBase, n_steps: int) -> TensorDictBase:
    """Pad trajectories to ``n_steps`` with sink states, dummy actions and zeros, or cut them."""
    extra = n_steps - td.get(keys.ACTION).shape[1]
    if extra == 0:
        return td
    out, state, per_step = td.copy(), td.get(keys.STATE), _STEP_FILL.keys() & td.keys()
    if extra < 0:
        out.set(keys.STATE, state[:, : n_steps + 1])
        for key in per_step:
            out.set(key, td.get(key)[:, :n_steps])
        return out
    # Taken from the row itself, for only the environment knows it: a backward row begins there.
    row = torch.arange(len(state), device=state.device)
    sink = state[row, td.get(keys.LENGTH) * (1 - direction(td))]
    tail = sink[:, None].expand(-1, extra, *sink.shape[1:])
    out.set(keys.STATE, torch.cat([state, tail], 1))
    for key in per_step:
        value = td.get(key)
        fill = value.new_full((len(value), extra, *value.shape[2:]), _STEP_FILL[key])
        out.set(key, torch.cat([value, fill], 1))
    return out


def padded_alike(batches: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """Pad trajectories of all batches to the longest, and mark rows forward if some are marked."""
    held = [set(batch.keys()) for batch in batches]
    if any(keys.IS_BACKWARD in each for each in held):
        batches = [
            batch.copy().set(keys.IS_BACKWARD, torch.zeros_like(batch.get(keys.LOG_REWARD)).bool())
            if keys.IS_BACKWARD not in each and keys.LOG_REWARD in each
            else batch
            for batch, each in zip(batches, held, strict=True)
        ]
    if all(each >= _TRAJECTORY for each in held):
        longest = max(batch.get(keys.ACTION).shape[1] for batch in batches)
        batches = [padded_to(batch, longest) for batch in batches]
    return [*batches]


def merged_rows(
    batches: Sequence[TensorDictBase], members: Sequence[int], order: Int64[Tensor, "n"]
) -> TensorDictBase:
    """Return one batch of the rows of several, each at its place in ``order``; see `padded_alike`.

    Masks that differ in width, and entries as wide as they are, are padded with zeros.
    """
    if len(batches) == 1:
        return batches[0]
    batches = padded_alike(batches)
    entries = [dict(batch.items(True, True, is_leaf=is_leaf_nontensor)) for batch in batches]
    _pad(entries)
    require_alike(entries, members)
    plain: dict[str, Any] = {}
    nested: dict[NestedKey, Any] = {}
    device = next(each.device for each in entries[0].values() if isinstance(each, Tensor))
    order = order.to(device, non_blocking=True)
    places = order.split([len(batch) for batch in batches])
    for key, first in entries[0].items():
        into = plain if isinstance(key, str) else nested
        if not isinstance(first, Tensor):  # text of a RaggedStorage
            listed = [text for each in entries for text in each[key].tolist()]
            into[key] = NonTensorStack.from_list([listed[i] for i in order.argsort().tolist()])
            continue
        # Each value is copied once; concatenated and sorted it would be twice.
        into[key] = column = first.new_empty((len(order), *first.shape[1:]))
        for each, place in zip(entries, places, strict=True):
            column.index_copy_(0, place, each[key])
    return new_tensordict(plain, order.shape, batches[0].device).update(nested)


def _pad(entries: Sequence[dict[NestedKey, Any]]) -> None:
    """Pad each mask to its highest width in any batch, and what has its width in each batch."""
    for mask in [*filter(keys.is_mask_key, entries[0])]:
        widths = _widths(entries, mask)
        if widths is None or len({*widths}) == 1:
            continue
        for name in entries[0]:
            if _widths(entries, name) == widths:
                for each in entries:
                    each[name] = flat.resized(each[name], max(widths))


def _widths(entries: Sequence[dict[NestedKey, Any]], name: NestedKey) -> list[int] | None:
    """Return the length of an entry's rows in each batch; None if one has no such tensor."""
    values = (each.get(name) for each in entries)
    widths = [value.shape[1] for value in values if isinstance(value, Tensor) and value.ndim > 1]
    return widths if len(widths) == len(entries) else None


def require_alike(
    entries: Sequence[dict[NestedKey, Any]],
    members: Sequence[int],
    what: str = "members",
) -> None:
    """Raise unless all rows have the same keys, dtypes, devices and shapes."""
    first = entries[0]
    for other, member in zip(entries[1:], members[1:], strict=True):
        if other.keys() != first.keys():
            pairs = ((first, other), (other, first))
            only = [sorted(map(str, a.keys() - b.keys())) for a, b in pairs]
            raise KeyMismatchError(
                f"{what} {members[0]} and {member} hold rows of different keys: only the first "
                f"has {only[0]}, only the second {only[1]}"
            )
        for key, value in other.items():
            one, differ = first[key], f"{what} {members[0]} and {member} differ in {key!r}: "
            one_dtype, dtype = getattr(one, "dtype", None), getattr(value, "dtype", None)
            if one_dtype != dtype:
                raise ShapeError(f"{differ}{one_dtype} and {dtype}")
            if dtype is None:
                continue
            if one.device != value.device:
                raise ArgumentError(f"{differ}on {one.device} and {value.device}")
            if one.shape[1:] != value.shape[1:]:
                shapes = f"{list(one.shape[1:])} and {list(value.shape[1:])}"
                raise ShapeError(f"{differ}rows of shape {shapes}")


def _at(td: TensorDictBase, key: str, *index: Tensor) -> Tensor | None:
    value = td.get(key, None)
    return None if value is None else value[index]
