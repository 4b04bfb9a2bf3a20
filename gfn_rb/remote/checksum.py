"""Checksums at the speed of memory."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from gfn_rb.shapes import Shaped

_STRIDES = (512, 511)  # coprime: no two words of a block share both remainders
_WORDS = 1 << 17  # of a block: below 512 * 511, and what a cache holds between the two passes


def checksum(data: Shaped[Tensor, "n"]) -> int:
    r"""Return 64 bits that depend on every byte and on where it stands.

    Of each block of 131,072 words :math:`w_i` of 64 bits,

    .. math:: s_m(j) = \sum_{i \equiv j \bmod m} w_i \bmod 2^{64}, \quad m \in \{512, 511\},

    then the CRC-32 of each :math:`s_m` over all blocks, and of the bytes left over. One changed
    word changes one sum for each m. Two exchanged words of a block would have to share both
    remainders to go unnoticed, and by the Chinese remainder theorem none do. The sums are added
    at the speed of memory, several times that of a CRC of all bytes.

    Args:
        data: bytes on the CPU.
    """
    aligned = data if data.data_ptr() % 8 == 0 else data.clone()
    words = aligned.numpy()[: len(data) // 8 * 8].view(np.int64)
    high, low = (_stride_crc(words, stride) for stride in _STRIDES)
    rest = aligned.numpy()[words.nbytes :]
    return zlib.crc32(rest.data, high) << 32 | zlib.crc32(rest.data, low)


def _stride_crc(words: np.ndarray, stride: int) -> int:
    crc = 0
    for start in range(0, len(words), _WORDS):
        block = words[start : start + _WORDS]
        whole = len(block) // stride * stride
        if whole:
            rows = torch.from_numpy(block[:whole]).view(-1, stride)
            crc = zlib.crc32(rows.sum(0).numpy().data, crc)
        crc = zlib.crc32(block[whole:].data, crc)
    return crc
