"""Tensors and texts as bytes, checksums, secrets, and errors on one line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from hashlib import blake2b
from hmac import compare_digest
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64

from gfn_rb.errors import ArgumentError, CheckpointError, SecretError

Buffer = Any  # bytes, memoryview, array: anything contiguous that memoryview takes; or LazyBuffer


class LazyBuffer(NamedTuple):
    """A buffer that is computed while earlier buffers are being sent, such as a checksum."""

    nbytes: int
    make: Callable[[], bytes]


# Quantised ones need more than their bytes.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
ALIGNMENT = 64


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype is stored and sent."""
    return str(dtype).removeprefix("torch.")


def aligned(position: int) -> int:
    """Return the next multiple of 64."""
    return -(-position // ALIGNMENT) * ALIGNMENT


MAX_DEPTH = 512  # well within what Python can recurse; values of checkpoints reach 400

# A circle is too deep, which is found anyway.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().raw_decode


def to_text(value: Any) -> bytes:
    """Return a value as JSON. NaN and infinities pass."""
    try:
        text = _encode(value).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    _check_depth(text)
    return text


def from_text(text: bytes | memoryview) -> Any:
    """Return the value that a JSON text means."""
    text = bytes(text)
    _check_depth(text)
    try:
        words = str(text, "utf8")
        value, end = _decode(words)
    except RecursionError as error:  # called from deep down
        raise ValueError(str(error)) from None
    if end < len(words):
        raise ValueError(f"it goes on after its end, with {words[end:]!r:.80}")
    return value


def opened(path: Path) -> BinaryIO:
    """Open a regular file to read; raise at once for a pipe, which would have the reader wait."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    word = "Is a directory" if stat.S_ISDIR(mode) else "Is no regular file"
    raise CheckpointError(f"cannot read {path}: {word}")


def one_line(what: Exception | str) -> str:
    """Return a text, or an error's type and message, in one line of at most 600 characters."""
    line = " ".join((what if isinstance(what, str) else f"{type(what).__name__}: {what}").split())
    return line if len(line) <= 600 else f"{line[:297]} ... {line[-298:]}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, of which no file or message is to blame."""
    if not isinstance(error, RuntimeError):  # which torch raises
        return isinstance(error, MemoryError)
    return any(words in str(error) for words in ("can't allocate memory", "out of memory"))


def _check_depth(text: bytes) -> None:
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    # Only brackets outside of strings count, and only quotes that are not escaped end these.
    letters = np.frombuffer(text.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    in_string = np.bitwise_xor.accumulate(letters == ord('"'))
    either = letters | 32  # [ is read as {, and ] as }
    step = (either == ord("{")).astype(np.int8) - (either == ord("}"))
    step[in_string] = 0
    depth = int(np.cumsum(step, dtype=np.int32).max(initial=0))
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested {depth} deep; expected at most {MAX_DEPTH}")


BLOCK = 1 << 24
SUM_NBYTES = 8


def sums_of(pieces: Iterable[memoryview], head: Any = None) -> bytes:
    """Return the checksum of each block of bytes that come in pieces.

    Keyed checksums continue the hash of the head, and include all blocks before.
    """
    sums: list[Any] = []
    room = 0  # bytes that the last block lacks
    for data in pieces:
        while data:
            if not room:
                sums.append(xxh3_64() if head is None else (sums[-1] if sums else head).copy())
                room = BLOCK
            piece, data = data[:room], data[room:]
            sums[-1].update(piece)
            room -= len(piece)
    return b"".join([each.digest() for each in sums])


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
