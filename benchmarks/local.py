"""Local buffers against their peers, at every size of batch: ``python -m benchmarks.local``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: extend sample cycle merged trajectories growth peers fill storage
                   torchgfn memory large
    --rows N ...   full buffers of these capacities alone, by default all
    --json PATH    also write the figures to a file
    --store        keep them in benchmarks/results, instead of those of the same parts

The second column is the number of rows in a batch. Each call gets a fresh batch. Where each object
is stored once, a quarter of its rows are stored objects, half of them with a better reward. "large"
compares a buffer of ten million rows with one of a million, and the most memory that the process
ever held with 24 GiB: run it alone. All run on one thread; see :mod:`benchmarks.workloads` for the
rows and :mod:`benchmarks.timing` for how a ratio is measured. The exit status is 0 whatever the
figures.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)

from benchmarks import workloads as work
from benchmarks.fifty_lines import FiftyLines
from benchmarks.timing import Contender, Effort, Result, compare, row, run_parts
from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)
from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

HALF = work.BATCH // 2
LIMIT = 24 * 2**30  # bytes
PEAKED = 5.0  # standard deviation of log-rewards, in nats, of a law that few rows dominate
PER_GROUP = 50

# Largest ratios allowed, of batches up to 128 rows, up to 512, and above.
Bounds = tuple[float, float, float]
WRITERS: dict[str, tuple[Callable[[], Any], Bounds]] = {
    "best": (RewardPrioritizedWriter, (0.8, 1.2, 2.0)),
    "one row per object": (partial(RewardPrioritizedWriter, unique="state"), (1.0, 1.5, 3.0)),
    "diverse, cutoff 0": (partial(DiversityWriter, cutoff_distance=0), (1.0, 1.5, 3.0)),
}
SAMPLERS: dict[str, tuple[Callable[[], Any], float, float]] = {  # bounds at rest, after a write
    "softmax": (SoftmaxRewardSampler, 1.0, 1.2),
    "rank": (RankRewardSampler, 1.3, 1.6),
    "quantile": (QuantileRewardSampler, 1.3, 1.6),
    "priority": (PrioritySampler, 1.3, 1.6),
}


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        capacities: rows of the full buffers.
        batches: rows of the batches.
        paths: rows of the buffers of trajectories.
        filled: rows of the buffers that are filled from empty.
        growth: rows of the buffers whose times are compared with those of ``capacities[1]``.
        effort: for calls of well under a millisecond.
        slow: for calls that last longer.
        faster: per capacity, how many times faster than torchgfn extend and sample must be.
        large: rows of a large buffer, and of the one that it is compared with.
    """

    capacities: tuple[int, ...]
    batches: tuple[int, ...]
    paths: tuple[int, ...]
    filled: int
    growth: int
    effort: Effort
    slow: Effort
    faster: dict[int, tuple[float, float] | None]
    large: tuple[int, int]


FULL = Scale(
    capacities=(10_000, 100_000, 1_000_000),
    batches=(16, 64, 128, 512, 2048, 8192, 16_384),
    paths=(10_000, 100_000),
    filled=1_000_000,
    growth=10_000_000,
    effort=Effort(seconds=1.5, least=15, most=400, warmup=5),
    slow=Effort(seconds=20, least=5, most=60, warmup=1),
    faster={100_000: (20, 10), 1_000_000: (400, 80)},
    large=(10_000_000, 1_000_000),
)
QUICK = Scale(
    capacities=(10_000, 20_000),
    batches=(16, 512),
    paths=(2_000,),
    filled=20_000,
    growth=40_000,
    effort=Effort(seconds=0.1, warmup=2),
    slow=Effort(seconds=0.5, warmup=1),
    faster={10_000: None},
    large=(20_000, 2_000),
)


# Batches of every size.


