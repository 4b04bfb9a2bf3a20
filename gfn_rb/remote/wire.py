"""Frames: a kind, a little metadata and the rows of a TensorDict, as bytes. Nothing is pickled.

=========  ==================================================================================
prefix     64 bytes, little-endian: magic, version, kind, CRC-32 of the head but for these four
           bytes, bytes of the frame, of the head, of the schema, of the metadata, sequence,
           schema id (0: no rows), number of rows
schema     JSON, in the first frame that needs it (:mod:`gfn_rb.remote.schema`)
metadata   JSON: an object
small      the tensors below 16 KiB, each at the next multiple of 64 bytes
           -- up to here, and to the next multiple of 64, it is the head --
large      the other tensors, those of wide dtypes first, which aligns each to its dtype
sums       after zeros up to a multiple of 8, a checksum of 8 bytes for each large tensor; zeros
           up to a multiple of 64
=========  ==================================================================================

Sizes and positions follow from the schema and the number of rows. Large tensors are sent from
where they are and received to where they stay: the TensorDict is made of views.
"""

from __future__ import annotations

import json
import struct
import zlib
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import (
    ArgumentError,
    ShapeError,
    WireCorruptError,
    WireSchemaError,
    WireVersionError,
)
from gfn_rb.remote.checksum import checksum
from gfn_rb.remote.schema import MAX_SCHEMA_NBYTES, Field, Schema, assembled, described
from gfn_rb.shapes import Shaped
from gfn_rb.transports.base import Buffer, Late

MAGIC = b"gfn_rb\r\n"
VERSION = 1
MAX_KIND = (1 << 16) - 1
MAX_META_NBYTES = 1 << 20
MAX_ROWS = 1 << 31
MAX_SCHEMAS = 256

Meta = dict[str, Any]

_SMALL = 1 << 14
_CRC = struct.Struct("<I")
_PREFIX = struct.Struct("<8sHHIQIIIxxxxQQQ")
_CRC_AT = 12
_SUM = struct.Struct("<Q")


class Frame(NamedTuple):
    """What one message says."""

    kind: int
    sequence: int
    """How many frames this sender had made before, or had since it began anew."""
    meta: Meta
    items: TensorDict | None
    """Views of the message's bytes, on the CPU."""
    nbytes: int


