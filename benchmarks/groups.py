"""Buffers that limit the rows of each group: ``python -m benchmarks.groups``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: extend sample torchrl prompts archive
    --json PATH    also write the figures to a file

Rows are those of :mod:`benchmarks.workloads` with a "prompt", an int64 that names their group. The
second column is the number of groups. See :mod:`benchmarks.timing` for how a ratio is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from benchmarks import workloads as work
from benchmarks.timing import Contender, Effort, Result, compare, run_parts
from gfn_rb.buffers import reward_prioritized_buffer
from gfn_rb.samplers import GroupSampler, SoftmaxRewardSampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

PER_GROUP = 8
BOUND = 1.5
WRITERS: dict[str, Callable[..., Any]] = {
    "best": RewardPrioritizedWriter,
    "best, one row per object": partial(RewardPrioritizedWriter, unique="state"),
    "newest": partial(FIFOWriter, unique="state"),
    "far apart": partial(DiversityWriter, features="state"),
}


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        groups: numbers of groups.
        capacity: most rows of a buffer.
        large: rows of the buffers of large groups.
        prompts: number of groups of one TorchRL buffer each.
        effort: when to stop.
    """

    groups: tuple[int, ...]
    capacity: int
    large: int
    prompts: int
    effort: Effort


FULL = Scale(
    groups=(1, 100, 10_000, 125_000),  # of 8 rows: the last fill a buffer of a million
    capacity=1_000_000,
    large=100_000,
    prompts=400,
    effort=Effort(seconds=3, most=400, warmup=10),
)
QUICK = Scale((1, 100), 1_000, 1_000, 20, Effort(seconds=0.2, warmup=2))


