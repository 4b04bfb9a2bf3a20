"""Conformance suite of transports: checks that all ranks run side by side.

Each check is a function of an endpoint. All ranks, any number of them, call the same checks in the
same order: :func:`run` calls them all, :func:`check_close` last.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import (
    ArgumentError,
    PeerLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from gfn_rb.transports.base import MAX_TAG, Envelope, Message, SendHandle, Transport

SIZES = (0, 1, 63, 64, 1000, 5000, 40_000, 100_000, 1_500_000)

E = TypeVar("E", bound=Exception)
Check = Callable[[Transport], None]


def run(transport: Transport) -> dict[str, str]:
    """Run all checks up to the first that fails; return the error of each, "" for none."""
    found = {}
    for check in CHECKS:
        try:
            check(transport)
            meet(transport)
            found[check.__name__] = ""
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = [frame.lineno for frame in frames if frame.filename == __file__][-1]
            told = f"{type(error).__name__} on line {line}: {error}"
            found[check.__name__] = " ".join(told.split())
            break
    with suppress(TransportTimeoutError):
        transport.close(1.0)
    return found


def meet(t: Transport) -> None:
    """Wait until every rank has come here."""
    if t.closed:
        return
    if t.rank:
        t.send([b"here"], 0, MAX_TAG)
        t.recv(0, MAX_TAG)
        return
    for rank in range(1, t.size):
        t.recv(rank, MAX_TAG)
    for rank in range(1, t.size):
        t.send([b"go"], rank, MAX_TAG)


def check_every_size(t: Transport) -> None:
    """Messages of any size arrive, whole, writable and aligned."""
    for nbytes in SIZES:
        content = _content(nbytes, t.rank)
        handle = t.isend([content], _right(t), 1)
        assert handle.nbytes == nbytes
        message = t.recv(_left(t), 1)
        handle.wait()
        assert (message.source, message.tag) == (_left(t), 1)
        assert message.data.dtype == np.uint8
        assert message.data.flags.c_contiguous
        assert message.data.ctypes.data % 16 == 0
        assert message.data.tobytes() == _content(nbytes, _left(t)).tobytes()
        message.data.fill(0)


def check_payloads_are_joined(t: Transport) -> None:
    """Buffers of all kinds arrive one after another, however many."""
    array, words = _content(50_000, 1), np.arange(12, dtype=np.int64).reshape(3, 4)
    late = [LazyBuffer(40_000, lambda: bytes(40_000)), LazyBuffer(3, lambda: b"end")]
    payloads: tuple[list[Any], ...] = (
        [],
        [b""],
        [b"a", bytearray(b"bc"), memoryview(b"d"), words, np.zeros((0, 3))],
        [b"head", array, late[1]],
        [array, b"x", *late, b"y", late[1], array],
        [array[i * 100 :] for i in range(12)],
        [b"many"] * 5_000,
    )
    for payload in payloads:
        expected = b"".join(
            part.make() if isinstance(part, LazyBuffer) else memoryview(part) for part in payload
        )
        handle = t.isend(payload, _right(t))
        assert t.recv(_left(t)).data.tobytes() == expected
        handle.wait()


def check_tags_are_chosen_and_kept_in_order(t: Transport) -> None:
    """Messages of one tag arrive in order, and any tag can be received first."""
    handles = [t.isend([_content(n, i)], _right(t), i % 3) for i, n in enumerate(SIZES)]
    for tag in (2, 9, 0, 1):
        if tag == 9:
            assert t.probe(tag=tag) is None
        else:
            for i in range(tag, len(SIZES), 3):
                assert t.recv(_left(t), tag).data.tobytes() == _content(SIZES[i], i).tobytes()
    _wait(handles)


def check_probe(t: Transport) -> None:
    """Check that a probe returns the next message's envelope, and receives nothing."""
    assert t.probe(tag=5) is None
    assert t.probe(_left(t), 5, timeout=0.01) is None
    meet(t)
    handles = [t.isend([_content(n, 0)], _right(t), 5) for n in (70_000, 7)]
    for n, receive in ((70_000, t.take), (7, lambda envelope: t.recv(*envelope[:2]))):
        envelope = t.probe(tag=5, timeout=t.timeout)
        assert envelope == (_left(t), 5, n)
        assert t.probe(_left(t), 5) == envelope
        assert t.probe(tag=4) is None
        assert receive(envelope).data.tobytes() == _content(n, 0).tobytes()
    _refused(ArgumentError, lambda: t.take(Envelope(_left(t), 5, 7)))  # it was received
    assert t.probe(tag=5) is None
    _wait(handles)


