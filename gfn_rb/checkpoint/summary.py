"""What a checkpoint holds, without reading the tensors."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from gfn_rb.checkpoint.storages import row_layout
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.prefix import VERSION
from gfn_rb.codec.primitives import dtype_name
from gfn_rb.errors import CheckpointCorruptError

# What a file holds; of save_state the last alone.
ROWS, BUFFERS, VALUES = "rows", "buffers", "values"


def inspect_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """Summarise a file of ``save_checkpoint`` or ``save_state``.

    Only the header is read and checked, so this takes no time however large the file is.

    Returns:
        ``version`` of the format; ``nbytes`` of the file; ``n_tensors`` and ``tensor_nbytes``;
        ``values``: the names of what was saved along with the buffer, or of the state;
        ``buffers``: for each buffer its classes, ``capacity``, ``length``, ``batch_size``,
        ``prefetched`` batches, and ``rows``: the dtype and per-row shape of each key. The members
        of an ensemble come before it. Everything in it can be written as JSON.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is no checkpoint, truncated, or its header is damaged.
    """
    file = ValueFile(Path(path))
    of_buffers = BUFFERS in file.nodes
    with file.named_errors():
        pairs = zip(file.outline(BUFFERS), file.outline(ROWS), strict=True) if of_buffers else ()
        return {
            "version": VERSION,
            "nbytes": file.nbytes,
            "n_tensors": len(file.tensors),
            "tensor_nbytes": sum(tensor.nbytes for tensor in file.tensors),
            "values": list(values_of(file, file.outline)),
            "buffers": [_buffer(state, rows) for state, rows in pairs],
        }


def outline(path: str | PathLike[str]) -> dict[str, Any]:
    """Return what was saved along with the buffer, or the state, its tensors without content.

    Only the header is read and checked.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is no checkpoint, truncated, or its header is damaged.
    """
    file = ValueFile(Path(path))
    return values_of(file, file.outline)


def values_of(file: ValueFile, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return what was saved along with the buffer, or the state, by a method of the file."""
    values = read(VALUES)
    if not isinstance(values, dict):
        raise CheckpointCorruptError(f"{file.path} holds {type(values).__name__}, expected a dict")
    return values


def _buffer(state: dict[str, Any], rows: Any) -> dict[str, Any]:
    storage = state["storage"] or {}
    layout = {} if rows is None else row_layout(rows)
    return {
        "class": state["class"],
        "storage": storage.get("class"),
        "sampler": state["sampler"]["class"],
        "writer": state["writer"]["class"],
        "capacity": storage.get("capacity"),
        "length": storage.get("length"),
        "batch_size": state["batch_size"],
        "prefetched": len(state["queue"]),
        "rows": {
            key: {"dtype": dtype_name(dtype), "shape": [*shape]}
            for key, (dtype, shape) in layout.items()
        },
    }
