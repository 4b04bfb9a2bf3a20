"""What each part that grows with the ranks costs: ``python -m benchmarks.many_ranks``.

    --parts ...    some of: calls memory start
    --quick        a smoke run, whose figures mean nothing
    --json PATH    also write the figures to a file
    --store        keep them in benchmarks/results, for the pages

calls
    CPU time of calls at 64, 1,000 and 10,000 ranks. One rank is real; messages of the others are
    put into its mailbox. The peer is the same call at 64 ranks.
memory
    bytes of a manager with 100,000 rows for each row and subscriber, beyond those of a manager
    without subscribers. The bound is 1 byte.
start
    CPU seconds of 64 processes that meet over TCP, exchange a message with a manager and close,
    from the end of their imports on. The bound is 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from benchmarks.timing import Result, conclude, header, options_of, row
from benchmarks.workloads import random_items
from gfn_rb import reward_prioritized_buffer
from gfn_rb.errors import TransportTimeoutError
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, PROTOCOL, Kind
from gfn_rb.training.session.joining import TAG, Star
from gfn_rb.transports import LocalTransport, TCPTransport
from gfn_rb.transports.addresses import Card
from gfn_rb.transports.hub import Hub, line

RANKS = (64, 1_000, 10_000)
CAPACITY, ROWS, FED = 10_000, 64, 16  # rows: of a manager, of a frame, and fed with its reply
MOST_BYTES, MOST_SECONDS, MOST_THREADS = 1.0, 5.0, 3
PATIENCE = 120.0
Times = dict[str, list[float]]
"""CPU seconds of calls, by name of the call."""


class Clock:
    """CPU seconds of calls, by name, of this thread or of the whole process."""

    def __init__(self) -> None:
        self.took: Times = {}

    def __call__(self, name: str, call: Callable[[], Any], *, whole: bool = False) -> Any:
        """Return what a call returns, and note its time."""
        clock = time.process_time if whole else time.thread_time
        start = clock()
        result = call()
        self.took.setdefault(name, []).append(clock() - start)
        return result


# Calls of a manager, and of rank 0.


def hello(fed: bool) -> dict[str, Any]:
    """Return what a worker greets with."""
    terms = {"quota": FED, "policy": "top", "own": False, "fresh": True}
    return {"protocol": PROTOCOL, "managers": [0], "subscription": terms if fed else None}


def manager_calls(n: int, clock: Clock, rounds: int) -> None:
    """Time what a manager does for one of n workers, all of which are connected."""
    mine, *theirs = LocalTransport.group(n)
    rb = reward_prioritized_buffer(CAPACITY)
    rb.extend(random_items(CAPACITY))
    manager = ReplayBufferManager(mine, rb)
    links = [FrameChannel(each) for each in theirs]

    def step() -> None:
        while manager.step():
            pass

    def post(name: str, of: Sequence[FrameChannel], kind: Kind, **message: Any) -> None:
        for link in of:
            link.send(0, DATA_TAG, kind, message.get("meta"), message.get("rows"))
            clock(name, step)
            while link.receive(0) is not None:
                pass

    post("manager: a worker connects", links, Kind.HELLO, meta=hello(False))
    some = links[:: max(1, len(links) // rounds)]
    for _ in range(2):
        for link in some:
            post("manager: a frame of 64 rows", [link], Kind.ITEMS, rows=random_items(ROWS))
    post("manager: a worker connects, to be fed", links, Kind.HELLO, meta=hello(True))
    for name in ("warm-up", "manager: a frame of 64 rows, 16 rows fed"):
        for link in some:
            post(name, [link], Kind.ITEMS, rows=random_items(ROWS))
    for _ in range(3):
        clock("manager: metrics, once per scrape", manager.metrics)
        links[0].send(0, METADATA_TAG, Kind.METADATA)
        clock("manager: metadata, once per query", step)
        links[0].receive(0)
    leaving = links[1::2]
    for link in leaving:
        link.send(0, DATA_TAG, Kind.GOODBYE)
    clock("manager: half of the workers leave", step)
    for link in leaving:
        link.transport.close()
    step()  # the closed endpoints are noticed
    some = links[:: max(2, len(links) // rounds // 2 * 2)]
    for name in ("warm-up", "manager: a frame with feed, half of the ranks are gone"):
        for link in some:
            post(name, [link], Kind.ITEMS, rows=random_items(ROWS))
    del clock.took["warm-up"]


def star_calls(n: int, clock: Clock, rounds: int) -> None:
    """Time rank 0 where n ranks end a step together."""
    mine, *theirs = LocalTransport.group(n)
    star, own = Star(mine, range(n), PATIENCE), FrameChannel(mine)
    others = [FrameChannel(each) for each in theirs]
    gradient = TensorDict({"gradient": torch.zeros(1, 1_000)}, [1])

    def share() -> None:  # as a star does, which waits until all is taken
        for rank in range(1, n):
            own.send(rank, TAG, 1, {"step": 1}, gradient)

    for _ in range(rounds):
        for link in others:
            link.send(0, TAG, 1, {"step": 1}, gradient)
        clock("rank 0: gathers 4 KB of all ranks", star.gather)
        clock("rank 0: shares 4 KB with all ranks", share)
        for link in others:
            assert link.receive(0) is not None


# Calls of TCP endpoints.


def card_of(rank: int) -> Card:
    """Return the card of one of many processes."""
    return Card(rank, f"{rank:032x}", f"node{rank // 64}", f"{rank // 64:036x}/1", ("10.0.0.1",),
                15_000 + rank % 64, False)  # fmt: skip


class Writer:
    """A connection that counts what is written to it."""

    def __init__(self) -> None:
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        """Count bytes."""
        self.nbytes += len(data)

    def is_closing(self) -> bool:
        """Return that it is open."""
        return False

    def close(self) -> None:
        """Do nothing."""

    def get_extra_info(self, name: str) -> tuple[str, int]:
        """Return the address of the peer."""
        return "10.0.0.1", 1


def hub_calls(n: int, clock: Clock) -> float:
    """Time rank 0 while n ranks come to it; return the bytes that it sends to each."""

    async def come() -> float:
        hub = Hub(card_of(0), {*range(n)}, lambda card: None, lambda *told: None)
        writers, served, start = [], [], time.thread_time()
        for rank in range(1, n):
            reader = asyncio.StreamReader()
            reader.feed_data(line(card_of(rank)._asdict()))
            writers.append(Writer())
            served.append(asyncio.ensure_future(hub.serve(rank, reader, writers[-1])))
            await asyncio.sleep(0)
        await asyncio.wait_for(hub.complete.wait(), PATIENCE)
        took = (time.thread_time() - start) / (n - 1)
        clock.took.setdefault("rank 0: a rank comes to its TCP endpoint", []).append(took)
        roster = line(hub._roster())

        def read() -> list[Card]:
            return [Card.of(each) for each in json.loads(roster)["cards"]]

        for _ in range(3):
            clock("rank: reads the addresses of all ranks", read)
        for each in served:
            each.cancel()
        await asyncio.gather(*served, return_exceptions=True)
        return sum(each.nbytes for each in writers) / (n - 1)

    return asyncio.run(come())


def endpoint_calls(n: int, clock: Clock) -> None:
    """Time the endpoint of rank 0 of n ranks, of which no other has come."""
    make = lambda: TCPTransport(dist.HashStore(), 0, n, wait_for=[0])  # noqa: E731
    for _ in range(3):
        endpoint = clock("rank: makes a TCP endpoint", make, whole=True)
        clock("rank: closes a TCP endpoint", endpoint.close, whole=True)


def calls(quick: bool) -> Iterator[Result]:
    """Compare calls at many ranks with the same calls at 64."""
    rounds = 20 if quick else 200
    least: Times = {}
    for n in RANKS[:2] if quick else RANKS:
        clock = Clock()
        manager_calls(n, clock, rounds)
        star_calls(n, clock, 3)
        nbytes = hub_calls(n, clock)
        endpoint_calls(n, clock)
        least = least or clock.took
        for name, took in clock.took.items():
            ours, peer = median(took), median(least[name])
            yield Result.of(name, n, [ours], [peer], None)
        print(f"rank 0 sends {nbytes:,.0f} bytes to each of {n:,} ranks at the start", flush=True)


def value(name: str, n: int, found: float, most: float, is_bound: bool = True) -> Result:
    """Return a row whose columns show a value and its bound instead of times."""
    return Result.of(name, n, [found * 1e-6], [most * 1e-6], 1.0 if is_bound else None)


# Memory.


def manager_bytes(rows: int, subscribers: int) -> int:
    """Return the bytes that a full manager takes beside its buffer, whose workers were fed."""
    rb = reward_prioritized_buffer(rows)
    rb.extend(random_items(rows))
    transports = LocalTransport.group(1 + max(subscribers, 1))
    links = [FrameChannel(each) for each in transports[1:]]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    manager = ReplayBufferManager(transports[0], rb)
    for link in links:
        link.send(0, DATA_TAG, Kind.HELLO, hello(subscribers > 0))
        link.send(0, DATA_TAG, Kind.ITEMS, {"id": 1}, random_items(1))
        while manager.step():
            pass
        answers = [link.receive(0), link.receive(0)]
        fed = answers[1].rows if answers[1] is not None else None
        assert (fed is not None and len(fed) == FED) == (subscribers > 0)
        del answers, fed
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used


def memory(quick: bool) -> Iterator[Result]:
    """Compare the bytes of each row and subscriber with one byte."""
    rows, subscribers = (1_000, 64) if quick else (100_000, 1_000)
    more = manager_bytes(rows, subscribers) - manager_bytes(rows, 0)
    each = more / (rows * subscribers)
    name = f"manager: bytes per row and subscriber, {rows:,} rows"
    yield value(name, subscribers, each, MOST_BYTES)


# Start.


def be_rank(where: str, rank: int, size: int, conn: Any) -> None:
    """Meet all ranks, exchange a message with rank 0, close; report CPU seconds and threads."""
    begun = time.process_time()  # by now, all is imported
    torch.set_num_threads(1)
    with TCPTransport(where, rank, size, timeout=PATIENCE) as here:
        if rank:
            here.send([b"hello"], 0)
            here.recv(0)
        for other in range(1, size) if rank == 0 else ():
            here.recv(other)
        n_threads = len(os.listdir("/proc/self/task"))
        for other in range(1, size) if rank == 0 else ():
            here.send([b"welcome"], other)
        with suppress(TransportTimeoutError):
            here.close()
    conn.send((time.process_time() - begun, n_threads))
    conn.close()


def start_ranks(size: int) -> tuple[float, float, int]:
    """Start processes; return CPU seconds in all, seconds until all ended, most threads of one."""
    context = multiprocessing.get_context("forkserver")
    # All that this module imports, but not the module: it may be run as __main__.
    context.set_forkserver_preload(["benchmarks.timing", "gfn_rb.training.session.joining"])
    idle = context.Process(target=int)  # once it has ended, the server has imported all
    idle.start()
    idle.join()
    with tempfile.TemporaryDirectory() as folder:
        where, begin = f"file://{folder}/store", time.monotonic()
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            context.Process(target=be_rank, args=(where, rank, size, there))
            for rank, (_, there) in enumerate(pipes)
        ]
        try:
            for each in processes:
                each.start()
            for _, there in pipes:
                there.close()
            found = [here.recv() for here, _ in pipes]
            for each in processes:
                each.join(PATIENCE)
        finally:
            for each in processes:
                each.kill()
        took = time.monotonic() - begin
    return sum(cpu for cpu, _ in found), took, max(n for _, n in found)


def start(quick: bool) -> Iterator[Result]:
    """Compare CPU seconds and threads of processes that meet with their bounds."""
    size = 4 if quick else 64
    found = [start_ranks(size) for _ in range(1 if quick else 3)]
    cpu, took, n_threads = (median(each) for each in zip(*found, strict=True))
    yield value("start over TCP: CPU seconds in all", size, cpu, MOST_SECONDS)
    yield value("start over TCP: seconds until all ended", size, took, MOST_SECONDS, False)
    yield value("start over TCP: threads of a rank", size, n_threads, MOST_THREADS)


PARTS: dict[str, Callable[[bool], Iterator[Result]]] = {
    "calls": calls,
    "memory": memory,
    "start": start,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts, print a table, and return the exit code.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = options_of("Parts that grow with the number of ranks.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(header("ranks"))
    found: dict[str, list[Result]] = {}
    for part in options.parts:
        found[part] = []
        for result in PARTS[part](options.quick):
            found[part].append(result)
            print(row(result), flush=True)
    conclude(Path(__file__).stem, found, options, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
