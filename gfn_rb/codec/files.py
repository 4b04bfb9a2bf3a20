"""Files of named values, whose tensors are written from memory and read from a map."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gfn_rb.codec.layout import FILE, Content, Prefix, sealed_head
from gfn_rb.codec.primitives import Secret, is_out_of_memory, one_line, opened, sums_of
from gfn_rb.codec.values import Decoder, Encoder
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
    WireCorruptError,
    WireVersionError,
)
from gfn_rb.numerics.flat import plain_bytes
from gfn_rb.shapes import Shaped
from gfn_rb.storages.memmaps import NO_ROOM

_STEP = 1 << 20  # bytes that are summed and then written, so that they are in the cache
_THREADS = min(4, os.cpu_count() or 1)
_CPU = torch.device("cpu")


def write_file(
    stream: BinaryIO | BytesIO,
    values: Mapping[str, Any],
    secret: Secret | None = None,
    called: Mapping[str, str] | None = None,
) -> None:
    """Write values by name to an empty file; errors call a value by its name or as ``called`` says.

    Tensors are copied a megabyte at a time, so that the checksums are valid even if they change
    meanwhile. Tensors with gaps or on other devices are first copied one by one.

    Raises:
        CheckpointError: a value cannot be saved.
    """
    encoder, words = Encoder(), called or {}
    try:
        nodes = {
            name: encoder.encode(value, words.get(name, name)) for name, value in values.items()
        }
    except ValueError as error:
        raise CheckpointError(f"cannot save {error}") from None
    tensors = encoder.tensors
    head, layout, running = sealed_head(FILE, 0, nodes, tensors, secret)
    nbytes = len(head) + layout.tail_nbytes
    if nbytes > _STEP and hasattr(os, "posix_fallocate"):  # a third quicker than a file that grows
        try:
            os.posix_fallocate(stream.fileno(), 0, nbytes)
        except OSError as error:  # of file systems that cannot: the file grows
            if error.errno in NO_ROOM:
                raise
    stream.write(head)
    copied = memoryview(bytearray(_STEP))

    def written() -> Iterator[memoryview]:
        for i, _, _ in layout.large:
            content = plain_bytes(tensors[i])
            for at in range(0, len(content), _STEP):
                step = copied[: min(_STEP, len(content) - at)]
                step[:] = content[at : at + _STEP]
                stream.write(step)
                yield step

    stream.write(sums_of(written(), running))


class ValueFile(Content):
    """A file opened for reading, its head checked. With data, it is the content of the file."""

    def __init__(self, path: Path, secret: Secret | None = None, data: bytes | None = None) -> None:
        self.path = path
        held = mapped(path) if data is None else np.frombuffer(bytearray(data), np.uint8)
        with self.named_errors():
            super().__init__(held, *Prefix.checked(held.data, "it", FILE, secret), "it")

    def verify(self, map_blocks: Any = None) -> None:
        """Raise CheckpointCorruptError or SecretError unless all checksums are right."""
        with self.named_errors(), ThreadPoolExecutor(_THREADS) as pool:
            super().verify(map_blocks or pool.map)

    def value(self, name: str, device: torch.device | None = _CPU) -> Any:
        """Return a value whose tensors are copies, on a device if they were not on the CPU.

        With None they are views of the file, which must not be written to.
        """

        def tensor(i: int) -> Tensor:
            is_moved = device is not None and self.layout.fields[i].device != "cpu"
            return self.tensor(i, device if is_moved else device and _CPU)

        with self.named_errors():
            return Decoder(tensor, device or _CPU).decode(self.nodes[name])

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
            if is_out_of_memory(error):
                raise
            raise CheckpointCorruptError(
                f"{self.path} is no sound checkpoint: its values make no sense: {one_line(error)}"
            ) from error


def mapped(path: Path) -> Shaped[np.ndarray, "n"]:
    """Return the content of a file as a read-only map, which needs no memory of its size."""
    try:
        with opened(path) as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return np.empty(0, np.uint8)
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():  # by way of torch, or each view of it would warn
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(content, dtype=torch.uint8).numpy()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
