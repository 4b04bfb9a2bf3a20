"""Reading the file format."""

from __future__ import annotations

import json
import mmap
import os
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gfn_rb.checkpoint.layout import (
    BLOCK,
    BUFFERS,
    EXTRA,
    HEAD,
    MAGIC,
    PREFIX,
    STATE,
    SUM,
    VERSION,
    aligned,
)
from gfn_rb.checkpoint.tree import DTYPES, Decoder, Node
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

_THREADS = min(4, os.cpu_count() or 1)
_CPU = torch.device("cpu")


class CheckpointFile:
    """A checkpoint opened for reading, its header checked.

    Args:
        path: the file.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is no checkpoint, truncated, or its header is damaged.
        CheckpointMismatchError: it is of another format version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = memoryview(_mapped(path))
        header_end = HEAD + self._read_prefix()
        self._header = json.loads(self._bytes[HEAD:header_end].tobytes())
        self._data = aligned(header_end)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self._bytes)

    @property
    def sections(self) -> dict[str, Node]:
        """The nodes by name."""
        return dict(self._header["sections"])

    @property
    def values_section(self) -> str:
        """The name of the section of what was saved along with the buffer, or of the state."""
        return EXTRA if BUFFERS in self._header["sections"] else STATE

    @property
    def tensor_sizes(self) -> list[int]:
        """The bytes of each tensor."""
        return [entry["nbytes"] for entry in self._header["tensors"]]

    def verify(self) -> None:
        """Compare every block with its checksum.

        Raises:
            CheckpointCorruptError: one does not match.
        """
        end = self._data + max(
            (aligned(entry["offset"] + entry["nbytes"]) for entry in self._header["tensors"]),
            default=0,
        )
        table = self._bytes[end : -SUM.size]
        blocks = [self._bytes[i : min(i + BLOCK, end)] for i in range(0, end, BLOCK)]
        if zlib.crc32(table) != SUM.unpack(self._bytes[-SUM.size :])[0]:
            raise self._corrupt("its checksums are damaged")
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(pool.map(zlib.crc32, blocks))
        for i, ((stored,), came) in enumerate(zip(SUM.iter_unpack(table), found, strict=True)):
            if stored != came:
                raise self._corrupt(
                    f"the checksum of bytes {i * BLOCK} to {i * BLOCK + len(blocks[i])} is "
                    f"{came:08x}, expected {stored:08x}"
                )

    def views(self, section: str) -> Any:
        """Return a section whose tensors lie in the file: they must not be written to.

        Args:
            section: its name.
        """
        return self._decode(section, self._view, _CPU)

    def load(self, section: str, accelerator: torch.device = _CPU) -> Any:
        """Return a section whose tensors are copies.

        Args:
            section: its name.
            accelerator: where to put what did not live on the CPU.
        """

        def load(index: int) -> Tensor:
            on_cpu = self._header["tensors"][index]["device"] == "cpu"
            content = self._content(index).to(_CPU if on_cpu else accelerator, copy=True)
            return self._shaped(index, content)

        return self._decode(section, load, accelerator)

    def outline(self, section: str) -> Any:
        """Return a section whose tensors have dtypes and shapes, but no content.

        Args:
            section: its name.
        """

        def blank(index: int) -> Tensor:
            entry = self._header["tensors"][index]
            return torch.empty((), dtype=DTYPES[entry["dtype"]]).expand(entry["shape"])

        return self._decode(section, blank, _CPU)

    def _decode(self, section: str, tensor: Any, accelerator: torch.device) -> Any:
        try:
            return Decoder(tensor, accelerator).decode(self._header["sections"][section])
        except KeyError as error:
            raise CheckpointMismatchError(
                f"{self.path} holds {error}, which this version of gfn_rb or torch does not know"
            ) from None

    def _view(self, index: int) -> Tensor:
        return self._shaped(index, self._content(index))

    def _content(self, index: int) -> Tensor:
        """Return the bytes of a tensor, in the file."""
        entry = self._header["tensors"][index]
        start = self._data + entry["offset"]
        content = self._bytes[start : start + entry["nbytes"]]
        if not content:
            return torch.empty(0, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.frombuffer(content, dtype=torch.uint8)

    def _shaped(self, index: int, content: Tensor) -> Tensor:
        entry = self._header["tensors"][index]
        return content.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def _read_prefix(self) -> int:
        """Return the length of the header, once it is known to be whole."""
        if len(self._bytes) < HEAD:
            raise self._corrupt(f"{len(self._bytes)} bytes are too few")
        magic, version, header, length, checksum = PREFIX.unpack(self._bytes[: PREFIX.size])
        (own,) = SUM.unpack(self._bytes[PREFIX.size : HEAD])
        if magic != MAGIC:
            raise self._corrupt(f"it begins with {magic!r}, expected {MAGIC!r}")
        if own != zlib.crc32(self._bytes[: PREFIX.size]):
            raise self._corrupt("its first bytes are damaged")
        if version != VERSION:
            raise CheckpointMismatchError(
                f"{self.path} is of format version {version}, expected {VERSION}"
            )
        if len(self._bytes) != length:
            raise self._corrupt(f"it has {len(self._bytes)} bytes, expected {length}")
        if checksum != zlib.crc32(self._bytes[HEAD : HEAD + header]):
            raise self._corrupt("its header is damaged")
        return int(header)

    def _corrupt(self, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self.path} is no sound checkpoint: {what}")


def _mapped(path: Path) -> mmap.mmap | bytes:
    """Return the content of a file, read where it is looked at.

    Read-only, so that the system need not set memory aside for a file larger than memory.
    """
    try:
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return b""
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
