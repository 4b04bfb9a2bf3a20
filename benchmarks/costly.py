"""One rank of training runs whose rewards cost time: ``python -m benchmarks.costly FILE``.

    FILE      a list of runs, as JSON: of each its options, those of TFBind8 and ``reward_seconds``

The runs come one after the other. Into the folder of each, every rank writes found-rankN.json:
which modes it found, at which reward call.

Alone, or under mpiexec. A reward that takes time stands for one computed elsewhere, by docking,
folding or an experiment: this process waits, and its core is free meanwhile.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from gfn_rb.envs import TFBind8
from gfn_rb.training import TFBind8Config, train
from gfn_rb.training.options import CompactName
from gfn_rb.transports.launch import launched

_ALL = 4**8  # the list of all 8-mers, whose rewards are asked for to measure a distance: free


class CostlyTFBind8(TFBind8):
    """TFBind8 whose rewards take time, one after the other.

    Args:
        seconds: of each reward.
        **options: of TFBind8.

    Attributes:
        calls: how many rewards were paid for.
        found: by mode, the number of the call that found it first.
    """

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self.calls = 0
        self.found: dict[int, int] = {}

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R(x), in nats, after a while."""
        if len(state) < _ALL:
            self._note(state)
            time.sleep(self._seconds * len(state))
        return super().log_reward(state, condition)

    def _note(self, state: Tensor) -> None:
        modes = self.mode_index(state).tolist()
        for call, mode in enumerate(modes, self.calls + 1):
            if mode >= 0:
                self.found.setdefault(mode, call)
        self.calls += len(modes)


CHECKED = 2  # rewards that are asked for before a run, of an environment made for that


@dataclass(frozen=True, kw_only=True)
class CostlyConfig(TFBind8Config):
    """Design DNA 8-mers, each of which takes time to look at."""

    reward_seconds: float = 0.0
    """What a reward call takes."""
    unique: bool = False  # as the published tables were made
    compact: CompactName = "none"  # likewise
    made: ClassVar[list[CostlyTFBind8]] = []  # in this process: a run makes several, and asks one

    def make_env(self) -> CostlyTFBind8:
        """Return the environment."""
        self.made.append(CostlyTFBind8(self.reward_seconds, form=self.form, beta=self.beta))
        return self.made[-1]


def main(file: Path) -> None:
    """Take part in runs, and write down what was found.

    Args:
        file: lists them.
    """
    started = launched()
    rank = 0 if started is None else started.rank
    for options in json.loads(file.read_text()):
        CostlyConfig.made.clear()
        config = CostlyConfig(**{**options, "out": Path(options["out"])})
        train(config)
        found = [each.found for each in CostlyConfig.made if each.calls > CHECKED]
        (config.out / f"found-rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
