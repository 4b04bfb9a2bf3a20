"""Ranks against raw MPI and torchgfn's exchange: ``python -m benchmarks.distributed``.

    --parts ...    some of: messages exchange
    --reverb PATH  a Python that has dm-reverb, whose insert is then measured, too
    --quick        a smoke run, whose figures mean nothing
    --json PATH    also write the figures to a file
    --store        keep them in benchmarks/results, for the pages

Starts itself on two ranks under mpiexec where it was not. A worker sends 64 trajectories to a
manager that keeps and scores nothing, and awaits the reply. Its peers move the same content:

compact
    this library, where both ends have the same ``CompactRows``.
raw
    the bytes of the plain rows, by mpi4py's ``Send`` and ``Recv`` between arrays that lie ready,
    and a small answer.
torchgfn
    as its main branch does over MPI: the message of its own ``Trajectories`` of equal content,
    with the environment they refer to, is pickled with dill and copied to a tensor, sent whole,
    probed for its size, received, copied to bytes and unpickled; the scores come back likewise.
dill
    the same with the very TensorDict that this library sends in the place of torchgfn's message.

The bounds are on raw and torchgfn. What is sent is another payload each time, out of twelve: a
program that sends one payload again and again measures its cache. All take turns, round by round;
see :mod:`benchmarks.timing` for how a ratio is made. A turn is ten exchanges in a row, as a ping
is measured; or a single one, which finds the processor's caches full of what its peers left there,
as after a training step. Or, in a stream, a hundred, of which up to eight are unanswered at a time.

In the part "exchange", managers store the rows, and the peer of all is raw TCP: the bytes by a
socket between the ranks, and a small answer. Others are raw MPI, torchgfn as above, Ray (a manager
that is an actor) and dm-reverb's insert; see :mod:`benchmarks.exchange_peers`.
The exit status is 0 whatever the figures.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import exchange_peers, ranks
from benchmarks.timing import Result, conclude, header, options_of, row
from benchmarks.torchgfn import answer, message_of
from gfn_rb import CompactRows, fifo_buffer
from gfn_rb.envs import HyperGrid
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker
from gfn_rb.remote.worker import Mode
from gfn_rb.transports import MPITransport, TCPTransport, Transport
from gfn_rb.transports.launch import launched

WORKER, MANAGER = 0, 1
PARTS = ("messages", "exchange")
N = 64  # trajectories of a batch
PAYLOADS = 12
SIZES = {"0.1 MB": (21, 8), "60 x 16": (60, 16), "0.9 MB": (185, 8), "3.5 MB": (719, 8)}
EXCHANGED = {"3 KB": (1, 1), "0.1 MB": (21, 8), "0.9 MB": (185, 8), "10 MB": (2050, 8)}
IN_A_ROW = 5  # exchanges of a turn, of those that store
STORED = 20  # batches that managers of exchanges have room for
AT_MOST_RAW = {"60 x 16": 1.0, "0.9 MB": 1 / 0.6, "3.5 MB": 1 / 0.6}  # times as long as raw MPI
FASTER = 10  # times as fast as torchgfn, at least
TURNS = (10, 1)  # exchanges in a row
STREAM, UNANSWERED = 100, 8
BLOCKED = 0.05  # of the time awaited
SCORING, TRAINING = 0.01, 0.015  # seconds, where waiting is measured

Act = Callable[[int], object]
Connect = Callable[[], Transport]


def environment(size: str) -> HyperGrid:
    """Return one whose longest trajectories have the steps of a size."""
    steps, width = (SIZES | EXCHANGED)[size]
    return HyperGrid(width, 2 + steps // width)


def trajectories(size: str) -> TensorDict:
    """Return trajectories of a size, steps and numbers of a state."""
    steps, width = (SIZES | EXCHANGED)[size]
    return TensorDict(
        {
            "state": torch.randint(0, environment(size).height, (N, steps + 1, width)),
            "action": torch.randint(0, 9, (N, steps)),
            "length": torch.full((N,), steps),
            "log_reward": torch.randn(N),
            "log_prob": torch.randn(N, steps),
        },
        [N],
    )


class Bench:
    """Both ranks in step.

    Args:
        comm: of mpi4py, for the peers and to keep step.
        rounds: how often each contender runs, warm-up included.
    """

    def __init__(self, comm: Any, rounds: int) -> None:
        self.comm, self.rounds = comm, rounds
        self.rank = comm.Get_rank()

    def interleave(self, contenders: dict[str, Act], turn: int) -> dict[str, list[float]]:
        """Run all in turn, so many times in a row.

        Returns:
            The seconds of one run, for each turn but the first few; those that it returns, if any.
        """
        took: dict[str, list[float]] = {name: [] for name in contenders}
        for start_at in range(0, self.rounds * turn, turn):
            for name, act in contenders.items():
                self._meet()
                start = time.perf_counter()
                told = [act(i) for i in range(start_at, start_at + turn)]
                own = [each for each in told if isinstance(each, float)]
                took[name].append((sum(own) if own else time.perf_counter() - start) / turn)
        return {name: times[self.rounds // 10 :] for name, times in took.items()}

    def _meet(self) -> None:
        """Wait for the other rank, which may measure a peer that needs this core."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)
        self.comm.Barrier()  # both go on at once

    def raw(self, nbytes: int) -> Act:
        """Return a Send of so many bytes, and a small answer."""
        from mpi4py import MPI

        generator = np.random.default_rng(0)
        payloads = [generator.integers(0, 255, nbytes, np.uint8) for _ in range(PAYLOADS)]
        places = [np.empty(nbytes, np.uint8) for _ in range(PAYLOADS)]
        small = np.zeros(64, np.uint8)

        def act(i: int) -> None:
            if self.rank == WORKER:
                self.comm.Send([payloads[i % PAYLOADS], MPI.BYTE], MANAGER)
                self.comm.Recv([small, MPI.BYTE], MANAGER)
            else:
                self.comm.Recv([places[i % PAYLOADS], MPI.BYTE], WORKER)
                self.comm.Send([small, MPI.BYTE], WORKER)

        return act

    def pickled(self, contents: Sequence[Any], answer: Any) -> Act:
        """Return torchgfn's exchange, of whatever is to be pickled."""
        import dill
        from mpi4py import MPI

        status = MPI.Status()

        def send(content: Any, dest: int) -> None:
            self.comm.Send(np.frombuffer(bytearray(dill.dumps(content)), np.uint8), dest)

        def receive(source: int) -> Any:
            self.comm.Probe(source, status=status)
            data = torch.empty(status.Get_count(MPI.BYTE), dtype=torch.uint8)
            self.comm.Recv(data.numpy(), source)
            return dill.loads(bytes(data.numpy()))  # noqa: S301

        def act(i: int) -> None:
            if self.rank == WORKER:
                send(contents[i % PAYLOADS], MANAGER)
                receive(MANAGER)
            else:
                receive(WORKER)
                send(answer, WORKER)

        return act

    @contextmanager
    def exchange(
        self,
        transport: Transport,
        size: str,
        mode: Mode = "awaited",
        score: Callable[..., Any] | None = None,
        compact: bool = False,
        stores: bool = False,
    ) -> Iterator[tuple[Act, ReplayBufferWorker | None]]:
        """Yield this library's exchange, and the worker on its rank."""
        form = CompactRows(environment(size)) if compact else None
        if self.rank == WORKER:
            batches = [trajectories(size) for _ in range(PAYLOADS)]
            worker = ReplayBufferWorker(
                transport,
                MANAGER,
                mode=mode,
                in_flight=UNANSWERED,
                keep=("log_prob",),
                compact=form,
            )
            worker.connect()

            def add(i: int) -> None:
                while worker.unanswered >= UNANSWERED:
                    worker.flush()  # which takes answers
                worker.extend(batches[i % PAYLOADS])

            yield add, worker
            worker.close()
            return
        scoring = {} if score is None else {"score": score}
        rb = fifo_buffer(STORED * N) if stores else None
        manager = ReplayBufferManager(
            transport, rb, workers=[WORKER], compact=form, duplicates="keep", **scoring
        )

        def serve(_: int) -> None:
            served = manager.batches
            while manager.batches == served:
                manager.step(0.2)

        while not manager.step(0.2):  # the greeting
            pass
        yield serve, None
        manager.run()


