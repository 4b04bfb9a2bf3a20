"""Proof of two processes to each other that they know a key, at the start of a connection.

Both send 32 random bytes, and answer with the HMAC-SHA256 of both and of who they are under the
key, which is never sent. The caller ends with one byte, after which both use the connection. What
follows on the connection is neither encrypted nor signed.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

from gfn_rb.errors import TransportError, WireVersionError

HUB = -1  # in place of the called rank: the connection is one to the hub
_NAME = b"gfn_rb tcp"
_MAGIC = _NAME + b"     2"  # with the version, raised by each change of what is sent
_NONCE = 32
_IDENTITY = struct.Struct("<q16sq")
_DEST = struct.Struct("<q")
_PROOF = 32
ANSWER = _IDENTITY.size + _PROOF  # bytes
_AGREED = b"y"


class Identity(NamedTuple):
    """Who is at the other end of a connection.

    Attributes:
        rank: its rank.
        process: identity of the process, as in its :class:`~gfn_rb.transports.addresses.Card`.
        epoch: how often it has lost the process that it is connected to.
    """

    rank: int
    process: str
    epoch: int

    def packed(self) -> bytes:
        """Return it as bytes."""
        return _IDENTITY.pack(self.rank, bytes.fromhex(self.process), self.epoch)

    @classmethod
    def of(cls, packed: bytes) -> Identity:
        """Return the identity of bytes."""
        rank, process, epoch = _IDENTITY.unpack(packed)
        return cls(rank, process.hex(), epoch)


async def call(connected: socket.socket, key: bytes, caller: Identity, called: int) -> Identity:
    """Prove the key to the process that was called, and return who it is.

    Args:
        connected: socket that does not block.
        key: the key.
        caller: who this process is.
        called: rank that is called, or ``HUB``.
    """
    loop = asyncio.get_running_loop()
    theirs = _checked(await receive(connected, len(_MAGIC) + _NONCE))
    mine, who = secrets.token_bytes(_NONCE), caller.packed() + _DEST.pack(called)
    proof = _proof(key, b"caller", theirs, mine, who)
    await loop.sock_sendall(connected, _MAGIC + mine + who + proof)
    answer = await receive(connected, ANSWER)
    packed, proof = answer[: _IDENTITY.size], answer[_IDENTITY.size :]
    if not hmac.compare_digest(proof, _proof(key, b"called", mine, theirs, packed)):
        raise TransportError("it does not know the key")
    found = Identity.of(packed)
    if called not in (HUB, found.rank):
        raise TransportError(f"it is rank {found.rank}")
    connected.send(_AGREED)  # no wait follows: the call is not given up any more
    return found


async def answer(
    connected: socket.socket, key: bytes, called: Identity, epoch: Callable[[int], int]
) -> tuple[Identity, int]:
    """Prove the key to a process that calls; return who it is, and the rank or hub that it calls.

    Args:
        connected: socket that does not block.
        key: the key.
        called: who this process is.
        epoch: function of a rank that returns how often it was lost here.

    Raises:
        TransportError: it is a stranger, or calls another rank.
        WireVersionError: it has another version.
    """
    loop = asyncio.get_running_loop()
    mine = secrets.token_bytes(_NONCE)
    await loop.sock_sendall(connected, _MAGIC + mine)
    said = await receive(connected, len(_MAGIC) + _NONCE + _IDENTITY.size + _DEST.size + _PROOF)
    theirs = _checked(said[: len(_MAGIC) + _NONCE])
    who, proof = said[len(_MAGIC) + _NONCE : -_PROOF], said[-_PROOF:]
    if not hmac.compare_digest(proof, _proof(key, b"caller", mine, theirs, who)):
        raise TransportError("it does not know the key")
    (dest,) = _DEST.unpack(who[_IDENTITY.size :])
    if dest not in (HUB, called.rank):
        raise TransportError(f"it calls rank {dest}")
    caller = Identity.of(who[: _IDENTITY.size])
    packed = called._replace(epoch=epoch(caller.rank)).packed()
    await loop.sock_sendall(connected, packed + _proof(key, b"called", theirs, mine, packed))
    # A connection that is used and then ends means that a rank is lost. A caller may give up until
    # here, as after its deadline.
    if await receive(connected, len(_AGREED)) != _AGREED:
        raise TransportError("it has not agreed")
    return caller, dest


async def receive(connected: socket.socket, n: int) -> bytes:
    """Return the next n bytes."""
    place = memoryview(content := bytearray(n))
    await receive_into(connected, place)
    return bytes(content)


async def receive_into(connected: socket.socket, place: memoryview) -> None:
    """Fill a place with the next bytes.

    Raises:
        ConnectionResetError: the connection ended.
    """
    loop = asyncio.get_running_loop()
    while len(place):
        try:
            n = connected.recv_into(place)  # the event loop costs more than a try
        except BlockingIOError:
            n = await loop.sock_recv_into(connected, place)
        if not n:
            raise ConnectionResetError("the connection ended")
        place = place[n:]


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")  # parts have fixed sizes


def _checked(said: bytes) -> bytes:
    """Return the random bytes after a name and version, or raise."""
    magic = said[: len(_MAGIC)]
    if magic.startswith(_NAME) and magic != _MAGIC:
        raise WireVersionError(
            f"it speaks {magic.decode(errors='replace')!r}, this process {_MAGIC.decode()!r}: "
            "expected one version of gfn_rb on all ranks"
        )
    if magic != _MAGIC:
        raise TransportError("it does not speak gfn_rb's protocol")
    return said[len(_MAGIC) :]
