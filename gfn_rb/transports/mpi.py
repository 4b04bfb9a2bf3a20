"""Messages between processes by MPI, of any kind: mpi4py's buffer protocol, no pickle."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gfn_rb.codec.primitives import Buffer, LazyBuffer
from gfn_rb.errors import ArgumentError, TransportError, TransportTimeoutError
from gfn_rb.transports.base import (
    MAX_NBYTES,
    TIMEOUT,
    Envelope,
    Part,
    SendHandle,
    Transport,
    polled,
)
from gfn_rb.transports.launch import is_fault_tolerant

_GOODBYE = 0  # the MPI tag of an endpoint that closes; others are one more than ours
_HOST_NBYTES = 256
_SELDOM = 8  # polls without success before the peers are checked, which costs more than a poll
_LAST = 1.0  # seconds that the rest of a message of a process that died may take
_COPIED = 1 << 18  # shorter messages are joined: a copy costs less than an MPI datatype
_CHUNK = 1 << 24  # memory for a message that is dropped
# MPI may still read from or write to buffers of abandoned requests: they must outlive it.
_abandoned: list[Any] = []


class MPITransport(Transport):
    """The endpoint of this process in an MPI communicator.

    The constructor is collective: every process of the communicator calls it and waits for the
    others without a timeout. With ``python -m mpi4py``, an exception on one process ends all.
    Messages use a duplicate of the communicator and never mix with other traffic. Waits leave the
    processor to other processes, in growing sleeps of up to 2 ms. Large buffers are sent without a
    copy.

    A fault tolerant MPI (Open MPI: ``mpiexec --with-ft ulfm``) reports the death of a process, and
    the others continue. Any other MPI ends the job. A program that initialises MPI itself, before
    its first endpoint, needs ``--mca async_mpi_finalize 1`` too; otherwise it may hang at its end
    after a death.

    Args:
        comm: mpi4py intracommunicator; None for ``MPI.COMM_WORLD``.
        timeout: seconds that calls wait without a timeout of their own.
        max_nbytes: size of the largest message that is sent or received, in bytes.

    Raises:
        TransportError: mpi4py or an MPI library is missing, or MPI fails.
        ArgumentError: an argument has a value that is not allowed; the message names it.
    """

    def __init__(
        self, comm: Any = None, timeout: float = TIMEOUT, max_nbytes: int = MAX_NBYTES
    ) -> None:
        self._mpi = _mpi()
        whole = self._mpi.COMM_WORLD if comm is None else comm
        if not isinstance(whole, self._mpi.Intracomm):
            raise ArgumentError(f"comm is a {type(whole).__name__}; expected an mpi4py Intracomm")
        super().__init__(whole.Get_rank(), whole.Get_size(), timeout, max_nbytes)
        try:
            self._comm = whole.Dup()
            self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
            self._hosts = _hosts(self._mpi, self._comm)
        except self._mpi.Exception as error:
            raise self.translated(error) from error
        self._status = self._mpi.Status()
        self._matched: list[_Incoming] = []
        self._sending: list[MPISend] = []
        self._empty_polls = 0

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on."""
        return self._hosts[rank]

    def check_peers(self) -> bool:
        """Record ranks that closed their endpoint or died; return whether there are any.

        Raises:
            TransportError: MPI fails.
        """
        before = len(self._lost)
        try:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, _GOODBYE, self._status):
                rank = self._status.Get_source()
                self._comm.Recv([bytearray(0), self._mpi.BYTE], rank, _GOODBYE)
                self._mark_lost(rank, "it closed its endpoint")
        except self._mpi.Exception as error:
            if not self._is_failure(error):
                raise self.translated(error) from error
        self._record_failures()
        return len(self._lost) > before

    def translated(self, error: Any, rank: int | None = None) -> TransportError:
        """Return gfn_rb's error for an ``MPI.Exception`` that concerns a rank."""
        self._record_failures()
        if rank is not None and self._is_failure(error):
            self._mark_lost(rank, "its process died")
        if rank in self._lost:  # of several requests, MPI says only that one went wrong
            return self._lost[rank]
        return TransportError(f"MPI refuses on rank {self.rank}: {error.Get_error_string()}")

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> MPISend:
        content = [part.make() if isinstance(part, LazyBuffer) else part for part in parts]
        if nbytes <= _COPIED:
            content = [b"".join(content)]
        send = MPISend(self, dest, nbytes, content, tag + 1)
        self._sending = [other for other in self._sending if other.pending]
        self._sending.append(send)
        return send

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        envelope = self._first_whole(source, tag)
        if envelope is None and self._match(source, tag):
            envelope = self._first_whole(source, tag)
        if envelope is None:
            self._empty_polls += 1
            # By the time that a peer is known to be gone, its messages have arrived.
            if self._empty_polls % _SELDOM == 0 and self.check_peers():
                self._match(source, tag)
                envelope = self._first_whole(source, tag)
        return envelope

    def _first_whole(self, source: int | None, tag: int | None) -> Envelope | None:
        """Return the first message that matches and has arrived whole, in order per source and tag.

        Nobody waits for the rest of a message but those who want it.
        """
        unfinished = set()
        for each in [*self._matched]:
            came_from, came_as, _ = each.envelope
            is_wanted = source in (None, came_from) and tag in (None, came_as)
            if is_wanted and (came_from, came_as) not in unfinished and self._is_whole(each):
                return each.envelope
            unfinished.add((came_from, came_as))
        return None

    def _is_whole(self, incoming: _Incoming) -> bool:
        """Return whether a message has arrived; drop it if its sender died before."""
        source = incoming.envelope.source
        try:
            if incoming.request.Test():
                return True
        except self._mpi.Exception as error:
            self.translated(error, source)
            incoming.end = 0.0
        if source in self._lost:
            # Its last bytes may be on their way; a message that it had only begun never ends.
            incoming.end = min(incoming.end, time.monotonic() + _LAST)
            if time.monotonic() >= incoming.end:
                self._matched.remove(incoming)
                _abandoned.append(incoming)
        return False

    def _match(self, source: int | None, tag: int | None) -> bool:
        """Begin to receive the first message that matches.

        A matched probe takes the message out of MPI's queue, so that no other can be mistaken for
        it. Receiving goes on in the background: its sender may be busy, and must not delay others.
        """
        mpi, status = self._mpi, self._status
        rank = mpi.ANY_SOURCE if source is None else source
        mpi_tag = mpi.ANY_TAG if tag is None else tag + 1
        try:
            while (message := self._comm.Improbe(rank, mpi_tag, status)) is not None:
                came_from, came_as = status.Get_source(), status.Get_tag() - 1
                envelope = Envelope(came_from, came_as, status.Get_count(mpi.BYTE))
                # MPI keeps what is not received, and Open MPI corrupts its memory where there is
                # less room than content: what is too large is received over and over itself.
                is_kept = envelope.nbytes <= self.max_nbytes
                data = np.empty(envelope.nbytes if is_kept else _CHUNK, np.uint8)
                places = [data.data]
                if not is_kept:
                    starts = range(0, envelope.nbytes, _CHUNK)
                    places = [data.data[: envelope.nbytes - start] for start in starts]
                request = _begun(mpi, message.Irecv, places)
                if came_as + 1 == _GOODBYE:
                    self._mark_lost(came_from, "it closed its endpoint")
                    continue
                self._matched.append(_Incoming(envelope, data, request))
                return True
        except mpi.Exception as error:
            if not self._is_failure(error):
                raise self.translated(error) from error
            self._record_failures()
        return False

    def _take(self, envelope: Envelope) -> np.ndarray:
        found = [each for each in self._matched if each.envelope == envelope]
        if not found:
            raise self._unknown(envelope)
        incoming = found[0]
        self._matched.remove(incoming)
        if envelope.nbytes > self.max_nbytes:
            raise self._too_large(envelope)
        return incoming.data

    def _record_failures(self) -> None:
        """Record the processes that died, and acknowledge it: each probe would raise it again."""
        try:
            failed = self._comm.Get_failed()
        except (NotImplementedError, self._mpi.Exception):
            return  # an MPI without fault tolerance
        try:
            if failed.Get_size() > len(self._lost):
                group = self._comm.Get_group()
                try:
                    ranks = failed.Translate_ranks(None, group)
                finally:
                    group.Free()
                for rank in ranks:
                    self._mark_lost(rank, "its process died")
                self._comm.Ack_failed()
        finally:
            failed.Free()

    def _is_failure(self, error: Any) -> bool:
        names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        return error.Get_error_class() in {getattr(self._mpi, name, None) for name in names}

    def _close(self, seconds: float) -> None:

        def emptied() -> bool | None:
            self._sending = [send for send in self._sending if send.in_flight()]
            return not self._sending or None

        polled(emptied, seconds)
        stuck = self._sending  # those to lost ranks do not count
        for rank in set(range(self.size)) - {self.rank} - self.lost:
            with suppress(TransportError):  # it is gone as well
                _abandoned.append(MPISend(self, rank, 0, [b""], _GOODBYE))
        if stuck:
            _abandoned.extend(stuck)
            raise TransportTimeoutError(
                f"rank {self.rank} closed its endpoint with {len(stuck)} messages on their way, "
                f"which their receivers did not take within {seconds:g} s"
            )


