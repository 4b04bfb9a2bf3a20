"""Which object an item stands for: what tells duplicates from different items."""

from __future__ import annotations

from hashlib import blake2b

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.containers import Trajectories, Transitions
from gfn_rb.errors import KeyMismatchError
from gfn_rb.keys import ACTION, CONDITION, IS_TERMINATING, LENGTH, LOG_REWARD, STATE
from gfn_rb.shapes import Bool, Shaped

_PLAIN = 64  # bytes up to which an identity is the object itself, beyond which it is its digest
_DIGEST = 32


def objects(rows: TensorDictBase) -> tuple[Shaped[Tensor, "n *S"], Bool[Tensor, "n"]] | None:
    """Return the terminating state of each row, and which rows stand for a whole object.

    Trajectories do, and terminating states; transitions and visited states are parts of one.

    Args:
        rows: any kind of items, batch size [n].

    Returns:
        The states, and a mask over them; None if the rows are transitions.

    Raises:
        KeyMismatchError: there are no states.
    """
    held = set(rows.keys())
    if held >= {ACTION, LENGTH}:
        state = Trajectories.from_tensordict(rows).terminating_states
        return state, torch.ones(len(rows), dtype=torch.bool, device=state.device)
    if ACTION in held:
        return None
    if STATE not in held:
        raise KeyMismatchError(f"items lack {STATE!r}: they hold {sorted(map(str, held))}")
    state = rows.get(STATE)
    whole = torch.ones(len(rows), dtype=torch.bool, device=state.device)
    return state, rows.get(IS_TERMINATING, whole)


def are_whole(rows: TensorDictBase) -> bool:
    """Return whether each row stands for a whole object, so that some may go without the others.

    Args:
        rows: any kind of items, batch size [n].
    """
    found = objects(rows)
    return found is not None and bool(found[1].all())


def identities(rows: TensorDictBase) -> list[bytes | None]:
    """Return what is the same for two rows exactly if they stand for the same object.

    That is the terminating state and the condition, as bytes; of objects longer than 64 bytes the
    256-bit BLAKE2b digest, of which no two are known to collide.

    Args:
        rows: any kind of items, batch size [n].

    Returns:
        One per row, None for a row that stands for no whole object.
    """
    found = objects(rows) if len(rows) else None
    if found is None:
        return [None] * len(rows)
    state, whole = found
    parts = [_bytes(state)]
    if rows.get(CONDITION, None) is not None:
        parts.append(_bytes(rows.get(CONDITION)))
    names: list[bytes | None] = _as_bytes(torch.cat(parts, 1))
    if not bool(whole.all()):
        names = [name if is_whole else None for name, is_whole in zip(names, whole, strict=True)]
    return names


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


def _bytes(value: Tensor) -> Tensor:
    flat = value.detach().reshape(value.shape[0], -1)
    if flat.is_floating_point():
        flat = flat + 0.0  # -0.0 and 0.0 are one number
    return flat.contiguous().cpu().view(torch.uint8)


def _as_bytes(rows: Tensor) -> list[bytes | None]:
    width = rows.shape[1]
    if width == 0:
        return [b""] * rows.shape[0]
    plain: list[bytes] = rows.contiguous().numpy().view(f"V{width}").ravel().tolist()
    if width <= _PLAIN:
        return [*plain]
    return [blake2b(each, digest_size=_DIGEST).digest() for each in plain]
