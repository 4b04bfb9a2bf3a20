"""Tensors as checked bytes: files for checkpoints, frames for messages and journal records.

Both share one layout (gfn_rb.codec.layout), without pickle:

    prefix     64 bytes, little-endian, with the sizes of what follows
    structure  JSON: a label, the dtype and the shape of every tensor
    metadata   JSON: what else there is
    small      the tensors below 16 KiB, each at the next multiple of 64 bytes
               -- up to the next multiple of 64, all this is the head, which the prefix sums --
    body       the other tensors, those of wide dtypes first, which aligns each to its dtype
    checksums  XXH3 of 64 bits of each block of 16 MiB of the body, big-endian; with a secret
               keyed BLAKE2b of all up to the block's end (gfn_rb.codec.primitives)

Where tensors lie follows from dtypes and shapes. All bytes are checked before they are used.
"""

from typing import TYPE_CHECKING

from gfn_rb.lazy import lazy_exports

if TYPE_CHECKING:
    from gfn_rb.codec.frames import (
        Frame as Frame,
        decode_frame as decode_frame,
        encode_frame as encode_frame,
    )
    from gfn_rb.codec.primitives import LazyBuffer as LazyBuffer

__getattr__, __all__ = lazy_exports(__name__)
