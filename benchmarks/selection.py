"""What is kept and what is drawn, against torchgfn and TorchRL: ``python -m benchmarks.selection``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: diverse duplicates sequences features sample merged
    --json PATH    also write the figures to a file

Batches are of 128 items, on one thread; see :mod:`benchmarks.workloads` for the items and
:mod:`benchmarks.timing` for how a ratio is measured. The exit status is 0 whatever the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import isin
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer

from benchmarks import workloads as work
from benchmarks.timing import Contender, Effort, Result, compare, run_parts
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)
from gfn_rb.writers import DiversityWriter, RewardPrioritizedWriter

HALF = work.BATCH // 2
NEAR = 0.25  # of points: beyond their near twins, below the others about the same centre
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
        points: rows of the buffers of real-valued features.
        points_faster: how many times faster than torchgfn's ours must be there.
        effort: for calls of well under a millisecond.
        slow: for calls that last longer.
    """

    capacities: tuple[int, ...]
    faster: dict[int, float | None]
    points: int
    points_faster: float | None
    effort: Effort
    slow: Effort


FULL = Scale(
    capacities=(10_000, 100_000, 1_000_000),
    faster={10_000: 10, 100_000: 40},
    points=100_000,
    points_faster=10,
    effort=Effort(seconds=5, most=1000, warmup=20),
    slow=Effort(seconds=20, least=5, most=60, warmup=1),
)
QUICK = Scale(
    capacities=(10_000,),
    faster={10_000: None},
    points=2_000,
    points_faster=None,
    effort=Effort(seconds=0.2, warmup=2),
    slow=Effort(seconds=0.5, warmup=1),
)


def diverse(scale: Scale) -> list[Result]:
    """Compare writing 128 items, none within a cutoff of 1, with torchgfn's diverse buffer."""
    if not _has_torchgfn():
        return []
    from benchmarks.torchgfn import TorchGFNDiverseBuffer

    results = []
    for capacity, faster in scale.faster.items():
        ours = work.fill(work.buffer(capacity, DiversityWriter(cutoff_distance=1, p=1)), capacity)
        peer = TorchGFNDiverseBuffer(work.random_items(capacity), 1, 1)
        pair = _extending(ours), Contender(peer.rb.add, partial(peer.challenge, HALF))
        label = "extend, cutoff 1 in 1-norm, against torchgfn"
        results.append(compare(label, capacity, *pair, scale.slow, _bound(faster)))
    return results


def duplicates(scale: Scale) -> list[Result]:
    """Compare writing 128 items, refusing exact duplicates, with writing them by reward alone."""
    results = []
    for capacity in scale.capacities:
        peer = work.fill(work.buffer(capacity, RewardPrioritizedWriter()), capacity)
        for name, writer, bound in (
            ("no duplicates", DiversityWriter(cutoff_distance=0), 1.5),
            ("one row per object", RewardPrioritizedWriter(unique="state"), 1.25),
        ):
            ours = work.fill(work.buffer(capacity, writer), capacity)
            pair = _extending(ours), _extending(peer)
            label = f"extend, {name}, against the reward writer"
            results.append(compare(label, capacity, *pair, scale.effort, bound))
    return results


