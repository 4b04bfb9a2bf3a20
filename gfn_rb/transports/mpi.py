"""Messages between processes by MPI, of any kind: mpi4py's buffer protocol, no pickle."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gfn_rb.codec.primitives import LazyBuffer
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
_CHUNK = 1 << 24  # longer segments are sent in pieces, so that they can be dropped in little room
# MPI may still read from or write to buffers of abandoned requests: they must outlive it.
_abandoned: list[Any] = []

# The first piece of a message: bytes of the message and of each later segment, then first bytes.
WHOLE = 1 << 18  # messages up to here are sent in one piece: a copy costs less than a second one
SMALL = 1 << 16  # a smaller first part goes with the first piece; others are sent without a copy
MAX_SEGMENTS = 7
PREAMBLE = struct.Struct(f"<{1 + MAX_SEGMENTS}Q")


class MPITransport(Transport):
    """The endpoint of this process in an MPI communicator.

    The constructor is collective: every process of the communicator calls it and waits for the
    others without a timeout. With ``python -m mpi4py``, an exception on one process ends all.
    Messages use duplicates of the communicator and never mix with other traffic. Waits leave the
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
            self._heads, self._bodies = whole.Dup(), whole.Dup()
            for each in (self._heads, self._bodies):
                each.Set_errhandler(self._mpi.ERRORS_RETURN)
            self._hosts = _hosts(self._mpi, self._heads)
        except self._mpi.Exception as error:
            raise self.translated(error) from error
        self._status = self._mpi.Status()
        self._matched: list[tuple[Envelope, np.ndarray, list[int]]] = []
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
            while self._heads.Iprobe(self._mpi.ANY_SOURCE, _GOODBYE, self._status):
                rank = self._status.Get_source()
                self._heads.Recv([bytearray(0), self._mpi.BYTE], rank, _GOODBYE)
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
        head, segments = cut(parts, nbytes)
        send = MPISend(self, dest, nbytes)
        self._sending = [other for other in self._sending if other.pending]
        self._sending.append(send)
        # Only heads are probed for: they tell the sizes of the segments. Segments of two messages
        # are not confused: MPI keeps the order of each source and tag, and no second head of these
        # is matched before the first has been taken with its segments.
        send.start(self._heads, memoryview(head), tag + 1)
        for part in segments:
            content = memoryview(part.make()) if isinstance(part, LazyBuffer) else part
            for start, end in _chunks(0, len(content)):
                send.start(self._bodies, content[start:end], tag + 1)
        return send

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        for matched, _, _ in self._matched:
            if source in (None, matched.source) and tag in (None, matched.tag):
                return matched
        envelope = self._match(source, tag)
        if envelope is None:
            self._empty_polls += 1
            # By the time that a peer is known to be gone, its messages have arrived.
            if self._empty_polls % _SELDOM == 0 and self.check_peers():
                envelope = self._match(source, tag)
        return envelope

    def _match(self, source: int | None, tag: int | None) -> Envelope | None:
        """Receive the head of the first message that matches, and keep it in ``_matched``.

        A matched probe takes the message out of MPI's queue, so that no other can be mistaken for
        it.
        """
        mpi, status = self._mpi, self._status
        rank = mpi.ANY_SOURCE if source is None else source
        mpi_tag = mpi.ANY_TAG if tag is None else tag + 1
        try:
            message = self._heads.Improbe(rank, mpi_tag, status)
            if message is None:
                return None
            came_from, came_as = status.Get_source(), status.Get_tag()
            head = np.empty(status.Get_count(mpi.BYTE), np.uint8)
            message.Recv([head, mpi.BYTE])
        except mpi.Exception as error:
            if not self._is_failure(error):
                raise self.translated(error) from error
            self._record_failures()
            return None
        if came_as == _GOODBYE:
            self._mark_lost(came_from, "it closed its endpoint")
            return self._match(source, tag)
        nbytes, sizes = sizes_after(head.data, came_from)
        envelope = Envelope(came_from, came_as - 1, nbytes)
        self._matched.append((envelope, head, sizes))
        return envelope

    def _take(self, envelope: Envelope) -> np.ndarray:
        found = [each for each in self._matched if each[0] == envelope]
        if not found:
            raise self._unknown(envelope)
        self._matched = [each for each in self._matched if each is not found[0]]
        _, head, sizes = found[0]
        inline = head[PREAMBLE.size :]
        if envelope.nbytes > self.max_nbytes:
            scratch = np.empty(min(max(sizes, default=0), _CHUNK), np.uint8).data
            for size in sizes:  # MPI would keep what is not received
                for start, end in _chunks(0, size):
                    self._receive(envelope, [scratch[: end - start]])
            raise self._too_large(envelope)
        if not sizes:
            return inline
        data = np.empty(envelope.nbytes, np.uint8)
        content, end = data.data, len(inline)
        data[:end] = inline
        places = []
        for size in sizes:
            places += [content[i:j] for i, j in _chunks(end, end + size)]
            end += size
        self._receive(envelope, places)
        return data

    def _receive(self, envelope: Envelope, places: list[memoryview]) -> None:
        mpi, requests = self._mpi, []
        try:
            for place in places:
                buffer = [place, mpi.BYTE]
                requests.append(self._bodies.Irecv(buffer, envelope.source, envelope.tag + 1))
            # Not Waitall, which would hold the processor, and never end if the source dies.
            if polled(lambda: mpi.Request.Testall(requests) or None, self.timeout) is None:
                raise TransportTimeoutError(
                    f"rank {envelope.source} began a message of {envelope.nbytes} bytes and did "
                    f"not finish it within {self.timeout:g} s"
                )
        except BaseException as error:
            _abandoned.append((requests, places))
            if isinstance(error, mpi.Exception):
                raise self.translated(error, envelope.source) from error
            raise

    def _record_failures(self) -> None:
        """Record the processes that died, and acknowledge it: each probe would raise it again."""
        try:
            failed = self._heads.Get_failed()
        except (NotImplementedError, self._mpi.Exception):
            return  # an MPI without fault tolerance
        try:
            if failed.Get_size() > len(self._lost):
                group = self._heads.Get_group()
                try:
                    ranks = failed.Translate_ranks(None, group)
                finally:
                    group.Free()
                for rank in ranks:
                    self._mark_lost(rank, "its process died")
                for comm in (self._heads, self._bodies):
                    comm.Ack_failed()
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
            goodbye = MPISend(self, rank, 0)
            try:
                goodbye.start(self._heads, memoryview(b""), _GOODBYE)
            except TransportError:
                continue  # gone as well
            _abandoned.append(goodbye)
        if stuck:
            _abandoned.extend(stuck)
            raise TransportTimeoutError(
                f"rank {self.rank} closed its endpoint with {len(stuck)} messages on their way, "
                f"which their receivers did not take within {seconds:g} s"
            )


