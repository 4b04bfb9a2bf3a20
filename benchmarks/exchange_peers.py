"""Peers of an exchange of rows: a raw socket, managers on Ray, and dm-reverb.

Each is a context that yields a function, which exchanges one of several batches.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

from gfn_rb import fifo_buffer
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker
from gfn_rb.transports import Transport

Act = Callable[[int], object]
ROOT, STORED = Path(__file__).parents[1], 20
ANSWER = 64  # bytes
PAYLOADS = 12


def nothing(_: int) -> None:
    """Do nothing, on the rank that has no part in an exchange."""


@contextmanager
def raw_tcp(comm: Any, nbytes: int) -> Iterator[Act]:
    """Yield the sending of bytes by a socket from rank 0 to rank 1, and of a small answer.

    Args:
        comm: communicator of mpi4py, of two ranks.
        nbytes: size of a message.
    """
    rank = comm.Get_rank()
    if rank:
        with socket.create_server(("127.0.0.1", 0)) as server:
            comm.bcast(server.getsockname()[1], root=1)
            connected, _ = server.accept()
    else:
        connected = socket.create_connection(("127.0.0.1", comm.bcast(None, root=1)))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    draw = np.random.default_rng(rank)
    payloads = [draw.integers(0, 255, nbytes, np.uint8) for _ in range(PAYLOADS)]
    small = bytearray(ANSWER)

    def act(i: int) -> None:
        payload = memoryview(payloads[i % PAYLOADS])
        if rank:
            receive(connected, payload)
            connected.sendall(small)
        else:
            connected.sendall(payload)
            receive(connected, memoryview(small))

    with connected:
        yield act


def receive(connected: socket.socket, place: memoryview) -> None:
    """Fill a place with what comes."""
    while place:
        place = place[connected.recv_into(place) :]


def manager_of(transport: Transport) -> ReplayBufferManager:
    """Return a manager that stores rows, and drops the oldest."""
    rb = fifo_buffer(STORED * 64)
    return ReplayBufferManager(transport, rb, duplicates="keep", worker_timeout=math.inf)


@contextmanager
def over_ray(batches: Sequence[TensorDict]) -> Iterator[Act]:
    """Yield the exchange of batches with a manager that is a Ray actor of this machine."""
    import ray

    from gfn_rb.transports import ManagerActor, RayTransport

    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    ray.init(num_cpus=1, object_store_memory=500_000_000,
             runtime_env={"env_vars": variables}, **options)  # fmt: skip
    try:
        actor = ray.remote(num_cpus=0)(ManagerActor).remote(manager_of, 0, 2)
        transport = RayTransport(1, {0: actor}, 2)
        with ReplayBufferWorker(transport, 0, mode="awaited", keep=("log_prob",)) as worker:

            def act(i: int) -> None:
                worker.extend(batches[i % len(batches)])

            yield act
    finally:
        ray.shutdown()


@contextmanager
def inserts(python: str, nbytes: int) -> Iterator[Act]:
    """Yield dm-reverb's insert, which returns its own seconds.

    Args:
        python: a Python that has dm-reverb.
        nbytes: size of the rows.
    """
    variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [python, str(ROOT / "benchmarks" / "reverb_peer.py")],
        env=kept | variables, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        if stdout.readline().strip() != "ready":
            raise SystemExit(f"--reverb must be a Python that has dm-reverb, got {python}")

        def act(_: int) -> float:
            stdin.write(f"{nbytes}\n")
            stdin.flush()
            return float(stdout.readline())

        yield act
        stdin.close()
