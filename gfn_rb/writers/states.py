"""The state of a writer, as checkpoints have it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.storages.state_folder import require_count, require_numbers

GENERATION = "generation"  # of the state: how often each slot was written to


def checked_state(
    state: dict[str, Any], options: dict[str, Any], beside: Iterable[str]
) -> tuple[Tensor, Tensor | None]:
    """Return the age of each row, and how often each slot was written to, if the state has that.

    Args:
        state: what ``state_dict`` of a writer returned.
        options: those of this writer, which the state must have.
        beside: names of what a state has beside options.

    Raises:
        CheckpointMismatchError: the state is of a writer with other options, or damaged.
    """
    beside = {GENERATION, *beside}
    came = {name: value for name, value in state.items() if name not in beside}
    if came.get("evict") == "worst":  # as version 0.3.0 saves it, where there was a choice
        del came["evict"]
    if came != options or "rank" not in state:
        came = came if "rank" in state else {}
        raise CheckpointMismatchError(
            f"writer state is of {listed(came)}, expected {listed(options)}"
        )
    require_numbers("rank", rank := state["rank"], torch.int64)
    for name in ("offered", "written"):
        require_count(name, state[name])
    if (known := state.get(GENERATION)) is not None:
        require_numbers(GENERATION, known, torch.int64)
    return rank, known


def check_size(n: int, storage: Storage) -> None:
    """Raise if a storage has no room for the rows of a state."""
    if n > storage.max_size:
        raise CheckpointMismatchError(
            f"writer state is of {n} items, expected at most {storage.max_size}"
        )


def listed(options: dict[str, Any]) -> str:
    """Return options as an error names them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "another kind"
