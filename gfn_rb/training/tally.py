"""What a run has seen: counts of reward calls, and the terminating states they reached."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.envs import EnumerableEnv
from gfn_rb.shapes import Bool, Shaped
from gfn_rb.stopwatch import Stopwatch

__all__ = ["Stopwatch", "Tally"]


class Tally:
    """Counts reward calls, and the terminating states and modes they reached.

    Args:
        env: the environment.
    """

    def __init__(self, env: EnumerableEnv) -> None:
        self._env = env
        self._mode = env.mode_index(env.terminating_states())
        self.calls = 0
        self.restore(0, torch.zeros(env.n_terminating, dtype=torch.bool))

    def add(self, state: Shaped[Tensor, "n *state"]) -> None:
        """Count one reward call for each terminating state."""
        index = self._env.terminating_index(state)
        self.calls += len(index)
        self.seen[index] = True
        self._found[self._mode[index]] = True  # no mode is -1, the last place

    def restore(self, calls: int, seen: Bool[Tensor, "m"]) -> None:
        """Start from counts made earlier.

        Args:
            calls: reward calls.
            seen: which terminating states they reached.
        """
        device = self._mode.device
        self.calls, self.seen = calls, seen.to(device)
        self._found = torch.zeros(self._env.n_modes + 1, dtype=torch.bool, device=device)
        self._found[self._mode[self.seen]] = True

    @property
    def distinct_calls(self) -> int:
        """How many different terminating states were reached."""
        return int(self.seen.sum())

    @property
    def modes_found(self) -> int:
        """How many different modes were reached."""
        return int(self._found[:-1].sum())
