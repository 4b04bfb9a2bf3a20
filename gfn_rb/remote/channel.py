"""Frames over a transport, and checks of the rows that another rank sent."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.buffers.compact import CompactRows
from gfn_rb.codec.frames import decode_frame, encode_frame
from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    PeerLostError,
    ShapeError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    WireError,
)
from gfn_rb.keys import ACTION, CONDITION, IS_BACKWARD, IS_TERMINATING, LENGTH, LOG_REWARD, STATE
from gfn_rb.shapes import Float
from gfn_rb.transports.base import Envelope, SendHandle, Transport
from gfn_rb.writers.rows import check_number, scalar_key


class ReceivedFrame(NamedTuple):
    """A received frame, or the error of one that cannot be read."""

    source: int
    tag: int
    kind: int
    meta: dict[str, Any]
    rows: TensorDictBase | None
    nbytes: int
    error: GfnRbError | None
    """Why it cannot be read; kind, rows and scores then mean nothing."""
    scores: TensorDictBase | None = None
    """Rows besides the items, of another number."""


class FrameChannel:
    """Sends and receives frames, and keeps frames alive that are being sent."""

    def __init__(
        self, transport: Transport, compact: CompactRows | None = None, max_rows: int = 1 << 31
    ) -> None:
        self.transport = transport
        self._compact = compact
        self._max_rows = max_rows
        self._have_form: set[int] = set()
        # By rank and tag: messages of one tag alone are received in order.
        self._in_flight: defaultdict[tuple[int, int], deque[SendHandle]] = defaultdict(deque)

    @property
    def row_form(self) -> str | None:
        """Name of the compact form of items in messages; None if they are sent whole."""
        return None if self._compact is None else repr(self._compact)

    def learn_form(self, rank: int, form: Any) -> None:
        """Send a rank compact items from now on if it has the same form, else whole ones."""
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
        # Frames that have left are released, and MPI moves the others on: it does so in calls
        # alone.
        unsent = self._unsent(dest, tag)
        if rows is not None and dest in self._have_form and self._compact is not None:
            with suppress(GfnRbError):  # rows of another kind than the form's are sent whole
                rows, meta = self._compact.packed(rows), {**(meta or {}), "compact": True}
        transport = self.transport
        frame = encode_frame(kind, rows, meta, transport.secret, scores)
        handle = transport.isend(frame, dest, tag)
        unsent.append(handle)
        return handle

    def receive(
        self, source: int | None = None, tag: int | None = None, timeout: float = 0.0
    ) -> ReceivedFrame | None:
        """Return the next frame of a source and tag, or of any; None if none comes in time."""
        envelope = self.transport.probe(source, tag, timeout)
        return None if envelope is None else self.take(envelope)

    def take(self, envelope: Envelope) -> ReceivedFrame:
        """Receive a frame that a probe has found, even an unreadable one: its sender is known."""
        source, tag, nbytes = envelope
        meta: dict[str, Any] = {}
        try:
            frame = decode_frame(self.transport.take(envelope).data, self.transport.secret)
            meta, rows, scores = frame.meta, frame.rows, frame.scores
            for each in (rows, scores):  # their bytes do not bound rows of no size
                if each is not None and (n := each.batch_size[0]) > self._max_rows:
                    raise WireError(f"it has {n} rows, expected max_rows={self._max_rows} at most")
            if rows is not None and meta.get("compact"):
                rows = self._whole(rows)
        except (PeerLostError, TransportClosedError, TransportTimeoutError):
            raise
        except (WireError, TransportError) as error:  # the latter if it was too large
            return ReceivedFrame(source, tag, 0, meta, None, nbytes, error)
        return ReceivedFrame(source, tag, frame.kind, meta, rows, nbytes, None, scores)

    def _whole(self, rows: TensorDictBase) -> TensorDictBase:
        if self._compact is None:
            raise WireError("rows came compact, expected whole ones: this rank has no form of them")
        try:
            # A few bytes of actions may stand for many of states: the size is computed first.
            self._compact.check_size(rows, self.transport.max_nbytes)
            return self._compact.forward(rows)
        except Exception as error:  # an environment may raise anything for foreign numbers
            raise WireError(f"rows cannot be read as {self.row_form}: {error}") from error

    def in_flight(self, dest: int, tag: int) -> tuple[int, int]:
        """Return number and bytes of the frames of a tag still being sent."""
        handles = self._unsent(dest, tag)
        return len(handles), sum([each.nbytes for each in handles])

    def _unsent(self, dest: int, tag: int) -> deque[SendHandle]:
        """Release frames that have left; return those still being sent, without counting them."""
        # From the oldest on: a transport delivers messages of one tag in their order.
        handles = self._in_flight[dest, tag]
        try:
            while handles and handles[0].done():
                handles.popleft()
        except PeerLostError:  # the next receive raises this error as well
            handles.clear()
        return handles

    def flush(self, timeout: float, exclude: Collection[int] = ()) -> int:
        """Wait until all frames but those to excluded ranks have left; return how many have not."""
        end = time.monotonic() + timeout
        queues = [queue for queue in self._in_flight if queue[0] not in exclude]
        for queue in queues:
            while unsent := self._unsent(*queue):
                try:
                    unsent[0].wait(max(0.0, end - time.monotonic()))
                except TransportTimeoutError:
                    break
                except PeerLostError:
                    unsent.clear()
        return sum(len(self._in_flight[queue]) for queue in queues)


_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
# Of others, PyTorch can make storages that it cannot write to, compare or look into.
_ANY = frozenset({torch.bool, torch.complex64, torch.complex128}) | _INTEGERS | _FLOATS
_DTYPES = {
    LOG_REWARD: _INTEGERS | _FLOATS,
    LENGTH: _INTEGERS,
    **dict.fromkeys((IS_BACKWARD, IS_TERMINATING), frozenset({torch.bool})),
    **dict.fromkeys((STATE, ACTION, CONDITION), _ANY),
}


def check_rows(rows: TensorDictBase, below: float | None = math.inf) -> Float[Tensor, "n"]:
    """Return the log-rewards of rows from another rank, or raise if they cannot be stored."""
    entries = dict(rows.items())
    for name, value in entries.items():
        if type(value) is not Tensor or value.dtype not in _DTYPES.get(name, _ANY):
            _check_dtype(name, value, _DTYPES.get(name))
    state = entries.get(STATE)
    has_steps = ACTION in entries and LENGTH in entries
    if state is not None and has_steps and (state.ndim < 2 or state.shape[1] < 2):
        raise ShapeError(
            f"key {STATE!r} must hold the states of trajectories, two or more, got shape "
            f"{tuple(state.shape[1:])} per item"
        )
    log_reward = scalar_key(rows, LOG_REWARD)
    highest = check_number(log_reward, LOG_REWARD)
    if below is not None and highest >= below:
        n = int((log_reward >= below).sum())
        raise ArgumentError(
            f"key {LOG_REWARD!r} must be below {below}, got up to {highest} in {n} of {len(rows)} "
            "items: nothing was written"
        )
    return log_reward


def _check_dtype(name: str, value: Any, expected: frozenset[torch.dtype] | None) -> None:
    if isinstance(value, TensorDictBase):
        if expected is not None:
            raise ShapeError(f"key {name!r} must be a tensor, got entries {sorted(value.keys())}")
        for key, inner in value.items(True, True):
            _check_dtype(str(key), inner, None)
    elif value.dtype not in (_ANY if expected is None else expected):
        raise ShapeError(
            f"key {name!r} must not be of {value.dtype}, expected one of "
            f"{sorted(map(str, _ANY if expected is None else expected))}"
        )
