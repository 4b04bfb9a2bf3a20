"""Run TorchRL's own replay-buffer tests with its writers and samplers replaced by this package's.

``python tools/torchrl_tests.py CHECKOUT/test/rb [pytest options]`` runs them twice, with TorchRL's
parts and with ours, and prints a table: how many tests of each class pass, and why those fail that
fail with ours. The tests need pytest-mock beside TorchRL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from other_tests import Outcomes, compare, outcomes_of
from torchrl.data.replay_buffers import replay_buffers as buffers

import gfn_rb


class MaxValueWriter(gfn_rb.RewardPrioritizedWriter):
    """TorchRL's constructor of the writer that keeps the items of highest key."""

    def __init__(self, rank_key: Any = None, reduction: str = "sum", **options: Any) -> None:
        super().__init__(("next", "reward") if rank_key is None else rank_key)


class RoundRobin(gfn_rb.FIFOWriter):
    """TorchRL's constructor of the writer that keeps the newest items."""

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable=compilable, track_generations=track_generations)


class Prioritized(gfn_rb.PrioritySampler):
    """TorchRL's constructor of the sampler that draws by priority."""

    def __init__(
        self,
        max_capacity: int,
        alpha: Any,
        beta: Any,
        eps: float = 1e-8,
        dtype: Any = None,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(alpha=float(alpha), beta=float(beta), eps=eps)
        self.reduction = reduction


OURS = {
    "RoundRobinWriter": RoundRobin,
    "TensorDictRoundRobinWriter": RoundRobin,
    "TensorDictMaxValueWriter": MaxValueWriter,
    "PrioritizedSampler": Prioritized,
}
# Where tests look for parts, and where buffers look for those they are made of by default.
_PUBLIC = ["torchrl.data", "torchrl.data.replay_buffers"]
_PUBLIC += [f"torchrl.data.replay_buffers.{name}" for name in ("writers", "samplers")]
_DEFAULTS = {
    buffers.base: ("RoundRobinWriter",),
    buffers.tensordict: ("TensorDictRoundRobinWriter",),
    buffers.prioritized: ("PrioritizedSampler",),
    buffers.prioritized_tensordict: ("PrioritizedSampler", "TensorDictRoundRobinWriter"),
}


def swap() -> None:
    """Put our parts under TorchRL's names."""
    places: dict[Any, Any] = {sys.modules[name]: OURS for name in _PUBLIC}
    for module, names in {**places, **_DEFAULTS}.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, OURS[name])


def run(ours: bool, arguments: Sequence[str]) -> Outcomes:
    """Run the tests with the parts of one of the two."""
    if ours:
        swap()
    return outcomes_of(arguments)


if __name__ == "__main__":
    compare("torchrl", run, sys.argv[1:])
