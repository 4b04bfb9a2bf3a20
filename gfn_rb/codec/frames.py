"""Frames: a kind, a little metadata and the rows of a TensorDict, as the bytes of a message.

Each describes itself, so that one that was lost or damaged takes nothing else with it. Large
tensors are sent from where they are and received to where they stay: the rows are views.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.codec.prefix import FRAME, PREFIX_NBYTES, VERSION, Prefix
from gfn_rb.codec.primitives import (
    BlockSums,
    Buffer,
    LazyBuffer,
    aligned,
    find_damage,
    from_text,
    to_text,
    viewed,
)
from gfn_rb.codec.schema import (
    MAX_SCHEMA_NBYTES,
    NO_ROWS,
    FrameLayout,
    assembled,
    laid_out,
    outlined,
    signature_of,
)
from gfn_rb.codec.secret import Running, Secret, check_body
from gfn_rb.errors import ArgumentError, WireCorruptError
from gfn_rb.numerics.flat import plain_bytes
from gfn_rb.shapes import Shaped

MAX_KIND = (1 << 16) - 1
MAX_META_NBYTES = 1 << 20
MAX_ROWS = 1 << 31

Meta = dict[str, Any]


class Frame(NamedTuple):
    """What one message says."""

    kind: int
    meta: Meta
    rows: TensorDict | None
    """Views of the message's bytes, on the CPU."""
    nbytes: int


def encode_frame(
    kind: int,
    rows: TensorDictBase | None = None,
    meta: Meta | None = None,
    secret: Secret | None = None,
) -> list[Buffer]:
    """Return the buffers that make a frame, one after another.

    They share memory with the rows, which must not change until the frame has been sent.

    Args:
        kind: 0 to 65,535: what it is about.
        rows: TensorDict of batch size [n], its tensors dense; nested ones travel, empty ones do
            not. Tensors that lie elsewhere or have gaps are copied first.
        meta: what JSON can say, at most 1 MiB of it. NaN and infinities travel.
        secret: that of those who are to believe it; by default it finds accidents alone.

    Raises:
        ArgumentError: the kind or the metadata break their rule.
        ShapeError: the rows cannot be sent.
    """
    if not 0 <= kind <= MAX_KIND:
        raise ArgumentError(f"kind is {kind}; expected 0 to {MAX_KIND}")
    text = _meta_text(meta)
    if rows is None:
        return _buffers(kind, b"", text, NO_ROWS, [], secret)
    signature, values = signature_of(rows)
    structure, layout, order = outlined(signature, rows.batch_size[0])
    return _buffers(kind, structure, text, layout, [values[i] for i in order], secret)


def _meta_text(meta: Meta | None) -> bytes:
    if not meta:
        return b""
    try:
        text = to_text(meta)
    except ValueError as error:
        raise ArgumentError(f"meta is nothing that JSON can say: {error}") from None
    if len(text) > MAX_META_NBYTES:
        raise ArgumentError(f"meta has {len(text)} bytes; expected at most {MAX_META_NBYTES}")
    return text


def _buffers(
    kind: int,
    structure: bytes,
    text: bytes,
    layout: FrameLayout,
    values: list[Tensor],
    secret: Secret | None,
) -> list[Buffer]:
    texts_end = PREFIX_NBYTES + len(structure) + len(text)
    head = bytearray(layout.head_nbytes(texts_end))
    view, base = memoryview(head), aligned(texts_end)
    view[PREFIX_NBYTES:texts_end] = structure + text
    for i, start, end in layout.small:
        view[base + start : base + end] = plain_bytes(values[i])
    large = [plain_bytes(values[i]) for i, _, _ in layout.large]
    nbytes = len(head) + layout.tail_nbytes
    sizes = (nbytes, len(head), len(structure), len(text), layout.n_rows)
    running = Prefix(VERSION, kind, FRAME, 0, *sizes).seal(view, secret)
    if not large:
        return [head]
    # Summed only when all else is on its way already.
    lazy = LazyBuffer(layout.tail_nbytes - layout.body_nbytes, lambda: _sums(large, running))
    return [head, *large, lazy]


