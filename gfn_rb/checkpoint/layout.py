"""The file format.

=========  ==================================================================================
prefix     magic, format version, length of the header, length of the file, CRC-32 of the
           header, CRC-32 of the prefix up to here; little-endian
header     JSON: ``sections``, nested values by name (see :mod:`gfn_rb.checkpoint.tree`), and
           ``tensors``: dtype, shape, offset, nbytes, device of each
tensors    raw bytes in C order, each at a multiple of 64 bytes from the start of the file;
           offsets count from the first such multiple after the header
checksums  CRC-32 of every block of 16 MiB from the start of the file to here, then the CRC-32
           of these; little-endian
=========  ==================================================================================

Everything but the checksums is known before the first byte is written, so files are written in
one pass, straight from the tensors' memory.
"""

from __future__ import annotations

import struct

VERSION = 1
MAGIC = b"gfn_rb\r\n"
PREFIX = struct.Struct("<8sIQQI")
SUM = struct.Struct("<I")
HEAD = PREFIX.size + SUM.size
BLOCK = 1 << 24

# Sections: of save_checkpoint the first three, of save_state the last.
ROWS, BUFFERS, EXTRA, STATE = "rows", "buffers", "extra", "state"

_ALIGN = 64


def aligned(position: int) -> int:
    """Return the next multiple of 64.

    Args:
        position: in bytes.
    """
    return -(-position // _ALIGN) * _ALIGN
