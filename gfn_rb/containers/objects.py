"""Which object an item stands for: what tells duplicates from different items."""

from __future__ import annotations

from itertools import repeat
from operator import is_not
from typing import TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.containers.transitions import Transitions
from gfn_rb.errors import ArgumentError, KeyMismatchError
from gfn_rb.keys import (
    ACTION,
    CONDITION,
    IS_BACKWARD,
    IS_TERMINATING,
    LENGTH,
    LOG_REWARD,
    STATE,
)
from gfn_rb.shapes import Bool, Int64, Shaped

_IN_NUMPY = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}

ObjectKeys: TypeAlias = list[bytes | None]
"""What is the same for two rows exactly if they stand for the same object.

The bits of its terminating state and condition; None for a row that stands for no whole object,
and is like nothing else. Python's own hash tables look some hundred of them up in a fraction of
the time that tensor operations take to begin.
"""


def terminating_states(
    rows: TensorDictBase, at: Int64[Tensor, "m"] | None = None
) -> tuple[Shaped[Tensor, "m *S"], Bool[Tensor, "m"] | None] | None:
    """Return the terminating state of each row, and which rows stand for a whole object.

    Trajectories do, and terminating states; transitions and visited states are parts of one.

    Args:
        rows: any kind of items, batch size [n].
        at: which of them; None for all.

    Returns:
        The states, and a mask over them, or None for all; None if the rows are transitions.

    Raises:
        KeyMismatchError: there are no states.
        ArgumentError: a trajectory has no step, or more than it has room for.
    """
    held = set(rows.keys())
    if STATE not in held:
        raise KeyMismatchError(f"items lack {STATE!r}: they hold {sorted(map(str, held))}")
    if held >= {ACTION, LENGTH}:
        return _exit_states(rows, at, IS_BACKWARD in held), None
    if ACTION in held:
        return None
    return _some(rows.get(STATE), at), _marked(rows, at) if IS_TERMINATING in held else None


def stand_alone(rows: TensorDictBase) -> bool:
    """Return whether each row stands for a whole object, so that some may go without the others.

    Args:
        rows: any kind of items, batch size [n].
    """
    held = set(rows.keys())
    if ACTION in held:
        return LENGTH in held
    return STATE in held and (IS_TERMINATING not in held or bool(rows.get(IS_TERMINATING).all()))


def object_keys(rows: TensorDictBase, at: Int64[Tensor, "m"] | None = None) -> ObjectKeys:
    """Return which objects rows stand for: their terminating states and conditions.

    Args:
        rows: any kind of items, batch size [n].
        at: which of them; None for all.

    Raises:
        KeyMismatchError, ArgumentError: see :func:`terminating_states`.
    """
    found = terminating_states(rows, at)
    if found is None:
        return [None] * (len(rows) if at is None else len(at))
    state, whole = found
    content, condition = _bytes(state), rows.get(CONDITION, None)
    if condition is not None:
        content = np.concatenate([content, _bytes(_some(condition, at))], 1)
    names = _named(content)
    if whole is None:
        return names
    return [name if known else None for name, known in zip(names, whole.tolist(), strict=True)]


def are_named(names: ObjectKeys) -> Bool[np.ndarray, "n"]:
    """Return which rows stand for a whole object.

    Args:
        names: of rows.
    """
    return np.fromiter(map(is_not, names, repeat(None)), bool, len(names))


def reduce_to_states(rows: TensorDictBase) -> TensorDictBase:
    """Reduce items to their terminating states, log-rewards and conditions.

    Args:
        rows: any kind of items, batch size [n].

    Returns:
        Fields of :class:`~gfn_rb.States`, one row per terminating state.
    """
    found = terminating_states(rows)
    if found is None:
        return _of_transitions(rows)
    state, whole = found
    kept = rows.select(LOG_REWARD, CONDITION, strict=False)
    everything = torch.ones(len(state), dtype=torch.bool, device=state.device)
    kept.set(STATE, state).set(IS_TERMINATING, everything if whole is None else whole)
    return kept if whole is None or bool(whole.all()) else kept[whole]


def _of_transitions(rows: TensorDictBase) -> TensorDictBase:
    states = Transitions.from_tensordict(rows).to_states().to_tensordict()
    return states[states.get(IS_TERMINATING)]


def _exit_states(
    rows: TensorDictBase, at: Tensor | None, are_directed: bool
) -> Shaped[Tensor, "m *S"]:
    """Return the last state before the sink, which of a backward row is its second."""
    state = rows.get(STATE).detach()
    step = _some(rows.get(LENGTH), at).cpu().numpy() - 1
    if len(step):
        _check_within(state.shape[1], step)
    if are_directed:
        step = np.where(_some(rows.get(IS_BACKWARD), at).cpu().numpy(), 1, step)
    row = np.arange(len(step)) if at is None else at.cpu().numpy()
    if state.is_cpu and state.dtype in _IN_NUMPY:  # which takes half the time
        return torch.from_numpy(state.numpy()[row, step])
    return state[torch.from_numpy(row).to(state.device), torch.from_numpy(step).to(state.device)]


def _check_within(room: int, step: Int64[np.ndarray, "m"]) -> None:
    lowest, highest = int(step.min()), int(step.max())
    if not 0 <= lowest <= highest < room:
        raise ArgumentError(
            f"length must be 1 to {room} in every row, got {lowest + 1} to {highest + 1}"
        )


def _marked(rows: TensorDictBase, at: Tensor | None) -> Bool[Tensor, "m"]:
    return _some(rows.get(IS_TERMINATING), at).reshape(-1)


def _some(value: Tensor, at: Tensor | None) -> Tensor:
    return value if at is None else value[at]


def _bytes(value: Tensor) -> Shaped[np.ndarray, "n w"]:
    """Return the bytes of each row."""
    flat = value.detach().reshape(value.shape[0], value.shape[1:].numel()).cpu()
    if flat.is_floating_point():
        flat = flat + 0.0  # -0.0 and 0.0 are one number
    if flat.dtype not in _IN_NUMPY:
        flat = flat.contiguous().view(torch.uint8)
    content: np.ndarray = flat.numpy()
    return np.ascontiguousarray(content).view(np.uint8)


def _named(content: Shaped[np.ndarray, "n w"]) -> ObjectKeys:
    n, width = content.shape
    if width == 0:
        return [b""] * n
    names: ObjectKeys = content.view(f"V{width}").reshape(-1).tolist()
    return names
