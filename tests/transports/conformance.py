"""Conformance suite of transports: all ranks, any number, call the same checks side by side."""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from gfn_rb.codec.primitives import LazyBuffer
from gfn_rb.errors import (
    ArgumentError,
    PeerLostError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from gfn_rb.transports.base import MAX_TAG, Envelope, Message, SendHandle, Transport

# Also around the size of Gloo's first piece.
SIZES = (0, 1, 63, 64, 4079, 4080, 4081, 40_000, 100_000, 1_500_000)


def run(transport: Transport) -> dict[str, str]:
    """Run all checks up to the first that fails; return the error of each, "" for none."""
    found = {}
    for check in CHECKS:
        try:
            check(transport)
            meet(transport)
            found[check.__name__] = ""
        except Exception:
            found[check.__name__] = traceback.format_exc()
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
    array, words = _content(50_000, 1), np.arange(12, dtype=np.int64).reshape(3, 4)
    late = [LazyBuffer(40_000, lambda: bytes(40_000)), LazyBuffer(3, lambda: b"end")]
    payloads = (
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
    handles = [t.isend([_content(n, i)], _right(t), i % 3) for i, n in enumerate(SIZES)]
    for tag in (2, 9, 0, 1):
        if tag == 9:
            assert t.probe(tag=tag) is None
        else:
            for i in range(tag, len(SIZES), 3):
                assert t.recv(_left(t), tag).data.tobytes() == _content(SIZES[i], i).tobytes()
    _wait(handles)


def check_probe(t: Transport) -> None:
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


def check_a_payload_is_kept_alive_and_shared_with_nobody(t: Transport) -> None:
    content = _content(200_000, 4)
    handle = t.isend([content, *[_content(300_000, 3) for _ in range(3)]], _right(t))
    gc.collect()
    _ = [_content(300_000, i) for i in range(10)]
    message = t.recv(_left(t))
    handle.wait()
    assert handle.done()
    meet(t)
    content.fill(0)
    meet(t)
    expected = _content(200_000, 4).tobytes() + 3 * _content(300_000, 3).tobytes()
    assert message.data.tobytes() == expected


def check_too_large_messages_are_dropped(t: Transport) -> None:
    handles = [t.isend([bytes(60_000)] * 3, _right(t)), t.isend([b"next"], _right(t))]
    limit, t.max_nbytes = t.max_nbytes, 100_000
    # A transport may have read it before the limit was lowered: then it is refused when taken.
    error = _refused(TransportError, lambda: t.recv(_left(t)))
    assert "sent 180000 bytes; expected at most max_nbytes, 100000" in str(error)
    assert t.recv(_left(t)).data.tobytes() == b"next"
    t.max_nbytes = limit
    _wait(handles)


def check_traffic(t: Transport) -> None:
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


CHECKS = (
    check_every_size,
    check_payloads_are_joined,
    check_tags_are_chosen_and_kept_in_order,
    check_probe,
    check_a_payload_is_kept_alive_and_shared_with_nobody,
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


def _refused(kind, call):
    """Return the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def _count(message: Message, seen: Counter[int]) -> None:
    """Check that a message of the traffic is the next one of its sender."""
    source, number, n = message.data[:24].view(np.int64).tolist()
    assert (source, number) == (message.source, seen[source])
    assert message.data[24:].tobytes() == _content(n, number).tobytes()
    seen[source] += 1