@dataclass(eq=False)
class _Incoming:
    """A message that is being received."""

    envelope: Envelope
    data: np.ndarray  # the message, or scratch memory for one that is too large
    request: Any
    end: float = math.inf  # when to give up, on the clock of time.monotonic


class MPISend(SendHandle):
    """A message that is being sent; see :class:`SendHandle` for the other arguments.

    MPI moves most of a large message only while it is called, by :meth:`done`.

    Args:
        content: buffers, sent one after another.
        mpi_tag: tag of the message for MPI.
    """

    _transport: MPITransport

    def __init__(
        self,
        transport: MPITransport,
        dest: int,
        nbytes: int,
        content: Sequence[Buffer],
        mpi_tag: int,
    ) -> None:
        super().__init__(transport, dest, nbytes)
        self.pending = True
        self._mpi = transport._mpi
        self._error: TransportError | None = None
        self._content = content  # which MPI reads until then
        self._empty_polls = 0
        try:
            self._request = _begun(self._mpi, transport._comm.Isend, content, dest, mpi_tag)
        except self._mpi.Exception as error:
            raise self._given_up(transport.translated(error, dest)) from error

    def done(self) -> bool:
        """Return whether the payload may be changed; see :meth:`SendHandle.done`."""
        if self._error is not None:
            raise self._error
        if not self.pending:
            return True
        try:
            self.pending = not self._request.Test()
        except self._mpi.Exception as error:
            raise self._given_up(self._transport.translated(error, self.dest)) from error
        self._empty_polls += 1
        # A send to a process that closed its endpoint stays pending for ever.
        if self.pending and self._empty_polls % _SELDOM == 0:
            self._transport.check_peers()
        if self.pending and (lost := self._transport.loss_of(self.dest)):
            raise self._given_up(lost)
        return not self.pending

    def in_flight(self) -> bool:
        """Return whether it is still being sent, and may yet leave."""
        try:
            return not self.done()
        except TransportError:
            return False

    def _given_up(self, error: TransportError) -> TransportError:
        """Give the message up, and return the error that is raised from now on."""
        self.pending, self._error = False, error
        _abandoned.append(self)
        return error


