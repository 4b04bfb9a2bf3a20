"""Files: nested values by name, their tensors written from memory and read where they lie."""

from __future__ import annotations

import errno
import math
import mmap
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from gfn_rb.codec.prefix import FILE, PREFIX_NBYTES, VERSION, Prefix
from gfn_rb.codec.primitives import (
    BLOCK,
    DTYPES,
    BlockSums,
    aligned,
    dtype_name,
    find_damage,
    from_text,
    one_line,
    sums_nbytes,
    to_text,
)
from gfn_rb.codec.secret import Running, Secret, check_body
from gfn_rb.codec.values import Decoder, Node
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
    WireCorruptError,
    WireVersionError,
)
from gfn_rb.numerics.flat import plain_bytes

_STEP = 1 << 20  # what is summed fits the cache when it is written
_THREADS = min(4, os.cpu_count() or 1)
_CPU = torch.device("cpu")


def write_file(
    stream: BinaryIO,
    values: dict[str, Node],
    tensors: list[Tensor],
    secret: Secret | None = None,
) -> None:
    """Write a whole file, in one pass.

    Tensors are copied a megabyte at a time, and what is summed is what is written, whoever changes
    them meanwhile; those that are not contiguous, or not on the CPU, a block at a time before.

    Args:
        stream: an empty file.
        values: nodes by name (:mod:`gfn_rb.codec.values`).
        tensors: what the nodes refer to.
        secret: that of those who are to believe it, if any.
    """
    structure = to_text([(dtype_name(t.dtype), t.shape, t.device.type) for t in tensors])
    meta = to_text(values)
    texts_end = PREFIX_NBYTES + len(structure) + len(meta)
    head = bytearray(aligned(texts_end))
    head[PREFIX_NBYTES:texts_end] = structure + meta
    body_nbytes = sum(aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)
    nbytes = len(head) + body_nbytes + sums_nbytes(body_nbytes)
    sizes = (nbytes, len(head), len(structure), len(meta), 0)
    running = Prefix(VERSION, 0, FILE, 0, *sizes).seal(memoryview(head), secret)
    _reserve(stream, nbytes)
    stream.write(head)
    sums, copied = BlockSums(running), memoryview(bytearray(_STEP))
    for piece in _body(tensors):
        for at in range(0, len(piece), _STEP):
            step = copied[: min(_STEP, len(piece) - at)]
            step[:] = piece[at : at + _STEP]
            sums.update(step)
            stream.write(step)
    stream.write(sums.digest())


