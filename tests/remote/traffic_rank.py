"""One rank of workers and managers with much traffic; writes down what it sent, or holds.

mpiexec -n 7 python -m remote.traffic_rank FOLDER OVER_MPI OVER_GLOO
python -m remote.traffic_rank FOLDER 0 OVER_GLOO RANK SIZE

Each worker adds so many batches in each round, and each in another mode: first over MPI, where an
MPI launcher started it, then over Gloo. In two rounds the first four ranks are three workers, with
batches of 1 to 8000 rows, and a manager; in the others all of them are workers and 2 to 5 managers.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import (
    Awaited,
    BaselineFilter,
    Deferred,
    ManagerQueries,
    NonBlocking,
    PercentileBaseline,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.transports import GlooTransport, MPITransport, Transport
from gfn_rb.transports.launch import launched

TIMEOUT = 30.0
MANAGER = 0
WORKERS = (1, 2, 3)
ROUNDS = ("roomy", "crowded")
RANKS = 7
SHARED = (2, 3, 5)  # how many managers there are in the other rounds, of a third of the batches
KEPT = 500
MEAN = 200  # rows of a batch, about
LARGEST = 8000
MODES = (Awaited, Deferred, NonBlocking)
POLICIES = ("top", "softmax", "newest")
UNHEARD_OF = 4_000_000  # values from here on are never stored
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


def are_intact(rows: TensorDictBase) -> bool:
    """Whether rows are as they were made."""
    return bool((rows["blob"] == _blob(rows["state"][:, 0])).all())


def _blob(values: torch.Tensor) -> torch.Tensor:
    return ((values[:, None] * _ODD) >> 5).to(torch.uint8)


def values_of(rows: TensorDictBase) -> list[int]:
    return rows["state"][:, 0].tolist()


class Recorder(BaselineFilter):
    """Remembers what a worker is about to send; leaves rows out only where it is told to."""

    def __init__(self, leaves_out: bool) -> None:
        super().__init__(3)
        self._leaves_out = leaves_out
        self.newest: TensorDictBase | None = None

    def __call__(self, rows: TensorDictBase, baseline: float | None) -> TensorDictBase:
        self.newest = super().__call__(rows, baseline) if self._leaves_out else rows
        return self.newest


class Sender:
    """A worker with random habits.

    Args:
        transport: to the manager.
        number: of the round.
        n_batches: how many to add.
    """

    def __init__(self, transport: Transport, number: int, n_batches: int) -> None:
        rank = transport.rank
        self._rank, self._n, self._sent = rank, n_batches, 0
        self._dice = random.Random(10 * number + rank)
        self._draw = torch.Generator().manual_seed(10 * number + rank)
        self._crowded = ROUNDS[number] == "crowded"
        self._recorder = Recorder(leaves_out=self._crowded and rank == 1)
        self._queries = ManagerQueries(transport)
        self.fed = fifo_buffer(30_000)
        self.to_store: list[int] = []
        self.unfit = self.largest = 0
        self.mode = MODES[(rank + number) % 3]
        self.worker = ReplayBufferWorker(
            transport,
            MANAGER,
            mode=self.mode(),
            on_error="log",
            timeout=TIMEOUT,
            payload="scoring" if self._crowded and rank == 2 else "items",
            frequency=2 if rank == 3 else 1,
            filter=self._recorder,
            subscription=Subscription(self.fed, 8, POLICIES[rank - 1]),
        )

    def run(self) -> None:
        with self.worker:
            for i in range(self._n):
                self._add(i)
                self._now_and_then()
        self._note()

    def _add(self, i: int) -> None:
        time.sleep(0.01)  # a training step: without any, one may be done before others have begun
        rows = items(self._values())
        if i > 10 and self.worker.frequency == 1 and self._dice.random() < 0.05:
            rows = items(rows["state"][:, 0] + UNHEARD_OF).set("unknown", torch.zeros(len(rows)))
        reply = self.worker.extend(rows)
        newest = self._note()
        if self.mode is Awaited and newest is not None:
            assert reply is not None
            assert reply.n == len(newest)
            if reply.error is None:
                assert torch.equal(reply.scores["each"], newest["log_reward"])

    def _values(self) -> torch.Tensor:
        """Some that only this worker draws, and some that others draw as well."""
        n = 1 + int((LARGEST - 1) * self._dice.random() ** (LARGEST / MEAN))
        own = 4 * torch.randint(1_000_000, (n,), generator=self._draw) + self._rank
        shared = 4 * torch.randint(5_000, (n,), generator=self._draw)
        return torch.where(torch.rand(n, generator=self._draw) < 0.1, shared, own)

    def _now_and_then(self) -> None:
        habit = self._dice.randrange(60)
        if habit == 0:
            self.worker.drain(TIMEOUT)
            self._note()
        elif habit == 1:
            self.worker.fetch(self._dice.randrange(1, 40))
        elif habit == 2:
            known = self._queries.metadata(MANAGER, TIMEOUT)["senders"][str(self._rank)]
            assert known["items"] <= self.worker.statistics.sent

    def _note(self) -> TensorDictBase | None:
        """Note and return the batch that was just sent, if one was."""
        before, self._sent = self._sent, self.worker.statistics.batches
        if self._sent == before:
            return None
        assert self._sent == before + 1
        newest = self._recorder.newest
        self.largest = max(self.largest, len(newest))
        if self.worker.payload == "scoring":
            return newest
        if "unknown" in newest.keys():  # noqa: SIM118, of a TensorDict
            self.unfit += len(newest)
        else:
            self.to_store += values_of(newest)
        return newest

    def report(self) -> dict[str, Any]:
        fed = self.fed[:] if len(self.fed) else items([])
        return {
            "rank": self._rank,
            "mode": self.mode.__name__,
            "counts": self.worker.statistics.to_json(),
            "unanswered": self.worker.unanswered + self.worker.pending,
            "to_store": self.to_store,
            "unfit": self.unfit,
            "largest": self.largest,
            "fed": values_of(fed),
            "intact": are_intact(fed),
        }


def scores(rows: TensorDictBase, sender: int) -> dict[str, torch.Tensor]:
    """Each row's log-reward; some batches cannot be scored."""
    if len(rows) % 7 == 0:
        raise ValueError("seven")
    return {"each": rows["log_reward"]}