def compare(bench: Bench, connect: Connect, name: str, size: str) -> list[Result]:
    """Compare the exchange of batches of one size with its peers."""
    batches = [trajectories(size) for _ in range(PAYLOADS)]
    nbytes = sum(value.nbytes for value in batches[0].values())
    with ExitStack() as stack:
        ours, compact = (
            stack.enter_context(
                bench.exchange(stack.enter_context(connect()), size, compact=compact)
            )[0]
            for compact in (False, True)
        )
        contenders = {
            "ours": ours,
            "compact": compact,
            "raw": bench.raw(nbytes),
            "torchgfn": bench.pickled([*map(message_of, batches)], answer()),
            "dill": bench.pickled(batches, {"score": 1.0, "baseline": 0.0}),
        }
        took = {turn: bench.interleave(contenders, turn) for turn in TURNS}
    bounds = {"raw": AT_MOST_RAW.get(size), "torchgfn": 1 / FASTER}
    return [
        Result.of(
            f"{name}, {turn} in a row, against {peer}",
            nbytes,
            took[turn]["ours"],
            took[turn][peer],
            bounds.get(peer) if name == "MPI" else None,
        )
        for turn in TURNS
        for peer in ("compact", "raw", "torchgfn", "dill")
    ]


def stream(bench: Bench, connect: Connect, name: str, size: str, compact: bool) -> Result:
    """Compare exchanges, some of them on their way at a time, with raw MPI's."""
    nbytes = sum(value.nbytes for value in trajectories(size).values())
    with (
        connect() as transport,
        bench.exchange(transport, size, "nonblocking", compact=compact) as (act, _),
    ):
        took = bench.interleave({"ours": act, "raw": bench.raw(nbytes)}, STREAM)
    bound = AT_MOST_RAW.get(size) if name == "MPI" and compact else None
    label = f"{name}, {'compact ' * compact}stream, against raw"
    return Result.of(label, nbytes, took["ours"], took["raw"], bound)


