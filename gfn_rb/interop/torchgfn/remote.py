"""Connection of a process's torchgfn buffers to their manager: one endpoint per process."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from gfn.env import Env
from tensordict import TensorDict, TensorDictBase

from gfn_rb.arguments import require_choice, require_kind
from gfn_rb.errors import ArgumentError, RemoteError
from gfn_rb.remote import BaselineFilter, ManagerQueries, Mode, ReplayBufferWorker, Reply
from gfn_rb.remote.messages import SentBatch
from gfn_rb.remote.options import Payload
from gfn_rb.torchrl_compat import default_store
from gfn_rb.transports import GlooTransport, MPITransport, Transport

PATIENCE = 1800.0  # seconds, those of torch.distributed; torchgfn waits for ever


class Checked:
    """Base class whose options are checked when they are assigned, then as in the constructor."""

    _checks: ClassVar[dict[str, Callable[[str, Any], Any]]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._checks:
            self._checks[name](name, value)
        super().__setattr__(name, value)


class SharedWorker(ReplayBufferWorker):
    """The worker of all buffers of a process: each is given the replies to its own batches.

    Attributes:
        waiting: buffers with items that are not due yet.
    """

    def __init__(self, transport: Transport, manager: int) -> None:
        super().__init__(transport, manager, timeout=PATIENCE)
        self.waiting: set[Any] = set()
        self._inboxes: dict[SentBatch, list[Reply]] = {}  # of unanswered batches
        self._inbox: list[Reply] = []  # of the batch that is being sent

    def send(
        self,
        rows: TensorDict,
        inbox: list[Reply],
        mode: Mode,
        filter: BaselineFilter | None,
        payload: Payload,
    ) -> None:
        """Send rows of one buffer; replies to its batches arrive in ``inbox``, oldest first.

        Raises:
            RemoteError: the manager could not store or score a batch of any buffer.
        """
        self._inbox, self.mode, self.filter, self.payload = inbox, mode, filter, payload
        try:
            self.extend(rows)
        except RemoteError:
            inbox.clear()
            raise

    def _send(
        self, rows: TensorDictBase, store: bool, ready: Collection[int], is_new: bool = True
    ) -> int:
        sent = super()._send(rows, store, ready, is_new)
        for share in self.sent.values():
            self._inboxes.setdefault(share.batch, self._inbox)
        return sent

    def _finish(self, batch: SentBatch) -> None:
        super()._finish(batch)
        if not batch.unanswered:
            self._inboxes.pop(batch, []).extend(self._replies)
            self._replies.clear()


class Endpoint:
    """A process's transport, with its queries to managers and the worker of its buffers."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.queries = ManagerQueries(transport)
        self._worker: tuple[int, SharedWorker] | None = None

    def worker(self, manager: int) -> SharedWorker:
        """Return the worker of the buffers that send to a manager; there is one manager."""
        if self._worker is None:
            self._worker = manager, SharedWorker(self.transport, manager)
        if self._worker[0] != manager:
            raise ArgumentError(
                f"remote_manager_rank must be {self._worker[0]} as long as another buffer of this "
                f"process sends to that manager, got {manager}"
            )
        return self._worker[1]

    def leave(self, manager: int) -> None:
        """Send pending items, and say goodbye to a manager, even if nothing was ever sent."""
        if self._worker is not None and self._worker[0] != manager:
            worker = SharedWorker(self.transport, manager)
        else:
            worker = self.worker(manager)
            for buffer in [*worker.waiting]:
                buffer.send_pending()
            self._worker = None
        worker.connect()
        worker.close(PATIENCE)


_endpoints: dict[str, Endpoint] = {}
_BACKENDS = {"mpi": "mpi", "torch": "gloo", "gloo": "gloo"}


def check_backend(name: str, backend: str) -> None:
    """Raise unless a backend has a known name."""
    require_choice(name, backend, _BACKENDS)


def endpoint(backend: str | None = None) -> Endpoint:
    """Return the endpoint of this process; the first call makes it, and waits for all processes.

    The backend None means that of the first call, or MPI.
    """
    if backend is None:
        backend = next(iter(_endpoints), "mpi")
    check_backend("backend", backend)
    name = _BACKENDS[backend]
    if name not in _endpoints:
        if name == "mpi":
            transport: Transport = MPITransport(timeout=PATIENCE)
        elif not dist.is_initialized():
            transport = GlooTransport(timeout=PATIENCE)
        else:
            ranks = dist.get_rank(), dist.get_world_size()
            transport = GlooTransport(default_store(), *ranks, timeout=PATIENCE)
        atexit.register(transport.close)
        _endpoints[name] = Endpoint(transport)
    return _endpoints[name]


def require_sendable(env: Env) -> None:
    """Raise NotImplementedError unless items can be sent."""
    require_kind("env", env, Env)
    if not isinstance(env.s0, torch.Tensor):
        raise NotImplementedError("states must be tensors to be sent, got graphs")
