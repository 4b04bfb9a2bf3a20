"""How writers and samplers write their state into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_FILE = "state.pt"


class StateInFolder:
    """Gives a part of a buffer ``dumps`` and ``loads``, made of its ``state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the storage does not hold."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        raise NotImplementedError

    def dumps(self, path: str | Path) -> None:
        """Write the state into a folder.

        Args:
            path: the folder, made if missing.
        """
        path = Path(path)
        path.mkdir(exist_ok=True)
        torch.save(self.state_dict(), path / _FILE)

    def loads(self, path: str | Path) -> None:
        """Read the state from a folder that :meth:`dumps` wrote.

        Args:
            path: the folder.

        Raises:
            CheckpointMismatchError: see :meth:`load_state_dict`.
        """
        self.load_state_dict(torch.load(Path(path) / _FILE, weights_only=True))
