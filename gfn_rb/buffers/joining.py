"""Rows drawn from several buffers joined into one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.containers.convert import padded
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import ACTION, IS_BACKWARD, LENGTH, LOG_REWARD, STATE
from gfn_rb.shapes import Int64

_TRAJECTORY = {STATE, ACTION, LENGTH}


def joined(
    batches: Sequence[TensorDictBase], members: Sequence[int], order: Int64[Tensor, "n"]
) -> TensorDictBase:
    """Return one batch of the rows of several.

    Trajectories are padded to the longest. Rows without ``is_backward`` are forward where others
    say which way they run, as in :meth:`gfn_rb.Trajectories.cat`.

    Args:
        batches: at least one, batch size [n_i] each.
        members: which member of the buffer each comes from, for messages.
        order: where each row goes, batch after batch.

    Raises:
        KeyMismatchError: a key is in some batches only.
        ArgumentError: they lie on different devices.
        ShapeError: rows differ in dtype or shape.
    """
    if len(batches) == 1:
        return batches[0]
    batches = _of_one_length(_with_direction(batches))
    entries = [entries_of(batch) for batch in batches]
    require_alike(entries, members)
    places = order.to(next(iter(entries[0].values())).device).split([len(b) for b in batches])
    rows = TensorDict(batch_size=order.shape, device=batches[0].device)
    for key in entries[0]:
        values = [each[key] for each in entries]
        _require_fit(key, values, members)
        rows.set(key, _placed(values, places))
    return rows


def require_alike(entries: Sequence[dict[NestedKey, Tensor]], members: Sequence[int]) -> None:
    """Raise unless all rows have the same keys and dtypes.

    Args:
        entries: the tensors of each batch by key.
        members: which member of the buffer each comes from, for messages.

    Raises:
        KeyMismatchError: a key is in some batches only.
        ShapeError: the dtypes of a key differ.
    """
    first = entries[0]
    for other, member in zip(entries[1:], members[1:], strict=True):
        if other.keys() != first.keys():
            names = [
                sorted(map(str, each)) for each in (first - other.keys(), other - first.keys())
            ]
            raise KeyMismatchError(
                f"members {members[0]} and {member} hold rows of different keys: only the first "
                f"has {names[0]}, only the second {names[1]}"
            )
        for key, value in other.items():
            if value.dtype != first[key].dtype:
                raise ShapeError(
                    f"members {members[0]} and {member} differ in {key!r}: {first[key].dtype} "
                    f"and {value.dtype}"
                )


def _require_fit(key: NestedKey, values: Sequence[Tensor], members: Sequence[int]) -> None:
    first = values[0]
    for value, member in zip(values[1:], members[1:], strict=True):
        differ = f"members {members[0]} and {member} differ in {key!r}: "
        if first.device != value.device:
            raise ArgumentError(f"{differ}on {first.device} and {value.device}")
        if first.shape[1:] != value.shape[1:]:
            shapes = f"{list(first.shape[1:])} and {list(value.shape[1:])}"
            raise ShapeError(f"{differ}rows of shape {shapes}")


def _placed(values: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    rows = values[0].new_empty((sum(map(len, places)), *values[0].shape[1:]))
    for value, place in zip(values, places, strict=True):
        rows.index_copy_(0, place, value)
    return rows


def entries_of(batch: TensorDictBase) -> dict[NestedKey, Tensor]:
    """Return the tensors of a batch by key."""
    return dict(batch.items(True, True))


def _with_direction(batches: Sequence[TensorDictBase]) -> Sequence[TensorDictBase]:
    """Say of rows without a direction that they are forward, where other rows have one."""
    silent = [IS_BACKWARD not in batch.keys() for batch in batches]  # noqa: SIM118
    if all(silent) or not any(silent):
        return batches
    return [
        batch.copy().set(IS_BACKWARD, torch.zeros_like(batch.get(LOG_REWARD), dtype=torch.bool))
        if mute and LOG_REWARD in batch.keys()  # noqa: SIM118
        else batch
        for batch, mute in zip(batches, silent, strict=True)
    ]


def _of_one_length(batches: Sequence[TensorDictBase]) -> Sequence[TensorDictBase]:
    """Pad trajectories to the longest; leave other rows as they are."""
    if not all(set(batch.keys()) >= _TRAJECTORY for batch in batches):
        return batches
    n_steps = [batch.get(ACTION).shape[1] for batch in batches]
    longest = max(n_steps)
    return [
        batch if n == longest else padded(batch, longest)
        for batch, n in zip(batches, n_steps, strict=True)
    ]