def manage(transport: Transport, number: int, n_batches: int) -> dict[str, Any]:
    """Serve for a round, and return what came of it."""
    is_roomy = ROUNDS[number] == "roomy"
    rb = reward_prioritized_buffer(6 * MEAN * n_batches if is_roomy else 500)
    baseline = None if is_roomy else PercentileBaseline()
    manager = ReplayBufferManager(transport, rb, scores, baseline)
    manager.run()
    known = manager.metadata()
    return {
        "rank": MANAGER,
        "held": values_of(rb[:]),
        "intact": are_intact(rb[:]),
        "senders": known["senders"],
        "batches": known["batches"],
        "stored": known["stored"],
    }


def work(transport: Transport, number: int, n_batches: int) -> dict[str, Any]:
    """Send for a round, and return what came of it."""
    sender = Sender(transport, number, n_batches)
    sender.run()
    return sender.report()


def share_managing(transport: Transport, owners: range) -> dict[str, Any]:
    """Be one of several managers for a round, and return what came of it."""
    rb = reward_prioritized_buffer(KEPT)
    manager = ReplayBufferManager(transport, rb, score_each, managers=owners)
    manager.run()
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
        worker.fetch(100)
    assert union is not None
    counts = worker.statistics.to_json()
    return {"sent": sent, "union": values_of(union), "fed": values_of(fed[:]), "counts": counts}


def play(kind: str, folder: str, n_batches: int, rank: int, size: int) -> None:
    """Play all rounds over one transport. Each has its own: making it, ranks wait for others."""
    for number, name in enumerate(ROUNDS):
        if transport := connected(kind, f"{folder}/{name}", rank, 1 + len(WORKERS)):
            with transport:
                found = (manage if rank == MANAGER else work)(transport, number, n_batches)
            Path(folder, f"{kind}-{name}-{rank}.json").write_text(json.dumps(found))
    for n_managers in SHARED:
        owners, name = range(n_managers), f"shared{n_managers}"
        with connected(kind, f"{folder}/{name}", rank, size) as transport:
            if rank in owners:
                found = share_managing(transport, owners)
            else:
                found = send_to_all(transport, owners, -(-n_batches // 3))
        Path(folder, f"{kind}-{name}-{rank}.json").write_text(json.dumps(found))


def connected(kind: str, file: str, rank: int, size: int) -> Transport | None:
    """Return a transport between the first ranks, on these."""
    if kind == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Split(rank < size)
        return MPITransport(comm, timeout=TIMEOUT) if rank < size else None
    return GlooTransport(f"file://{file}", rank, size, timeout=TIMEOUT) if rank < size else None


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