def extend(scale: Scale) -> list[Result]:
    """Compare a batch of 128 rows with the same writer without groups.

    Each group has room for 8 rows, and the buffer for all groups, up to its capacity. "large
    groups" share fewer rows.
    """
    results = []
    for n_groups in scale.groups:
        small = min(PER_GROUP * n_groups, scale.capacity)
        shapes = [("", small, PER_GROUP)]
        if 1 < n_groups < scale.large:
            shapes.append(("large groups, ", scale.large, -(-scale.large // n_groups)))
        for shape, capacity, per_group in shapes:
            for name, writer in WRITERS.items():
                limited = writer(group="prompt", per_group=per_group)
                ours, peer = (_filled(each, capacity, n_groups) for each in (limited, writer()))
                label = f"extend, {shape}{name}"
                bound = None if shape else BOUND
                pair = (_extending(rb, n_groups) for rb in (ours, peer))
                results.append(compare(label, n_groups, *pair, scale.effort, bound))
    return results


def sample(scale: Scale) -> list[Result]:
    """Compare a draw of 8 groups with 8 rows each with a draw of 64 rows by the same law."""
    results = []
    for n_groups in scale.groups:
        capacity = min(PER_GROUP * n_groups, scale.capacity)
        by_reward: dict[str, Any] = {"weight": "best", "temperature": 1.0}
        laws = ("uniformly", {}, None), ("by reward", by_reward, SoftmaxRewardSampler())
        for name, law, same in laws:
            sampler = GroupSampler("prompt", num_groups=8, **law)
            limited = (RewardPrioritizedWriter(group="prompt", per_group=PER_GROUP), sampler)
            ours, plain = (
                _filled(writer, capacity, n_groups, drawn)
                for writer, drawn in (limited, (RewardPrioritizedWriter(), same))
            )
            pair = (Contender(lambda _, rb=rb: rb.sample(64)) for rb in (ours, plain))
            label = f"sample 8 x 8 rows {name}, against 64"
            results.append(compare(label, n_groups, *pair, scale.effort, BOUND))
    return results


def torchrl(scale: Scale) -> list[Result]:
    """Compare one buffer of groups with one TorchRL buffer for each."""
    n = scale.prompts
    writer = FIFOWriter(group="prompt", per_group=PER_GROUP)
    ours = _filled(writer, PER_GROUP * n, n)
    peers = [TensorDictReplayBuffer(storage=LazyTensorStorage(PER_GROUP)) for _ in range(n)]

    def write(batch: TensorDict) -> None:
        group = batch["prompt"]
        for number in group.unique().tolist():
            peers[number].extend(batch[group == number])

    for _ in range(PER_GROUP):
        write(_rows(n * 2, n))
    theirs = Contender(write, lambda: _rows(work.BATCH, n))
    mine = _extending(ours, n)
    return [compare("extend, one TorchRL buffer per group", n, mine, theirs, scale.effort, 1.0)]


def prompts(scale: Scale) -> list[Result]:
    """Compare one buffer of groups with a buffer for each prompt.

    128 rows of random prompts are added, and 8 random prompts with 8 rows each are drawn.
    """
    results = []
    for n in (scale.prompts // 20, scale.prompts):
        sampler = GroupSampler("prompt", num_groups=8)
        ours = _filled(
            RewardPrioritizedWriter(group="prompt", per_group=PER_GROUP), PER_GROUP * n, n, sampler
        )
        each = [work.buffer(PER_GROUP, RewardPrioritizedWriter()) for _ in range(n)]

        def write(batch: TensorDict, each: list[Any] = each) -> None:
            group = batch["prompt"]
            for number in group.unique().tolist():
                each[number].extend(batch[group == number])

        for _ in range(PER_GROUP):
            write(_rows(n * 2, n))
        theirs = Contender(write, lambda n=n: _rows(work.BATCH, n))
        adding = _extending(ours, n), theirs
        drawing = (
            Contender(lambda _, rb=ours: rb.sample(64)),
            Contender(partial(_draw_groups, each)),
        )
        results += [
            compare("extend, one buffer per prompt", n, *adding, scale.effort, 1.0),
            compare("sample 8 x 8 rows, one buffer per prompt", n, *drawing, scale.effort, 1.0),
        ]
    return results


def archive(scale: Scale) -> list[Result]:
    """Compare an archive of cells with ribs' ``GridArchive``: batches of 128, draws of 64."""
    from ribs.archives import GridArchive

    n = math.isqrt(scale.large)
    bounds, shape = [(0.0, 1.0)] * 2, (n, n)

    def cell(rows: TensorDict) -> Tensor:
        return (rows["descriptor"] * n).long().clamp(0, n - 1)

    rb = reward_prioritized_buffer(
        n * n, group=cell, per_group=1, tie="oldest", sampler=RandomSampler()
    )
    theirs = GridArchive(solution_dim=work.WIDTH, dims=shape, ranges=bounds)

    def items(size: int = work.BATCH) -> TensorDict:
        rows = work.random_items(size)
        return rows.set("descriptor", torch.rand(size, 2, dtype=torch.float64))

    def arrays(rows: TensorDict) -> tuple[Any, ...]:
        return tuple(rows[key].numpy() for key in ("state", "log_reward", "descriptor"))

    rb.extend(rows := items(2 * n * n))
    theirs.add(*arrays(rows))
    adding = Contender(lambda each: theirs.add(*each), lambda: arrays(items()))
    extending = Contender(rb.extend, items), adding
    drawn = Contender(lambda _: rb.sample(64)), Contender(lambda _: theirs.sample_elites(64))
    return [
        compare("extend an archive, against ribs", n * n, *extending, scale.effort),
        compare("sample 64 rows of it, against ribs", n * n, *drawn, scale.effort),
    ]


PARTS: dict[str, Callable[[Scale], list[Result]]] = {
    "extend": extend,
    "sample": sample,
    "torchrl": torchrl,
    "prompts": prompts,
    "archive": archive,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    run_parts("Buffers of groups.", PARTS, FULL, QUICK, arguments, size="groups")


def _rows(n: int, n_groups: int) -> TensorDict:
    return work.random_items(n).set("prompt", torch.randint(n_groups, (n,)))


def _filled(
    writer: Any, capacity: int, n_groups: int, sampler: Any = None
) -> TensorDictReplayBuffer:
    """Return a buffer that was offered twice as many rows as it holds."""
    rb = work.buffer(capacity, writer, sampler)
    for _ in range(2):
        rb.extend(_rows(capacity, n_groups))
    return rb


def _extending(rb: TensorDictReplayBuffer, n_groups: int) -> Contender:
    """Return batches of which half beats the worst row that it competes with, and half does not.

    Rows compete with those of their group where the writer limits groups, else with all.
    """
    is_limited = getattr(rb.writer, "group", None) is not None

    def setup() -> TensorDict:
        batch, stored = _rows(work.BATCH, n_groups), rb[:]
        worst = stored["log_reward"].min().expand(n_groups)
        if is_limited:
            worst = worst.scatter_reduce(
                0, stored["prompt"], stored["log_reward"], "amin", include_self=False
            )
        step = 0.1 * torch.rand(work.BATCH) + 1e-3
        step[torch.randperm(work.BATCH)[: work.BATCH // 2]] *= -1
        batch["log_reward"] = worst[batch["prompt"]] + step
        return batch

    return Contender(rb.extend, setup)


def _draw_groups(each: Sequence[TensorDictReplayBuffer], _: object) -> TensorDict:
    """Draw 8 rows of each of 8 buffers."""
    chosen = torch.randperm(len(each))[:8].tolist()
    return torch.cat([each[i].sample(8) for i in chosen])


if __name__ == "__main__":
    main()
