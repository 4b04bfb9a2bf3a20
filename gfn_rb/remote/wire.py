"""Frames: a kind, a little metadata and the rows of a TensorDict, as bytes. Nothing is pickled.

=========  ==================================================================================
prefix     64 bytes, little-endian: magic, version, kind, CRC-32 of the head but for these four
           bytes, bytes of the frame, of the head, of the schema, of the metadata, sequence,
           schema id (0: no rows), number of rows
schema     JSON, in the first frame that needs it (:mod:`gfn_rb.remote.schema`)
metadata   JSON: an object
small      the tensors below 16 KiB, each at the next multiple of 64 bytes
           -- up to here, and to the next multiple of 64, it is the head --
large      the other tensors, each at the next multiple of 64 bytes
sums       a checksum of 8 bytes for each large tensor, at the next multiple of 64
=========  ==================================================================================

Sizes and positions follow from the schema and the number of rows. Large tensors are sent from
where they are and received to where they stay: the TensorDict is made of views.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError, WireCorruptError, WireSchemaError, WireVersionError
from gfn_rb.remote.checksum import checksum
from gfn_rb.remote.schema import MAX_SCHEMA_NBYTES, Field, Schema, assembled, described
from gfn_rb.shapes import Int
from gfn_rb.transports.base import Buffer

MAGIC = b"gfn_rb\r\n"
VERSION = 1
MAX_KIND = (1 << 16) - 1
MAX_META_NBYTES = 1 << 20
MAX_ROWS = 1 << 31
MAX_SCHEMAS = 256

Meta = dict[str, Any]

_ALIGN = 64
_SMALL = 1 << 14
_CRC = struct.Struct("<I")
_PREFIX = struct.Struct("<8sHHIQIIIxxxxQQQ")
_CRC_AT = 12
_SUM = struct.Struct("<Q")
_ZEROS = bytes(_ALIGN)


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
        plan = Plan(fields, n_rows, _PREFIX.size + len(announcement) + len(text))
        head = bytearray(plan.head_nbytes)
        head[_PREFIX.size : plan.start] = announcement + text
        for at, value in zip(plan.positions, values, strict=True):
            if at < plan.head_nbytes:
                content = _content(value)
                head[at : at + len(content)] = content
        sizes = (plan.nbytes, plan.head_nbytes, len(announcement), len(text))
        known = (self.sequence, 0 if schema is None else schema.id, n_rows)
        _PREFIX.pack_into(head, 0, MAGIC, VERSION, kind, 0, *sizes, *known)
        _CRC.pack_into(head, _CRC_AT, _head_crc(memoryview(head)))
        large = [_content(v) for i, v in enumerate(values) if plan.positions[i] >= len(head)]
        return [head, *_padded(large), _sums(large)]

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

    def read(self, data: Int[Tensor, "n"]) -> Frame:
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
        head = memoryview(data[: prefix.head_nbytes].numpy())
        text, meta = self._texts(prefix, head)
        schema = self._schema(prefix, text)
        items = None if schema is None else _items(data, prefix, schema)
        self._accept(prefix, schema)
        return Frame(prefix.kind, prefix.sequence, meta, items, len(data))
