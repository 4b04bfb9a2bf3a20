"""Memory, descriptors and threads of long traffic: ``python -m benchmarks.soak``.

    --batches N    how many a worker sends to a manager
    --over WORD    local (two threads of one process) or mpi (two processes)
    --rows N       terminating states in a batch, half of which others have sent before

The worker draws each batch, sends it and takes what it is fed; the manager keeps the best 10,000,
and answers with scores, baseline and feed. What a process uses is noted 21 times, from a tenth of
the batches on. The exit status is 1 if resident memory ever was over 1% above that at the first of
these, or there were more open files or threads.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import tyro
from tensordict import TensorDict, TensorDictBase

from benchmarks import ranks
from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import (
    Baseline,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.transports import LocalTransport, MPITransport, Transport
from gfn_rb.transports.launch import launched

WORKER, MANAGER = 0, 1
NOTES = 20
GROWTH = 0.01  # of resident memory


@dataclass(frozen=True)
class Options:
    """How long, and over what."""

    batches: int = 200_000
    over: Literal["local", "mpi"] = "mpi"
    rows: int = 16


class Used(NamedTuple):
    """What a process uses: resident bytes, open files, threads."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Used:
        """Return it as the kernel tells."""
        process = Path("/proc/self")
        lines = (process / "status").read_text().splitlines()
        told = dict(line.split(":", 1) for line in lines)
        memory, threads = int(told["VmRSS"].split()[0]) * 1024, int(told["Threads"])
        return cls(memory, len([*(process / "fd").iterdir()]), threads)


class Notes:
    """What a process used at each of some moments.

    Args:
        who: to tell of.
        batches: how many there are.
    """

    def __init__(self, who: str, batches: int) -> None:
        self._who, self._start = who, time.monotonic()
        self._first, self._every = batches // 10, max(1, (batches - batches // 10) // NOTES)
        self.used: list[Used] = []

    def __call__(self, done: int) -> None:
        """Note it, if it is time to."""
        if done >= self._first and (done - self._first) % self._every == 0:
            self.used.append(Used.now())

    def is_flat(self) -> bool:
        """Tell what was noted, and whether nothing grew."""
        first, most = self.used[0], Used(*map(max, zip(*self.used, strict=True)))
        growth = most.memory / first.memory - 1
        print(
            f"{self._who}: {first.memory / 1e6:.1f} MB, at most {growth:+.2%}; open files "
            f"{first.files}, at most {most.files}; threads {first.threads}, at most {most.threads};"
            f" {time.monotonic() - self._start:,.0f} s",
            flush=True,
        )
        return growth <= GROWTH and most[1:] <= first[1:]


def states(n: int, draw: torch.Generator) -> TensorDict:
    """Return terminating states, of which half are likely to be known."""
    value = torch.randint(1 << 40, (n,), generator=draw)
    value = torch.where(torch.rand(n, generator=draw) < 0.5, value % 5_000, value)
    reward = (value % 99_991).float() / 1e4
    return TensorDict({"state": torch.stack([value, value >> 3], 1), "log_reward": reward}, [n])


def work(transport: Transport, options: Options) -> bool:
    """Send all batches, and tell whether nothing grew."""
    draw, notes = torch.Generator().manual_seed(0), Notes("worker", options.batches)
    subscription = Subscription(fifo_buffer(5_000), 8, "newest")
    local = fifo_buffer(5_000)
    worker = ReplayBufferWorker(
        transport, MANAGER, local, mode="deferred", subscription=subscription
    )
    with worker:
        for i in range(options.batches):
            worker.extend(states(options.rows, draw))
            worker.take_fed()
            notes(i + 1)
    return notes.is_flat()


def score(rows: TensorDictBase, sender: int) -> dict[str, torch.Tensor]:
    """Return each row's log-reward."""
    return {"each": rows["log_reward"]}


def manage(transport: Transport, options: Options) -> bool:
    """Serve until the worker is done, and tell whether nothing grew."""
    notes = Notes("manager", options.batches)
    rb = reward_prioritized_buffer(10_000, unique="state")
    manager = ReplayBufferManager(transport, rb, score, Baseline(0.1))
    known = 0
    while not manager.finished:
        manager.step(0.2)
        if manager.batches > known:
            known = manager.batches
            notes(known)
    manager.run()  # until the answers have left
    return notes.is_flat()


def locally(options: Options) -> bool:
    """Run both as threads of this process, of which the worker's notes tell."""
    ends = LocalTransport.group(2)
    thread = threading.Thread(target=lambda: manage(ends[MANAGER], options), daemon=True)
    thread.start()
    is_flat = work(ends[WORKER], options)
    thread.join()
    return is_flat


def main() -> int:
    """Run the traffic, and return the exit status."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    if options.over == "local":
        return 0 if locally(options) else 1
    started = launched()
    if started is None:
        return ranks.run(2, ["-m", "benchmarks.soak", *sys.argv[1:]])
    with MPITransport() as transport:
        is_flat = (work if started.rank == WORKER else manage)(transport, options)
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
