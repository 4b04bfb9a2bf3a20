"""Files of ``torch.save``, which other libraries read and write."""

from __future__ import annotations

import zipfile
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from gfn_rb.checkpoint.atomic import published
from gfn_rb.codec.primitives import is_out_of_memory, opened
from gfn_rb.errors import CheckpointError


def read_torch_file(
    path: str | PathLike[str], device: torch.device | str | None = None
) -> dict[Any, Any]:
    """Return the dictionary in a file of ``torch.save``, without running code from it.

    Raises:
        CheckpointError: the file is missing, damaged, or contains anything else.
    """
    try:
        with opened(Path(path)) as stream:  # no pipe, which would have the reader wait
            with zipfile.ZipFile(stream) as archive:
                # torch.save stores entries as they are. A compressed one may take any memory.
                kinds = {each.compress_type for each in archive.infolist()}
            stream.seek(0)
            is_plain, content = kinds <= {zipfile.ZIP_STORED}, None
            if is_plain:
                content = torch.load(stream, weights_only=True, map_location=device)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises five classes of errors for damaged files
        if is_out_of_memory(error):
            raise
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot read {fspath(path)}: {why}") from error
    if not is_plain:
        raise CheckpointError(f"{fspath(path)} must not be compressed, got packed entries")
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{fspath(path)} must contain a dictionary, got a {type(content).__name__}"
        )
    return content


def write_torch_file(path: str | PathLike[str], content: dict[Any, Any]) -> None:
    """Replace a file by one of ``torch.save``, in one step; raise CheckpointError if that fails."""
    with published(Path(path)) as stream:
        try:
            torch.save(content, stream)
        except RuntimeError as error:  # which torch raises after an error of the disk
            raise (error.__context__ or error) from None
