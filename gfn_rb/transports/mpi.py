"""Messages between processes by MPI, of any kind: mpi4py's buffer protocol, no pickle."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import numpy as np

from gfn_rb.codec.buffers import LazyBuffer
from gfn_rb.errors import (
    ArgumentError,
    TransportError,
    TransportTimeoutError,
)
from gfn_rb.transports.base import (
    MAX_NBYTES,
    TIMEOUT,
    Envelope,
    Part,
    Transport,
    checked_timeout,
    polled,
)
from gfn_rb.transports.bytes import blank
from gfn_rb.transports.launch import is_fault_tolerant
from gfn_rb.transports.segments import PREAMBLE, cut, sizes_after

_GOODBYE = 0  # the MPI tag of an endpoint that closes; others are one more than ours
_HOST_NBYTES = 256
_SELDOM = 8  # how often to look in vain for a message before looking after the peers
_CHUNK = 1 << 24  # longer segments are sent in pieces, so that they can be dropped in little room
_abandoned: list[Any] = []  # what MPI may still read from or write to


class MPITransport(Transport):
    """The endpoint of this process in an MPI communicator.

    Making one is collective: every process of the communicator makes its own, and waits for the
    others without a timeout. Started by ``python -m mpi4py``, a program that fails on one of them
    ends them all. Messages travel in duplicates of the communicator, and never mix with other
    traffic. Whoever waits leaves the processor to others, in growing sleeps of up to 2 ms.

    Large buffers are sent from where they are. Under a fault tolerant MPI (Open MPI: ``mpiexec
    --with-ft ulfm``) the death of a process is noticed, and the others go on; under any other,
    MPI ends the job. A program that begins MPI itself, before its first endpoint, wants ``--mca
    async_mpi_finalize 1`` as well, or may hang at its very end after a death.

    Args:
        comm: an mpi4py intracommunicator; None stands for ``MPI.COMM_WORLD``.
        timeout: how long calls wait that are given no timeout, in seconds.
        max_nbytes: the largest message that is sent or received.

    Raises:
        TransportError: mpi4py or an MPI library are not installed, or MPI refuses.
        ArgumentError: an argument breaks its rule.
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
            raise self.mapped(error) from error
        self._status = self._mpi.Status()
        self._matched: list[tuple[Envelope, np.ndarray, list[int]]] = []
        self._sending: list[MPISend] = []
        self._in_vain = 0

    def host(self, rank: int) -> str | None:
        """Return the name of the machine a rank runs on.

        Args:
            rank: any.
        """
        return self._hosts[rank]

    def look_after_peers(self) -> bool:
        """Note who has closed their endpoint or died, and return whether there is news.

        Raises:
            TransportError: MPI refuses.
        """
        before = len(self._lost)
        try:
            while self._heads.Iprobe(self._mpi.ANY_SOURCE, _GOODBYE, self._status):
                rank = self._status.Get_source()
                self._heads.Recv([bytearray(0), self._mpi.BYTE], rank, _GOODBYE)
                self._lose(rank, "it closed its endpoint")
        except self._mpi.Exception as error:
            if not self._is_failure(error):
                raise self.mapped(error) from error
        self._note_failures()
        return len(self._lost) > before

    def mapped(self, error: Any, rank: int | None = None) -> TransportError:
        """Return this library's error for one of MPI.

        Args:
            error: an ``MPI.Exception``.
            rank: with whom it happened.
        """
        self._note_failures()
        if rank is not None and self._is_failure(error):
            self._lose(rank, "its process died")
        if rank in self._lost:  # of several requests, MPI says only that one went wrong
            return self._lost[rank]
        return TransportError(f"MPI refuses on rank {self.rank}: {error.Get_error_string()}")

    def _isend(self, parts: list[Part], nbytes: int, dest: int, tag: int) -> MPISend:
        head, segments = cut(parts, nbytes)
        send = MPISend(self, dest, nbytes)
        self._sending = [other for other in self._sending if other.pending]
        self._sending.append(send)
        send.begin(self._heads, memoryview(head), tag + 1)
        for part in segments:
            content = memoryview(part.make()) if isinstance(part, LazyBuffer) else part
            for start, end in _chunks(0, len(content)):
                send.begin(self._bodies, content[start:end], tag + 1)
        return send

    def _poll(self, source: int | None, tag: int | None) -> Envelope | None:
        for envelope, _, _ in self._matched:
            if source in (None, envelope.source) and tag in (None, envelope.tag):
                return envelope
        found = self._match(source, tag)
        if found is None:
            self._in_vain += 1
            # What a peer sent before it was gone has arrived by the time that this is known.
            if self._in_vain % _SELDOM == 0 and self.look_after_peers():
                found = self._match(source, tag)
        return found

    def _match(self, source: int | None, tag: int | None) -> Envelope | None:
        """Receive the head of the first message that matches."""
        mpi = self._mpi
        rank = mpi.ANY_SOURCE if source is None else source
        mpi_tag = mpi.ANY_TAG if tag is None else tag + 1
        try:
            message = self._heads.Improbe(rank, mpi_tag, self._status)
            if message is None:
                return None
            came_from, came_as = self._status.Get_source(), self._status.Get_tag()
            head = blank(self._status.Get_count(mpi.BYTE))
            message.Recv([head, mpi.BYTE])
        except mpi.Exception as error:
            if not self._is_failure(error):
                raise self.mapped(error) from error
            self._note_failures()
            return None
        if came_as == _GOODBYE:
            self._lose(came_from, "it closed its endpoint")
            return self._match(source, tag)
        nbytes, sizes = sizes_after(head.data, came_from)
        envelope = Envelope(came_from, came_as - 1, nbytes)
        self._matched.append((envelope, head, sizes))
        return envelope

    def _take(self, envelope: Envelope) -> np.ndarray:
        index = next((i for i, each in enumerate(self._matched) if each[0] == envelope), None)
        if index is None:
            raise self._not_here(envelope)
        _, head, sizes = self._matched.pop(index)
        inline = head[PREAMBLE.size :]
        if envelope.nbytes > self.max_nbytes:
            self._drop(envelope, sizes)
            raise self._too_large(envelope.source, envelope.nbytes)
        return self._joined(envelope, inline, sizes) if sizes else inline

    def _joined(self, envelope: Envelope, inline: np.ndarray, sizes: list[int]) -> np.ndarray:
        data = blank(envelope.nbytes)
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
            self._await(envelope, requests)
        except BaseException:
            _abandoned.append((requests, places))
            raise

    def _await(self, envelope: Envelope, requests: list[Any]) -> None:
        try:
            if polled(lambda: self._arrived(requests), self.timeout) is None:
                raise TransportTimeoutError(
                    f"rank {envelope.source} began a message of {envelope.nbytes} bytes and did "
                    f"not finish it within {self.timeout:g} s"
                )
        except self._mpi.Exception as error:
            raise self.mapped(error, envelope.source) from error

    def _arrived(self, requests: list[Any]) -> bool | None:
        return self._mpi.Request.Testall(requests) or None

    def _drop(self, envelope: Envelope, sizes: list[int]) -> None:
        """Take a message off the line without room for it."""
        scratch = blank(min(max(sizes, default=0), _CHUNK)).data
        for size in sizes:
            for start, end in _chunks(0, size):
                self._receive(envelope, [scratch[: end - start]])

    def _note_failures(self) -> None:
        """Learn from MPI which processes have died, and let it go on without them."""
        try:
            failed = self._heads.Get_failed()
        except (NotImplementedError, self._mpi.Exception):
            return  # an MPI without fault tolerance
        if failed.Get_size() > len(self._lost):
            group = self._heads.Get_group()
            ranks = failed.Translate_ranks(None, group)
            for rank in ranks:
                self._lose(rank, "its process died")
            for comm in (self._heads, self._bodies):
                comm.Ack_failed()

    def _is_failure(self, error: Any) -> bool:
        names = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
        return error.Get_error_class() in {getattr(self._mpi, name, None) for name in names}

    def _close(self, seconds: float) -> None:
        stuck = self._drain(seconds)
        for rank in set(range(self.size)) - {self.rank} - self.lost:
            goodbye = MPISend(self, rank, 0)
            try:
                goodbye.begin(self._heads, memoryview(b""), _GOODBYE)
            except TransportError:
                continue  # gone as well
            _abandoned.append(goodbye)
        if stuck:
            _abandoned.extend(stuck)
            raise TransportTimeoutError(
                f"rank {self.rank} closed its endpoint with {len(stuck)} messages on their way, "
                f"which their receivers did not take within {seconds:g} s"
            )

    def _drain(self, seconds: float) -> list[MPISend]:
        """Return the messages that did not leave in time; those to lost ranks do not count."""

        def emptied() -> bool | None:
            self._sending = [send for send in self._sending if send.on_its_way()]
            return not self._sending or None

        polled(emptied, seconds)
        return self._sending