def _reserve(stream: BinaryIO, nbytes: int) -> None:
    """Have the disk set room aside: it takes a third less time than to do so on the way."""
    if nbytes > _STEP and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(stream.fileno(), 0, nbytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise


def _body(tensors: list[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        yield from _pieces(tensor)
        yield memoryview(bytes(aligned(nbytes) - nbytes))


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in C order."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= BLOCK or (tensor.device.type == "cpu" and tensor.is_contiguous()):
        yield plain_bytes(tensor)
        return
    rows = BLOCK * len(tensor) // nbytes
    for part in tensor.split(rows) if rows else tensor.unbind():
        yield from _pieces(part)


def check_written(path: Path, secret: Secret | None = None) -> None:
    """Raise unless a file that was just written can be read.

    It is read, not mapped: twice as quick where nobody needs its content.

    Raises:
        CheckpointError: it cannot, or holds something else than its checksums say.
    """
    file, step = ValueFile(path, secret), memoryview(bytearray(_STEP))
    sums = BlockSums(file.running)
    for name in file.nodes:
        file.outline(name)
    with path.open("rb", buffering=0) as stream:
        at, end = file.bounds
        stream.seek(at)
        while at < end and (n := stream.readinto(step[: end - at])):
            sums.update(step[:n])
            at += n
    if sums.digest() != file.sums:
        raise CheckpointError(f"{path} does not hold what was written to it: is the disk sound?")


class StoredTensor(NamedTuple):
    """What is known of a tensor in a file."""

    dtype: torch.dtype
    shape: list[int]
    device: str
    start: int
    """In bytes, from the beginning of the file."""
    nbytes: int

    def shaped(self, content: Tensor) -> Tensor:
        """Return its bytes as what they are."""
        return content.view(self.dtype).reshape(self.shape)


class ValueFile:
    """A file opened for reading, its head checked.

    Args:
        path: the file.
        secret: that it must have been made with, None for without any.

    Attributes:
        path: likewise.
        running: what has summed the head with the secret.

    Raises:
        SecretError: it was not made with the secret, or with one, or was changed since.
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is no checkpoint, truncated, or its header is damaged.
        CheckpointMismatchError: it is of another format version.
    """

    def __init__(self, path: Path, secret: Secret | None = None) -> None:
        self.path = path
        self._bytes = memoryview(_mapped(path))
        prefix, self.running = self._checked_prefix(secret)
        with self.named_errors():
            structure = from_text(self._bytes[PREFIX_NBYTES : prefix.meta_at])
            self.tensors, self._end = _located(structure, prefix.head_nbytes)
            self.nodes: dict[str, Node] = dict(
                from_text(self._bytes[prefix.meta_at : prefix.texts_end])
            )
        self._start = prefix.head_nbytes
        expected = self._end + sums_nbytes(self._end - self._start)
        if expected != self.nbytes:
            raise self._corrupt(f"it has {self.nbytes} bytes; its tensors take {expected}")

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self._bytes)

    @property
    def bounds(self) -> tuple[int, int]:
        """Where the tensors begin and end, in bytes."""
        return self._start, self._end

    @property
    def sums(self) -> bytes:
        """The checksums of the tensors' blocks, one after another."""
        return bytes(self._bytes[self._end :])

    def verify(self) -> None:
        """Compare every block of the tensors with its checksum.

        Raises:
            CheckpointCorruptError: one does not match.
            SecretError: likewise, of a file that was made with a secret.
        """
        body, sums = self._bytes[self._start : self._end], self._bytes[self._end :]
        if self.running is not None:
            check_body(body, sums, self.running, str(self.path))
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            if damage := find_damage(body, sums, self._start, pool.map):
                raise self._corrupt(damage)

    def views(self, name: str) -> Any:
        """Return a value whose tensors lie in the file: they must not be written to."""
        return self._decode(name, lambda each: each.shaped(self._bytes_of(each)), _CPU)

    def load(self, name: str, accelerator: torch.device = _CPU) -> Any:
        """Return a value whose tensors are copies."""

        def load(tensor: StoredTensor) -> Tensor:
            device = _CPU if tensor.device == "cpu" else accelerator
            return tensor.shaped(self._bytes_of(tensor).to(device, copy=True))

        return self._decode(name, load, accelerator)

    def outline(self, name: str) -> Any:
        """Return a value whose tensors have dtypes and shapes, but no content."""

        def outline(tensor: StoredTensor) -> Tensor:
            # Seen as its type, not made as such: of some types torch warns when one is made.
            element = torch.empty(tensor.dtype.itemsize, dtype=torch.uint8).view(tensor.dtype)[0]
            return element.expand(tensor.shape)

        return self._decode(name, outline, _CPU)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise errors of this library alone: the checksums may be right, and the content wrong."""
        try:
            yield
        except CheckpointError:
            raise
        except KeyError as error:
            raise CheckpointMismatchError(
                f"{self.path} holds {error}, which this version of gfn_rb or torch does not know"
            ) from None
        except Exception as error:
            raise self._corrupt(f"its values make no sense: {one_line(error)}") from error

    def _decode(
        self, name: str, tensor: Callable[[StoredTensor], Tensor], accelerator: torch.device
    ) -> Any:
        taken = set()

        def at(index: int) -> Tensor:
            if type(index) is not int or index < 0:
                raise ValueError(f"a tensor is {index!r}, expected a position")
            if index in taken:  # or few bytes could stand for many
                raise ValueError(f"tensor {index} occurs twice")
            taken.add(index)
            return tensor(self.tensors[index])

        with self.named_errors():
            return Decoder(at, accelerator).decode(self.nodes[name])

    @cached_property
    def _content(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def _bytes_of(self, tensor: StoredTensor) -> Tensor:
        return self._content[tensor.start : tensor.start + tensor.nbytes]

    def _checked_prefix(self, secret: Secret | None) -> tuple[Prefix, Running]:
        """Return the prefix, once the head is known to be whole, and what has summed that."""
        try:
            return Prefix.checked(self._bytes, "it", FILE, secret)
        except SecretError as error:
            raise SecretError(f"{self.path}: {error}") from None
        except WireVersionError as error:
            raise CheckpointMismatchError(f"{self.path}: {error}") from None
        except WireCorruptError as error:
            raise self._corrupt(str(error)) from None

    def _corrupt(self, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self.path} is no sound checkpoint: {what}")


def _located(structure: list[Any], start: int) -> tuple[list[StoredTensor], int]:
    """Return the tensors of a file, and where the last one ends."""
    tensors = []
    for name, shape, device in structure:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a shape is {shape!r}, expected sizes")
        nbytes = math.prod(shape) * DTYPES[name].itemsize
        tensors.append(StoredTensor(DTYPES[name], shape, device, start, nbytes))
        start += aligned(nbytes)
    return tensors, start


def _mapped(path: Path) -> mmap.mmap | bytes:
    """Return the content of a file, read where it is looked at.

    Read-only, so that the system need not set memory aside for a file larger than memory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would have it wait
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                word = "Is a directory" if stat.S_ISDIR(status.st_mode) else "Is no regular file"
                raise CheckpointError(f"cannot read {path}: {word}")
            if status.st_size == 0:
                return b""
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
