"""torchgfn's buffers and ours behind their interface: ``python -m benchmarks.interop``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: newest best
    --json PATH    also write the figures to a file

Batches are of 128 trajectories of 60 steps, in torchgfn's own containers on both sides, on one
thread; see :mod:`benchmarks.timing` for how a ratio is measured. It needs torchgfn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from benchmarks.records import NO_TORCHGFN

if find_spec("gfn") is None:
    sys.exit(NO_TORCHGFN)

import gfn.containers
import torch
from gfn.containers import Trajectories
from gfn.gym import HyperGrid
from torch.nn.functional import one_hot

import gfn_rb.interop.torchgfn
from benchmarks.timing import Contender, Effort, Result, compare, run_parts

BATCH, STEPS, WIDTH = 128, 60, 4
ENV = HyperGrid(ndim=WIDTH, height=STEPS, validate_modes=False)


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        faster: per capacity, how many times faster than torchgfn's ours must add and draw.
        effort: when to stop.
    """

    faster: dict[int, tuple[float, float | None]]
    effort: Effort


FULL = Scale(
    {1000: (1, 1), 10_000: (20, None), 100_000: (200, 3)},
    Effort(seconds=20, least=5, most=200, warmup=2),
)
QUICK = Scale({1000: (1, 1)}, Effort(seconds=0.3, warmup=1))


def newest(scale: Scale) -> list[Result]:
    """Compare buffers that keep the newest trajectories and draw them uniformly."""
    return _both(scale, "by age")


def best(scale: Scale) -> list[Result]:
    """Compare buffers that keep the best trajectories and draw them by reward."""
    return _both(scale, "by reward", prioritized_capacity=True, prioritized_sampling=True)


def trajectories(n: int) -> Trajectories:
    """Return random walks of 59 moves and the exit action, with random rewards.

    Args:
        n: how many.
    """
    move = torch.randint(WIDTH, (STEPS - 1, n))
    state = torch.zeros(STEPS + 1, n, WIDTH, dtype=torch.int64)
    state[1:-1] = one_hot(move, WIDTH).cumsum(0)
    state[-1] = ENV.sf
    action = torch.cat([move, torch.full((1, n), ENV.n_actions - 1)])[..., None]
    return Trajectories(
        ENV,
        states=ENV.states_from_tensor(state),
        actions=ENV.actions_from_tensor(action),
        terminating_idx=torch.full((n,), STEPS),
        log_rewards=torch.randn(n),
    )


def _both(scale: Scale, label: str, **options: Any) -> list[Result]:
    results = []
    for capacity, (adding, drawing) in scale.faster.items():
        full = trajectories(capacity)
        pair = []
        for module in (gfn_rb.interop.torchgfn, gfn.containers):
            rb = module.ReplayBuffer(ENV, capacity, **options)
            rb.add(full)
            pair.append(rb)
        del full
        setup = partial(trajectories, BATCH)
        for name, times, contenders in (
            ("add", adding, [Contender(rb.add, setup) for rb in pair]),
            ("sample", drawing, [Contender(partial(_draw, rb)) for rb in pair]),
        ):
            bound = None if times is None else 1 / times
            results.append(compare(f"{name}, {label}", capacity, *contenders, scale.effort, bound))
    return results


def _draw(rb: Any, _: None) -> None:
    rb.sample(BATCH)


PARTS = {"newest": newest, "best": best}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    run_parts("Our buffers behind torchgfn's interface.", PARTS, FULL, QUICK, arguments)


if __name__ == "__main__":
    main()