class MPISend:
    """A message on its way.

    Args:
        transport: of the sender.
        dest: rank of the receiver.
        nbytes: of the message.
    """

    def __init__(self, transport: MPITransport, dest: int, nbytes: int) -> None:
        self.pending = True
        self.nbytes = nbytes
        self._error: TransportError | None = None
        self._transport = transport
        self._dest = dest
        self._requests: list[Any] = []  # each keeps its buffer alive
        self._in_vain = 0

    def begin(self, comm: Any, content: memoryview, mpi_tag: int) -> None:
        """Begin to send a piece of it.

        Args:
            comm: the communicator to send it in.
            content: the bytes.
            mpi_tag: of MPI.

        Raises:
            PeerLostError: the receiver is gone.
            TransportError: MPI refuses.
        """
        mpi = self._transport._mpi
        try:
            self._requests.append(comm.Isend([content, mpi.BYTE], self._dest, mpi_tag))
        except mpi.Exception as error:
            raise self._given_up(self._transport.mapped(error, self._dest)) from error

    def done(self) -> bool:
        """Return whether the payload may be changed.

        Raises:
            PeerLostError: the receiver is gone.
        """
        if self._error is not None:
            raise self._error
        if self.pending:
            self._test()
        if self.pending and self._dest in self._transport._lost:
            raise self._given_up(self._transport._lost[self._dest])
        return not self.pending

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the payload may be changed.

        Args:
            timeout: in seconds; None stands for that of the transport.

        Raises:
            TransportTimeoutError: it may not yet. The message stays on its way.
            PeerLostError: the receiver is gone.
        """
        seconds = self._transport.timeout if timeout is None else checked_timeout(timeout)
        if polled(lambda: self.done() or None, seconds) is None:
            raise TransportTimeoutError(
                f"rank {self._dest} did not take a message of {self.nbytes} bytes within "
                f"{seconds:g} s"
            )

    def on_its_way(self) -> bool:
        """Return whether it may still arrive."""
        try:
            return not self.done()
        except TransportError:
            return False

    def _test(self) -> None:
        mpi = self._transport._mpi
        try:
            self.pending = not mpi.Request.Testall(self._requests)
        except mpi.Exception as error:
            raise self._given_up(self._transport.mapped(error, self._dest)) from error
        self._in_vain += 1
        if self.pending and self._in_vain % _SELDOM == 0:
            self._transport.look_after_peers()

    def _given_up(self, error: TransportError) -> TransportError:
        """Let go of it, and return why, which is told from now on."""
        self.pending, self._error = False, error
        _abandoned.append(self._requests)
        return error


def _mpi() -> ModuleType:
    if is_fault_tolerant():
        # Read when MPI begins. Without it, finalizing waits for all processes in a fence, which now
        # and then never ends once one of them has died.
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            "MPITransport needs mpi4py and an MPI library: pip install '.[mpi]' in a clone of "
            f"gfn_rb; importing mpi4py.MPI says: {error}"
        ) from error
    return MPI


def _chunks(start: int, end: int) -> list[tuple[int, int]]:
    return [(i, min(i + _CHUNK, end)) for i in range(start, end, _CHUNK)]


def _hosts(mpi: ModuleType, comm: Any) -> list[str]:
    """Return the name of every rank's machine."""
    own = mpi.Get_processor_name().encode()[:_HOST_NBYTES].ljust(_HOST_NBYTES, b"\0")
    names = bytearray(_HOST_NBYTES * comm.Get_size())
    comm.Allgather([own, mpi.BYTE], [names, mpi.BYTE])
    starts = range(0, len(names), _HOST_NBYTES)
    return [names[i : i + _HOST_NBYTES].rstrip(b"\0").decode(errors="replace") for i in starts]