def _mpi() -> ModuleType:
    if is_fault_tolerant():
        # Read when MPI begins. Without it, MPI finalizes behind a fence of all processes, which
        # sometimes never ends once one of them has died.
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            "MPITransport needs mpi4py and an MPI library: pip install '.[mpi]' in a clone of "
            f"gfn_rb; importing mpi4py.MPI says: {error}"
        ) from error
    return MPI


def _begun(mpi: ModuleType, start: Callable[..., Any], buffers: Sequence[Buffer], *to: int) -> Any:
    """Return the request of an ``Isend`` or ``Irecv`` of buffers, one after another."""
    if len(buffers) == 1:
        return start([buffers[0], mpi.BYTE], *to)
    buffers = [each for each in buffers if len(each)]
    places = [mpi.Get_address(each) for each in buffers]
    datatype = mpi.BYTE.Create_hindexed([len(each) for each in buffers], places).Commit()
    try:
        return start([mpi.BOTTOM, 1, datatype], *to)
    finally:
        datatype.Free()  # MPI keeps it until the request is complete


def _hosts(mpi: ModuleType, comm: Any) -> list[str]:
    """Return the name of every rank's machine."""
    own = mpi.Get_processor_name().encode()[:_HOST_NBYTES].ljust(_HOST_NBYTES, b"\0")
    names = bytearray(_HOST_NBYTES * comm.Get_size())
    comm.Allgather([own, mpi.BYTE], [names, mpi.BYTE])
    starts = range(0, len(names), _HOST_NBYTES)
    return [names[i : i + _HOST_NBYTES].rstrip(b"\0").decode(errors="replace") for i in starts]
