"""Local buffers against TorchRL's and torchgfn's: ``python -m benchmarks.local``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: extend fill sample torchgfn memory
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

from torchrl.data import TensorDictReplayBuffer, TensorDictRoundRobinWriter

from benchmarks import workloads as work
from benchmarks.timing import Contender, Effort, Result, compare, run_parts
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.writers import RewardPrioritizedWriter

HALF = work.BATCH // 2
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
    """

    capacities: tuple[int, ...]
    filled: int
    effort: Effort
    slow: Effort
    faster: dict[int, tuple[float, float] | None]


FULL = Scale(
    capacities=(10_000, 100_000, 1_000_000),
    filled=1_000_000,
    effort=Effort(seconds=6, most=1000, warmup=20),
    slow=Effort(seconds=20, least=5, most=60, warmup=1),
    faster={100_000: (20, 10), 1_000_000: (400, 80)},
)
QUICK = Scale(
    capacities=(10_000,),
    filled=20_000,
    effort=Effort(seconds=0.2, warmup=2),
    slow=Effort(seconds=0.5, warmup=1),
    faster={10_000: None},
)


def extend(scale: Scale) -> list[Result]:
    """Compare writing 128 items into a full buffer with round-robin writing."""
    results = []
    for capacity in scale.capacities:
        ours = work.fill(work.buffer(capacity, RewardPrioritizedWriter()), capacity)
        peer = work.fill(work.buffer(capacity), capacity)
        for name, accepted, bound in (
            ("extend, half of the rows accepted", HALF, 2.0),
            ("extend, all rows rejected", 0, 0.5),
        ):
            mine, its = _extending(ours, accepted), _extending(peer, accepted)
            results.append(compare(name, capacity, mine, its, scale.effort, bound))
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
    "sample": sample,
    "torchgfn": torchgfn,
    "memory": memory,
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


def _extending(rb: TensorDictReplayBuffer, accepted: int, spread: float = 1.0) -> Contender:
    return Contender(rb.extend, partial(work.challenge_to, rb, accepted, spread))


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
            None if kind else 3.0,
        )
    ]

    def write(rb: TensorDictReplayBuffer) -> None:
        rb.extend(work.challenge_to(rb, work.BATCH, spread))

    mine, its = _drawing(ours, partial(write, ours)), _drawing(peer, partial(write, peer))
    results.append(compare(f"sample after writing, {kind}{mode}", capacity, mine, its, effort))
    return results


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
