"""One rank of the scenarios of test_row_accounts.py: a manager or a worker of each in turn.

    python accounts_rank.py WHERE NUMBER...

``WHERE`` is ``mpi``, ``env://`` under torchrun, or ``file://PATH RANK SIZE``. Each rank prints what
it sent, was fed and holds as JSON, in one piece: torchrun mixes the lines of ranks.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from statistics_of_draws import chi_square_p
from tensordict import TensorDict, TensorDictBase

from gfn_rb import MergedReplayBuffer, SoftmaxRewardSampler, fifo_buffer
from gfn_rb.remote import BaselineFilter, ReplayBufferManager, ReplayBufferWorker, Subscription
from gfn_rb.transports import MPITransport, TCPTransport, Transport
from gfn_rb.transports.meeting import meet

MODES = ["awaited", "deferred", "nonblocking"]
FEEDS = [None, "top", "softmax", "newest"]
KINDS = ["integers", "bytes", "floats", "conditions", "trajectories", "padded", "transitions"]
BATCHES, CAPACITY, SHARED, DRAWS, PATIENCE = 25, 10_000, 9_000, 4_000, 120.0


@dataclass(frozen=True)
class Scenario:
    """What the ranks do: the first ``n_managers`` manage, and the others send rows of a kind."""

    mode: str
    n_managers: int
    feed: str | None
    filtered: bool
    kind: str
    seed: int

    @property
    def are_objects(self) -> bool:
        """Whether rows identify objects, of which managers keep one each."""
        return self.kind != "transitions"


def scenario(number: int, size: int) -> Scenario:
    """Return the scenario of a number; 504 different ones follow each other in random order."""
    managers = [n for n in (1, 2, 3) if n < size]
    found = [*product(MODES, managers, FEEDS, [False, True], KINDS)]
    return Scenario(*random.Random(0).sample(found, len(found))[number % len(found)], seed=number)


def rows_of(values: list[int], kind: str) -> TensorDictBase:
    """Return a row for each value, which its first number holds; equal values are equal rows."""
    value = torch.tensor(values, dtype=torch.int64)
    n, log_reward = len(values), value * 7919 % 10_007 / 5000  # all different
    state = torch.stack([value, value % 2], 1)
    if kind == "bytes":
        state = torch.stack([value // 256, value % 256], 1).to(torch.uint8)
    if kind == "floats":
        state = state / 8
    if kind not in ("trajectories", "padded", "transitions"):
        rows = TensorDict({"state": state, "log_reward": log_reward}, [n])
        return rows.set("condition", value[:, None] % 5) if kind == "conditions" else rows
    if kind == "transitions":
        following = {"state": state + 1, "done": torch.ones(n, 1, dtype=torch.bool)}
        action, more = torch.ones(n, dtype=torch.int64), {"next": TensorDict(following, [n])}
        more["log_reward"] = log_reward
        return TensorDict({"state": state, "action": action, **more}, [n])
    length = 2 + value % 3 if kind == "padded" else torch.full((n,), 2)
    state, action = torch.full((n, 5, 2), -1), torch.full((n, 4), -1)
    for i in range(n):
        state[i, : length[i]], action[i, : length[i]] = 0, 1
        state[i, length[i] - 1] = torch.stack([value[i], value[i] % 2])
    rows = {"state": state, "action": action, "length": length, "log_reward": log_reward}
    return TensorDict(rows, [n])


def values_of(rows: TensorDictBase | None, kind: str) -> list[int]:
    """Return the values of rows."""
    if rows is None or not len(rows):
        return []
    state = rows["state"]
    if kind in ("trajectories", "padded"):
        state = state[torch.arange(len(rows)), rows["length"] - 1]
    if kind == "bytes":
        state = state.long() @ torch.tensor([[256], [1]])
    if kind == "floats":
        state = (state * 8).long()
    return [int(value) for value in state[:, 0]]


class Recording(BaselineFilter):
    """A filter that knows what it let through, and may let all rows through."""

    def __init__(self, kind: str, is_filter: bool) -> None:
        super().__init__(2)
        self.kind, self.is_filter, self.passed = kind, is_filter, list[int]()

    def __call__(self, rows: TensorDictBase, baseline: float | None) -> TensorDictBase:
        kept = super().__call__(rows, baseline) if self.is_filter else rows
        self.passed += values_of(kept, self.kind)
        return kept


def manage(transport: Transport, what: Scenario) -> dict[str, Any]:
    """Be a manager until all workers have left; return what it holds."""
    ranks = [*range(what.n_managers)]
    manager = ReplayBufferManager(transport, fifo_buffer(CAPACITY), managers=ranks)
    manager.run()
    rows = manager.buffer[:] if len(manager.buffer) else None
    return {"held": values_of(rows, what.kind)}


def work(transport: Transport, what: Scenario) -> dict[str, Any]:
    """Send rows, of which some are those of other workers too; return what became of them."""
    dice, number = random.Random(1000 * what.seed + transport.rank), 1000 * transport.rank
    local, fed = (
        fifo_buffer(CAPACITY, sampler=SoftmaxRewardSampler(replacement=True)) for _ in range(2)
    )
    seen = Recording(what.kind, what.filtered)
    worker = ReplayBufferWorker(
        transport,
        [*range(what.n_managers)],
        local,
        mode=what.mode,
        in_flight=10 * BATCHES,  # so that nothing is skipped
        filter=seen,
        subscription=Subscription(fed, 5, what.feed) if what.feed and what.are_objects else None,
        timeout=PATIENCE,
    )
    own, received = list[int](), list[int]()
    with worker:
        for _ in range(BATCHES):
            n = dice.choice([0, 1, 2, 7, 16])
            values = [number + i for i in range(n)] + dice.sample(range(SHARED, SHARED + 40), n)
            number += n
            own += values
            worker.extend(rows_of(values, what.kind))
            fresh = values_of(worker.take_fed(), what.kind)
            assert not {*fresh} & {*own}  # though it may find them later
            received += fresh
        worker.drain(PATIENCE)
        received += values_of(worker.take_fed(), what.kind)
    told = {"own": own, "passed": seen.passed, "fed": received, "counts": asdict(worker.statistics)}
    return {**told, "p": merged_p(local, fed, what) if received else None}


def merged_p(local: Any, fed: Any, what: Scenario) -> float:
    """Return the p-value of draws from both buffers under the softmax of their union."""
    merged = MergedReplayBuffer(local, fed, p="mass", batch_size=DRAWS)
    torch.manual_seed(what.seed)
    drawn = Counter(values_of(merged.sample(), what.kind))
    n_rows = Counter(values_of(local[:], what.kind)) + Counter(values_of(fed[:], what.kind))
    log_reward = rows_of([*n_rows], what.kind)["log_reward"].double().numpy()
    weight = np.exp(log_reward) * np.array([*n_rows.values()])
    assert drawn.keys() <= n_rows.keys()
    return chi_square_p([drawn[value] for value in n_rows], weight / weight.sum())


def play(transport: Transport, number: int) -> dict[str, Any]:
    """Play one scenario, and return what this rank knows of it."""
    what = scenario(number, transport.size)
    role = manage if transport.rank < what.n_managers else work
    return {"number": number, "rank": transport.rank, **role(transport, what)}


def main(where: str, *words: str) -> None:
    """Play scenarios on a transport, one after another."""
    torch.set_num_threads(1)
    if where == "mpi":
        from mpi4py import MPI

        make = lambda i: MPITransport(MPI.COMM_WORLD, PATIENCE)  # noqa: E731
    elif where == "env://":
        store, rank, size = meet(where, -1, -1, timedelta(seconds=PATIENCE))
        make = lambda i: TCPTransport(  # noqa: E731
            dist.PrefixStore(i, store), rank, size, PATIENCE
        )
    else:
        (rank, size), words = map(int, words[:2]), words[2:]
        make = lambda i: TCPTransport(f"{where}{i}", rank, size, PATIENCE)  # noqa: E731
    for word in words:
        with make(word) as transport:
            sys.stdout.write(json.dumps(play(transport, int(word))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
