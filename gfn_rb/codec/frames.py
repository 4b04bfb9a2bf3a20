"""Frames: a kind, a little metadata and rows, as the bytes of a message.

A frame describes itself, so one that is lost or damaged harms no other. Large tensors are sent
from where they are, and decoded rows are views of the message.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDictBase

from gfn_rb.codec.layout import FRAME, Content, Prefix, sealed_head
from gfn_rb.codec.primitives import Buffer, LazyBuffer, Secret, one_line, sums_of
from gfn_rb.codec.values import Decoder, Encoder
from gfn_rb.errors import ArgumentError, ShapeError, WireCorruptError, WireError, WireSchemaError
from gfn_rb.numerics.flat import plain_bytes
from gfn_rb.shapes import Shaped

MAX_KIND = (1 << 16) - 1
MAX_TEXT_NBYTES = 1 << 24

Meta = dict[str, Any]


class Frame(NamedTuple):
    """The contents of one message."""

    kind: int
    meta: Meta
    rows: TensorDictBase | None
    """Views of the message's bytes, on the CPU."""
    nbytes: int
    scores: TensorDictBase | None = None
    """Further rows, of any number."""


def encode_frame(
    kind: int,
    rows: TensorDictBase | None = None,
    meta: Meta | None = None,
    secret: Secret | None = None,
    scores: TensorDictBase | None = None,
) -> list[Buffer]:
    """Return the buffers that form a frame, in order.

    They share memory with the rows, which must not change until the frame has been sent.

    Args:
        kind: kind of the message, 0 to 65,535.
        rows: TensorDict of batch size [n]. Entries are tensors, strings (``NonTensorStack``), and
            TensorDicts of them. Tensors on other devices or with gaps are copied first.
        meta: dict that JSON can represent. NaN and infinities are allowed.
        secret: secret to make the frame with. None: its checksums detect accidents alone.
        scores: further rows, of any number.

    Raises:
        ArgumentError: the kind or the metadata are not allowed, or take over 16 MiB as text.
        ShapeError: the rows cannot be sent.
    """
    if not 0 <= kind <= MAX_KIND:
        raise ArgumentError(f"kind is {kind}; expected 0 to {MAX_KIND}")
    encoder = Encoder()
    nodes: dict[str, Any] = {"meta": meta} if meta else {}
    for name, each in (("rows", rows), ("scores", scores)):
        if each is None:
            continue
        if len(each.batch_size) != 1:
            raise ShapeError(f"{name} have batch size {list(each.batch_size)}; expected [n]")
        try:
            nodes[name] = encoder.encode(each, name)
        except ValueError as error:
            raise ShapeError(f"cannot send {error}") from None
    try:
        head, layout, running = sealed_head(FRAME, kind, nodes, encoder.tensors, secret)
    except ValueError as error:
        raise ArgumentError(f"meta is nothing that JSON can say: {error}") from None
    if len(head) > MAX_TEXT_NBYTES and len(head) - layout.head_nbytes(0) > MAX_TEXT_NBYTES:
        raise ArgumentError("meta and rows take too much text; expected at most 16 MiB")
    if not layout.large:
        return [head]
    large = [plain_bytes(encoder.tensors[i]) for i, _, _ in layout.large]
    # Summed only when all else is on its way already.
    lazy = LazyBuffer(layout.tail_nbytes - layout.body_nbytes, lambda: sums_of(large, running))
    return [head, *large, lazy]


def decode_frame(data: Shaped[np.ndarray, "n"], secret: Secret | None = None) -> Frame:
    """Return the contents of a message after verifying all of it.

    Args:
        data: bytes of one message, uint8, aligned to 16. The rows are views of it.
        secret: secret that the frame must have been made with; None for a frame without one.

    Raises:
        SecretError: the frame was made with another secret, or was changed.
        WireCorruptError: the bytes are not a frame, truncated or damaged.
        WireVersionError: the frame has another version.
        WireSchemaError: the bytes are sound, and what they describe are no metadata and rows.
    """
    prefix, running = Prefix.checked(data.data, "a frame", FRAME, secret)
    name = f"a frame of kind {prefix.kind}"
    if (n_text := prefix.structure_nbytes + prefix.meta_nbytes) > MAX_TEXT_NBYTES:
        raise WireCorruptError(f"{name} has {n_text} bytes of text; expected at most 16 MiB")
    try:
        content = Content(data, prefix, running, name)
        if content.layout.large:
            content.verify()
        nodes = content.nodes
        meta = nodes.pop("meta", {})
        if not isinstance(meta, dict) or not nodes.keys() <= {"rows", "scores"}:
            raise ValueError(f"it holds {[*nodes]} and metadata that are a {type(meta).__name__}")
        decoder = Decoder(content.tensor)
        values = {each: decoder.decode(node) for each, node in nodes.items()}
    except WireError:
        raise
    except Exception as error:
        raise WireSchemaError(f"{name} makes no sense: {one_line(error)}") from None
    for each, value in values.items():
        if not isinstance(value, TensorDictBase) or len(value.batch_size) != 1:
            raise WireSchemaError(f"the {each} of {name} are no TensorDict of batch size [n]")
    return Frame(prefix.kind, meta, values.get("rows"), prefix.nbytes, values.get("scores"))
