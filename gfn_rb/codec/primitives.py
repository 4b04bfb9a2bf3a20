"""Tensors, texts and checksums as bytes, and what messages are made of."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64

from gfn_rb.errors import CheckpointError

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


def one_line(error: Exception) -> str:
    """Return an error's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


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


class BlockSums:
    """The checksum of each block of bytes that come piece by piece."""

    def __init__(self, head: Any = None) -> None:
        self._sums: list[Any] = []
        self._room = 0  # bytes that the last block lacks
        self._before = head  # of all that comes before, which keyed checksums include

    def update(self, data: memoryview) -> None:
        """Add bytes to those before."""
        while data:
            if not self._room:
                self._sums.append(xxh3_64() if self._before is None else self._before.copy())
                self._room = BLOCK
            piece, data = data[: self._room], data[self._room :]
            self._sums[-1].update(piece)
            self._room -= len(piece)
            if self._before is not None:
                self._before = self._sums[-1]

    def digest(self) -> bytes:
        """Return the checksums, one after another."""
        return b"".join([each.digest() for each in self._sums])


def sums_of(pieces: Iterable[memoryview], head: Any = None) -> bytes:
    """Return the checksums of the blocks of bytes that come in pieces."""
    sums = BlockSums(head)
    for piece in pieces:
        sums.update(piece)
    return sums.digest()
