"""Messages between processes by MPI, of any kind: mpi4py's buffer protocol, no pickle."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import CLOSED, ArgumentError, TransportError, TransportTimeoutError
from gfn_rb.transports.base import (
    EAGER,
    EAGER_ON_SHARED_CORE,
    MAX_NBYTES,
    TIMEOUT,
    Envelope,
    Part,
    SendHandle,
    Transport,
    polled,
)
from gfn_rb.transports.duplicates import Duplicates
from gfn_rb.transports.launch import is_fault_tolerant

T = TypeVar("T")

_GOODBYE = 0  # the MPI tag of an endpoint that closes; others are one more than ours
_SELDOM = 8  # polls without success before the peers are checked, which costs more than a poll
_LAST = 1.0  # seconds that the rest of a message of a process that died may take
_LONGEST_START = 10.0  # seconds that an endpoint waits for the others when it closes at once
_LONGEST_LOOK = 0.1  # seconds between two looks at a message that count as waiting
_CHUNK = 1 << 24  # longer segments are sent in pieces, so that they can be dropped in little room
# MPI may still read from or write to buffers of abandoned requests: they must outlive it.
_abandoned: list[Any] = []

# The first piece of a message: the number of its bytes, and the first of them.
PREAMBLE = struct.Struct("<Q8x")  # as long as what follows is aligned to
WHOLE = 1 << 18  # messages up to here are sent in one piece: a copy costs less than a second one
SMALL = 1 << 16  # a smaller first part goes with the first piece; others are sent without a copy


class MPITransport(Transport):
    """The endpoint of this process in an MPI communicator.

    Every process of the communicator calls the constructor, in the same order as other collective
    calls of that communicator. The constructor does not wait. The first message waits, with its
    timeout, until all have called it: messages use duplicates of the communicator, so that they
    never mix with other traffic, and MPI makes no communicator without all of its members. Messages
    on the communicator itself would need no duplicate. But ``comm.recv()`` of other code, which
    takes any tag by default, would then take them.

    Until the first message, other code may use blocking collective calls of the communicator, and
    no nonblocking ones such as ``Ibarrier``: Open MPI 5 numbers these together with those of the
    duplication, and ranks then report ``MPI_ERR_TRUNCATE``. Code that needs them passes
    ``comm=MPI.COMM_WORLD.Dup()``.

    With ``python -m mpi4py``, an exception on one process ends all. Waits leave the
    processor to other processes, in growing sleeps of up to 2 ms. They begin after 2 ms, or after
    50 us if a machine has fewer cores than ranks. Large buffers are sent without a
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
            self._duplicates = Duplicates(self._mpi, whole)
        except self._mpi.Exception as error:
            raise self.translated(error) from error
        self._heads, self._bodies = self._duplicates.heads, self._duplicates.bodies
        self._is_connected = False
        self._held: list[tuple[MPISend, Any, memoryview, int]] = []  # pieces until connected
        self._status = self._mpi.Status()
        self._matched: list[_Incoming] = []
        self._refused: set[int] = set()  # ranks whose messages made no sense
        self._sending: list[MPISend] = []
        self._empty_polls = 0

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on, None until it is known."""
        hosts = self._duplicates.hosts
        return (hosts[rank] or None) if hosts else None

    def _hint(self) -> str:
        waits = not self._is_connected and self._duplicates.error is None
        return "; not all ranks have made their MPITransport" if waits else ""

    @property
    def _eager(self) -> float:
        """Seconds of a wait until sleeps begin."""
        return EAGER_ON_SHARED_CORE if self._duplicates.share_cores else EAGER

    def _connected(self) -> bool:
        """Return whether all ranks have made their endpoints; send what was held back till then.

        Raises:
            TransportError: MPI could not duplicate the communicator.
        """
        if not self._is_connected and self._duplicates.ready():
            if self._duplicates.error is not None:
                raise self.translated(self._duplicates.error)
            self._is_connected = True
            held, self._held = self._held, []
            for send, *piece in held:
                with suppress(TransportError):  # which the handle raises
                    send.start(*piece)
        return self._is_connected

    def check_peers(self) -> bool:
        """Record ranks that closed their endpoint or died; return whether there are any.

        Raises:
            TransportError: MPI fails.
        """
        if not self._connected():
            return False
        before = len(self._lost)
        try:
            while self._heads.Iprobe(self._mpi.ANY_SOURCE, _GOODBYE, self._status):
                rank, n = self._status.Get_source(), self._status.Get_count(self._mpi.BYTE)
                # As many bytes as came, though there should be none: MPI refuses others.
                self._heads.Recv([bytearray(n), self._mpi.BYTE], rank, _GOODBYE)
                self._mark_lost(rank, CLOSED)
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
        head, rest = cut(parts, nbytes)
        send = MPISend(self, dest, nbytes)
        self._sending = [other for other in self._sending if other.pending]
        self._sending.append(send)
        # Messages are not confused: MPI keeps the order of each source and tag, and pieces are
        # looked for to complete the oldest message of these alone.
        send.start(self._heads, memoryview(head), tag + 1)
        for part in rest:
            content = memoryview(_made(part))
            for start in range(0, len(content), _CHUNK):
                send.start(self._bodies, content[start : start + _CHUNK], tag + 1)
        return send

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        if not self._connected():
            return None
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
        """Return whether a message has arrived; give up its sender if it never will."""
        source, mpi = incoming.envelope.source, self._mpi
        try:
            while (left := incoming.envelope.nbytes - incoming.end) > 0:
                # Not received blindly: some MPI crash where more comes than there is room for.
                found = self._bodies.Improbe(source, incoming.envelope.tag + 1, self._status)
                if found is None:
                    break
                if not 0 < (came := self._status.Get_count(mpi.BYTE)) <= min(left, _CHUNK):
                    why = f"it sent {came} bytes where {left} of its message were left"
                    return self._give_up(source, why, incoming)
                place = incoming.place(came)
                incoming.requests.append(found.Irecv([place, mpi.BYTE]))
                incoming.end += came
            if left == 0 and mpi.Request.Testall(incoming.requests):
                return True
        except mpi.Exception as error:
            self.translated(error, source)
            why = f"its message cannot be received: {error.Get_error_string()}"
            return self._give_up(source, why, incoming)
        # MPI moves messages only while it is called: a process that was busy has not waited.
        now = time.monotonic()
        incoming.waited += min(now - incoming.looked, _LONGEST_LOOK)
        incoming.looked = now
        if incoming.waited > self.timeout:
            why = (
                f"it began a message of {incoming.envelope.nbytes} bytes and did not finish it "
                f"within {self.timeout:g} s"
            )
            return self._give_up(source, why, incoming)
        if source in self._lost and source not in self._refused and incoming.waited > _LAST:
            return self._give_up(source, "its process died", incoming)
        return False

    def _give_up(self, rank: int, why: str, incoming: _Incoming | None = None) -> bool:
        """Take no message of a rank any more: its next ones could not be told apart."""
        self._refused.add(rank)
        self._mark_lost(rank, why)
        if incoming is not None:
            self._matched.remove(incoming)
            _abandoned.append(incoming)
        return False

    def _match(self, source: int | None, tag: int | None) -> bool:
        """Receive the head of the first message that matches, and begin to receive the rest.

        A matched probe takes the message out of MPI's queue, so that no other can be mistaken for
        it.
        """
        mpi, status = self._mpi, self._status
        rank = mpi.ANY_SOURCE if source is None else source
        mpi_tag = mpi.ANY_TAG if tag is None else tag + 1
        while True:
            try:
                message = self._heads.Improbe(rank, mpi_tag, status)
                if message is None:
                    return False
                came_from, came_as = status.Get_source(), status.Get_tag()
                head = np.empty(status.Get_count(mpi.BYTE), np.uint8)
                message.Recv([head, mpi.BYTE])
            except mpi.Exception as error:
                if not self._is_failure(error):
                    raise self.translated(error) from error
                self._record_failures()
                return False
            if came_as == _GOODBYE:
                self._mark_lost(came_from, CLOSED)
            elif came_from not in self._refused:
                break
        inline = head[PREAMBLE.size :]
        nbytes = PREAMBLE.unpack_from(head.data)[0] if len(head) >= PREAMBLE.size else -1
        if len(inline) > nbytes:
            self._give_up(came_from, f"it began a message with {len(head)} bytes that are none")
            return False
        data, is_kept = inline, nbytes <= self.max_nbytes  # MPI would keep what is not received
        if len(inline) < nbytes:
            data = np.empty(nbytes if is_kept else _CHUNK, np.uint8)
            data[: len(inline)] = inline if is_kept else 0
        envelope = Envelope(came_from, came_as - 1, nbytes)
        self._matched.append(_Incoming(envelope, data, is_kept, len(inline)))
        return True

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
        if not self._is_connected:
            return
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

    def _wait(self, attempt: Callable[[], T | None], seconds: float) -> T | None:
        # A rank that waits on a core that another one needs delays what it waits for.
        return polled(attempt, seconds, self._eager)

    def _is_failure(self, error: Any) -> bool:
        names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        return error.Get_error_class() in {getattr(self._mpi, name, None) for name in names}

    def _close(self, seconds: float) -> None:
        # Others may be about to connect. Those that come later hear nothing of this rank, and MPI
        # may abort a process that ends while its communicators are being made.
        polled(lambda: self._connected() or None, min(seconds, _LONGEST_START))

        def emptied() -> bool | None:
            self._sending = [send for send in self._sending if send.in_flight()]
            return not self._sending or None

        polled(emptied, seconds)
        stuck = self._sending  # those to lost ranks do not count
        others = set(range(self.size)) - {self.rank} - self.lost
        for rank in others if self._is_connected else ():
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


@dataclass(eq=False)
class _Incoming:
    """A message whose head has come."""

    envelope: Envelope
    data: np.ndarray  # the message, or scratch memory for one that is too large
    is_kept: bool
    end: int  # bytes of the message that have begun to come
    requests: list[Any] = field(default_factory=list)
    waited: float = 0.0  # seconds
    looked: float = field(default_factory=time.monotonic)

    def place(self, n: int) -> memoryview:
        """Return where the next n bytes go: side by side, or all over each other."""
        start = self.end if self.is_kept else 0
        return self.data.data[start : start + n]


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
        """Begin to send a piece, or hold it back until all ranks are connected."""
        if not self._transport._connected():
            self._transport._held.append((self, comm, content, mpi_tag))
            return
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
        if not self._transport._connected():
            return False
        if self._error is not None:  # of a piece that was held back
            raise self._error
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


def cut(parts: Sequence[Part], nbytes: int) -> tuple[bytes, Sequence[Part]]:
    """Return the first piece of a message, and the parts that follow it."""
    n_inline = len(parts)
    if nbytes > WHOLE:
        n_inline = int(parts[0].nbytes < SMALL and not isinstance(parts[0], LazyBuffer))
    return b"".join([PREAMBLE.pack(nbytes), *map(_made, parts[:n_inline])]), parts[n_inline:]


def _made(part: Part) -> bytes | memoryview:
    return part.make() if isinstance(part, LazyBuffer) else part