def sequences(scale: Scale) -> list[Result]:
    """Compare writing 128 sequences of 100 tokens, half of them known, with TorchRL's writer.

    Known sequences are dropped, by TorchRL's side with ``isin``. Half of the new ones are accepted.
    """

    def rows(log_reward: Tensor) -> TensorDict:
        tokens = torch.randint(0, 40, (len(log_reward), 100))
        return TensorDict({"tokens": tokens, "log_reward": log_reward}, [len(log_reward)])

    def batch(rb: TensorDictReplayBuffer) -> TensorDict:
        stored = rb[:].select("tokens", "log_reward")
        new = rows(work.challenge(stored["log_reward"], HALF // 2, n=HALF).float())
        known = stored[torch.randint(len(stored), (HALF,))]
        return torch.cat([new, known])[torch.randperm(work.BATCH)]

    results = []
    for capacity in (100, 1000):
        writer = RewardPrioritizedWriter(unique="tokens", on_duplicate="keep")
        ours = work.buffer(capacity, writer)
        highest = TensorDictMaxValueWriter(rank_key="log_reward")
        peer = work.buffer(capacity, highest, storage=LazyTensorStorage)
        for rb in (ours, peer):
            rb.extend(rows(torch.randn(capacity)))
        pair = (
            Contender(ours.extend, partial(batch, ours)),
            Contender(
                lambda td, rb=peer: rb.extend(td[~isin(td, rb[:], "tokens")]),
                partial(batch, peer),
            ),
        )
        label = "extend, half known, against TensorDictMaxValueWriter"
        results.append(compare(label, capacity, *pair, scale.effort))
    return results


def features(scale: Scale) -> list[Result]:
    """Compare writing 128 points, some close to stored ones, with torchgfn's diverse buffer."""
    if not _has_torchgfn():
        return []
    from benchmarks.torchgfn import TorchGFNDiverseBuffer

    centre, capacity = work.centres(), scale.points
    ours = work.buffer(capacity, DiversityWriter(cutoff_distance=NEAR, p=2))
    while len(ours) < capacity:
        ours.extend(work.points(centre, torch.randn(min(capacity, 10_000))))
    peer = TorchGFNDiverseBuffer(work.points(centre, torch.randn(capacity)), NEAR, 2)

    def batch(stored: TensorDict) -> TensorDict:
        log_reward = work.challenge(stored["log_reward"], HALF)
        return work.nearby(work.points(centre, log_reward), stored["state"])

    pair = (
        Contender(ours.extend, lambda: batch(ours[:])),
        Contender(peer.rb.add, lambda: peer.container(batch(peer.rows()))),
    )
    label = f"extend, {work.FEATURES} features, cutoff {NEAR} in 2-norm, against torchgfn"
    return [compare(label, capacity, *pair, scale.slow, _bound(scale.points_faster))]


def sample(scale: Scale) -> list[Result]:
    """Compare drawing 128 items, just after 128 were written, with drawing them uniformly."""
    results = []
    for capacity in scale.capacities:
        peer = _filled(capacity)
        for name, sampler in SAMPLERS.items():
            ours = _filled(capacity, sampler())
            label = f"sample after writing, {name}"
            pair = _drawing(ours), _drawing(peer)
            results.append(compare(label, capacity, *pair, scale.effort, 4.0))
            if isinstance(ours.sampler, PrioritySampler):
                label = "the same, priorities of the last draw set as well"
                pair = Contender(ours.sample, partial(_learn, ours)), _drawing(peer)
                results.append(compare(label, capacity, *pair, scale.effort, 4.0))
                label = "update_priority of what was drawn"
                pair = _prioritizing(ours), _drawing(peer)
                results.append(compare(label, capacity, *pair, scale.effort))
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


PARTS: dict[str, Callable[[Scale], list[Result]]] = {
    "diverse": diverse,
    "duplicates": duplicates,
    "sequences": sequences,
    "features": features,
    "sample": sample,
    "merged": merged,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    run_parts("What is kept and what is drawn.", PARTS, FULL, QUICK, arguments)


# Contenders.


def _filled(capacity: int, sampler: Any = None) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(capacity)
    return work.fill(TensorDictReplayBuffer(storage=storage, sampler=sampler), capacity)


def _extending(rb: TensorDictReplayBuffer) -> Contender:
    return Contender(rb.extend, partial(work.challenge_to, rb, HALF))


def _write(rb: TensorDictReplayBuffer) -> None:
    rb.extend(work.random_items(work.BATCH))


def _drawing(rb: TensorDictReplayBuffer) -> Contender:
    """Draw a batch, after one was written outside the clock."""
    return Contender(lambda _: rb.sample(work.BATCH), partial(_write, rb))


def _learn(rb: TensorDictReplayBuffer) -> int:
    """Write a batch, and do to another what a training step does; return how many to draw."""
    _write(rb)
    rb.update_priority(rb.sample(work.BATCH)["index"], torch.rand(work.BATCH))
    return work.BATCH


def _prioritizing(rb: TensorDictReplayBuffer) -> Contender:
    """Set the priorities of a batch that was drawn outside the clock."""

    def setup() -> tuple[Tensor, Tensor]:
        _write(rb)
        return rb.sample(work.BATCH)["index"], torch.rand(work.BATCH)

    return Contender(lambda drawn: rb.update_priority(*drawn), setup)


def _alone(members: Sequence[TensorDictReplayBuffer]) -> Contender:
    """Draw an equal part of a batch from each."""
    n = work.BATCH // len(members)
    return Contender(lambda _: [rb.sample(n) for rb in members])


def _has_torchgfn() -> bool:
    found = find_spec("gfn") is not None
    if not found:
        print("torchgfn is not installed: not compared")
    return found


def _bound(faster: float | None) -> float | None:
    return None if faster is None else 1 / faster


if __name__ == "__main__":
    main()
