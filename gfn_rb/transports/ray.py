"""Messages to managers that are Ray actors, which Ray restarts where they die."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from ray import exceptions

from gfn_rb.errors import ArgumentError, PeerLostError
from gfn_rb.transports.base import (
    MAX_NBYTES,
    TIMEOUT,
    Envelope,
    Part,
    SendHandle,
    Transport,
)
from gfn_rb.transports.local import LocalTransport, joined

T = TypeVar("T")

_RETRY = 0.2  # seconds between calls of an actor that is being restarted


class ManagerActor:
    """A manager in a Ray actor: each call hands it a message, and returns its replies.

    Make an actor of it with ``ray.remote(max_restarts=-1)(ManagerActor)``. Ray then restarts it
    after its process or its machine died, and ``make`` is called again. Open a
    :class:`~gfn_rb.checkpoint.Journal` with ``sync="always"`` there: the manager then has every row
    that it acknowledged.

    Args:
        make: callable that gets the transport of the manager, and returns the manager. Give it
            ``worker_timeout=math.inf``: workers may come at any time.
        rank: rank of the manager.
        size: number of ranks that there may be, managers and all workers that will ever join.
    """

    def __init__(self, make: Callable[[Transport], Any], rank: int, size: int) -> None:
        self._ends = LocalTransport.group(size)
        self._rank, self._manager = rank, make(self._ends[rank])

    def exchange(self, source: int, tag: int, data: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Handle a message of a worker, and return the tags and bytes of the replies to it."""
        end, replies = self._ends[source], []
        end.send([data], self._rank, tag)
        while self._manager.step():
            pass
        while (envelope := end.probe()) is not None:
            replies.append((envelope.tag, end.take(envelope).data))
        return replies

    def metadata(self) -> dict[str, Any]:
        """Return what a query for the manager's metadata returns."""
        found: dict[str, Any] = self._manager.metadata()
        return found


class _Call(NamedTuple):
    """A message that a manager was sent."""

    tag: int
    data: np.ndarray
    reply: Any


class _Sent(SendHandle):
    """Handle of a message that was copied."""

    def done(self) -> bool:
        """Return that its payload may be changed."""
        return True


class RayTransport(Transport):
    """Endpoint of a worker whose managers are Ray actors. It needs the extra ``ray``.

    A worker may be the program itself, a task or an actor, and may join at any time, under a rank
    that no other worker has. Only managers can be sent to. A manager that dies is lost, and back
    once Ray has restarted it: the worker then sends it the rows of its own buffer.

    Args:
        rank: rank of the worker.
        managers: handles of :class:`ManagerActor` actors by rank.
        size: number of ranks that there may be, the same as that of the managers.
        timeout: seconds that calls wait without a timeout of their own.
        max_nbytes: size of the largest message that is sent or received, in bytes, below 2^31.

    Raises:
        ArgumentError: the ranks are not different ones below ``size``.
    """

    def __init__(
        self,
        rank: int,
        managers: Mapping[int, Any],
        size: int,
        timeout: float = TIMEOUT,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        super().__init__(rank, size, timeout, max_nbytes)
        if not managers or not all(0 <= each < size for each in (rank, *managers)):
            ranks = f"rank {rank}, managers {sorted(managers)}"
            raise ArgumentError(f"managers and rank must be below size={size}, got {ranks}")
        if rank in managers:
            raise ArgumentError(f"rank must be that of no manager, got {rank}")
        self._managers = dict(managers)
        self._calls: dict[int, deque[_Call]] = {each: deque() for each in managers}
        self._replies: deque[tuple[Envelope, np.ndarray]] = deque()
        # Managers that cannot be reached, and when each is called again. At first that is no loss:
        # Ray may still start them.
        self._down = dict.fromkeys(managers, 0.0)

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> SendHandle:
        if dest not in self._managers:
            raise ArgumentError(f"dest must be a manager, {sorted(self._managers)}, got {dest}")
        data = joined(parts)
        self._calls[dest].append(_Call(tag, data, self._call(dest, tag, data)))
        return _Sent(self, dest, nbytes)

    def _call(self, dest: int, tag: int, data: np.ndarray) -> Any:
        return self._managers[dest].exchange.remote(self.rank, tag, data)

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        for dest in self._managers if source is None else [source]:
            self._collect(dest)
        for envelope, _ in self._replies:
            if source in (None, envelope.source) and tag in (None, envelope.tag):
                return envelope
        return None

    def _collect(self, dest: int) -> None:
        """Take the replies of a manager that have come, in the order of its messages."""
        calls = self._calls.get(dest, ())
        while calls and ray.wait([calls[0].reply], timeout=0)[0]:
            try:
                replies = ray.get(calls[0].reply)
            except exceptions.RayError as error:
                self._fail(dest, error)
                return
            self._down.pop(dest, None)
            calls.popleft()
            for tag, data in replies:
                data = np.array(data)  # what Ray returns cannot be written to
                self._replies.append((Envelope(dest, tag, data.nbytes), data))

    def _fail(self, dest: int, error: Exception) -> None:
        """Report that a manager is lost, once; until it is back, repeat what it is sent since."""
        calls, now = self._calls[dest], time.monotonic()
        if dest not in self._down:
            # None of them is answered: they went to the process that died.
            calls.clear()
            self._down[dest] = now
            raise PeerLostError(dest, f"its actor has failed: {str(error).splitlines()[0]}")
        if now >= self._down[dest]:
            self._down[dest] = now + _RETRY
            # In the order in which they came; a greeting that is repeated does no harm.
            for i, call in enumerate(calls):
                calls[i] = call._replace(reply=self._call(dest, call.tag, call.data))

    def _take(self, envelope: Envelope) -> np.ndarray:
        for i, (each, data) in enumerate(self._replies):
            if each == envelope:
                del self._replies[i]
                if each.nbytes > self.max_nbytes:
                    raise self._too_large(envelope)
                return data
        raise self._unknown(envelope)

    def _wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        end = time.monotonic() + seconds
        while (result := attempt()) is None and (left := end - time.monotonic()) > 0:
            pending = [calls[0].reply for calls in self._calls.values() if calls]
            slice_ = min(left, _RETRY)
            if pending and not self._down.keys() & {d for d, calls in self._calls.items() if calls}:
                ray.wait(pending, timeout=slice_)
            else:
                time.sleep(min(slice_, 0.01))
        return result

    def _close(self, seconds: float) -> None:
        """Leave the actors, which are those of their owner."""
        self._replies.clear()
