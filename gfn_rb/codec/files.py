"""Files of named values, whose tensors are written from memory and read from a map."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gfn_rb.codec.layout import (
    FILE,
    PREFIX_NBYTES,
    Layout,
    Prefix,
    TensorInfo,
    field_of,
    sealed_head,
    structure_of,
)
from gfn_rb.codec.primitives import BLOCK, DTYPES, BlockSums, from_text, one_line, to_text
from gfn_rb.codec.secret import Secret
from gfn_rb.codec.values import Decoder, Node
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    GfnRbError,
    SecretError,
    WireCorruptError,
    WireVersionError,
)
from gfn_rb.numerics.flat import plain_bytes

_STEP = 1 << 20  # bytes that are summed and then written, so that they are in the cache
_THREADS = min(4, os.cpu_count() or 1)
_CPU = torch.device("cpu")


def write_file(
    stream: BinaryIO,
    values: dict[str, Node],
    tensors: list[Tensor],
    secret: Secret | None = None,
) -> None:
    """Write nodes by name, and the tensors that they refer to, to an empty file.

    Tensors are copied a megabyte at a time, so that the checksums are valid even if they change
    meanwhile. Tensors with gaps or on other devices are first copied a block at a time.
    """
    fields = tuple(TensorInfo(t.device.type, t.dtype, tuple(t.shape)) for t in tensors)
    layout = Layout(fields)
    texts = structure_of(fields), to_text(values)
    head, running = sealed_head(FILE, 0, texts, layout, tensors, secret)
    nbytes = len(head) + layout.tail_nbytes
    if nbytes > _STEP and hasattr(os, "posix_fallocate"):  # a third quicker than a file that grows
        try:
            os.posix_fallocate(stream.fileno(), 0, nbytes)
        except OSError as error:  # of file systems that cannot: the file grows
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
    stream.write(head)
    sums, copied = BlockSums(running), memoryview(bytearray(_STEP))
    for i, _, _ in layout.large:
        for piece in _pieces(tensors[i]):
            for at in range(0, len(piece), _STEP):
                step = copied[: min(_STEP, len(piece) - at)]
                step[:] = piece[at : at + _STEP]
                sums.update(step)
                stream.write(step)
    stream.write(sums.digest())


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
    """Raise :class:`CheckpointError` unless a file that was just written can be read."""
    try:
        file = ValueFile(path, secret)
        for name in file.nodes:
            file.outline(name)
        file.verify()
    except GfnRbError as error:
        raise CheckpointError(
            f"{path} does not hold what was written to it, is the disk sound? {error}"
        ) from error


class ValueFile:
    """A file opened for reading, its head checked: the layout of its tensors, its nodes by name."""

    def __init__(self, path: Path, secret: Secret | None = None) -> None:
        self.path = path
        self._bytes = memoryview(_mapped(path))
        with self.named_errors():
            self.prefix, self.running = Prefix.checked(self._bytes, "it", FILE, secret)
            meta_at, texts_end = self.prefix.meta_at, self.prefix.texts_end
            structure = from_text(self._bytes[PREFIX_NBYTES:meta_at])
            self.layout = Layout(
                tuple(field_of(on, dtype, shape, DTYPES) for on, dtype, shape in structure)
            )
            self.layout.check_sizes(self.prefix, "it")
            self.nodes: dict[str, Node] = dict(from_text(self._bytes[meta_at:texts_end]))
        self._starts = dict(self.layout.starts(self.prefix))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            self._content = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def verify(self) -> None:
        """Raise CheckpointCorruptError or SecretError unless all checksums are right."""
        with self.named_errors(), ThreadPoolExecutor(_THREADS) as pool:
            self.layout.check_body(self._bytes, self.prefix, self.running, "it", pool.map)

    def views(self, name: str) -> Any:
        """Return a value whose tensors are views of the file. They must not be written to."""
        return self._decode(name, self._view, _CPU)

    def load(self, name: str, accelerator: torch.device = _CPU) -> Any:
        """Return a value whose tensors are copies, on the accelerator if they were on one."""

        def load(i: int) -> Tensor:
            device = _CPU if self.layout.fields[i].label == "cpu" else accelerator
            return self._view(i, device)

        return self._decode(name, load, accelerator)

    def outline(self, name: str) -> Any:
        """Return a value whose tensors have dtypes and shapes, but no content."""

        def outline(i: int) -> Tensor:
            _, dtype, shape = self.layout.fields[i]
            # Seen as its type, not made as such: of some types torch warns when one is made.
            return torch.empty(dtype.itemsize, dtype=torch.uint8).view(dtype)[0].expand(shape)

        return self._decode(name, outline, _CPU)

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise errors of this library alone, also for wrong content with right checksums."""
        try:
            yield
        except SecretError as error:
            raise SecretError(f"{self.path}: {error}") from None
        except CheckpointError:
            raise
        except WireVersionError as error:
            raise CheckpointMismatchError(f"{self.path}: {error}") from None
        except WireCorruptError as error:
            raise CheckpointCorruptError(f"{self.path} is no sound checkpoint: {error}") from None
        except KeyError as error:
            raise CheckpointMismatchError(
                f"{self.path} holds {error}, which this version of gfn_rb or torch does not know"
            ) from None
        except Exception as error:
            raise CheckpointCorruptError(
                f"{self.path} is no sound checkpoint: its values make no sense: {one_line(error)}"
            ) from error

    def _decode(self, name: str, tensor: Callable[[int], Tensor], accelerator: torch.device) -> Any:
        taken = set()

        def at(index: int) -> Tensor:
            if type(index) is not int or index < 0:
                raise ValueError(f"a tensor is {index!r}, expected a position")
            if index in taken:  # or few bytes could stand for many
                raise ValueError(f"tensor {index} occurs twice")
            taken.add(index)
            return tensor(index)

        with self.named_errors():
            return Decoder(at, accelerator).decode(self.nodes[name])

    def _view(self, i: int, copied_to: torch.device | None = None) -> Tensor:
        _, dtype, shape = self.layout.fields[i]
        content = self._content[self._starts[i] :][: self.layout.sizes[i]]
        if copied_to is not None:  # as bytes, since torch copies no tensors of some dtypes
            content = content.to(copied_to, copy=True)
        return content.view(dtype).reshape(shape)


def _mapped(path: Path) -> mmap.mmap | bytes:
    """Return the content of a file as a read-only map, which needs no memory of its size."""
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