class FrameWriter:
    """Makes the frames of one connection in one direction.

    It counts them, and announces each schema in the first frame that needs it.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self._announced: set[tuple[Field, ...]] = set()

    def frame(
        self, kind: int, items: TensorDictBase | None = None, meta: Meta | None = None
    ) -> list[Buffer]:
        """Return the buffers that make a frame, one after another.

        They share memory with the items, which must not change until the frame has been sent.
        Every frame made has to be sent, in order.

        Args:
            kind: 0 to 65,535: what it is about.
            items: TensorDict of batch size [n], its tensors dense; nested ones travel, empty ones
                do not. Tensors that lie elsewhere or have gaps are copied first.
            meta: what JSON can say, at most 1 MiB of it. NaN and infinities travel.

        Raises:
            ArgumentError: the kind or the metadata break their rule.
            ShapeError: items cannot be sent. No frame was made: the next has its number.
        """
        if not 0 <= kind <= MAX_KIND:
            raise ArgumentError(f"kind is {kind}; expected 0 to {MAX_KIND}")
        text = _encoded(meta)
        if items is None:
            buffers = self._buffers(kind, text, None, [], 0)
        else:
            fields, values = described(items)
            buffers = self._buffers(kind, text, _schema(fields), values, items.batch_size[0])
        self.sequence += 1
        return buffers

    def forget(self) -> None:
        """Begin anew: count from 0, and announce schemas again."""
        self.sequence = 0
        self._announced.clear()

    def _buffers(
        self, kind: int, text: bytes, schema: Schema | None, values: list[Tensor], n_rows: int
    ) -> list[Buffer]:
        announcement = self._announcement(schema)
        fields = () if schema is None else schema.fields
        texts = announcement + text
        plan = Plan(fields, n_rows, _PREFIX.size + len(texts))
        head = bytearray(plan.head_nbytes)
        head[_PREFIX.size : _PREFIX.size + len(texts)] = texts
        for at, value in zip(plan.positions, values, strict=True):
            if at < plan.head_nbytes:
                content = _content(value)
                head[at : at + len(content)] = content
        sizes = (plan.nbytes, plan.head_nbytes, len(announcement), len(text))
        known = (self.sequence, 0 if schema is None else schema.id, n_rows)
        _PREFIX.pack_into(head, 0, MAGIC, VERSION, kind, 0, *sizes, *known)
        _CRC.pack_into(head, _CRC_AT, _head_crc(memoryview(head)))
        large = [_content(values[i]) for i in plan.large]
        if not large:
            return [head]
        late = Late(plan.nbytes - plan.large_end, lambda: _sums(large, plan))
        return [head, *large, late]

    def _announcement(self, schema: Schema | None) -> bytes:
        """Return what says how rows look, nothing if the other side knows."""
        if schema is None or schema.fields in self._announced:
            return b""
        if len(self._announced) == MAX_SCHEMAS:
            self._announced.clear()
        self._announced.add(schema.fields)
        return schema.json


class FrameReader:
    """Reads the frames of one connection in one direction, and believes none unchecked.

    A frame numbered 0 begins a connection anew.
    """

    def __init__(self) -> None:
        self.missed = 0
        """How many frames were sent but not read, as the numbers of later ones tell."""
        self._next = 0
        self._known: dict[int, Schema] = {}

    def read(self, data: Shaped[Tensor, "n"]) -> Frame:
        """Return what a message says. Items are views of it.

        Args:
            data: the bytes of one message, aligned to 64.

        Raises:
            WireCorruptError: it is no frame, truncated, damaged, or came before.
            WireVersionError: it is a frame of another version.
            WireSchemaError: its schema is malformed, or was not announced. Whatever is raised, the
                reader is as it was.
        """
        prefix = Prefix.read(data)
        head = data[: prefix.head_nbytes].numpy().data
        text, meta = self._texts(prefix, head)
        schema = self._schema(prefix, text)
        items = _items(data, prefix, () if schema is None else schema.fields)
        self._accept(prefix, schema)
        return Frame(prefix.kind, prefix.sequence, meta, items if schema else None, len(data))

    def _texts(self, prefix: Prefix, head: memoryview) -> tuple[bytes, Meta]:
        end = _PREFIX.size + prefix.schema_nbytes
        text = bytes(head[_PREFIX.size : end])
        return text, _decoded(bytes(head[end : end + prefix.meta_nbytes]))

    def _schema(self, prefix: Prefix, text: bytes) -> Schema | None:
        if text:
            schema = Schema.from_json(text)
            if schema.id != prefix.schema_id:
                raise WireSchemaError(f"{prefix} announces the schema {schema.id:016x}")
            return schema
        if prefix.schema_id == 0:
            return None
        known = self._known if prefix.sequence else {}
        if prefix.schema_id not in known:
            raise WireSchemaError(f"{prefix} has a schema that no frame before it announced")
        return known[prefix.schema_id]

    def _accept(self, prefix: Prefix, schema: Schema | None) -> None:
        if prefix.sequence == 0:
            self._next = 0
            self._known.clear()
        elif prefix.sequence < self._next:
            raise WireCorruptError(f"{prefix} came before; expected number {self._next} or later")
        self.missed += prefix.sequence - self._next
        self._next = prefix.sequence + 1
        if schema is not None and prefix.schema_nbytes:
            # The writer counts on its last MAX_SCHEMAS announcements, at most.
            self._known.pop(schema.id, None)
            self._known[schema.id] = schema
            if len(self._known) > MAX_SCHEMAS:
                del self._known[next(iter(self._known))]


class Prefix(NamedTuple):
    """The first 64 bytes of a frame."""

    version: int
    kind: int
    crc: int
    nbytes: int
    head_nbytes: int
    schema_nbytes: int
    meta_nbytes: int
    sequence: int
    schema_id: int
    n_rows: int

    @classmethod
    def read(cls, data: Shaped[Tensor, "n"]) -> Prefix:
        """Return what a frame begins with, its sizes and the checksum of its head checked.

        Args:
            data: the bytes of one message.

        Raises:
            WireCorruptError: it is no frame, truncated, or its head is damaged.
            WireVersionError: it is a frame of another version.
        """
        view = data.numpy().data
        if len(view) < _PREFIX.size:
            raise WireCorruptError(
                f"a frame has {len(view)} bytes; expected {_PREFIX.size} or more"
            )
        magic, *values = _PREFIX.unpack(view[: _PREFIX.size])
        prefix = cls(*values)
        if magic != MAGIC:
            raise WireCorruptError(f"a message begins with {magic!r}; expected {MAGIC!r}")
        if prefix.version != VERSION:
            raise WireVersionError(f"{prefix} is of version {prefix.version}; expected {VERSION}")
        if prefix.nbytes != len(view):
            raise WireCorruptError(f"{prefix} has {len(view)} bytes; expected {prefix.nbytes}")
        prefix._check_bounds()
        if (came := _head_crc(view[: prefix.head_nbytes])) != prefix.crc:
            raise WireCorruptError(
                f"the checksum of the head of {prefix} is {came:08x}; expected {prefix.crc:08x}"
            )
        return prefix

    def _check_bounds(self) -> None:
        texts = _PREFIX.size + self.schema_nbytes + self.meta_nbytes
        if not texts <= self.head_nbytes <= self.nbytes or self.n_rows > MAX_ROWS:
            raise WireCorruptError(
                f"{self} has a head of {self.head_nbytes} bytes with texts up to {texts}, and "
                f"{self.n_rows} rows; expected it to hold the texts, and {MAX_ROWS} rows at most"
            )
        if self.schema_nbytes > MAX_SCHEMA_NBYTES or self.meta_nbytes > MAX_META_NBYTES:
            raise WireCorruptError(
                f"{self} has a schema of {self.schema_nbytes} and metadata of {self.meta_nbytes} "
                f"bytes; expected at most {MAX_SCHEMA_NBYTES} and {MAX_META_NBYTES}"
            )

    def __str__(self) -> str:
        return f"frame {self.sequence} of kind {self.kind}"


class Plan:
    """Where everything in a frame lies.

    Args:
        fields: of the schema.
        n_rows: of each tensor.
        texts_end: where prefix, schema and metadata end.
    """

    def __init__(self, fields: tuple[Field, ...], n_rows: int, texts_end: int) -> None:
        sizes = [field.row_nbytes * n_rows for field in fields]
        self.positions = [0] * len(fields)
        self.large = [i for i, nbytes in enumerate(sizes) if nbytes >= _SMALL]
        self.large.sort(key=lambda i: -fields[i].dtype.itemsize)
        end = texts_end
        for i, nbytes in enumerate(sizes):
            if nbytes < _SMALL:
                self.positions[i] = aligned(end)
                end = self.positions[i] + nbytes
        self.head_nbytes = aligned(end)
        end = self.head_nbytes
        for i in self.large:
            self.positions[i] = end
            end += sizes[i]
        self.large_end = end
        self.sums_at = aligned(end, _SUM.size)
        self.nbytes = aligned(self.sums_at + _SUM.size * len(self.large))


def aligned(position: int, alignment: int = 64) -> int:
    """Return the next multiple.

    Args:
        position: in bytes.
        alignment: of what.
    """
    return -(-position // alignment) * alignment


# Writing.


@lru_cache(maxsize=2 * MAX_SCHEMAS)
def _schema(fields: tuple[Field, ...]) -> Schema:
    """Return a schema that the other side will not refuse."""
    schema = Schema(fields)
    if len(schema.json) > MAX_SCHEMA_NBYTES:
        raise ShapeError(
            f"items have a schema of {len(schema.json)} bytes; expected {MAX_SCHEMA_NBYTES} at most"
        )
    try:
        return Schema.from_json(schema.json)
    except WireSchemaError as error:
        raise ShapeError(f"items cannot be sent: {error}") from None


def _encoded(meta: Meta | None) -> bytes:
    if not meta:
        return b""
    try:
        text = json.dumps(meta, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"meta is nothing that JSON can say: {error}") from None
    if len(text) > MAX_META_NBYTES:
        raise ArgumentError(f"meta has {len(text)} bytes; expected at most {MAX_META_NBYTES}")
    return text


def _content(value: Tensor) -> memoryview:
    """Return the bytes of a tensor in C order, without a copy where they are on the CPU."""
    if value.numel() == 0:
        return memoryview(b"")
    plain = value.detach().as_subclass(Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    # Strides of contiguous tensors mean nothing, and can be anything, in dimensions of one.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().data


def _sums(contents: list[memoryview], plan: Plan) -> bytes:
    sums = bytearray(plan.nbytes - plan.large_end)
    values = [checksum(torch.frombuffer(content, dtype=torch.uint8)) for content in contents]
    struct.pack_into(f"<{len(values)}Q", sums, plan.sums_at - plan.large_end, *values)
    return bytes(sums)


def _head_crc(head: memoryview) -> int:
    return zlib.crc32(head[_CRC_AT + _CRC.size :], zlib.crc32(head[:_CRC_AT]))


# Reading.


def _decoded(text: bytes) -> Meta:
    if not text:
        return {}
    try:
        meta = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireCorruptError(f"the metadata of a frame is no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise WireCorruptError(
            f"the metadata of a frame is a {type(meta).__name__}; expected a dict"
        )
    return meta


def _items(data: Shaped[Tensor, "n"], prefix: Prefix, fields: tuple[Field, ...]) -> TensorDict:
    texts_end = _PREFIX.size + prefix.schema_nbytes + prefix.meta_nbytes
    plan = Plan(fields, prefix.n_rows, texts_end)
    if (prefix.head_nbytes, prefix.nbytes) != (plan.head_nbytes, plan.nbytes):
        raise WireCorruptError(
            f"{prefix} has {prefix.n_rows} rows in {prefix.nbytes} bytes, {prefix.head_nbytes} of "
            f"them head; expected {plan.nbytes} and {plan.head_nbytes}"
        )
    _check_sums(data, prefix, plan, fields)
    views = _views(data, plan, fields, prefix.n_rows)
    return assembled(fields, views, prefix.n_rows)


def _check_sums(
    data: Shaped[Tensor, "n"], prefix: Prefix, plan: Plan, fields: tuple[Field, ...]
) -> None:
    sums = data[plan.sums_at :].numpy().data
    for k, i in enumerate(plan.large):
        start = plan.positions[i]
        came = checksum(data[start : start + prefix.n_rows * fields[i].row_nbytes])
        (expected,) = _SUM.unpack_from(sums, k * _SUM.size)
        if came != expected:
            raise WireCorruptError(
                f"the checksum of {fields[i].key} in {prefix} is {came:016x}; expected "
                f"{expected:016x}"
            )


def _views(
    data: Shaped[Tensor, "n"], plan: Plan, fields: tuple[Field, ...], n_rows: int
) -> list[Tensor]:
    typed = {field.dtype: data.view(field.dtype) for field in fields}
    views = []
    for field, at in zip(fields, plan.positions, strict=True):
        base, shape = typed[field.dtype], (n_rows, *field.shape)
        start = base.storage_offset() + at // field.dtype.itemsize
        views.append(base.as_strided(shape, _strides(shape), start))
    return views


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))
