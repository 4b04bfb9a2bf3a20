"""Wall time of the phases of a loop."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch


class Stopwatch(AbstractContextManager[None]):
    """Adds up wall time by phase, exclusively: while an inner phase runs, the outer one stands.

    Time outside of all phases counts as "other".
    """

    def __init__(self, phases: tuple[str, ...], device: torch.device | str = "cpu") -> None:
        self.seconds = dict.fromkeys((*phases, "other"), 0.0)
        self._device = torch.device(device)
        self._waits = self._device.type == "cuda"
        self._phase, self._since = "other", time.perf_counter()
        self._outer: list[str] = []

    def __call__(self, phase: str) -> AbstractContextManager[None]:
        """Attribute the time spent inside of a ``with`` to ``phase``."""
        # It is its own context: a generator takes three times as long.
        self._outer.append(self.switch(phase))
        return self

    def __exit__(self, *_: object) -> None:
        self.switch(self._outer.pop())

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase up to now."""
        self.switch(self._phase)
        return dict(self.seconds)

    def summary(self) -> str:
        """Return in one line where the time went."""
        seconds = self.read()
        total = sum(seconds.values()) or 1.0
        return ", ".join(f"{name} {s:.2f} s ({s / total:.0%})" for name, s in seconds.items())

    def restore(self, seconds: dict[str, float]) -> None:
        """Continue from an earlier reading."""
        self.seconds = dict(seconds)
        self._since = time.perf_counter()

    def switch(self, phase: str) -> str:
        """Attribute the time from now on to a phase, and return the one before."""
        if self._waits:
            torch.cuda.synchronize(self._device)
        now, outer = time.perf_counter(), self._phase
        self.seconds[outer] += now - self._since
        self._phase, self._since = phase, now
        return outer
