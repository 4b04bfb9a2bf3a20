"""Local buffers against TorchRL's and torchgfn's: ``python -m benchmarks.local``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: extend fill storage sample rank merged unique torchgfn memory large
    --json PATH    also write the figures to a file

"large" compares a buffer of ten million rows with one of a million, and the most memory that the
process ever held with 24 GiB: run it alone. Batches are of 128 items, on one thread; see
:mod:`benchmarks.workloads` for the items and :mod:`benchmarks.timing` for how a ratio is measured.
The exit status is 0 whatever the figures.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter

from benchmarks import workloads as work
from benchmarks.timing import Contender, Effort, Result, compare, row, run_parts
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.samplers import RankRewardSampler, SoftmaxRewardSampler
from gfn_rb.storages import RowTensorStorage
from gfn_rb.writers import FIFOWriter, RewardPrioritizedWriter

HALF = work.BATCH // 2
LIMIT = 24 * 2**30  # bytes
PEAKED = 5.0  # standard deviation of the log-rewards, in nats, of a distribution few rows dominate


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        capacities: rows of the full buffers.
        filled: rows of the buffers that are filled from empty.
        effort: for calls of well under a millisecond.
        slow: for calls that last longer.
        faster: per capacity, how many times faster than torchgfn extend and sample must be.
        large: rows of a large buffer, and of the one that it is compared with.
    """

    capacities: tuple[int, ...]
    filled: int
    effort: Effort
    slow: Effort
    faster: dict[int, tuple[float, float] | None]
    large: tuple[int, int]


FULL = Scale(
    capacities=(10_000, 100_000, 1_000_000),
    filled=1_000_000,
    effort=Effort(seconds=6, most=1000, warmup=20),
    slow=Effort(seconds=20, least=5, most=60, warmup=1),
    faster={100_000: (20, 10), 1_000_000: (400, 80)},
    large=(10_000_000, 1_000_000),
)
QUICK = Scale(
    capacities=(10_000,),
    filled=20_000,
    effort=Effort(seconds=0.2, warmup=2),
    slow=Effort(seconds=0.5, warmup=1),
    faster={10_000: None},
    large=(20_000, 2_000),
)


def extend(scale: Scale) -> list[Result]:
    """Compare writing a batch into a full buffer with round-robin writing."""
    results = []
    for capacity in scale.capacities:
        ours = work.fill(work.buffer(capacity, RewardPrioritizedWriter()), capacity)
        peer = work.fill(work.buffer(capacity), capacity)
        for n, accepted, bound in ((64, 32, 0.8), (128, 64, 0.8), (512, 256, 1.2), (128, 0, 0.4)):
            mine, its = (_extending(rb, accepted, n=n) for rb in (ours, peer))
            name = f"extend, {accepted} of {n} rows accepted"
            results.append(compare(name, capacity, mine, its, scale.effort, bound))
        newest = work.fill(work.buffer(capacity, FIFOWriter()), capacity)
        mine, its = _extending(newest, HALF), _extending(peer, HALF)
        results.append(compare("extend, the newest kept", capacity, mine, its, scale.effort, 1.0))
    return results


def fill(scale: Scale) -> list[Result]:
    """Compare filling a buffer from empty, start to end, with round-robin writing."""
    results = []
    for size in (work.BATCH, 10_000):
        ours = _filling(scale.filled, size, RewardPrioritizedWriter)
        peer = _filling(scale.filled, size, TensorDictRoundRobinWriter)
        name = f"fill from empty by batches of {size:,}"
        results.append(compare(name, scale.filled, ours, peer, scale.slow, 1.5))
    return results


def sample(scale: Scale) -> list[Result]:
    """Compare drawing 128 items by reward with drawing them uniformly."""
    results = []
    for capacity in scale.capacities:
        for spread in (1.0, PEAKED):
            for replacement in ("auto", True):
                sampler = SoftmaxRewardSampler(replacement=replacement)
                ours = _full(capacity, RewardPrioritizedWriter(), sampler, spread)
                peer = _full(capacity, None, None, spread)
                results += _sampling(ours, peer, capacity, spread, replacement, scale.effort)
    return results


