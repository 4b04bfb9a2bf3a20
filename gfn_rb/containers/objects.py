"""Identity of the object that a row stands for, by which duplicates are found."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.containers.convert import require_lengths
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import ACTION, CONDITION, IS_BACKWARD, IS_TERMINATING, LENGTH, STATE, mask_key
from gfn_rb.numerics.flat import equal_bits
from gfn_rb.shapes import Bool, Int64, Rows, Shaped
from gfn_rb.torchrl_compat import entry_of

_STATE_MASK = mask_key(STATE)
_IN_NUMPY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}


class ObjectsInRows(NamedTuple):
    """The objects of n rows, on the host."""

    n: int
    at: Int64[np.ndarray, "k"]
    """Positions of the rows that stand for whole objects, ascending."""
    columns: Int64[np.ndarray, "k d"]
    """Integers of these rows, equal exactly for rows of the same object.

    Those of :func:`object_columns`, or of states padded behind a mask their hash.
    """


def objects_in(rows: TensorDictBase, at: Int64[Tensor, "m"] | None = None) -> ObjectsInRows:
    """Return which objects rows stand for: their terminating states and conditions."""
    n, states = len(rows if at is None else at), terminating_states(rows, at)
    if states is None:
        return ObjectsInRows(n, np.zeros(0, np.int64), np.zeros((0, 0), np.int64))
    state, whole = states
    columns: np.ndarray = _columns(rows, state, at).cpu().contiguous().numpy()
    if whole is None:
        return ObjectsInRows(n, np.arange(n), columns)
    position = whole.cpu().numpy().nonzero()[0]
    return ObjectsInRows(n, position, columns[position])


def object_columns(rows: Rows) -> Int64[Tensor, "n d"]:
    """Return integers that are equal in two rows exactly if these stand for the same object.

    They are on the device of the rows.
    """
    return _with_condition(rows, equal_bits(object_states(rows).detach()))


def object_states(rows: Rows) -> Shaped[Tensor, "n *S"]:
    """Return the terminating state of each row; raise unless all rows stand for whole objects."""
    states = terminating_states(rows)
    if states is None:
        raise ArgumentError(
            f"rows must stand for objects, got transitions, with {sorted(map(str, rows.keys()))}: "
            "expected trajectories or terminating states"
        )
    state, whole = states
    if whole is not None and not bool(whole.all()):
        raise ArgumentError(
            f"rows must stand for objects, got {int((~whole).sum())} of {len(rows)} that are "
            "visited states: expected terminating ones"
        )
    return state


def state_columns(rows: Rows) -> Int64[Tensor, "n d"] | None:
    """Return what :func:`object_columns` does, of visited states too; None for transitions."""
    states = terminating_states(rows)
    return None if states is None else _columns(rows, states[0])


def _columns(rows: Rows, state: Tensor, at: Tensor | None = None) -> Int64[Tensor, "n d"]:
    """Return columns of rows that may be padded, with a mask: the padding does not count."""
    mask = entry_of(rows, _STATE_MASK)
    mask = _some(mask, at) if isinstance(mask, Tensor) and mask.dtype == torch.bool else None
    if mask is None or mask.shape != state.shape[:2]:
        return _with_condition(rows, equal_bits(state.detach()), at)
    position = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    end = (mask * position).amax(1) if len(position) else mask.sum(1)
    columns = hashed_rows(state.detach(), end)
    return _with_condition(rows, columns.to(state.device), at)


def hashed_rows(rows: Shaped[Tensor, "n T *E"], length: Int64[Tensor, "n"]) -> Int64[Tensor, "n 2"]:
    """Return the hash of each padded row, up to its end; see :func:`hashes_of`."""
    bits, n_each = equal_bits(rows).cpu().numpy(), rows.shape[2:].numel()
    ends = (length * n_each).tolist()
    return hashes_of(row[:end].tobytes() for row, end in zip(bits, ends, strict=True))


def hashes_of(contents: Iterable[bytes]) -> Int64[Tensor, "n 2"]:
    """Return a BLAKE2b hash of 128 bits (RFC 7693) for each content, as two integers on the host.

    No two contents of one hash are known or can be made, so equal hashes mean equal contents.
    """
    joined = b"".join([blake2b(each, digest_size=16).digest() for each in contents])
    return torch.from_numpy(np.frombuffer(bytearray(joined), np.int64)).view(-1, 2)


def _with_condition(rows: Rows, columns: Tensor, at: Tensor | None = None) -> Tensor:
    condition = entry_of(rows, CONDITION)
    if condition is None:
        return columns
    return torch.cat([columns, equal_bits(_some(condition.detach(), at))], 1)


def terminating_states(
    rows: Rows, at: Int64[Tensor, "m"] | None = None
) -> tuple[Shaped[Tensor, "m *S"], Bool[Tensor, "m"] | None] | None:
    """Return the terminating state of each row, and which rows stand for a whole object.

    Trajectories do, and terminating states; transitions and visited states are parts of one.

    Returns:
        The states, and a mask over them, or None for all; None if the rows are transitions.
    """
    entries = dict(rows.items())  # cheaper than keys()
    held = set(entries)
    if STATE not in held:
        raise KeyMismatchError(f"items lack {STATE!r}: they hold {sorted(map(str, held))}")
    if held >= {ACTION, LENGTH}:
        return _exit_states(rows, at, IS_BACKWARD in held), None
    if ACTION in held:
        return None
    whole = _one_per_row(rows, IS_TERMINATING, at) if IS_TERMINATING in held else None
    return _some(entries[STATE], at), whole


def stand_alone(rows: TensorDictBase) -> bool:
    """Return whether each row stands for a whole object, so that some may go without the others."""
    held = set(rows.keys())
    if ACTION in held:
        return LENGTH in held
    return STATE in held and (IS_TERMINATING not in held or bool(rows.get(IS_TERMINATING).all()))


def _exit_states(rows: Rows, at: Tensor | None, are_directed: bool) -> Shaped[Tensor, "m *S"]:
    """Return the last state before the sink, which of a backward row is its second."""
    state = entry_of(rows, STATE).detach()
    length = _one_per_row(rows, LENGTH, at).to(state.device)
    require_lengths(length, state.shape[1] - 1)
    step = length - 1
    if are_directed:
        is_backward = _one_per_row(rows, IS_BACKWARD, at).to(state.device)
        step = torch.where(is_backward, 1, step)
    row = torch.arange(len(step), device=state.device) if at is None else at.to(state.device)
    if state.is_cpu and state.dtype in _IN_NUMPY:  # which takes half the time
        return torch.from_numpy(state.numpy()[row.numpy(), step.numpy()])
    return state[row, step]


def _one_per_row(rows: Rows, key: str, at: Tensor | None) -> Shaped[Tensor, "m"]:
    """Return an entry of shape [n] or [n, 1], which numpy would broadcast against [n]."""
    value = entry_of(rows, key)
    if value.numel() != rows.batch_size[0]:
        raise ShapeError(
            f"key {key!r} must hold one value per item, got shape {tuple(value.shape)} for batch "
            f"size {list(rows.batch_size)}"
        )
    return _some(value, at).reshape(-1)


def _some(value: Tensor, at: Tensor | None) -> Tensor:
    return value if at is None else value[at]
