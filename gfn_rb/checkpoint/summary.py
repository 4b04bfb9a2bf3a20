"""What a checkpoint holds, without reading the tensors."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from gfn_rb.checkpoint.storages import leaves
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.prefix import VERSION
from gfn_rb.codec.tensors import dtype_name
from gfn_rb.errors import CheckpointCorruptError

# What files hold: those of save_checkpoint the first three, those of save_state the last.
ROWS, BUFFERS, EXTRA, STATE = "rows", "buffers", "extra", "state"


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
    file = ValueFile(Path(path))
    of_buffers = BUFFERS in file.nodes
    with file.named_errors():
        pairs = zip(file.outline(BUFFERS), file.outline(ROWS), strict=True) if of_buffers else ()
        return {
            "version": VERSION,
            "nbytes": file.nbytes,
            "n_tensors": len(file.tensors),
            "tensor_nbytes": sum(tensor.nbytes for tensor in file.tensors),
            "values": list(named_values(file, file.outline)),
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
    file = ValueFile(Path(path))
    return named_values(file, file.outline)


def named_values(file: ValueFile, read: Callable[[str], Any]) -> dict[str, Any]:
    """Return what was saved along with the buffer, or the state.

    Args:
        file: with either.
        read: one of its methods.

    Raises:
        CheckpointCorruptError: it is something else.
    """
    values = read(EXTRA if BUFFERS in file.nodes else STATE)
    if not isinstance(values, dict):
        raise CheckpointCorruptError(f"{file.path} holds {type(values).__name__}, expected a dict")
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
