"""How buffers of torchgfn's reach their manager: one endpoint for each process."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist
from gfn.containers import Transitions
from gfn.env import Env
from tensordict import TensorDict

from gfn_rb.errors import ArgumentError
from gfn_rb.interop.torchgfn.rows import rows_of
from gfn_rb.remote import ManagerQueries, ReplayBufferWorker, Reply
from gfn_rb.torchrl_compat import default_store
from gfn_rb.transports import GlooTransport, MPITransport, Transport

PATIENCE = 1800.0  # seconds, those of torch.distributed; torchgfn waits for ever


class Endpoint:
    """Where a process stands among those that send to managers and those that manage.

    Args:
        transport: between them.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.queries = ManagerQueries(transport)
        self._worker: tuple[int, ReplayBufferWorker] | None = None

    def worker(self, manager: int, **options: Any) -> ReplayBufferWorker:
        """Return the worker of a buffer; one buffer at a time has one.

        Args:
            manager: its rank.
            **options: of :class:`~gfn_rb.remote.ReplayBufferWorker`.

        Raises:
            ArgumentError: another buffer has not left its manager, or an option breaks its rule.
        """
        if self._worker is not None:
            raise ArgumentError(
                f"remote_manager_rank must be None while another buffer of this process sends to "
                f"manager {self._worker[0]}, got {manager}"
            )
        worker = ReplayBufferWorker(self.transport, manager, timeout=PATIENCE, **options)
        self._worker = manager, worker
        return worker

    def leave(self, manager: int) -> None:
        """Send what is pending, and say goodbye to a manager, even if nothing was ever sent.

        Raises:
            TransportTimeoutError, PeerLostError, RemoteError: see
                :class:`~gfn_rb.remote.ReplayBufferWorker`.
        """
        if self._worker is not None and self._worker[0] == manager:
            worker, self._worker = self._worker[1], None
        else:
            worker = ReplayBufferWorker(self.transport, manager, timeout=PATIENCE)
        worker.connect()
        worker.close(PATIENCE)


_endpoints: dict[str, Endpoint] = {}


def endpoint(backend: str | None = None) -> Endpoint:
    """Return the endpoint of this process. The first call makes it, and waits for all processes.

    Args:
        backend: ``"mpi"``; or ``"torch"``, likewise ``"gloo"``: Gloo, between the processes of
            torch.distributed. None for that of the first call, which is then ``"mpi"``.

    Raises:
        ArgumentError: another ``backend``.
        TransportError: the processes do not find each other, or the backend is not installed.
    """
    if backend is None:
        backend = next(iter(_endpoints), "mpi")
    name = {"mpi": "mpi", "torch": "gloo", "gloo": "gloo"}.get(backend)
    if name is None:
        raise ArgumentError(
            f"communication_backend must be 'mpi', 'torch' or 'gloo', got {backend!r}"
        )
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
    """Raise unless items of an environment can be sent.

    Args:
        env: of torchgfn's.
        frequency: of how many adds the items are sent together.

    Raises:
        NotImplementedError: states are graphs, or continuous actions are to be joined.
    """
    if not isinstance(env.s0, torch.Tensor):
        raise NotImplementedError("states must be tensors to be sent, got graphs")
    if frequency > 1 and not env.is_discrete:  # whose dummy actions are not what pads ours
        raise NotImplementedError(
            f"remote_buffer_freq must be 1 where actions are continuous, got {frequency}"
        )


def rows_to_send(container: Any, worker: ReplayBufferWorker) -> TensorDict:
    """Return the rows of a container, if they can be sent.

    Args:
        container: torchgfn's ``Trajectories``, ``Transitions`` or ``StatesContainer``.
        worker: that is to send them.

    Raises:
        AssertionError: they are transitions, and are to be filtered or reduced to states.
        ValueError: there are no log-rewards.
    """
    if worker.filter is not None or worker.payload != "items":
        assert not isinstance(container, Transitions), (
            "baseline_filtering and scoring_only support Trajectories or StatesContainer only; "
            "got Transitions"
        )
    if container.log_rewards is None:  # which computes them where they are not yet
        raise ValueError("log_rewards must be defined for prioritized replay.")
    return rows_of(container)


def scores_of(reply: Reply | None) -> dict[str, float] | None:
    """Return what a manager answered as torchgfn does: a number for each score of the batch.

    Args:
        reply: scores of rows in it become their mean; None if there was none.
    """
    if reply is None:
        return None
    scores = {
        name: float(torch.as_tensor(value, dtype=torch.float64).mean())
        for name, value in reply.scores.items()
    }
    return scores if reply.baseline is None else {**scores, "baseline_log_reward": reply.baseline}
