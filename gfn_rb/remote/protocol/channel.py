"""Frames over a transport."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase

from gfn_rb.buffers.compact import CompactRows
from gfn_rb.codec.frames import MAX_ROWS, decode_frame, encode_frame
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
    rows: TensorDictBase | None
    nbytes: int
    error: GfnRbError | None
    """Why it cannot be read; all but source, tag, size and what metadata there is mean nothing."""
    scores: TensorDictBase | None = None
    """Other rows than the items, and not as many."""

    def checked(self) -> ReceivedFrame:
        """Return the message, unless it cannot be read or tells an error."""
        if self.error is not None:
            raise self.error
        if self.kind == Kind.ERROR:
            raise remote_error(self.source, self.meta.get("error"))
        return self


class FrameChannel:
    """Sends and receives frames, and keeps what is on its way alive."""

    def __init__(
        self,
        transport: Transport,
        compact: CompactRows | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        self.transport = transport
        self._compact = compact
        self._max_rows = max_rows
        self._have_form: set[int] = set()
        self._in_flight: defaultdict[int, deque[SendHandle]] = defaultdict(deque)

    @property
    def row_form(self) -> str | None:
        """Name of the compact form that items travel in, None where they travel whole."""
        return None if self._compact is None else repr(self._compact)

    def learn_form(self, rank: int, form: Any) -> None:
        """Send a rank items in the form of this one from now on if it has the same, else whole."""
        has_it = form is not None and form == self.row_form
        (self._have_form.add if has_it else self._have_form.discard)(rank)

    def send(
        self,
        dest: int,
        tag: int,
        kind: int,
        meta: dict[str, Any] | None = None,
        rows: TensorDictBase | None = None,
        scores: TensorDictBase | None = None,
    ) -> SendHandle:
        """Send a frame without waiting; items must not change until it has left."""
        self.in_flight(dest)  # which releases what has left, and lets MPI move what has not
        if dest in self._have_form:
            rows, meta = self._packed(rows, meta or {})
        if scores is not None:
            rows, meta = _nested(rows, scores), {**(meta or {}), "nested": True}
        handle = self.transport.isend(
            encode_frame(kind, rows, meta, self.transport.secret), dest, tag
        )
        self._in_flight[dest].append(handle)
        return handle

    def receive(
        self, source: int | None = None, tag: int | None = None, timeout: float = 0.0
    ) -> ReceivedFrame | None:
        """Return the next frame of a source and tag, or of any, None if none comes in time."""
        envelope = self.transport.probe(source, tag, timeout)
        return None if envelope is None else self.take(envelope)

    def take(self, envelope: Envelope) -> ReceivedFrame:
        """Receive a frame that a probe has found.

        An unreadable frame is returned too, because the receiver must learn its sender.
        """
        source, tag, nbytes = envelope
        meta: dict[str, Any] = {}
        try:
            data = self.transport.take(envelope).data
            frame = decode_frame(data, self.transport.secret)
            meta, rows, scores = frame.meta, frame.rows, None
            if meta.get("nested"):
                rows, scores = _unnested(rows, "rows"), _unnested(rows, "scores")
            for each in (rows, scores):  # their bytes do not bound rows of no size
                if each is not None and each.batch_size[0] > self._max_rows:
                    raise WireError(
                        f"it has {len(each)} rows, expected max_rows={self._max_rows} at most"
                    )
            if meta.get("compact"):
                rows = self._whole(rows)
        except (PeerLostError, TransportClosedError, TransportTimeoutError):
            raise
        except (WireError, TransportError) as error:  # the latter of one that was too large
            return ReceivedFrame(source, tag, 0, meta, None, nbytes, error)
        return ReceivedFrame(source, tag, frame.kind, meta, rows, nbytes, None, scores)

    def _packed(
        self, rows: TensorDictBase | None, meta: dict[str, Any]
    ) -> tuple[TensorDictBase | None, dict[str, Any]]:
        if rows is None or self._compact is None:
            return rows, meta
        try:
            return self._compact.packed(rows), {**meta, "compact": True}
        except GfnRbError:  # of another kind than is stored here: they travel whole
            return rows, meta

    def _whole(self, rows: TensorDictBase | None) -> TensorDictBase | None:
        if rows is None:
            return None
        if self._compact is None:
            raise WireError("rows came compact, expected whole ones: this rank has no form of them")
        try:
            self._compact.check_size(rows, self.transport.max_nbytes)
            return self._compact.forward(rows)
        except Exception as error:  # of whatever an environment makes of foreign numbers
            raise WireError(f"rows cannot be read as {self.row_form}: {error}") from error

    def in_flight(self, dest: int) -> tuple[int, int]:
        """Return how many frames and bytes are on their way to a rank, and release the others."""
        handles = self._in_flight[dest]
        try:
            while handles and handles[0].done():
                handles.popleft()
        except PeerLostError:  # the next receive raises this error as well
            handles.clear()
        return len(handles), sum([handle.nbytes for handle in handles])

    def flush(self, timeout: float, exclude: Collection[int] = ()) -> int:
        """Wait until all frames but those to excluded ranks have left; return how many have not."""
        end = time.monotonic() + timeout
        ranks = [rank for rank in self._in_flight if rank not in exclude]
        for dest in ranks:
            while self.in_flight(dest)[0]:
                try:
                    self._in_flight[dest][0].wait(max(0.0, end - time.monotonic()))
                except TransportTimeoutError:
                    break
                except PeerLostError:
                    self._in_flight[dest].clear()
        return sum(len(self._in_flight[rank]) for rank in ranks)


def _nested(rows: TensorDictBase | None, scores: TensorDictBase) -> TensorDict:
    """Return items and scores as one row: all tensors of a frame have equally many."""
    groups = {"rows": rows, "scores": scores}
    return TensorDict({k: v.unsqueeze(0) for k, v in groups.items() if v is not None}, [1])


def _unnested(nested: TensorDictBase | None, name: str) -> TensorDictBase | None:
    group = None if nested is None else nested.get(name, None)
    if group is None:
        return None
    if isinstance(group, TensorDictBase) and len(group) == 1:
        rows = group[0].auto_batch_size_(1)
        if rows.ndim == 1:
            return rows
    raise WireError(f"a frame has {name!r} that are no rows, expected a TensorDict of them")