def storage(scale: Scale) -> list[Result]:
    """Compare TorchRL's own parts over our storage with the same over its own."""
    results = []
    for capacity in scale.capacities:
        ours, peer = (
            work.fill(work.buffer(capacity, storage=kind), capacity)
            for kind in (RowTensorStorage, LazyTensorStorage)
        )
        pairs = (
            ("round robin over our storage", partial(_extending, accepted=HALF)),
            ("random draws over our storage", _drawing),
        )
        for name, contender in pairs:
            mine, its = contender(ours), contender(peer)
            results.append(compare(name, capacity, mine, its, scale.effort, 1.0))
    return results


def rank(scale: Scale) -> list[Result]:
    """Compare drawing 128 items by rank with drawing them uniformly."""
    results = []
    for capacity in scale.capacities:
        ours = _full(capacity, RewardPrioritizedWriter(), RankRewardSampler())
        peer = _full(capacity, None, None)
        for name, setup, bound in (("at rest", False, 1.2), ("after writing", True, 2.0)):
            pair = [
                _drawing(rb, partial(_write, rb)) if setup else _drawing(rb) for rb in (ours, peer)
            ]
            label = f"sample by rank, {name}"
            results.append(compare(label, capacity, *pair, scale.effort, bound))
    return results


def merged(scale: Scale) -> list[Result]:
    """Compare a draw from two buffers as one with a draw of half the rows from each."""
    results = []
    for capacity in scale.capacities:
        members = [
            _full(capacity, RewardPrioritizedWriter(), SoftmaxRewardSampler()) for _ in range(2)
        ]
        for p in ("mass", "size"):
            ours = _drawing(MergedReplayBuffer(*members, p=p))
            peer = Contender(lambda _, each=members: [rb.sample(HALF) for rb in each])
            label = f"sample of two members by {p}, against the members"
            results.append(compare(label, capacity, ours, peer, scale.effort, 1.2))
    return results


def unique(scale: Scale) -> list[Result]:
    """Compare writing 128 items, one row per object, with writing them by reward alone."""
    results = []
    for capacity in scale.capacities:
        ours, peer = (
            _extending(_full(capacity, writer, None), HALF)
            for writer in (RewardPrioritizedWriter(unique="state"), RewardPrioritizedWriter())
        )
        name = "extend, one row per object, against the same without"
        results.append(compare(name, capacity, ours, peer, scale.effort, 1.25))
    return results


def large(scale: Scale) -> list[Result]:
    """Compare a buffer of many rows, one per object, with a smaller one of the same kind."""
    ours, peer = (
        _full(n, RewardPrioritizedWriter(unique="state"), SoftmaxRewardSampler())
        for n in scale.large
    )
    results = []
    for name, contender in (
        ("extend, one row per object", partial(_extending, accepted=HALF)),
        ("sample", _drawing),
        ("sample after writing", lambda rb: _drawing(rb, partial(_write, rb))),
    ):
        label = f"{name}, against {scale.large[1]:,} rows"
        pair = contender(ours), contender(peer)
        results.append(compare(label, scale.large[0], *pair, scale.slow, 1.3))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.append(Result("bytes held at most, against 24 GiB", scale.large[0], *_bytes(held)))
    print(row(results[-1]), flush=True)
    return results


def _bytes(held: float) -> tuple[float, float, float, float, float, int, float]:
    """Return what :class:`Result` says of bytes, in MiB."""
    ratio = held / LIMIT
    return held / 2**20, LIMIT / 2**20, ratio, ratio, ratio, 1, 1.0


