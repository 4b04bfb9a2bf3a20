"""Frames: a kind, a little metadata and the rows of a TensorDict, as bytes. Nothing is pickled.

=========  ==================================================================================
prefix     64 bytes, little-endian: magic, version, kind, bytes of the head, checksum of the head
           but for magic and checksum, bytes of the frame, of the schema, of the metadata,
           sequence, schema id (0: no rows), number of rows (:mod:`gfn_rb.remote.prefix`)
schema     JSON, in the first frame that needs it (:mod:`gfn_rb.remote.schema`)
metadata   JSON: an object
small      the tensors below 16 KiB, each at the next multiple of 64 bytes
           -- up to here, and to the next multiple of 64, it is the head --
large      the other tensors, those of wide dtypes first, which aligns each to its dtype
sums       after zeros up to a multiple of 8, a checksum of 8 bytes for each large tensor; zeros
           up to a multiple of 64
=========  ==================================================================================

Sizes and positions follow from the schema and the number of rows (:mod:`gfn_rb.remote.plan`).
Large tensors are sent from where they are and received to where they stay: the TensorDict is made
of views.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError, ShapeError, WireCorruptError, WireSchemaError
from gfn_rb.remote.checksum import checksum
from gfn_rb.remote.content import plain_bytes, viewed
from gfn_rb.remote.plan import Plan, aligned, planned
from gfn_rb.remote.prefix import MAX_META_NBYTES, PREFIX_NBYTES, VERSION, Prefix
from gfn_rb.remote.schema import (
    MAX_SCHEMA_NBYTES,
    Schema,
    Signature,
    assembled,
    fields_of,
    signature_of,
)
from gfn_rb.shapes import Shaped
from gfn_rb.transports.base import Buffer, Late

MAX_KIND = (1 << 16) - 1
MAX_SCHEMAS = 256

Meta = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


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
        self._announced: set[int] = set()

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
            buffers = self._buffers(kind, text, None, NO_ROWS, [])
        else:
            signature, values = signature_of(items)
            schema, plan, order = _outlined(signature, items.batch_size[0])
            buffers = self._buffers(kind, text, schema, plan, [values[i] for i in order])
            self._announced.add(schema.id)
        self.sequence += 1
        return buffers

    def forget(self) -> None:
        """Begin anew: count from 0, and announce schemas again."""
        self.sequence = 0
        self._announced.clear()

    def _buffers(
        self, kind: int, text: bytes, schema: Schema | None, plan: Plan, values: list[Tensor]
    ) -> list[Buffer]:
        announcement = self._announcement(schema)
        texts_end = PREFIX_NBYTES + len(announcement) + len(text)
        head = bytearray(plan.head_nbytes(texts_end))
        view, base = memoryview(head), aligned(texts_end)
        view[PREFIX_NBYTES:texts_end] = announcement + text
        for i, start, end in plan.small:
            view[base + start : base + end] = plain_bytes(values[i])
        large = [plain_bytes(values[i]) for i, _, _ in plan.large]
        sizes = (len(head) + plan.tail_nbytes, len(announcement), len(text))
        known = (self.sequence, 0 if schema is None else schema.id, plan.n_rows)
        Prefix(VERSION, kind, len(head), 0, *sizes, *known).seal(view)
        if not large:
            return [head]
        late = Late(plan.tail_nbytes - plan.large_nbytes, lambda: _sums(large, plan))
        return [head, *large, late]

    def _announcement(self, schema: Schema | None) -> bytes:
        """Return what says how rows look, nothing if the other side knows."""
        if schema is None or schema.id in self._announced:
            return b""
        if len(self._announced) == MAX_SCHEMAS:
            self._announced.clear()
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

    def read(self, data: Shaped[np.ndarray, "n"]) -> Frame:
        """Return what a message says. Items are views of it.

        Args:
            data: the bytes of one message, uint8, aligned to 16.

        Raises:
            WireCorruptError: it is no frame, truncated, damaged, or came before.
            WireVersionError: it is a frame of another version.
            WireSchemaError: its schema is malformed, or was not announced. Whatever is raised, the
                reader is as it was.
        """
        frame = data.data
        prefix = Prefix.read(frame)
        schema, meta = self._schema(prefix, frame), _meta(prefix, frame)
        plan = NO_ROWS if schema is None else planned(schema.fields, prefix.n_rows)
        _check_sizes(prefix, plan)
        items = None if schema is None else _items(data, prefix, plan)
        self._accept(prefix, schema)
        return Frame(prefix.kind, prefix.sequence, meta, items, prefix.nbytes)

    def _schema(self, prefix: Prefix, frame: memoryview) -> Schema | None:
        if prefix.schema_nbytes:
            end = PREFIX_NBYTES + prefix.schema_nbytes
            schema = Schema.from_json(bytes(frame[PREFIX_NBYTES:end]))
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


# Writing.


@lru_cache(maxsize=128)
def _outlined(signature: Signature, n_rows: int) -> tuple[Schema, Plan, tuple[int, ...]]:
    """Return what the other side will not refuse: how rows look, and where tensors go.

    The last is the order of the tensors.
    """
    fields, order = fields_of(signature)
    schema = Schema(fields)
    if len(schema.json) > MAX_SCHEMA_NBYTES:
        raise ShapeError(
            f"items have a schema of {len(schema.json)} bytes; expected {MAX_SCHEMA_NBYTES} at most"
        )
    try:
        return Schema.from_json(schema.json), planned(fields, n_rows), order
    except WireSchemaError as error:
        raise ShapeError(f"items cannot be sent: {error}") from None


def _encoded(meta: Meta | None) -> bytes:
    if not meta:
        return b""
    try:
        text = _encode(meta).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"meta is nothing that JSON can say: {error}") from None
    if len(text) > MAX_META_NBYTES:
        raise ArgumentError(f"meta has {len(text)} bytes; expected at most {MAX_META_NBYTES}")
    return text


def _sums(contents: list[memoryview], plan: Plan) -> bytes:
    sums = bytearray(plan.tail_nbytes - plan.large_nbytes)
    plan.sums.pack_into(sums, plan.sums_at - plan.large_nbytes, *map(checksum, contents))
    return bytes(sums)


# Reading.


def _meta(prefix: Prefix, frame: memoryview) -> Meta:
    if not prefix.meta_nbytes:
        return {}
    try:
        meta = _decode(str(frame[prefix.texts_end - prefix.meta_nbytes : prefix.texts_end], "utf8"))
    except (ValueError, RecursionError) as error:
        raise WireCorruptError(f"the metadata of a frame is no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise WireCorruptError(
            f"the metadata of a frame is a {type(meta).__name__}; expected a dict"
        )
    return meta


def _check_sizes(prefix: Prefix, plan: Plan) -> None:
    """See that the sizes in the prefix are those that the rows bear out."""
    head_nbytes = plan.head_nbytes(prefix.texts_end)
    nbytes = head_nbytes + plan.tail_nbytes
    if (prefix.head_nbytes, prefix.nbytes) != (head_nbytes, nbytes):
        raise WireCorruptError(
            f"{prefix} has {prefix.n_rows} rows in {prefix.nbytes} bytes, {prefix.head_nbytes} of "
            f"them head; expected {nbytes} and {head_nbytes}"
        )


def _items(content: np.ndarray, prefix: Prefix, plan: Plan) -> TensorDict:
    if plan.large:
        _check_sums(content.data[prefix.head_nbytes :], prefix, plan)
    views: list[Any] = [None] * len(plan.fields)
    small, n_rows = aligned(prefix.texts_end), (plan.n_rows,)
    for base, places in ((small, plan.small), (prefix.head_nbytes, plan.large)):
        for i, start, _ in places:
            field = plan.fields[i]
            views[i] = viewed(content, base + start, field.dtype, n_rows + field.shape)
    for i in plan.truths:
        _check_truth(prefix, plan, i, views[i])
    return assembled(plan.fields, views, plan.n_rows)


def _check_sums(tail: memoryview, prefix: Prefix, plan: Plan) -> None:
    sums = plan.sums.unpack_from(tail, plan.sums_at)
    for (i, start, end), expected in zip(plan.large, sums, strict=True):
        if (came := checksum(tail[start:end])) != expected:
            raise WireCorruptError(
                f"the checksum of {plan.fields[i].key} in {prefix} is {came:016x}; expected "
                f"{expected:016x}"
            )


def _check_truth(prefix: Prefix, plan: Plan, index: int, view: Tensor) -> None:
    """See that truth values are bytes of 0 or 1: what torch makes of others is undefined."""
    if view.numpy().view(np.uint8).max(initial=0) > 1:
        raise WireCorruptError(
            f"{plan.fields[index].key} in {prefix} holds truth values of bytes above 1; expected "
            "0 or 1"
        )


NO_ROWS = Plan((), 0)
