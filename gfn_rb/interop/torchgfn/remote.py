"""Connection of a process's torchgfn buffers to their manager: one endpoint per process."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist
from gfn.env import Env

from gfn_rb.arguments import require_choice, require_kind
from gfn_rb.errors import ArgumentError
from gfn_rb.remote import ManagerQueries, ReplayBufferWorker
from gfn_rb.torchrl_compat import default_store
from gfn_rb.transports import GlooTransport, MPITransport, Transport

PATIENCE = 1800.0  # seconds, those of torch.distributed; torchgfn waits for ever


class Endpoint:
    """A process's transport, with its queries to managers and the worker of its buffer."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.queries = ManagerQueries(transport)
        self._worker: tuple[int, ReplayBufferWorker] | None = None

    def worker(self, manager: int, **options: Any) -> ReplayBufferWorker:
        """Return a new worker for a buffer that sends to a manager; only one buffer may."""
        if self._worker is not None:
            raise ArgumentError(
                f"remote_manager_rank must be None while another buffer of this process sends to "
                f"manager {self._worker[0]}, got {manager}"
            )
        worker = ReplayBufferWorker(self.transport, manager, timeout=PATIENCE, **options)
        self._worker = manager, worker
        return worker

    def leave(self, manager: int) -> None:
        """Send pending items, and say goodbye to a manager, even if nothing was ever sent."""
        if self._worker is not None and self._worker[0] == manager:
            worker, self._worker = self._worker[1], None
        else:
            worker = ReplayBufferWorker(self.transport, manager, timeout=PATIENCE)
        worker.connect()
        worker.close(PATIENCE)


_endpoints: dict[str, Endpoint] = {}
_BACKENDS = {"mpi": "mpi", "torch": "gloo", "gloo": "gloo"}


def check_backend(backend: str) -> None:
    """Raise unless a backend has a known name."""
    require_choice("communication_backend", backend, _BACKENDS)


def endpoint(backend: str | None = None) -> Endpoint:
    """Return the endpoint of this process; the first call makes it, and waits for all processes.

    The backend None means that of the first call, or MPI.
    """
    if backend is None:
        backend = next(iter(_endpoints), "mpi")
    check_backend(backend)
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


def require_sendable(env: Env, frequency: int = 1) -> None:
    """Raise NotImplementedError unless items can be sent, those of ``frequency`` adds at once."""
    require_kind("env", env, Env)
    if not isinstance(env.s0, torch.Tensor):
        raise NotImplementedError("states must be tensors to be sent, got graphs")
    if frequency > 1 and not env.is_discrete:  # whose dummy actions are not what pads ours
        raise NotImplementedError(
            f"remote_buffer_freq must be 1 where actions are continuous, got {frequency}"
        )
