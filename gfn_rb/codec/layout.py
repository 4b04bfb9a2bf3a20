"""The layout that files and frames share: a checked head, tensors, and checksums of them."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from gfn_rb.codec.primitives import (
    BLOCK,
    DTYPES,
    SUM_NBYTES,
    RunningHash,
    Secret,
    aligned,
    dtype_name,
    from_text,
    require_equal,
    sums_of,
    to_text,
)
from gfn_rb.errors import SecretError, WireCorruptError, WireVersionError
from gfn_rb.numerics.flat import plain_bytes
from gfn_rb.shapes import Shaped

MAGIC = b"gfn_rb\r\n"
VERSION = 4
FRAME, FILE = b"rows", b"file"  # in capital letters what is summed with a secret
SMALL_NBYTES = 1 << 14  # from which on a tensor is part of the body

_PREFIX = struct.Struct("<8sHH4sQQQQQ8x")
_WORD = struct.Struct("<Q")
_SEED_AT, _SUM_AT, _SUMMED_FROM = 8, 16, 24
PREFIX_NBYTES = _PREFIX.size

_MOST = 1 << 62  # elements of a tensor, sizes of 0 left out, whose strides torch can count

_NUMPY = {
    dtype: np.dtype(name)
    for name, dtype in DTYPES.items()
    if re.fullmatch(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", name)
}

Place = tuple[int, int, int]  # the number of a tensor, and where it begins and ends


class TensorInfo(NamedTuple):
    """Description of one tensor."""

    device: str  # its type
    dtype: torch.dtype
    shape: tuple[int, ...]


class Layout:
    """Positions of tensors in a file or frame.

    Those below 16 KiB are part of the head, each at a multiple of 64 bytes. The others make the
    body, without gaps; wide dtypes are first, so that each tensor is aligned to its dtype.
    """

    def __init__(self, fields: tuple[TensorInfo, ...]) -> None:
        self.fields = fields
        self.sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in fields]
        small = [i for i, size in enumerate(self.sizes) if size < SMALL_NBYTES]
        large = [i for i, size in enumerate(self.sizes) if size >= SMALL_NBYTES]
        large.sort(key=lambda i: -fields[i].dtype.itemsize)
        # From the first multiple of 64 after the texts.
        self.small, end = self._placed(small, aligned)
        self.small_nbytes = aligned(end)
        # From the end of the head.
        self.large, self.body_nbytes = self._placed(large, int)
        self.tail_nbytes = self.body_nbytes + -(-self.body_nbytes // BLOCK) * SUM_NBYTES
        # Where each tensor begins, from that same multiple of 64.
        self.starts = {i: start for i, start, _ in self.small}
        self.starts |= {i: self.small_nbytes + start for i, start, _ in self.large}

    def _placed(self, numbers: list[int], begin: Any) -> tuple[list[Place], int]:
        places, end = [], 0
        for i in numbers:
            start = begin(end)
            end = start + self.sizes[i]
            places.append((i, start, end))
        return places, end

    def head_nbytes(self, texts_end: int) -> int:
        """Return the bytes of the head."""
        return aligned(texts_end) + self.small_nbytes


@lru_cache(maxsize=32)
def _planned(
    fields: tuple[tuple[torch.device, torch.dtype, torch.Size], ...],
) -> tuple[bytes, Layout]:
    """Return the structure of tensors as text, and their layout."""
    text = to_text([(device.type, dtype_name(dtype), shape) for device, dtype, shape in fields])
    return text, _layout_of(text)


@lru_cache(maxsize=32)
def _layout_of(structure: bytes) -> Layout:
    return Layout(tuple([_field(*entry) for entry in from_text(structure)]))


def _field(device: Any, dtype: Any, shape: Any) -> TensorInfo:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a shape is {shape!r:.80}, expected sizes")
    # Without sizes of 0, or a product of 0 would let any other size pass.
    if math.prod(size for size in shape if size) > _MOST:
        raise ValueError(f"a shape is {shape!r:.80}, expected at most {_MOST} elements")
    return TensorInfo(device, DTYPES[dtype], tuple(shape))


def sealed_head(
    form: bytes,
    kind: int,
    nodes: dict[str, Any],
    tensors: Sequence[Tensor],
    secret: Secret | None,
) -> tuple[bytearray, Layout, RunningHash]:
    """Return the head of a file or frame, the layout, and the hash of the head with the secret."""
    structure, layout = _planned(tuple([(t.device, t.dtype, t.shape) for t in tensors]))
    meta = to_text(nodes)
    texts_end = PREFIX_NBYTES + len(structure) + len(meta)
    head = bytearray(layout.head_nbytes(texts_end))
    view, base = memoryview(head), len(head) - layout.small_nbytes
    view[PREFIX_NBYTES:texts_end] = structure + meta
    for i, start, end in layout.small:
        view[base + start : base + end] = plain_bytes(tensors[i])
    sizes = (len(head) + layout.tail_nbytes, len(head), len(structure), len(meta))
    return head, layout, Prefix(VERSION, kind, form, 0, *sizes).seal(view, secret)


class Prefix(NamedTuple):
    """The first 64 bytes of a file or frame."""

    version: int
    kind: int  # of a frame
    form: bytes
    sum: int  # of the head but for magic and checksum
    nbytes: int  # of all
    head_nbytes: int
    structure_nbytes: int
    meta_nbytes: int

    @classmethod
    def read(cls, data: memoryview, name: str) -> Prefix:
        """Return the prefix of bytes, of which only the magic is checked."""
        if len(data) < PREFIX_NBYTES:
            raise WireCorruptError(
                f"{name} has {len(data)} bytes; expected {PREFIX_NBYTES} or more"
            )
        magic, *values = _PREFIX.unpack_from(data)
        if magic != MAGIC:
            hint = ": torch.load reads files of torch.save" * bytes(magic).startswith(b"PK\x03\x04")
            raise WireCorruptError(f"{name} begins with {magic!r}; expected {MAGIC!r}{hint}")
        return cls._make(values)

    @classmethod
    def checked(
        cls, data: memoryview, name: str, form: bytes, secret: Secret | None = None
    ) -> tuple[Prefix, RunningHash]:
        """Return the prefix of a valid head, and the hash of the head with the secret."""
        prefix, running = cls.read(data, name), None
        if form == FRAME:
            name = f"{name} of kind {prefix.kind}"
        is_keyed = prefix.form in (FRAME.upper(), FILE.upper())
        if is_keyed and secret is None:
            raise SecretError(f"{name} was made with a secret, and none is given to read it")
        if secret is not None and not is_keyed:
            raise SecretError(f"{name} was made without the secret that is given to read it")
        # The checksum comes first, so that a damaged version is not taken for another version.
        # Version 1 has other forms and another checksum.
        if prefix.version == VERSION or prefix.form == form or secret is not None:
            running = prefix._check_head(data, name, secret)
        if prefix.version != VERSION:
            raise WireVersionError(f"{name} is of version {prefix.version}; expected {VERSION}")
        if prefix.form.lower() != form:
            raise WireCorruptError(f"{name} is of form {prefix.form!r}; expected {form!r}")
        return prefix, running

    def _check_head(self, data: memoryview, name: str, secret: Secret | None) -> RunningHash:
        """Compare sizes and checksum; return the hash of the head with the secret."""
        if self.nbytes != len(data):
            raise WireCorruptError(f"{name} has {len(data)} bytes; expected {self.nbytes}")
        texts_end = PREFIX_NBYTES + self.structure_nbytes + self.meta_nbytes
        if not texts_end <= self.head_nbytes <= self.nbytes:
            raise WireCorruptError(
                f"{name} has a head of {self.head_nbytes} bytes with texts up to {texts_end}; "
                f"expected it to hold the texts, and to lie within {self.nbytes}"
            )
        came, running = _head_sum(data[: self.head_nbytes], secret)
        if secret is not None:
            require_equal(_WORD.pack(came), _WORD.pack(self.sum), name)
        elif came != self.sum:
            raise WireCorruptError(
                f"the checksum of the head of {name} is {came:016x}; expected {self.sum:016x}"
            )
        return running

    def seal(self, head: memoryview, secret: Secret | None = None) -> RunningHash:
        """Write the prefix and the checksum of a head; return its hash with the secret."""
        prefix = self if secret is None else self._replace(form=self.form.upper())
        _PREFIX.pack_into(head, 0, MAGIC, *prefix)
        came, running = _head_sum(head, secret)
        _WORD.pack_into(head, _SUM_AT, came)
        return running


def _head_sum(head: memoryview, secret: Secret | None) -> tuple[int, RunningHash]:
    """Return the checksum of a head without magic and checksum, and its hash with the secret."""
    if secret is None:
        # The seed contains version, kind and form, so that these are summed as well.
        return xxh3_64_intdigest(head[_SUMMED_FROM:], _WORD.unpack_from(head, _SEED_AT)[0]), None
    running = secret.hash()
    running.update(head[_SEED_AT:_SUM_AT])
    running.update(head[_SUMMED_FROM:])
    return _WORD.unpack(running.digest())[0], running


class Content:
    """Values of a file or frame by name, and the tensors that they refer to by number.

    Attributes:
        nodes: the values, which a :class:`~gfn_rb.codec.values.Decoder` reads.
        layout: descriptions of the tensors.
    """

    def __init__(
        self, data: Shaped[np.ndarray, "n"], prefix: Prefix, running: RunningHash, name: str
    ) -> None:
        self._data, self._running, self._name = data, running, name
        view, meta_at = data.data, PREFIX_NBYTES + prefix.structure_nbytes
        texts_end = meta_at + prefix.meta_nbytes
        self.layout = layout = _layout_of(bytes(view[PREFIX_NBYTES:meta_at]))
        self._head_nbytes = head_nbytes = layout.head_nbytes(texts_end)
        nbytes = head_nbytes + layout.tail_nbytes
        if (prefix.head_nbytes, prefix.nbytes) != (head_nbytes, nbytes):
            raise WireCorruptError(
                f"{name} has {prefix.nbytes} bytes, {prefix.head_nbytes} of them head; expected "
                f"{nbytes} and {head_nbytes}"
            )
        self.nodes: dict[str, Any] = dict(from_text(view[meta_at:texts_end]))
        self._tensors_at = head_nbytes - layout.small_nbytes

    def verify(self, map_blocks: Callable[..., Any] = map) -> None:
        """Raise unless the body is as its checksums say; ``map_blocks`` may be an executor's."""
        data, start, name = self._data.data, self._head_nbytes, self._name
        end = start + self.layout.body_nbytes
        if self._running is not None:
            require_equal(sums_of([data[start:end]], self._running), data[end:], name)
            return
        blocks = [data[at : min(at + BLOCK, end)] for at in range(start, end, BLOCK)]
        for i, came in enumerate(map_blocks(xxh3_64_digest, blocks)):
            expected = bytes(data[end + i * SUM_NBYTES : end + (i + 1) * SUM_NBYTES])
            if came != expected:
                first = start + i * BLOCK
                raise WireCorruptError(
                    f"{name} is damaged: the checksum of bytes {first} to {first + len(blocks[i])} "
                    f"is {came.hex()}; expected {expected.hex()}"
                )

    def tensor(self, i: int, device: torch.device | None = None) -> Tensor:
        """Return a tensor as a view of the bytes, or as a copy on a device."""
        (_, dtype, shape), size = self.layout.fields[i], self.layout.sizes[i]
        start = self._tensors_at + self.layout.starts[i]
        if device is None and dtype in _NUMPY and size and dtype is not torch.bool:
            # In a third of the time that torch takes to make a view.
            return torch.from_numpy(np.ndarray(shape, _NUMPY[dtype], self._data, start))
        content = self._data[start : start + size]
        # What torch makes of other truth values is undefined.
        if dtype is torch.bool and content.max(initial=0) > 1:
            raise ValueError(f"tensor {i} holds truth values of bytes above 1, expected 0 or 1")
        flat = torch.from_numpy(content)
        if device is not None:  # copied as bytes, since torch copies no tensors of some dtypes
            flat = flat.to(device, copy=True)
        return flat.view(dtype).view(shape)
