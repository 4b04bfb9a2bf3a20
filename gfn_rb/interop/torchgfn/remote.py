"""Connection of a process's torchgfn buffers to their manager: one endpoint per process."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist
from gfn.env import Env
from tensordict import TensorDict

from gfn_rb.arguments import require_choice, require_kind
from gfn_rb.errors import ArgumentError
from gfn_rb.remote import BaselineFilter, ManagerQueries, ReplayBufferWorker, Reply
from gfn_rb.remote.worker import Mode
from gfn_rb.torchrl_compat import default_store
from gfn_rb.transports import MPITransport, TCPTransport, Transport
from gfn_rb.transports.launch import launched

PATIENCE = 1800.0  # seconds, those of torch.distributed; torchgfn waits for ever


class SharedWorker(ReplayBufferWorker):
    """The worker of all buffers of a process, which take turns.

    Attributes:
        manager: rank of the manager.
        waiting: buffers with items that are not due yet.
    """

    def __init__(self, transport: Transport, manager: int) -> None:
        super().__init__(transport, manager, timeout=PATIENCE)
        self.manager, self.waiting = manager, set[Any]()
        self._inbox: list[Reply] = []  # of the buffer whose turn it is

    def send(
        self,
        rows: TensorDict,
        inbox: list[Reply],
        mode: Mode,
        filter: BaselineFilter | None,
    ) -> None:
        """Send rows of one buffer; replies to them arrive in ``inbox``, oldest first.

        Another buffer first gets the replies that it still waits for.

        Raises:
            RemoteError: the manager could not store or score a batch of any buffer.
        """
        if inbox is not self._inbox:
            self.drain(PATIENCE)
            self._inbox = inbox
        self.mode, self.filter = mode, filter
        if (reply := self.extend(rows)) is not None:
            inbox.append(reply)

    def drain(self, timeout: float = 30.0) -> list[Reply]:
        """Wait for all replies, which go to the buffer that sent last."""
        self._inbox += super().drain(timeout)
        return self._inbox


class Endpoint:
    """A process's transport, with its queries to managers and the worker of its buffers."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.queries = ManagerQueries(transport)
        self._worker: SharedWorker | None = None

    def worker(self, manager: int) -> SharedWorker:
        """Return the worker of the buffers that send to a manager; there is one manager."""
        if self._worker is None:
            self._worker = SharedWorker(self.transport, manager)
        if self._worker.manager != manager:
            raise ArgumentError(
                f"remote_manager_rank must be {self._worker.manager} as long as another buffer of "
                f"this process sends to that manager, got {manager}"
            )
        return self._worker

    def leave(self, manager: int) -> None:
        """Send pending items, and say goodbye to a manager, even if nothing was ever sent."""
        worker = self.worker(manager)
        for buffer in [*worker.waiting]:
            buffer.send_pending()
        self._worker = None
        worker.connect()
        worker.close(PATIENCE)


_endpoints: dict[str, Endpoint] = {}
BACKENDS = {"mpi": "mpi", "torch": "gloo", "gloo": "gloo"}


def begin(communication_backend: str) -> None:
    """Begin to connect this process by MPI, if mpiexec started it; does not wait for others."""
    started = launched() if BACKENDS[communication_backend] == "mpi" else None
    if started is not None and started.transport == "mpi":
        endpoint("mpi")


def connect(communication_backend: str | None = None) -> None:
    """Begin to connect this process to the others now; does not wait for them.

    The first message of a process waits until every rank has begun. A rank begins when it makes a
    buffer with a manager, or the manager. A rank that waits for another one before that, or makes
    neither, calls this first: otherwise the other rank waits for it in its first ``add``.

    Args:
        communication_backend: that of the buffers and the manager. Default: MPI.

    Raises:
        TransportError: a library is missing, or the connection failed.
    """
    endpoint(communication_backend)


def endpoint(backend: str | None = None) -> Endpoint:
    """Return the endpoint of this process; the first call makes it.

    The backend None means that of the first call, or MPI.
    """
    if backend is None:
        backend = next(iter(_endpoints), "mpi")
    require_choice("backend", backend, BACKENDS)
    name = BACKENDS[backend]
    if name not in _endpoints:
        if name == "mpi":
            transport: Transport = MPITransport(timeout=PATIENCE)
        elif not dist.is_initialized():
            transport = TCPTransport(timeout=PATIENCE)
        else:
            ranks = dist.get_rank(), dist.get_world_size()
            transport = TCPTransport(default_store(), *ranks, timeout=PATIENCE)
        atexit.register(transport.close)
        _endpoints[name] = Endpoint(transport)
    return _endpoints[name]


def require_sendable(env: Env) -> None:
    """Raise NotImplementedError unless items can be sent."""
    require_kind("env", env, Env)
    if not isinstance(env.s0, torch.Tensor):
        raise NotImplementedError("states must be tensors to be sent, got graphs")


def scores_of(replies: list[Reply]) -> dict[str, float] | None:
    """Take replies, and return the newest as torchgfn does: the mean of each score of a batch."""
    if not replies:
        return None
    reply = replies[-1]
    replies.clear()
    scores = {name: float(torch.as_tensor(x).double().mean()) for name, x in reply.scores.items()}
    return scores if reply.baseline is None else {**scores, "baseline_log_reward": reply.baseline}
