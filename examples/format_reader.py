"""A reader of the file format, which needs NumPy and xxhash and no code of gfn_rb.

python examples/format_reader.py writes a file and a frame, and reads both.
"""

import json
import math
import struct

import numpy as np
import xxhash

BLOCK = 1 << 24


def aligned(position):
    """Return the next multiple of 64."""
    return -(-position // 64) * 64


def read(data):
    """Return form, kind, values by name as nodes, and tensors by number."""
    magic, seed, total, nbytes, head, n_structure, n_meta = struct.unpack("<8s6Q", data[:56])
    version, kind, form = struct.unpack("<HH4s", data[8:16])
    texts_end = 64 + n_structure + n_meta
    assert magic == b"gfn_rb\r\n"
    assert nbytes == len(data)
    assert texts_end <= head <= nbytes
    assert xxhash.xxh3_64_intdigest(data[24:head], seed) == total
    assert version == 4

    structure = json.loads(data[64 : 64 + n_structure])
    values = json.loads(data[64 + n_structure : texts_end])
    tensors, end = tensors_of(data, structure, aligned(texts_end), head)
    blocks = [data[i : min(i + BLOCK, end)] for i in range(head, end, BLOCK)]
    assert data[end:] == b"".join(map(xxhash.xxh3_64_digest, blocks))
    return form, kind, values, tensors


def tensors_of(data, structure, small, head):
    """Return the tensors by number, and where the body ends."""
    dtypes = [np.dtype(dtype) for _, dtype, _ in structure]
    shapes = [shape for _, _, shape in structure]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]

    def tensor(i, at):
        return np.frombuffer(data[at : at + sizes[i]], dtypes[i]).reshape(shapes[i])

    tensors = {}
    for i, size in enumerate(sizes):
        if size < 16384:
            tensors[i] = tensor(i, small)
            small = aligned(small + size)
    for i in sorted(range(len(sizes)), key=lambda i: -dtypes[i].itemsize):
        if sizes[i] >= 16384:
            tensors[i] = tensor(i, head)
            head += sizes[i]
    return tensors, head


if __name__ == "__main__":
    from pathlib import Path

    import torch
    from tensordict import TensorDict

    from gfn_rb.checkpoint import save_state
    from gfn_rb.codec import LazyBuffer, encode_frame

    save_state("state.ckpt", {"weights": torch.ones(2, 3), "step": 7, "rate": 0.5})
    form, _, values, tensors = read(Path("state.ckpt").read_bytes())
    print(form, values["values"])
    print(tensors[0].tolist())

    rows = TensorDict({"tokens": torch.arange(4).view(2, 2), "text": ["é", ""]}, [2])
    buffers = encode_frame(3, rows, {"id": 1})
    frame = b"".join(each.make() if isinstance(each, LazyBuffer) else each for each in buffers)
    form, kind, values, tensors = read(frame)
    columns = dict(values["rows"]["tensordict"]["entries"])
    print(form, kind, values["meta"], columns["tokens"], columns["text"])
    print(tensors[0].tolist())
