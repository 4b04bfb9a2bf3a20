"""What is kept and what is drawn, against torchgfn and TorchRL: ``python -m benchmarks.selection``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: diverse duplicates features sample merged
    --json PATH    also write the figures to a file

Batches are of 128 items, on one thread; see :mod:`benchmarks.workloads` for the items and
:mod:`benchmarks.timing` for how a ratio is measured. The exit status is 0 whatever the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchrl.data import TensorDictReplayBuffer

from benchmarks import workloads as work
from benchmarks.timing import Contender, Effort, Result, compare, header, summary, write_json
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)

MEMBERS = 4
SAMPLERS: dict[str, Callable[[], Any]] = {
    "softmax, distinct rows": SoftmaxRewardSampler,
    "softmax, with replacement": partial(SoftmaxRewardSampler, replacement=True),
    "rank, distinct rows": RankRewardSampler,
    "rank, with replacement": partial(RankRewardSampler, replacement=True),
    "quantile, distinct rows": QuantileRewardSampler,
    "quantile, with replacement": partial(QuantileRewardSampler, replacement=True),
    "priority": PrioritySampler,
}


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        capacities: rows of the full buffers.
        faster: per capacity, how many times faster than torchgfn's diverse buffer ours must be.
        effort: for calls of well under a millisecond.
        slow: for calls that last longer.
    """

    capacities: tuple[int, ...]
    faster: dict[int, float | None]
    effort: Effort
    slow: Effort


FULL = Scale(
    capacities=(10_000, 100_000, 1_000_000),
    faster={10_000: 10, 100_000: 40},
    effort=Effort(seconds=5, most=1000, warmup=20),
    slow=Effort(seconds=20, least=5, most=60, warmup=1),
)
QUICK = Scale(
    capacities=(10_000,),
    faster={10_000: None},
    effort=Effort(seconds=0.2, warmup=2),
    slow=Effort(seconds=0.5, warmup=1),
)


def sample(scale: Scale) -> list[Result]:
    """Compare drawing 128 items, just after 128 were written, with drawing them uniformly."""
    results = []
    for capacity in scale.capacities:
        peer = work.fill(work.buffer(capacity), capacity)
        for name, sampler in SAMPLERS.items():
            ours = work.fill(work.buffer(capacity, sampler=sampler()), capacity)
            label = f"sample after writing, {name}"
            pair = _drawing(ours), _drawing(peer)
            results.append(compare(label, capacity, *pair, scale.effort, 4.0))
            if isinstance(ours.sampler, PrioritySampler):
                label = "the same, and update_priority of what was drawn"
                pair = _learning(ours), _drawing(peer)
                results.append(compare(label, capacity, *pair, scale.effort, 4.0))
    return results


def merged(scale: Scale) -> list[Result]:
    """Compare 128 rows drawn from four buffers together with 32 drawn from each alone."""
    results = []
    for capacity in scale.capacities:
        for replacement in ("auto", True):
            members = [
                _filled(capacity, SoftmaxRewardSampler(replacement=replacement))
                for _ in range(MEMBERS)
            ]
            mode = "distinct rows" if replacement == "auto" else "with replacement"
            for p in ("mass", "size"):
                rb = MergedReplayBuffer(*members, p=p)
                ours = Contender(lambda _, rb=rb: rb.sample(work.BATCH))
                label = f'merged sample of {MEMBERS} members, p="{p}", {mode}'
                results.append(compare(label, capacity, ours, _alone(members), scale.effort, 2.0))
    return results


PARTS: dict[str, Callable[[Scale], list[Result]]] = {"sample": sample, "merged": merged}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description="What is kept and what is drawn.")
    parser.add_argument("--quick", action="store_true", help="smoke run: the figures mean nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(header())
    results = [r for part in options.parts for r in PARTS[part](QUICK if options.quick else FULL)]
    print(summary(results) + (" (quick run: no measurement)" if options.quick else ""))
    if options.json:
        write_json(options.json, results, {"quick": options.quick})


# Contenders.


def _filled(capacity: int, sampler: Any = None) -> TensorDictReplayBuffer:
    return work.fill(work.buffer(capacity, sampler=sampler), capacity)


def _write(rb: TensorDictReplayBuffer) -> None:
    rb.extend(work.random_items(work.BATCH))


def _drawing(rb: TensorDictReplayBuffer) -> Contender:
    """Draw a batch, after one was written outside the clock."""
    return Contender(lambda _: rb.sample(work.BATCH), partial(_write, rb))


def _learning(rb: TensorDictReplayBuffer) -> Contender:
    """Draw a batch and set its priorities, as a loss would."""

    def setup() -> torch.Tensor:
        _write(rb)
        return torch.rand(work.BATCH)

    def run(loss: torch.Tensor) -> None:
        rb.update_priority(rb.sample(work.BATCH)["index"], loss)

    return Contender(run, setup)


def _alone(members: Sequence[TensorDictReplayBuffer]) -> Contender:
    """Draw an equal part of a batch from each."""
    n = work.BATCH // len(members)
    return Contender(lambda _: [rb.sample(n) for rb in members])


if __name__ == "__main__":
    main()
