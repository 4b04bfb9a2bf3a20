"""State of writers and samplers, checked, and saved in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gfn_rb.arguments import KeepsArguments
from gfn_rb.errors import CheckpointMismatchError

_FILE = "state.pt"


def require_numbers(name: str, value: Any, dtype: torch.dtype) -> None:
    """Raise unless an entry of a state is a row of numbers."""
    if not isinstance(value, torch.Tensor) or value.ndim != 1 or value.dtype != dtype:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise CheckpointMismatchError(
            f"{name} of the state is a {getattr(value, 'dtype', type(value).__name__)}{shape}, "
            f"expected one {dtype} per slot"
        )


def require_count(name: str, value: Any) -> None:
    """Raise unless an entry of a state is a number of things."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise CheckpointMismatchError(f"{name} of the state is {value!r:.80}, expected a count")


class StateInFolder(KeepsArguments):
    """Gives a part of a buffer ``dumps`` and ``loads``, made of its ``state_dict``."""

    def dumps(self: Any, path: str | Path) -> None:
        """Write the state into a folder."""
        path = Path(path)
        path.mkdir(exist_ok=True)
        torch.save(self.state_dict(), path / _FILE)

    def loads(self: Any, path: str | Path) -> None:
        """Read the state from a folder that :meth:`dumps` wrote."""
        self.load_state_dict(torch.load(Path(path) / _FILE, weights_only=True))
