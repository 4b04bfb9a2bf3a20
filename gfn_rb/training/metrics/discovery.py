"""Counts of what a run has found: reward calls, distinct objects and modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import ShapeError
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.numerics.near.neighbours import Distance
from gfn_rb.shapes import Float, Shaped


def norm_distance(p: float) -> Distance:
    """Return the p-norm of the difference of states as a distance; Hamming distance for p = 0."""

    def distance(
        a: Shaped[Tensor, "n *state"], b: Shaped[Tensor, "m *state"]
    ) -> Float[Tensor, "n m"]:
        return torch.cdist(flat_rows(a).float(), flat_rows(b).float(), p)

    return distance


HAMMING = norm_distance(0.0)


def mean_distance(state: Shaped[Tensor, "n *state"], distance: Distance = HAMMING) -> float | None:
    """Return the mean distance between two different rows; None for fewer than two rows.

    Of the states of the best k objects, it is their diversity (Jain et al. 2022, arXiv:2203.04115).

    Args:
        state: states.
        distance: symmetric callable between states.

    Raises:
        ShapeError: ``distance`` returns another shape.
    """
    n = len(state)
    if n < 2:
        return None
    apart = distance(state, state)
    if apart.shape != (n, n):
        raise ShapeError(f"distance must return shape {[n, n]}, got {list(apart.shape)}")
    apart = apart.double()
    return float((apart.sum() - apart.trace()) / (n * (n - 1)))


N_TOP = 100


class DiscoveryMetrics:
    """Counts reward calls, and the distinct terminating states and modes they reached.

    Args:
        env: the environment.
        distance: callable between states; measures the diversity of the best 100.
    """

    def __init__(self, env: GFNEnv, distance: Distance = HAMMING) -> None:
        self._env, self._distance = env, distance
        self.calls = 0
        device = env.source_state.device
        self.top: Float[Tensor, "k"] = torch.zeros(0, device=device)
        self.top_state = env.source(0)
        self._seen: set[int] = set()  # fingerprints
        self._modes: dict[int, int] = {}  # and the reward calls after which each was first found

    def add(self, trajectories: Trajectories) -> int:
        """Count one reward call for each trajectory, and return how many objects are new."""
        state, before = trajectories.terminating_states, len(self._seen)
        self.calls += len(state)
        is_new = []
        for number in self._env.fingerprint(state).tolist():  # of equal ones the first is new
            is_new.append(number not in self._seen)
            self._seen.add(number)
        new = torch.tensor(is_new, dtype=torch.bool, device=state.device)
        # Modes and scores of states seen before are known already.
        fresh = state[new], trajectories.log_reward[new]
        for mode in self._env.modes_reached(*fresh).tolist():
            self._modes.setdefault(mode, self.calls)
        score = self._env.score(*fresh)
        self.top, best = torch.cat([self.top, score]).sort(descending=True)
        self.top_state = torch.cat([self.top_state, fresh[0]])[best[:N_TOP]]
        self.top = self.top[:N_TOP]
        return len(self._seen) - before

    @property
    def modes_found(self) -> int:
        """Number of distinct modes reached."""
        return len(self._modes)

    @property
    def top_score(self) -> float | None:
        """Mean score of the best 100 distinct terminating states reached."""
        return float(self.top.double().mean()) if len(self.top) else None

    def columns(self) -> dict[str, int | float | None]:
        """Return the counts, and mean score and diversity of the best, by name."""
        return {
            "reward_calls": self.calls,
            "distinct_reward_calls": len(self._seen),
            "modes_found": self.modes_found,
            "top_100_score": self.top_score,
            "top_100_diversity": mean_distance(self.top_state, self._distance),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all counts."""
        return {
            "calls": self.calls,
            "seen": torch.tensor(sorted(self._seen), dtype=torch.int64),
            "modes": torch.tensor(sorted(self._modes), dtype=torch.int64),
            "modes_at": torch.tensor(
                [self._modes[mode] for mode in sorted(self._modes)], dtype=torch.int64
            ),
            "top": self.top,
            "top_state": self.top_state,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        device = self._env.source_state.device
        self.calls, self.top = state_dict["calls"], state_dict["top"].to(device)
        self.top_state = state_dict["top_state"].to(device)
        self._seen = {*state_dict["seen"].tolist()}
        modes, at = state_dict["modes"].tolist(), state_dict["modes_at"].tolist()
        self._modes = dict(zip(modes, at, strict=True))
