"""Frames over a transport."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase

from gfn_rb.codec.frames import decode_frame, encode_frame
from gfn_rb.errors import (
    GfnRbError,
    PeerLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    WireError,
)
from gfn_rb.remote.protocol.messages import Kind, remote_error
from gfn_rb.transports.base import Envelope, SendHandle, Transport


class ReceivedFrame(NamedTuple):
    """A frame that came, or what came instead."""

    source: int
    tag: int
    kind: int
    meta: dict[str, Any]
    rows: TensorDict | None
    nbytes: int
    error: GfnRbError | None
    """Why it cannot be read; all but source, tag and size are then meaningless."""

    def checked(self) -> ReceivedFrame:
        """Return the message, unless it cannot be read or tells an error.

        Raises:
            GfnRbError: it cannot be read.
            RemoteError: its sender refuses what it answers.
        """
        if self.error is not None:
            raise self.error
        if self.kind == Kind.ERROR:
            raise remote_error(self.source, self.meta.get("error"))
        return self


class FrameChannel:
    """Sends and receives frames, and keeps what is on its way alive.

    Args:
        transport: which is used by nobody else for the same tags.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._in_flight: defaultdict[int, deque[SendHandle]] = defaultdict(deque)

    def send(
        self,
        dest: int,
        tag: int,
        kind: int,
        meta: dict[str, Any] | None = None,
        rows: TensorDictBase | None = None,
    ) -> int:
        """Send a frame without waiting.

        Args:
            dest: rank of the receiver.
            tag: of the message.
            kind: of the frame.
            meta: what JSON can say.
            rows: batch size [n]; must not change until it has left.

        Returns:
            The size of the frame in bytes.

        Raises:
            ArgumentError: the metadata or the frame are too large.
            ShapeError: the rows cannot be sent.
            PeerLostError: the receiver is known to be gone.
        """
        self.in_flight(dest)  # which releases what has left, and lets MPI move what has not
        handle = self.transport.isend(encode_frame(kind, rows, meta), dest, tag)
        self._in_flight[dest].append(handle)
        return handle.nbytes

    def receive(
        self, source: int | None = None, tag: int | None = None, timeout: float = 0.0
    ) -> ReceivedFrame | None:
        """Return the next frame of a source and tag, or of any, None if none comes in time.

        Raises:
            PeerLostError: the source is gone, or any rank of which this was not said before.
        """
        envelope = self.transport.probe(source, tag, timeout)
        return None if envelope is None else self.take(envelope)

    def take(self, envelope: Envelope) -> ReceivedFrame:
        """Receive a frame that a probe has found."""
        source, tag, nbytes = envelope
        try:
            frame = decode_frame(self.transport.take(envelope).data)
        except WireError as error:  # a message like others: whoever waits must learn who sent it
            return ReceivedFrame(source, tag, 0, {}, None, nbytes, error)
        except (PeerLostError, TransportClosedError, TransportTimeoutError):
            raise
        except TransportError as error:  # too large a message, which was dropped
            return ReceivedFrame(source, tag, 0, {}, None, nbytes, error)
        return ReceivedFrame(source, tag, frame.kind, frame.meta, frame.rows, nbytes, None)

    def in_flight(self, dest: int) -> int:
        """Return how many frames to a rank are still on their way, and release the others."""
        handles = self._in_flight[dest]
        try:
            while handles and handles[0].done():
                handles.popleft()
        except PeerLostError:  # whoever waits for a message is told as well
            handles.clear()
        return len(handles)

    def flush(self, timeout: float, exclude: Collection[int] = ()) -> int:
        """Wait until all frames but those to excluded ranks have left; return how many have not."""
        end = time.monotonic() + timeout
        ranks = [rank for rank in self._in_flight if rank not in exclude]
        for dest in ranks:
            while self.in_flight(dest):
                try:
                    self._in_flight[dest][0].wait(max(0.0, end - time.monotonic()))
                except TransportTimeoutError:
                    break
                except PeerLostError:
                    self._in_flight[dest].clear()
        return sum(len(self._in_flight[rank]) for rank in ranks)
