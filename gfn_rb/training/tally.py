"""What a run has seen and how long it took: counts of reward calls, and a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gfn_rb.envs import EnumerableEnv
from gfn_rb.shapes import Bool, Shaped


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


class Stopwatch:
    """Adds up wall time by phase, exclusively: while an inner phase runs, the outer one stands.

    Time outside of all phases counts as "other".

    Args:
        phases: their names.
        device: waited for at each change of phase, where it works asynchronously.
    """

    def __init__(self, phases: tuple[str, ...], device: torch.device | str = "cpu") -> None:
        self.seconds = dict.fromkeys((*phases, "other"), 0.0)
        self._device = torch.device(device)
        self._phase, self._since = "other", time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Attribute the time spent inside to ``phase``."""
        outer = self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase up to now."""
        self._switch(self._phase)
        return dict(self.seconds)

    def restore(self, seconds: dict[str, float]) -> None:
        """Go on from an earlier reading."""
        self.seconds = dict(seconds)
        self._since = time.perf_counter()

    def _switch(self, phase: str) -> str:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now, outer = time.perf_counter(), self._phase
        self.seconds[outer] += now - self._since
        self._phase, self._since = phase, now
        return outer