def _sums(contents: list[memoryview], head: Running) -> bytes:
    sums = BlockSums(head)
    for content in contents:
        sums.update(content)
    return sums.digest()


def decode_frame(data: Shaped[np.ndarray, "n"], secret: Secret | None = None) -> Frame:
    """Return what a message says, once all of it has been checked.

    Args:
        data: the bytes of one message, uint8, aligned to 16. The rows are views of it.
        secret: that it must have been made with, None for without any.

    Raises:
        SecretError: it was not made with the secret, or with one, or was changed since.
        WireCorruptError: it is no frame, truncated or damaged.
        WireVersionError: it is a frame of another version.
        WireSchemaError: its schema is malformed.
    """
    content = data.data
    prefix, name, running = _checked(content, secret)
    text = bytes(content[PREFIX_NBYTES : prefix.meta_at])
    layout = laid_out(text, prefix.n_rows) if text else NO_ROWS
    meta = _meta(content[prefix.meta_at : prefix.texts_end], name)
    head_nbytes = layout.head_nbytes(prefix.texts_end)
    nbytes = head_nbytes + layout.tail_nbytes
    if (prefix.head_nbytes, prefix.nbytes, prefix.n_rows) != (head_nbytes, nbytes, layout.n_rows):
        raise WireCorruptError(
            f"{name} has {prefix.n_rows} rows in {prefix.nbytes} bytes, {prefix.head_nbytes} of "
            f"them head; expected {layout.n_rows} in {nbytes} and {head_nbytes}"
        )
    rows = _rows(data, prefix, layout, name, running) if text else None
    return Frame(prefix.kind, meta, rows, prefix.nbytes)


def _checked(data: memoryview, secret: Secret | None) -> tuple[Prefix, str, Running]:
    """Return the prefix of a frame whose head is sound, what errors call it, and the head's sum."""
    prefix, running = Prefix.checked(data, "a frame", FRAME, secret)
    name = f"a frame of kind {prefix.kind}"
    if prefix.n_rows > MAX_ROWS:
        raise WireCorruptError(f"{name} has {prefix.n_rows} rows; expected at most {MAX_ROWS}")
    if prefix.structure_nbytes > MAX_SCHEMA_NBYTES or prefix.meta_nbytes > MAX_META_NBYTES:
        raise WireCorruptError(
            f"{name} has a schema of {prefix.structure_nbytes} and metadata of "
            f"{prefix.meta_nbytes} bytes; expected at most {MAX_SCHEMA_NBYTES} and "
            f"{MAX_META_NBYTES}"
        )
    return prefix, name, running


def _meta(text: memoryview, name: str) -> Meta:
    if not text:
        return {}
    try:
        meta = from_text(text)
    except ValueError as error:
        raise WireCorruptError(f"the metadata of {name} is no JSON: {error}") from None
    if not isinstance(meta, dict):
        raise WireCorruptError(
            f"the metadata of {name} is a {type(meta).__name__}; expected a dict"
        )
    return meta


def _rows(
    data: np.ndarray, prefix: Prefix, layout: FrameLayout, name: str, running: Running
) -> TensorDict:
    if layout.large:
        end = prefix.head_nbytes + layout.body_nbytes
        body, sums = data.data[prefix.head_nbytes : end], data.data[end:]
        if running is not None:
            check_body(body, sums, running, name)
        elif damage := find_damage(body, sums, prefix.head_nbytes):
            raise WireCorruptError(f"{name} is damaged: {damage}")
    views: list[Any] = [None] * len(layout.fields)
    small = aligned(prefix.texts_end)
    for base, places in ((small, layout.small), (prefix.head_nbytes, layout.large)):
        for i, start, _ in places:
            views[i] = viewed(data, base + start, layout.fields[i].dtype, layout.shapes[i])
    for i in layout.truths:
        # What torch makes of other bytes than 0 and 1 is undefined.
        if views[i].numpy().view(np.uint8).max(initial=0) > 1:
            raise WireCorruptError(
                f"{layout.fields[i].key} in {name} holds truth values of bytes above 1; expected "
                "0 or 1"
            )
    return assembled(layout, views)