def exchanges(bench: Bench, connects: dict[str, Connect], size: str, reverb: str) -> list[Result]:
    """Compare the exchange of a batch over each transport, and peers, with raw TCP."""
    batches = [trajectories(size) for _ in range(PAYLOADS)]
    nbytes = sum(value.nbytes for value in batches[0].values())
    is_worker, rounds = bench.rank == WORKER, bench.rounds
    bench.rounds = max(10, rounds // (10 if nbytes > 5e6 else 2))
    with ExitStack() as stack:
        contenders = {"raw TCP": stack.enter_context(exchange_peers.raw_tcp(bench.comm, nbytes))}
        for name, connect in connects.items():
            exchange = bench.exchange(stack.enter_context(connect()), size, stores=True)
            contenders[f"gfn_rb over {name}"] = stack.enter_context(exchange)[0]
        contenders["gfn_rb over Ray"] = exchange_peers.nothing
        if is_worker:
            contenders["gfn_rb over Ray"] = stack.enter_context(exchange_peers.over_ray(batches))
        contenders["raw MPI"] = bench.raw(nbytes)
        theirs = bench.pickled([*map(message_of, batches)], answer())
        contenders["torchgfn's messages over MPI"] = theirs
        if reverb:
            contenders["dm-reverb's insert"] = exchange_peers.nothing
        if reverb and is_worker:
            insert = exchange_peers.inserts(reverb, nbytes)
            contenders["dm-reverb's insert"] = stack.enter_context(insert)
        took = bench.interleave(contenders, IN_A_ROW)
    bench.rounds = rounds
    floor = took.pop("raw TCP")
    return [Result.of(name, nbytes, times, floor, None) for name, times in took.items()]


def waiting(bench: Bench, connect: Connect, name: str, size: str) -> Result:
    """Compare how long adds take that never wait, with adds that await a scoring of 10 ms.

    Blocked is the time within ``extend``, all its work included, and not only what the worker
    itself counts as waiting.
    """

    def score(*_: Any) -> dict[str, float]:
        time.sleep(SCORING)
        return {"score": 1.0}

    took: dict[str, list[float]] = {}
    modes: dict[str, Mode] = {"ours": "nonblocking", "awaited": "awaited"}
    for key, mode in modes.items():
        with connect() as transport, bench.exchange(transport, size, mode, score) as (act, worker):
            took[key] = []
            for i in range(bench.rounds):
                start = time.perf_counter()
                act(i)
                took[key].append(time.perf_counter() - start)
                if worker is not None:
                    time.sleep(TRAINING)
            assert worker is None or worker.statistics.skipped == 0, "the manager fell behind"
    bound = BLOCKED if name == "MPI" else None
    nbytes = sum(value.nbytes for value in trajectories(size).values())
    label = f"{name}, not waiting against waiting"
    return Result.of(label, nbytes, took["ours"], took["awaited"], bound)


def measure(options: argparse.Namespace) -> None:
    """Do this rank's part, and print the table on the worker's."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    bench = Bench(comm, 20 if options.quick else 100)
    if bench.rank == WORKER:
        print(header("bytes"))
    parts: dict[str, list[Result]] = {part: [] for part in options.parts}

    def report(part: str, *found: Result) -> None:
        parts[part].extend(found)
        if bench.rank == WORKER:
            print(*map(row, found), sep="\n", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        store, numbers = comm.bcast(f"file://{folder}/store"), count()
        connects: dict[str, Connect] = {
            "MPI": lambda: MPITransport(comm),
            "TCP": lambda: TCPTransport(f"{store}{next(numbers)}", bench.rank, 2),
        }
        for size in EXCHANGED if "exchange" in parts else ():
            report("exchange", *exchanges(bench, connects, size, options.reverb))
        for name, connect in connects.items() if "messages" in parts else ():
            for size in SIZES:
                report("messages", *compare(bench, connect, name, size))
            for compact in (False, True):
                report("messages", stream(bench, connect, name, "60 x 16", compact))
            report("messages", waiting(bench, connect, name, "0.9 MB"))
        comm.Barrier()
    if bench.rank == WORKER:
        options.reverb = bool(options.reverb)
        conclude("distributed", parts, options, {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparisons, under mpiexec.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = options_of("Exchanges between ranks against their peers.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--reverb", default="", metavar="PATH")
    options = parser.parse_args(words)
    started = launched()
    if started is None:
        return ranks.run(2, ["-m", "benchmarks.distributed", *words])
    if started.size != 2:
        parser.error(f"two ranks are needed, got {started.size}: mpiexec -n 2")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
