"""What a checkpoint holds, without reading the tensors."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from gfn_rb.checkpoint.layout import BUFFERS, ROWS, VERSION
from gfn_rb.checkpoint.reading import CheckpointFile
from gfn_rb.checkpoint.storages import leaves
from gfn_rb.checkpoint.tree import dtype_name


def inspect_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """Summarise a file of ``save_checkpoint`` or ``save_state``.

    Only the header is read and checked, so this takes no time however large the file is.

    Args:
        path: the file.

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
    file = CheckpointFile(Path(path))
    sizes = file.tensor_sizes
    of_buffers = BUFFERS in file.sections
    pairs = zip(file.outline(BUFFERS), file.outline(ROWS), strict=True) if of_buffers else ()
    return {
        "version": VERSION,
        "nbytes": file.nbytes,
        "n_tensors": len(sizes),
        "tensor_nbytes": sum(sizes),
        "values": list(file.outline(file.values_section)),
        "buffers": [_buffer(state, rows) for state, rows in pairs],
    }


def outline(path: str | PathLike[str]) -> dict[str, Any]:
    """Return what was saved along with the buffer, or the state, its tensors without content.

    Only the header is read and checked.

    Args:
        path: the file.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointCorruptError: it is no checkpoint, truncated, or its header is damaged.
    """
    file = CheckpointFile(Path(path))
    values: dict[str, Any] = file.outline(file.values_section)
    return values


def _buffer(state: dict[str, Any], rows: Any) -> dict[str, Any]:
    storage = state["storage"] or {}
    return {
        "class": state["class"],
        "storage": storage.get("class"),
        "sampler": state["sampler"]["class"],
        "writer": state["writer"]["class"],
        "capacity": storage.get("capacity"),
        "length": storage.get("length"),
        "batch_size": state["batch_size"],
        "prefetched": len(state["queue"]),
        "rows": {} if rows is None else _keys(rows),
    }


def _keys(rows: Any) -> dict[str, dict[str, Any]]:
    return {
        "/".join(map(str, path)): {"dtype": dtype_name(leaf.dtype), "shape": list(leaf.shape[1:])}
        for path, leaf in leaves(rows).items()
    }