class MPISend(SendHandle):
    """A message that is being sent in pieces; see :class:`SendHandle` for the arguments.

    MPI moves most of a large message only while it is called, by :meth:`done`.
    """

    _transport: MPITransport

    def __init__(self, transport: MPITransport, dest: int, nbytes: int) -> None:
        super().__init__(transport, dest, nbytes)
        self.pending = True
        self._mpi = transport._mpi
        self._error: TransportError | None = None
        self._requests: list[Any] = []  # each keeps its buffer alive
        self._empty_polls = 0

    def start(self, comm: Any, content: memoryview, mpi_tag: int) -> None:
        """Begin to send a piece."""
        try:
            self._requests.append(comm.Isend([content, self._mpi.BYTE], self.dest, mpi_tag))
        except self._mpi.Exception as error:
            raise self._given_up(self._transport.translated(error, self.dest)) from error

    def done(self) -> bool:
        """Return whether the payload may be changed; see :meth:`SendHandle.done`."""
        if self._error is not None:
            raise self._error
        if not self.pending:
            return True
        try:
            self.pending = not self._mpi.Request.Testall(self._requests)
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
        _abandoned.append(self._requests)
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


# Pieces of messages.


def cut(parts: Sequence[Part], nbytes: int) -> tuple[bytes, list[Part]]:
    """Return the first piece of a message, with the sizes of the others, and the others."""
    if nbytes <= WHOLE:
        first, segments = parts, list[Part]()
    else:
        n_inline = int(parts[0].nbytes < SMALL and not isinstance(parts[0], LazyBuffer))
        first, segments = parts[:n_inline], [part for part in parts[n_inline:] if part.nbytes]
    if len(segments) > MAX_SEGMENTS:
        segments = [memoryview(b"".join(map(_made, segments)))]
    sizes = [part.nbytes for part in segments] + [0] * (MAX_SEGMENTS - len(segments))
    return b"".join([PREAMBLE.pack(nbytes, *sizes), *map(_made, first)]), segments


def sizes_after(head: memoryview, source: int) -> tuple[int, list[int]]:
    """Return the sizes in the first piece: of the message, and of each segment to come."""
    if len(head) < PREAMBLE.size:
        raise TransportError(f"rank {source} sent {len(head)} bytes, too few for a preamble")
    nbytes, *sizes = PREAMBLE.unpack_from(head)
    inline = len(head) - PREAMBLE.size
    if inline + sum(sizes) != nbytes:
        raise TransportError(
            f"rank {source} announced {nbytes} bytes, in pieces of {inline} and {sizes}"
        )
    return nbytes, [size for size in sizes if size]


def _made(part: Part) -> bytes | memoryview:
    return part.make() if isinstance(part, LazyBuffer) else part


def _chunks(start: int, end: int) -> list[tuple[int, int]]:
    return [(i, min(i + _CHUNK, end)) for i in range(start, end, _CHUNK)]


def _hosts(mpi: ModuleType, comm: Any) -> list[str]:
    """Return the name of every rank's machine."""
    own = mpi.Get_processor_name().encode()[:_HOST_NBYTES].ljust(_HOST_NBYTES, b"\0")
    names = bytearray(_HOST_NBYTES * comm.Get_size())
    comm.Allgather([own, mpi.BYTE], [names, mpi.BYTE])
    starts = range(0, len(names), _HOST_NBYTES)
    return [names[i : i + _HOST_NBYTES].rstrip(b"\0").decode(errors="replace") for i in starts]
