"""Tensors as checked bytes: what checkpoints are files of, and messages are frames of.

Both consist of a fixed prefix, two texts in JSON, tensors in C order, and checksums:

    prefix     64 bytes, little-endian (gfn_rb.codec.prefix)
    structure  JSON: dtype and shape of every tensor
    metadata   JSON: what else there is
    small      of frames: the tensors below 16 KiB, each at the next multiple of 64 bytes
               -- up to here, and to the next multiple of 64, it is the head: the prefix sums it --
    body       the other tensors: of files each at a multiple of 64 bytes; of frames one after
               another, those of wide dtypes first, which aligns each to its dtype
    checksums  XXH3 of 64 bits of each block of 16 MiB of the body, big-endian; with a secret
               keyed BLAKE2b of all up to the block's end (gfn_rb.codec.secret)

Where tensors lie follows from dtypes and shapes; no position is stored that could lie. Nothing is
pickled, and nothing that arrives is believed unchecked.
"""

from gfn_rb.codec.frames import Frame, decode_frame, encode_frame
from gfn_rb.codec.primitives import LazyBuffer

__all__ = ["Frame", "LazyBuffer", "decode_frame", "encode_frame"]