def torchgfn(scale: Scale) -> list[Result]:
    """Compare writing and drawing with torchgfn's prioritised replay buffer."""
    if find_spec("gfn") is None:
        print("torchgfn is not installed: not compared")
        return []
    from benchmarks.torchgfn import LAZY, TorchGFNBuffer

    results = []
    for capacity, faster in scale.faster.items():
        bounds = (None, None) if faster is None else tuple(1 / times for times in faster)
        for options in ({}, LAZY) if LAZY else ({},):
            ours = _full(capacity, RewardPrioritizedWriter(), SoftmaxRewardSampler())
            peer = TorchGFNBuffer(capacity, **options)
            suffix = "".join(f", its {name}" for name in options)
            adding = Contender(peer.rb.add, partial(peer.challenge, HALF))
            drawing = _drawing(peer.rb)
            for name, mine, its, bound in (
                ("extend", _extending(ours, HALF), adding, bounds[0]),
                ("sample", _drawing(ours), drawing, bounds[1]),
            ):
                label = f"{name}, against torchgfn{suffix}"
                results.append(compare(label, capacity, mine, its, scale.slow, bound))
    return results


def memory(scale: Scale) -> list[Result]:
    """Print what writer and sampler hold beyond the storage."""
    for capacity in scale.capacities:
        rb = _full(capacity, RewardPrioritizedWriter(), SoftmaxRewardSampler())
        rb.sample()
        rb.extend(work.challenge_to(rb, HALF))
        item = sum(leaf.nbytes for leaf in rb[:].values(True, True)) / capacity
        extra = work.bytes_beyond_storage(rb) / capacity
        print(
            f"memory of writer and sampler at {capacity:,}: {extra:.1f} bytes per row, "
            f"beside the {item:.0f} of the item itself"
        )
    return []


PARTS: dict[str, Callable[[Scale], list[Result]]] = {
    "extend": extend,
    "fill": fill,
    "storage": storage,
    "sample": sample,
    "rank": rank,
    "merged": merged,
    "unique": unique,
    "torchgfn": torchgfn,
    "memory": memory,
    "large": large,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    work.check_challenge()
    run_parts("Local buffers against TorchRL's and torchgfn's.", PARTS, FULL, QUICK, arguments)


# Contenders.


def _full(capacity: int, writer: Any, sampler: Any, spread: float = 1.0) -> TensorDictReplayBuffer:
    return work.fill(work.buffer(capacity, writer, sampler), capacity, spread)


def _extending(rb: TensorDictReplayBuffer, accepted: int, n: int = work.BATCH) -> Contender:
    return Contender(rb.extend, partial(work.challenge_to, rb, accepted, n=n))


def _drawing(rb: Any, setup: Callable[[], Any] = lambda: None) -> Contender:
    return Contender(lambda _: rb.sample(work.BATCH), setup)


def _sampling(
    ours: TensorDictReplayBuffer,
    peer: TensorDictReplayBuffer,
    capacity: int,
    spread: float,
    replacement: Any,
    effort: Effort,
) -> list[Result]:
    """Compare draws from a buffer at rest, and from one written to before each draw."""
    mode = "distinct rows" if replacement == "auto" else "with replacement"
    kind = "peaked rewards, " if spread == PEAKED else ""
    results = [
        compare(
            f"sample, {kind}{mode}",
            capacity,
            _drawing(ours),
            _drawing(peer),
            effort,
            None if kind else 0.8,
        )
    ]

    mine, its = (_drawing(rb, partial(_write, rb, spread)) for rb in (ours, peer))
    bound = None if kind else 1.0
    name = f"sample after writing, {kind}{mode}"
    results.append(compare(name, capacity, mine, its, effort, bound))
    return results


def _write(rb: TensorDictReplayBuffer, spread: float = 1.0) -> None:
    rb.extend(work.challenge_to(rb, work.BATCH, spread))


def _filling(capacity: int, size: int, writer: Callable[[], Any]) -> Contender:
    def setup() -> tuple[TensorDictReplayBuffer, list[Any]]:
        rb = work.buffer(capacity, writer())
        return rb, list(work.random_items(capacity).split(size))

    def run(argument: tuple[TensorDictReplayBuffer, list[Any]]) -> None:
        rb, batches = argument
        for batch in batches:
            rb.extend(batch)

    return Contender(run, setup)


if __name__ == "__main__":
    main()