def extend(scale: Scale) -> list[Result]:
    """Compare writing a batch into a full buffer with round-robin writing."""
    results = []
    for capacity, batches in _sizes(scale):
        peer = _full(capacity)
        for name, (writer, bounds) in WRITERS.items():
            ours = _full(capacity, writer())
            known = name != "best"  # rows are compared, so some must be stored already
            for n in batches:
                pair = tuple(_extending(rb, n // 2, n, known) for rb in (ours, peer))
                results.append(_compare("extend, " + name, capacity, n, pair, scale, bounds))
        ours, newest = _full(capacity, RewardPrioritizedWriter()), _full(capacity, FIFOWriter())
        nothing = _full(capacity)
        nothing.set_writer(work.WritesNothing())
        for n in batches:
            pair = _extending(ours, 0, n), _extending(peer, 0, n)
            label = "extend, all rejected"
            results.append(_compare(label, capacity, n, pair, scale, (0.4, 0.4, 0.4)))
            pair = _extending(newest, n // 2, n), _extending(peer, n // 2, n)
            results.append(_compare("extend, newest", capacity, n, pair, scale, (1.0, 1.0, 1.0)))
            pair = _extending(nothing, n // 2, n), _extending(peer, n // 2, n)
            results.append(_compare("extend, a writer that does nothing", capacity, n, pair, scale))
        results += _groups(scale, capacity, batches)
    return results


def _groups(scale: Scale, capacity: int, batches: Sequence[int]) -> list[Result]:
    """Compare a limit per group with one row per object; rows of a group lie apart."""
    options = {"group": "prompt", "per_group": PER_GROUP}
    ours = work.buffer(capacity, RewardPrioritizedWriter(unique="state", **options))
    peer = work.buffer(capacity, RewardPrioritizedWriter(unique="state"))
    rows = _with_groups(work.random_items(capacity), capacity)
    for rb in (ours, peer):
        rb.extend(rows)
    results = []
    for n in batches:
        pair = _extending_groups(ours, n, capacity), _extending_groups(peer, n, capacity)
        label = f"extend, groups of {PER_GROUP}, against one row per object"
        results.append(_compare(label, capacity, n, pair, scale, (1.3, 1.3, 1.3)))
    return results


def sample(scale: Scale) -> list[Result]:
    """Compare drawing by a stored number with drawing uniformly, at rest and after a write."""
    results = []
    for capacity, batches in _sizes(scale):
        peer = _full(capacity)
        for name, (sampler, *bounds) in SAMPLERS.items():
            ours = _full(capacity, RewardPrioritizedWriter(), sampler())
            for when, bound in zip(("at rest", "after a write"), bounds, strict=True):
                for n in batches:
                    pair = tuple(
                        _drawing(rb, partial(_write, rb, n) if when != "at rest" else _nothing, n)
                        for rb in (ours, peer)
                    )
                    label = f"sample, {name}, {when}"
                    results.append(_compare(label, capacity, n, pair, scale, (bound,) * 3))
        first = _full(capacity, FIFOWriter(), work.DrawsTheFirst())
        for n in batches:
            pair = _drawing(first, n=n), _drawing(peer, n=n)
            label = "sample, a sampler that draws the first rows, at rest"
            results.append(_compare(label, capacity, n, pair, scale))
        for replacement in ("auto", True):
            sampler = SoftmaxRewardSampler(replacement=replacement)
            ours = _full(capacity, RewardPrioritizedWriter(), sampler, PEAKED)
            label = f"sample, peaked rewards, replacement={replacement}"
            pair = _drawing(ours), _drawing(peer)
            results.append(_compare(label, capacity, work.BATCH, pair, scale))
    return results


def cycle(scale: Scale) -> list[Result]:
    """Compare an extend, half accepted, and a draw with round robin and a uniform draw."""
    results = []
    for capacity, batches in _sizes(scale):
        peer = _full(capacity)
        for name in ("softmax", "rank", "quantile"):
            ours = _full(capacity, RewardPrioritizedWriter(), SAMPLERS[name][0]())
            for n in batches:
                pair = _cycling(ours, n), _cycling(peer, n)
                label = f"extend and sample, {name}"
                results.append(_compare(label, capacity, n, pair, scale, (1.2, 1.2, 1.2)))
    return results


def merged(scale: Scale) -> list[Result]:
    """Compare a draw from two buffers as one with a draw of half the rows from each."""
    results = []
    for capacity, batches in _sizes(scale):
        members = [
            _full(capacity, RewardPrioritizedWriter(), SoftmaxRewardSampler()) for _ in range(2)
        ]
        for p in ("mass", "size"):
            both = MergedReplayBuffer(*members, p=p)
            for n in batches:
                peer = Contender(partial(_sample_each, members, n // 2))
                label = f"sample of two members by {p}, against the members"
                pair = _drawing(both, n=n), peer
                results.append(_compare(label, capacity, n, pair, scale, (1.2, 1.2, 1.2)))
    return results


def trajectories(scale: Scale) -> list[Result]:
    """Compare rows of 60 states of 16 numbers, half of a batch accepted, with round robin."""
    results = []
    for capacity in scale.paths:
        writer = RewardPrioritizedWriter(unique=lambda rows: rows["state"][:, -1])
        ours, peer = work.buffer(capacity, writer, SoftmaxRewardSampler()), work.buffer(capacity)
        rows = _paths(torch.randn(capacity))
        for rb in (ours, peer):
            rb.extend(rows)
        for n in (n for n in scale.batches if n <= capacity // 10):
            for name, bounds in (("extend", (1.0, 1.5, 3.0)), ("sample", (1.0, 1.0, 1.0))):
                pair = tuple(
                    Contender(rb.extend, partial(_challenge_of_paths, rb, n))
                    if name == "extend"
                    else _drawing(rb, n=n)
                    for rb in (ours, peer)
                )
                label = f"{name}, trajectories of 60 x 16"
                results.append(_compare(label, capacity, n, pair, scale, bounds))
    return results


def growth(scale: Scale) -> list[Result]:
    """Compare buffers of many rows with one of 100,000."""
    few, results = scale.capacities[1], []
    for capacity in (*scale.capacities[2:], scale.growth):
        peer, ours = (
            _full(rows, RewardPrioritizedWriter(unique="state"), SoftmaxRewardSampler())
            for rows in (few, capacity)
        )
        for name, contender in (
            ("extend, one row per object", lambda rb, n: _extending(rb, n // 2, n, True)),
            ("sample", lambda rb, n: _drawing(rb, n=n)),
            ("extend and sample", _cycling),
        ):
            for n in scale.batches:
                if n <= few // 10:
                    label = f"{name}, against {few:,} rows"
                    pair = contender(ours, n), contender(peer, n)
                    results.append(_compare(label, capacity, n, pair, scale, (1.6, 1.6, 1.6)))
        del ours, peer
        floors = _full(capacity), _full(few)
        for name, contender in (
            ("round robin", lambda rb, n: _extending(rb, n // 2, n)),
            ("random draws", lambda rb, n: _drawing(rb, n=n)),
        ):
            for n in scale.batches:
                if n <= few // 10:  # what the memory of so many rows costs TorchRL as well
                    label = f"{name} of TorchRL, against {few:,} rows"
                    pair = contender(floors[0], n), contender(floors[1], n)
                    results.append(_compare(label, capacity, n, pair, scale))
    return results


def peers(scale: Scale) -> list[Result]:
    """Compare extend, sample and update with buffers that do the same job."""
    results = []
    for capacity, batches in _sizes(scale):
        kinds: dict[str, tuple[Any, Callable[[Any, int], Contender], Any, Any, float | None]] = {}
        by_priority = _full(capacity, FIFOWriter(), PrioritySampler())
        if (peer := _torchrl_priorities(capacity)) is not None:
            kinds["PrioritizedSampler"] = by_priority, _updating, peer, _updating, 0.9
        if find_spec("cpprb"):
            kinds["cpprb"] = by_priority, _updating, _cpprb(capacity), _updating_cpprb, 1.0
        for keep in ("best", "newest"):
            for draw in ("softmax", "rank", "uniform"):
                ours, peer = _as_fifty_lines(capacity, keep, draw)
                name = f"fifty lines, {keep}, {draw}"
                kinds[name] = ours, partial(_cycling, known=True), peer, _cycling_fifty_lines, None
        for name, (ours, mine, peer, its, bound) in kinds.items():
            for n in batches:
                pair = mine(ours, n), its(peer, n)
                bounds = None if bound is None else (bound,) * 3
                results.append(_compare(f"cycle, {name}", capacity, n, pair, scale, bounds))
        if capacity == min(scale.capacities):  # it loops over rows
            ours = _full(capacity, RewardPrioritizedWriter())
            peer = _full(capacity, TensorDictMaxValueWriter(rank_key="log_reward"))
            for n in batches:
                pair = _extending(ours, n // 2, n), _extending(peer, n // 2, n)
                label = "extend, best, against TensorDictMaxValueWriter"
                results.append(_compare(label, capacity, n, pair, scale, (0.1, 0.1, 0.1)))
    return results


# Batches of 128 rows.


def fill(scale: Scale) -> list[Result]:
    """Compare filling a buffer from empty, start to end, with round-robin writing."""
    results = []
    for size in (work.BATCH, 10_000):
        ours = _filling(scale.filled, size, RewardPrioritizedWriter)
        peer = _filling(scale.filled, size, TensorDictRoundRobinWriter)
        name = f"fill {scale.filled:,} rows from empty"
        results.append(compare(name, size, ours, peer, scale.slow, 1.5))
    return results


def storage(scale: Scale) -> list[Result]:
    """Compare TorchRL's own parts over our storage with the same over its own."""
    results = []
    for capacity, batches in _sizes(scale):
        ours, peer = (
            work.fill(work.buffer(capacity, storage=kind), capacity)
            for kind in (RowTensorStorage, LazyTensorStorage)
        )
        for n in batches:
            pair = _extending(ours, n // 2, n), _extending(peer, n // 2, n)
            label = "round robin over our storage"
            results.append(_compare(label, capacity, n, pair, scale, (1.0, 1.0, 1.0)))
            pair = _drawing(ours, n=n), _drawing(peer, n=n)
            label = "random draws over our storage"
            results.append(_compare(label, capacity, n, pair, scale, (1.0, 1.0, 1.0)))
    return results


def large(scale: Scale) -> list[Result]:
    """Compare a buffer of many rows, one per object, with a smaller one of the same kind."""
    ours, peer = (
        _full(n, RewardPrioritizedWriter(unique="state"), SoftmaxRewardSampler())
        for n in scale.large
    )
    results = []
    for name, contender in (
        ("extend, one row per object", partial(_extending, accepted=HALF, known=True)),
        ("sample", _drawing),
        ("sample after a write", lambda rb: _drawing(rb, partial(_write, rb))),
    ):
        label = f"{name}, {scale.large[0]:,} against {scale.large[1]:,} rows"
        pair = contender(ours), contender(peer)
        results.append(compare(label, work.BATCH, *pair, scale.slow, 1.3))
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.append(Result("bytes held at most, against 24 GiB", work.BATCH, *_bytes(held)))
    print(row(results[-1]), flush=True)
    return results


def _bytes(held: float) -> tuple[float, float, float, float, float, int, float]:
    """Return what :class:`Result` says of bytes, in MiB."""
    ratio = held / LIMIT
    return held / 2**20, LIMIT / 2**20, ratio, ratio, ratio, 1, 1.0


def torchgfn(scale: Scale) -> list[Result]:
    """Compare our parts, on TensorDicts, with torchgfn's prioritised replay buffer.

    :mod:`benchmarks.interop` compares the same behind torchgfn's interface.
    """
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
                label = f"{name}, {capacity:,} rows, against torchgfn{suffix}"
                results.append(compare(label, work.BATCH, mine, its, scale.slow, bound))
    return results


def memory(scale: Scale) -> list[Result]:
    """Print what writer and sampler hold beyond the storage."""
    for capacity in scale.capacities:
        rb = _full(capacity, RewardPrioritizedWriter(), SoftmaxRewardSampler())
        rb.sample(work.BATCH)
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
    "sample": sample,
    "cycle": cycle,
    "merged": merged,
    "trajectories": trajectories,
    "growth": growth,
    "peers": peers,
    "fill": fill,
    "storage": storage,
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
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", type=int, nargs="+", choices=FULL.capacities)
    options, others = parser.parse_known_args(arguments)
    full = replace(FULL, capacities=tuple(options.rows or FULL.capacities))
    if options.rows:
        full = replace(full, paths=tuple(n for n in FULL.paths if n in options.rows))
    run_parts("Local buffers against their peers.", PARTS, full, QUICK, others, "batch")


def _sizes(scale: Scale) -> list[tuple[int, list[int]]]:
    """Return each capacity with the batches that are at most a tenth of it."""
    return [(rows, [n for n in scale.batches if n <= rows // 10]) for rows in scale.capacities]


def _compare(
    label: str,
    capacity: int,
    n: int,
    pair: Any,
    scale: Scale,
    bounds: Bounds | None = None,
) -> Result:
    """Compare two contenders at a batch size, of which each range has a bound."""
    bound = None if bounds is None else bounds[0 if n <= 128 else 1 if n <= 512 else 2]
    return compare(f"{label}, {capacity:,} rows", n, *pair, scale.effort, bound)


# Contenders.


def _nothing() -> None:
    pass


def _full(
    capacity: int, writer: Any = None, sampler: Any = None, spread: float = 1.0
) -> TensorDictReplayBuffer:
    return work.fill(work.buffer(capacity, writer, sampler), capacity, spread)


def _extending(
    rb: TensorDictReplayBuffer, accepted: int, n: int = work.BATCH, known: bool = False
) -> Contender:
    """Return extends of fresh batches, some of whose rows may be ``known`` to the buffer."""

    def setup() -> TensorDict:
        batch = work.challenge_to(rb, accepted, n=n)
        return work.with_known(batch, rb[:]) if known else batch

    return Contender(rb.extend, setup)


def _drawing(rb: Any, setup: Callable[[], Any] = _nothing, n: int = work.BATCH) -> Contender:
    return Contender(lambda _: rb.sample(n), setup)


def _sample_each(members: Sequence[TensorDictReplayBuffer], n: int, _: object) -> None:
    for rb in members:
        rb.sample(n)


def _cycling(rb: TensorDictReplayBuffer, n: int, known: bool = False) -> Contender:
    def run(batch: TensorDict) -> None:
        rb.extend(batch)
        rb.sample(n)

    return Contender(run, _extending(rb, n // 2, n, known).setup)


def _write(rb: TensorDictReplayBuffer, n: int = work.BATCH) -> None:
    rb.extend(work.challenge_to(rb, n // 2, n=n))


def _with_groups(rows: TensorDict, capacity: int) -> TensorDict:
    return rows.set("prompt", torch.randint(max(1, capacity // PER_GROUP), (len(rows),)))


def _extending_groups(rb: TensorDictReplayBuffer, n: int, capacity: int) -> Contender:
    def setup() -> TensorDict:
        batch = work.with_known(work.challenge_to(rb, n // 2, n=n), rb[:])
        return _with_groups(batch, capacity)

    return Contender(rb.extend, setup)


def _paths(log_reward: torch.Tensor) -> TensorDict:
    state = torch.randint(0, work.HEIGHT, (len(log_reward), 60, work.WIDTH))
    return TensorDict({"state": state, "log_reward": log_reward}, [len(log_reward)])


def _challenge_of_paths(rb: TensorDictReplayBuffer, n: int) -> TensorDict:
    return _paths(work.challenge(rb[:].get("log_reward"), n // 2, n=n).float())


def _torchrl_priorities(capacity: int) -> TensorDictReplayBuffer | None:
    """Return TorchRL's prioritized buffer, None where its compiled extension does not load."""
    try:
        sampler = PrioritizedSampler(capacity, alpha=0.6, beta=0.4)
    except RuntimeError:
        print("the extension of TorchRL's PrioritizedSampler does not load: not compared")
        return None
    return _full(capacity, None, sampler)


def _updating(rb: TensorDictReplayBuffer, n: int) -> Contender:
    """Return an extend, a draw and new priorities of the drawn rows."""

    def run(batch: TensorDict) -> None:
        rb.extend(batch)
        drawn = rb.sample(n)
        rb.update_priority(drawn["index"], drawn["log_reward"].exp())

    return Contender(run, partial(work.random_items, n))


def _cpprb(capacity: int) -> Any:
    from cpprb import PrioritizedReplayBuffer

    entries = {"state": {"shape": work.WIDTH, "dtype": "int64"}, "log_reward": {}}
    rb = PrioritizedReplayBuffer(capacity, entries, alpha=0.6)
    rows = work.random_items(capacity)
    rb.add(state=rows["state"].numpy(), log_reward=rows["log_reward"].numpy())
    return rb


def _updating_cpprb(rb: Any, n: int) -> Contender:
    def run(batch: TensorDict) -> None:
        rb.add(state=batch["state"].numpy(), log_reward=batch["log_reward"].numpy())
        drawn = rb.sample(n, beta=0.4)
        rb.update_priorities(drawn["indexes"], torch.from_numpy(drawn["log_reward"]).exp().numpy())

    return Contender(run, partial(work.random_items, n))


def _as_fifty_lines(
    capacity: int, keep: Any, draw: Any
) -> tuple[TensorDictReplayBuffer, FiftyLines]:
    """Return the same buffer twice: of the library's parts, and in fifty lines."""
    writer = RewardPrioritizedWriter if keep == "best" else FIFOWriter
    sampler = None if draw == "uniform" else SAMPLERS[draw][0]()
    ours = work.buffer(capacity, writer(unique="state", on_duplicate="keep"), sampler)
    peer, rows = FiftyLines(capacity, keep, draw), work.random_items(capacity)
    ours.extend(rows)
    peer.extend(dict(rows))
    return ours, peer


def _cycling_fifty_lines(rb: FiftyLines, n: int) -> Contender:
    def run(batch: dict[str, Any]) -> None:
        rb.extend(batch)
        rb.sample(n)

    def batch() -> dict[str, Any]:
        stored = TensorDict({key: value[: len(rb)] for key, value in rb.rows.items()}, [len(rb)])
        rows = work.items(work.challenge(stored["log_reward"], n // 2, n=n))
        return dict(work.with_known(rows, stored))

    return Contender(run, batch)


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
