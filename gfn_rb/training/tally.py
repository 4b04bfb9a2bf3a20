"""What a run has seen: counts of reward calls, and the terminating states they reached."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.envs import EnumerableEnv
from gfn_rb.shapes import Bool, Shaped
from gfn_rb.stopwatch import Stopwatch

__all__ = ["Stopwatch", "Tally"]


class Tally:
    """Counts reward calls, and the distinct terminating states and modes they reached.

    Args:
        env: the environment.
    """

    def __init__(self, env: GFNEnv) -> None:
        self._env = env
        self.calls = 0
        device = env.source_state.device
        self.top: Float[Tensor, "k"] = torch.zeros(0, device=device)
        self._seen, self._modes = KeySet(device), KeySet(device)

    def add(self, trajectories: Trajectories) -> None:
        """Count one reward call for each trajectory."""
        state = trajectories.terminating_states
        self.calls += len(state)
        new = self._seen.add(self._env.fingerprint(state))
        fresh = state[new], trajectories.log_reward[new]
        self._modes.add(self._env.modes_reached(*fresh))
        score = self._env.score(*fresh)
        self.top = torch.cat([self.top, score]).sort(descending=True).values[:N_TOP]

    @property
    def distinct_calls(self) -> int:
        """How many different terminating states were reached."""
        return len(self._seen)

    @property
    def modes_found(self) -> int:
        """How many different modes were reached."""
        return int(self._found[:-1].sum())
