"""One rank of workers and managers with much traffic; writes down what it sent, or holds.

mpiexec -n 7 python -m remote.traffic_rank FOLDER OVER_MPI OVER_GLOO
python -m remote.traffic_rank FOLDER 0 OVER_GLOO RANK SIZE

Each worker adds so many batches in each round, and each in another mode: first over MPI, where an
MPI launcher started it, then over Gloo. A round has 1 to 5 managers, of which each knows what it is
sent and holds the best of that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import (
    Awaited,
    Deferred,
    ManagerQueries,
    NonBlocking,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.transports import GlooTransport, MPITransport, Transport
from gfn_rb.transports.launch import launched

TIMEOUT = 30.0
RANKS = 7
SHARED = (1, 2, 5)  # how many managers there are in each round
KEPT = 500
POLICIES = ("top", "softmax", "newest")
WIDTH = 240  # bytes of a row that only have to arrive
_ODD = torch.arange(WIDTH) * 2 + 1


def items(values: Any) -> TensorDict:
    """Terminating states, one for each value, from which all else follows."""
    values = torch.as_tensor(values, dtype=torch.int64)
    rows = {
        "state": torch.stack([values, torch.zeros_like(values)], 1),
        "log_reward": values.float() / 1024,  # exactly
        "blob": _blob(values),
    }
    return TensorDict(rows, [len(values)])


def check_intact(rows: TensorDictBase) -> None:
    """See that rows are as they were made."""
    assert bool((rows["blob"] == _blob(rows["state"][:, 0])).all())


def _blob(values: torch.Tensor) -> torch.Tensor:
    return ((values[:, None] * _ODD) >> 5).to(torch.uint8)


def values_of(rows: TensorDictBase) -> list[int]:
    return rows["state"][:, 0].tolist()


def share_managing(transport: Transport, owners: range) -> dict[str, Any]:
    """Be one of several managers for a round, and return what came of it."""
    rb = reward_prioritized_buffer(KEPT)
    manager = ReplayBufferManager(transport, rb, score_each, managers=owners)
    manager.run()
    check_intact(rb[:])
    return {"held": values_of(rb[:]), "senders": manager.metadata()["senders"]}


def score_each(rows: TensorDictBase, sender: int) -> dict[str, torch.Tensor]:
    """Each row's log-reward."""
    return {"each": rows["log_reward"]}


def send_to_all(transport: Transport, owners: range, n_batches: int) -> dict[str, Any]:
    """Send to several managers for a round, and return what came of it."""
    rank, fed, sent = transport.rank, fifo_buffer(30_000), []
    draw, queries = torch.Generator().manual_seed(rank), ManagerQueries(transport)
    mode = (Awaited(), Deferred(), NonBlocking(10_000))[rank % 3]
    worker = ReplayBufferWorker(
        transport,
        owners,
        mode=mode,
        timeout=TIMEOUT,
        subscription=Subscription(fed, 8, POLICIES[rank % 3]),
    )
    with worker:
        for i in range(n_batches):
            rows = items(torch.randint(20_000, (1 + i % 90,), generator=draw))
            reply = worker.extend(rows)
            sent += values_of(rows)
            if rank % 3 == 0:
                assert reply is not None
                assert torch.equal(reply.scores["each"], rows["log_reward"])
        worker.drain(TIMEOUT)
        union = queries.items(owners, TIMEOUT)
    assert union is not None
    check_intact(union)
    check_intact(fed[:])
    counts = worker.statistics.to_json()
    return {"sent": sent, "union": values_of(union), "fed": values_of(fed[:]), "counts": counts}


def play(kind: str, folder: str, n_batches: int, rank: int, size: int) -> None:
    """Play all rounds over one transport. Each has its own: making it, ranks wait for others."""
    for n_managers in SHARED:
        owners, name = range(n_managers), f"shared{n_managers}"
        with connected(kind, f"{folder}/{name}", rank, size) as transport:
            if rank in owners:
                found = share_managing(transport, owners)
            else:
                found = send_to_all(transport, owners, n_batches)
        Path(folder, f"{kind}-{name}-{rank}.json").write_text(json.dumps(found))


def connected(kind: str, file: str, rank: int, size: int) -> Transport:
    """Return a transport between all ranks."""
    if kind == "mpi":
        return MPITransport(timeout=TIMEOUT)
    return GlooTransport(f"file://{file}", rank, size, timeout=TIMEOUT)


def main(folder: str, over_mpi: str, over_gloo: str, *where: str) -> None:
    """Play all rounds over all transports."""
    torch.set_num_threads(1)
    started = launched()
    rank, size = (started.rank, started.size) if started else map(int, where)
    if started:
        play("mpi", folder, int(over_mpi), rank, size)
    play("gloo", folder, int(over_gloo), rank, size)


if __name__ == "__main__":
    main(*sys.argv[1:])
