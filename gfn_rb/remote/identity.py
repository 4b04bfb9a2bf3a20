"""Which object an item stands for: what tells duplicates from different items."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.containers import Transitions
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
from gfn_rb.shapes import Bool, Int, Int64, Shaped

_NARROW = {1: torch.int8, 2: torch.int16}


class Identities(NamedTuple):
    """What is the same for two rows exactly if they stand for the same object.

    Args:
        content: terminating state and condition, bit by bit, int32 [n, w].
        whole: which rows stand for a whole object, bool [n]; the others are like nothing else.
    """

    content: Int[Tensor, "n w"]
    whole: Bool[Tensor, "n"]

    def select(self, rows: Tensor) -> Identities:
        """Return those of some rows.

        Args:
            rows: positions or a mask.
        """
        return Identities(self.content[rows], self.whole[rows])


def objects(
    rows: TensorDictBase, at: Int64[Tensor, "m"] | None = None
) -> tuple[Shaped[Tensor, "m *S"], Bool[Tensor, "m"]] | None:
    """Return the terminating state of each row, and which rows stand for a whole object.

    Trajectories do, and terminating states; transitions and visited states are parts of one.

    Args:
        rows: any kind of items, batch size [n].
        at: which of them; None for all.

    Returns:
        The states, and a mask over them; None if the rows are transitions.

    Raises:
        KeyMismatchError: there are no states.
        ArgumentError: a trajectory has no step, or more than it has room for.
    """
    held = set(rows.keys())
    if STATE not in held:
        raise KeyMismatchError(f"items lack {STATE!r}: they hold {sorted(map(str, held))}")
    at = torch.arange(len(rows)) if at is None else at
    if held >= {ACTION, LENGTH}:
        state = _exit_states(rows, at)
    elif ACTION in held:
        return None
    else:
        state = rows.get(STATE)[at]
        if IS_TERMINATING in held:
            return state, rows.get(IS_TERMINATING)[at].reshape(-1)
    return state, torch.ones(len(state), dtype=torch.bool, device=state.device)


def are_whole(rows: TensorDictBase) -> bool:
    """Return whether each row stands for a whole object, so that some may go without the others.

    Args:
        rows: any kind of items, batch size [n].
    """
    held = set(rows.keys())
    if ACTION in held:
        return LENGTH in held
    return STATE in held and (IS_TERMINATING not in held or bool(rows.get(IS_TERMINATING).all()))


def identities(rows: TensorDictBase, at: Int64[Tensor, "m"] | None = None) -> Identities:
    """Return which objects rows stand for: their terminating states and conditions.

    Args:
        rows: any kind of items, batch size [n].
        at: which of them; None for all.

    Returns:
        On the CPU.

    Raises:
        KeyMismatchError, ArgumentError: see :func:`objects`.
    """
    found = objects(rows, at)
    if found is None:
        n = len(rows) if at is None else len(at)
        return Identities(torch.empty(n, 0, dtype=torch.int32), torch.zeros(n, dtype=torch.bool))
    state, whole = found
    content, condition = _words(state), rows.get(CONDITION, None)
    if condition is not None:
        content = torch.cat([content, _words(condition if at is None else condition[at])], 1)
    return Identities(content, whole.cpu())


def terminating(rows: TensorDictBase) -> TensorDictBase:
    """Reduce items to their terminating states, log-rewards and conditions.

    Args:
        rows: any kind of items, batch size [n].

    Returns:
        Fields of :class:`~gfn_rb.States`, one row per terminating state.
    """
    found = objects(rows)
    if found is None:
        return _of_transitions(rows)
    state, whole = found
    kept = rows.select(LOG_REWARD, CONDITION, strict=False)
    kept.set(STATE, state).set(IS_TERMINATING, whole)
    return kept if bool(whole.all()) else kept[whole]


def _of_transitions(rows: TensorDictBase) -> TensorDictBase:
    states = Transitions.from_tensordict(rows).to_states().to_tensordict()
    return states[states.get(IS_TERMINATING)]


def _exit_states(rows: TensorDictBase, at: Tensor) -> Tensor:
    """Return the last state before the sink, which of a backward row is its second."""
    state, last = rows.get(STATE), rows.get(LENGTH)[at] - 1
    if last.numel() and not 0 <= int(last.min()) <= int(last.max()) < state.shape[1]:
        raise ArgumentError(
            f"length must be 1 to {state.shape[1]} in every row, got {int(last.min()) + 1} to "
            f"{int(last.max()) + 1}"
        )
    if rows.get(IS_BACKWARD, None) is not None:
        last = last.masked_fill(rows.get(IS_BACKWARD)[at], 1)
    return state[at, last]


def _words(value: Tensor) -> Int[Tensor, "n w"]:
    """Return the bits of each row."""
    flat = value.detach().reshape(value.shape[0], value.shape[1:].numel())
    if flat.is_floating_point():
        flat = flat + 0.0  # -0.0 and 0.0 are one number
    flat, size = flat.cpu().contiguous(), flat.element_size()
    return flat.view(torch.int32) if size >= 4 else flat.view(_NARROW[size]).to(torch.int32)