def check_receive_from_any(t: Transport) -> None:
    """Every rank's messages reach one that waits for any, in the order of each."""
    sizes = [(7919 * i * i + 13) % 60_000 for i in range(20)]
    handles = [t.isend([_content(n, t.rank)], 0, i) for i, n in enumerate(sizes)]
    if t.rank == 0:
        seen: Counter[int] = Counter()
        for _ in range(len(sizes) * t.size):
            message = t.recv()
            assert message.tag == seen[message.source]
            n = sizes[message.tag]
            assert message.data.tobytes() == _content(n, message.source).tobytes()
            seen[message.source] += 1
        assert seen == dict.fromkeys(range(t.size), len(sizes))
        handles += [t.isend([b"all came"], rank, 21) for rank in range(t.size)]
    t.recv(0, 21)  # before anything else is sent, which would be received from any as well
    _wait(handles)


def check_timeouts(t: Transport) -> None:
    """Check that a wait without a message ends on time, with an error."""
    for source in (None, _left(t)):
        start = time.monotonic()
        error = _refused(TransportTimeoutError, partial(t.recv, source, 9, 0.05))
        assert "within 0.05 s" in str(error)
        assert 0.04 < time.monotonic() - start < 5.0


def check_bad_arguments(t: Transport) -> None:
    """Check that arguments that are not allowed are refused, and nothing is sent."""
    large = np.zeros(t.max_nbytes // 2 + 1, np.uint8) if t.max_nbytes < 1 << 24 else None
    for wrong in (
        lambda: t.isend([b""], t.size),
        lambda: t.isend([b""], -1),
        lambda: t.isend([b""], 0, -1),
        lambda: t.isend([b""], 0, MAX_TAG + 1),
        lambda: t.isend([np.zeros(10)[::2]], 0),
        lambda: t.isend([LazyBuffer(t.max_nbytes + 1, bytes)], 0),
        lambda: t.isend([b""] if large is None else [large, large], t.size if large is None else 0),
        lambda: t.recv(t.size),
        lambda: t.recv(0, MAX_TAG + 1),
        lambda: t.recv(timeout=-1.0),
        lambda: t.probe(timeout=float("nan")),
    ):
        _refused(ArgumentError, wrong)
    meet(t)
    assert t.probe(tag=0) is None


def check_payload_outlives_its_names(t: Transport) -> None:
    """Check that the transport keeps a payload alive."""
    handle = t.isend([_content(300_000, 3) for _ in range(3)], _right(t))
    gc.collect()
    _ = [_content(300_000, i) for i in range(10)]
    assert t.recv(_left(t)).data.tobytes() == 3 * _content(300_000, 3).tobytes()
    handle.wait()
    assert handle.done()


def check_nothing_is_shared(t: Transport) -> None:
    """Once a send is done, sender and receiver can write without the other seeing it."""
    content = _content(200_000, 4)
    handle = t.isend([content], _right(t))
    message = t.recv(_left(t))
    handle.wait()
    meet(t)
    content.fill(0)
    meet(t)
    assert message.data.tobytes() == _content(200_000, 4).tobytes()


def check_too_large_messages_are_dropped(t: Transport) -> None:
    """Check that a message above the limit is refused, and the next one arrives."""
    handles = [t.isend([bytes(60_000)] * 3, _right(t)), t.isend([b"next"], _right(t))]
    limit, t.max_nbytes = t.max_nbytes, 100_000
    # A transport may have read it before the limit was lowered: then it is refused when taken.
    error = _refused(TransportError, lambda: t.recv(_left(t)))
    assert "sent 180000 bytes; expected at most max_nbytes, 100000" in str(error)
    assert t.recv(_left(t)).data.tobytes() == b"next"
    t.max_nbytes = limit
    _wait(handles)


def check_traffic(t: Transport) -> None:
    """Hundreds of messages of random sizes between all ranks arrive once each, unharmed."""
    draw = np.random.default_rng(t.rank)
    sent, seen, handles = Counter[int](), Counter[int](), []
    for _ in range(300):
        dest = int(draw.integers(t.size))
        n = int(2 ** draw.uniform(0, 17))
        head = np.array([t.rank, sent[dest], n], np.int64)
        handles.append(t.isend([head, _content(n, sent[dest])], dest, 2))
        sent[dest] += 1
        while t.probe(tag=2) is not None:
            _count(t.recv(tag=2), seen)
    totals = [t.isend([np.array([sent[rank]])], rank, 3) for rank in range(t.size)]
    for rank in range(t.size):
        expected = int(t.recv(rank, 3).data.view(np.int64)[0])
        while seen[rank] < expected:
            _count(t.recv(tag=2), seen)
        assert seen[rank] == expected
    _wait(handles + totals)
    meet(t)
    assert t.probe(tag=2) is None


def check_close(t: Transport) -> None:
    """All messages of a rank that closes are received; then it is lost."""
    if t.rank:
        handle = t.isend([_content(200_000, t.rank)], 0)
        t.send([b"last"], 0, 7)
        handle.wait()
    else:
        for rank in range(1, t.size):
            assert t.recv(rank, 7).data.tobytes() == b"last"
            assert t.recv(rank).data.tobytes() == _content(200_000, rank).tobytes()
            assert _refused(PeerLostError, partial(t.recv, rank)).rank == rank
            _refused(PeerLostError, partial(t.isend, [b""], rank))
        told = {_refused(PeerLostError, t.recv).rank for _ in range(1, t.size)}
        assert told == t.lost == set(range(1, t.size))
        _refused(TransportTimeoutError, lambda: t.recv(timeout=0.01))
    t.close()
    t.close()
    assert t.closed
    for wrong in (lambda: t.isend([b""], 0), t.recv, t.probe, lambda: t.take(Envelope(0, 0, 0))):
        _refused(TransportClosedError, wrong)


CHECKS: tuple[Check, ...] = (
    check_every_size,
    check_payloads_are_joined,
    check_tags_are_chosen_and_kept_in_order,
    check_probe,
    check_receive_from_any,
    check_timeouts,
    check_bad_arguments,
    check_payload_outlives_its_names,
    check_nothing_is_shared,
    check_too_large_messages_are_dropped,
    check_traffic,
    check_close,
)


def _right(t: Transport) -> int:
    return (t.rank + 1) % t.size


def _left(t: Transport) -> int:
    return (t.rank - 1) % t.size


def _content(nbytes: int, seed: int) -> np.ndarray:
    """Return bytes that depend on the seed and do not repeat soon."""
    return (np.arange(nbytes, dtype=np.uint32) * 2_654_435_761 + seed >> 13).astype(np.uint8)


def _wait(handles: list[SendHandle]) -> None:
    for handle in handles:
        handle.wait()
        assert handle.done()


def _refused(kind: type[E], call: Callable[[], object]) -> E:
    """Return the error that a call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def _count(message: Message, seen: Counter[int]) -> None:
    """Check that a message of the traffic is the next one of its sender."""
    source, number, n = message.data[:24].view(np.int64).tolist()
    assert (source, number) == (message.source, seen[source])
    assert message.data[24:].tobytes() == _content(n, number).tobytes()
    seen[source] += 1
