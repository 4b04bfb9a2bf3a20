"""Checksums that only those can make who share a secret."""

from __future__ import annotations

import stat
from hashlib import blake2b
from hmac import compare_digest
from os import PathLike
from pathlib import Path
from typing import Any

from gfn_rb.codec.primitives import SUM_NBYTES
from gfn_rb.errors import ArgumentError, SecretError

_LEAST = 16  # bytes, which nobody guesses if they are random

RunningHash = Any  # a hash of hashlib, which has no public class


class Secret:
    """A secret that authenticates files and messages among the processes that share it.

    Checksums are then keyed BLAKE2b (RFC 7693) of 64 bits. Data that was made with another secret
    or none, or was changed, raises :class:`~gfn_rb.errors.SecretError`. A forgery without the
    secret succeeds with probability 2^-64. Nothing is encrypted, and old data is accepted again.

    Args:
        content: at least 16 random bytes.

    Raises:
        ArgumentError: ``content`` has fewer bytes.

    Examples:
        >>> secret = Secret.read("run.secret")  # head -c 32 /dev/urandom > run.secret
        >>> save_checkpoint("run.ckpt", rb, secret=secret)
    """

    def __init__(self, content: bytes) -> None:
        if not isinstance(content, bytes):
            raise ArgumentError(f"secret must be bytes, got a {type(content).__name__}")
        if len(content) < _LEAST:
            raise ArgumentError(f"secret must have {_LEAST} bytes or more, got {len(content)}")
        self._key = blake2b(content).digest()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Secret:
        """Return the secret that a file contains.

        Args:
            path: file with at least 16 bytes, readable by its owner alone (mode 0600).

        Raises:
            ArgumentError: the file cannot be read, is too short, or other users may read it.
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

    def hash(self) -> RunningHash:
        """Return a function that computes checksums of bytes with this secret."""
        return blake2b(key=self._key, digest_size=SUM_NBYTES)


def require_equal(came: bytes, expected: bytes | memoryview, name: str) -> None:
    """Raise :class:`SecretError` unless two keyed checksums are equal, and show neither."""
    if not compare_digest(came, expected):
        raise SecretError(f"{name} was made with another secret, or changed since")
