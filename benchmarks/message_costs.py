"""What messages cost managers and workers: ``python -m benchmarks.message_costs``.

    --quick        a smoke run, whose figures mean nothing
    --json PATH    also write the figures to a file

Measured, in CPU time, within one process: what an exchange of n rows takes a worker, and a manager
that stores them in a full buffer, scores nothing, replies and feeds, with as many workers as ever.
A row is a state of 16 int64 and its log-reward; workers are fed 16 rows with each answer. Of three
measurements, the median of each cost counts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.records import measured as measured_now
from benchmarks.workloads import random_items
from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, PROTOCOL, Kind
from gfn_rb.transports import LocalTransport, Transport

RATE, IN_FLIGHT = 640, 8  # rows a second of a worker; frames a manager may leave unanswered
CAPACITY, FED = 10_000, 16  # rows: a manager's, and of a feed
THINKING = 10.0  # seconds between two frames of a worker


@dataclass(frozen=True)
class Costs:
    """CPU seconds that messages take.

    Attributes:
        batch: to make a batch, which is no message.
        worker: per frame, at a worker.
        frame: per frame, at a manager.
        row: further, per row of it.
        subscriber: further, per worker that the manager feeds.
        waiting: per frame of 64 rows of ten workers that are fed, at a manager, where each comes
            by itself.
        together: the same where all ten wait, which are then stored by one call.
    """

    batch: float
    worker: float
    frame: float
    row: float
    subscriber: float
    waiting: float
    together: float

    def served(self, rows: np.ndarray | float, workers: int) -> Any:
        """Return how long a manager takes for a frame, given its rows and how many it feeds."""
        return self.frame + self.row * rows + self.subscriber * workers

    def carried(self, rows: float, interval: float) -> int:
        """Return how many workers keep a manager busy half of the time.

        Args:
            rows: of a frame.
            interval: seconds between the frames of a worker.
        """
        a, b = self.subscriber, self.frame + self.row * rows  # a w^2 + b w = interval / 2
        return int((math.sqrt(b * b + 2 * a * interval) - b) / (2 * a))


def new_manager(transport: Transport, managers: Sequence[int]) -> ReplayBufferManager:
    """Return a manager, one of some ranks, whose buffer is full."""
    rb = reward_prioritized_buffer(CAPACITY)
    rb.extend(random_items(CAPACITY))
    return ReplayBufferManager(transport, rb, managers=managers)


def new_worker(transport: Transport, managers: Sequence[int]) -> ReplayBufferWorker:
    """Return a worker that keeps nothing but what it is fed."""
    fed = Subscription(fifo_buffer(1000), FED, "newest")
    return ReplayBufferWorker(
        transport, managers, mode="nonblocking", in_flight=IN_FLIGHT, subscription=fed
    )


def timed(rows: int, n_workers: int, rounds: int) -> tuple[float, float, float]:
    """Return the mean CPU seconds to make a batch, of a worker's exchange, and of a manager's.

    Args:
        rows: of a batch.
        n_workers: who take turns.
        rounds: exchanges after everybody had one.
    """
    mine, *theirs = LocalTransport.group(n_workers + 1)
    manager, connected = new_manager(mine, [0]), threading.Event()

    def serve() -> None:
        while not connected.is_set():
            manager.step(0.01)

    server = threading.Thread(target=serve)
    server.start()
    workers = [new_worker(transport, [0]) for transport in theirs]
    for worker in workers:
        worker.connect()
    connected.set()
    server.join()
    took = []
    for i in range(n_workers + rounds):
        worker = workers[i % n_workers]
        clock = [time.thread_time()]
        batch = random_items(rows)
        clock.append(time.thread_time())
        worker.extend(batch)
        clock.append(time.thread_time())
        manager.step(1.0)
        clock.append(time.thread_time())
        worker.flush()  # which takes the answer
        clock.append(time.thread_time())
        made, sent, served, taken = np.diff(clock)
        took.append((made, sent + taken, served))
    return tuple(np.mean(took[n_workers:], 0).tolist())


def timed_frames(n_waiting: int, rounds: int, n_workers: int = 10) -> float:
    """Return the least CPU seconds per frame of 64 rows, where so many wait at a time."""
    mine, *theirs = LocalTransport.group(n_workers + 1)
    manager, links = new_manager(mine, [0]), [FrameChannel(each) for each in theirs]
    terms = {"quota": FED, "policy": "newest", "own": False, "fresh": True}
    hello = {"protocol": PROTOCOL, "managers": [0], "subscription": terms}

    def serve() -> None:
        while manager.step():
            pass

    for link in links:
        link.send(0, DATA_TAG, Kind.HELLO, hello)
    serve()
    took = []
    for i in range(rounds):
        start, spent = i * n_workers, 0.0
        for j, link in enumerate(links):
            link.send(0, DATA_TAG, Kind.ITEMS, {"id": start + j}, random_items(64))
            if (j + 1) % n_waiting == 0:
                clock = time.thread_time()
                serve()
                spent += time.thread_time() - clock
        took.append(spent / n_workers)
        for link in links:
            while link.receive(0) is not None:
                pass
    return min(took[rounds // 2 :])


def measured(quick: bool) -> Costs:
    """Return what messages cost, by least squares over sizes of batches and numbers of workers."""
    sizes, crowds = ((1, 64), (2, 8)) if quick else ((1, 64, 640), (4, 128, 1024))
    cases = list(product(sizes, crowds))
    took = np.array([timed(rows, crowd, 20 if quick else 200) for rows, crowd in cases])
    factors = np.array([(1, rows, crowd) for rows, crowd in cases])
    frame, row, subscriber = np.linalg.lstsq(factors, took[:, 2], rcond=None)[0]
    whole = took[[rows == 64 for rows, _ in cases]]
    worker = float(took[:, 1].mean())
    alone, together = (timed_frames(n, 4 if quick else 40) for n in (1, 10))
    return Costs(float(whole[:, 0].mean()), worker, frame, row, subscriber, alone, together)


def typical(quick: bool) -> Costs:
    """Return the median of each cost, of three measurements."""
    found = [astuple(measured(quick)) for _ in range(1 if quick else 3)]
    return Costs(*(median(each) for each in zip(*found, strict=True)))


def report(costs: Costs) -> list[dict[str, float]]:
    """Print what messages cost, and return how many workers a manager carries."""
    print("microseconds: " + ", ".join(f"{k} {1e6 * v:.2f}" for k, v in asdict(costs).items()))
    found = []
    for rows in (64, round(RATE * THINKING)):
        each, n = costs.served(rows, 1000), costs.carried(rows, THINKING)
        found.append({"rows": rows, "seconds": each, "workers": n})
        print(
            f"{rows:,} rows every {THINKING:g} s: {1e3 * each:.2f} ms a frame among 1,000 workers; "
            f"{n:,} workers keep a manager busy half of the time"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description="What messages cost managers and workers.")
    parser.add_argument("--quick", action="store_true", help="smoke run: the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    costs = typical(options.quick)
    carried = report(costs)
    if options.json:
        found = {"measured": measured_now("message_costs"), "quick": options.quick}
        found |= {"costs": asdict(costs), "carried": carried}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
