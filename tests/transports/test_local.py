"""Messages between threads: copied once, taken whole."""

from __future__ import annotations

import pytest

from gfn_rb.errors import ArgumentError, PeerLostError, TransportTimeoutError
from gfn_rb.transports import LocalTransport


@pytest.mark.parametrize("size", [0, -3])
def test_groups_have_members(size: int) -> None:
    with pytest.raises(ArgumentError, match=f"size is {size}; expected 1 or more"):
        LocalTransport.group(size)


def test_a_handle_is_done_when_the_receiver_has_taken_it() -> None:
    a, b = LocalTransport.group(2)
    handle = a.isend([b"x"], 1)
    assert b.probe(0) is not None
    assert not handle.done()
    with pytest.raises(TransportTimeoutError):
        handle.wait(0.0)
    b.recv()
    assert handle.done()


def test_closing_drops_what_was_not_received_and_tells_its_sender() -> None:
    a, b = LocalTransport.group(2)
    handle = a.isend([b"x"], 1)
    b.close()
    with pytest.raises(PeerLostError):
        handle.wait()
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        a.send([b"y"], 1)
    assert len(b._mailbox) == 0
