"""Checksums that only those can make who share a secret."""

from __future__ import annotations

import stat
from hashlib import blake2b
from hmac import compare_digest
from os import PathLike
from pathlib import Path
from typing import Any

from gfn_rb.codec.primitives import SUM_NBYTES, BlockSums
from gfn_rb.errors import ArgumentError, SecretError

_LEAST = 16  # bytes, which nobody guesses if they are random

Running = Any  # a hash of hashlib, which has no public class


class Secret:
    """What those share who believe each other's files and messages, and nobody else's.

    Their checksums are then BLAKE2b with a key (RFC 7693), of 64 bits: who lacks the secret and
    makes one up is right once in 2^64 times. What was made with another secret or none, or was
    changed since, raises :class:`~gfn_rb.errors.SecretError`. Nothing is encrypted, and what is
    put back or sent again as it once was is believed again.

    Args:
        content: 16 bytes or more, random ones.

    Raises:
        ArgumentError: they are fewer.

    Examples:
        >>> secret = Secret.read("run.secret")  # head -c 32 /dev/urandom > run.secret
        >>> save_checkpoint("run.ckpt", rb, secret=secret)
    """

    def __init__(self, content: bytes) -> None:
        if len(content) < _LEAST:
            raise ArgumentError(f"secret must have {_LEAST} bytes or more, got {len(content)}")
        self._key = blake2b(content).digest()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Secret:
        """Return the secret that a file holds.

        Raises:
            ArgumentError: it cannot be read, is too short, or others than its owner may use it.
        """
        try:
            with Path(path).open("rb") as stream:
                mode = stat.S_IMODE(Path(path).stat().st_mode)
                content = stream.read()
        except OSError as error:
            raise ArgumentError(f"secret cannot be read from {path}: {error.strerror}") from None
        if mode & 0o077:
            raise ArgumentError(
                f"secret must be its owner's alone, got {path} of mode {mode:04o}: chmod 600"
            )
        return cls(content)

    def __eq__(self, other: object) -> bool:
        """Return whether two secrets have the same content."""
        return isinstance(other, Secret) and compare_digest(self._key, other._key)

    def __hash__(self) -> int:
        """Return a hash of the content."""
        return hash(self._key)

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> Any:
        """Refuse to be pickled: it would lie in what others may read."""
        raise ArgumentError("secret must not be pickled: read it where it is used")

    def hash(self) -> Running:
        """Return what sums bytes with this secret."""
        return blake2b(key=self._key, digest_size=SUM_NBYTES)


def check_body(body: memoryview, sums: memoryview, head: Running, name: str) -> None:
    """Compare the checksums of a body, each of all from the head up to its block's end."""
    came = BlockSums(head)
    came.update(body)
    if not compare_digest(came.digest(), sums):
        raise changed(name)


def changed(name: str) -> SecretError:
    """Return the error of a checksum that is wrong. What would be right is nobody's to know."""
    return SecretError(f"{name} was made with another secret, or changed since")
