"""Writing the file format, in one pass."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gfn_rb.checkpoint.layout import BLOCK, HEAD, MAGIC, PREFIX, SUM, VERSION, aligned
from gfn_rb.checkpoint.tree import Node, dtype_name

_STEP = 1 << 20  # what is summed fits the cache when it is written; divides the block


def write_file(stream: BinaryIO, sections: dict[str, Node], tensors: list[Tensor]) -> None:
    """Write a whole checkpoint.

    No tensor on the CPU that is contiguous is copied; of any other, one block at a time.

    Args:
        stream: an empty file.
        sections: nodes by name.
        tensors: what the nodes refer to.
    """
    table, end = _table(tensors)
    header = json.dumps({"sections": sections, "tensors": table}, separators=(",", ":")).encode()
    end += aligned(HEAD + len(header))
    blocks = -(-end // BLOCK)
    length = end + (blocks + 1) * SUM.size
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), length, zlib.crc32(header))
    out = _Summed(stream)
    out.write(prefix + SUM.pack(zlib.crc32(prefix)) + header)
    for tensor in tensors:
        out.align()
        for piece in _pieces(tensor):
            out.write(piece)
    out.align()
    sums = b"".join(map(SUM.pack, out.sums))
    stream.write(sums + SUM.pack(zlib.crc32(sums)))


def _table(tensors: Iterable[Tensor]) -> tuple[list[dict[str, Any]], int]:
    """Return what the header says of each tensor, and where the last one ends, aligned."""
    table, offset = [], 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        entry = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "offset": offset,
            "nbytes": nbytes,
            "device": tensor.device.type,
        }
        table.append(entry)
        offset = aligned(offset + nbytes)
    return table, offset


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in C order."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= BLOCK or (tensor.device.type == "cpu" and tensor.is_contiguous()):
        plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu().contiguous()
        # Strides of contiguous tensors mean nothing, and can be anything, in dimensions of one.
        yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data
        return
    rows = BLOCK * len(tensor) // nbytes
    for part in tensor.split(rows) if rows else tensor.unbind():
        yield from _pieces(part)


class _Summed:
    """Writes to a file and sums what it writes, block by block."""

    def __init__(self, stream: BinaryIO) -> None:
        self.sums: list[int] = []  # CRC-32 of each block begun so far
        self._stream = stream
        self._position = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            room = _STEP - self._position % _STEP
            self._write_step(view[:room])
            view = view[room:]

    def align(self) -> None:
        """Write zeros up to the next multiple of 64."""
        self.write(bytes(aligned(self._position) - self._position))

    def _write_step(self, piece: memoryview) -> None:
        if self._position % BLOCK == 0:
            self.sums.append(0)
        self.sums[-1] = zlib.crc32(piece, self.sums[-1])
        self._stream.write(piece)
        self._position += len(piece)
