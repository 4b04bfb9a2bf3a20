"""Files of ``torch.save`` that other libraries wrote."""

from __future__ import annotations

import zipfile
from os import PathLike, fspath
from typing import Any

import torch

from gfn_rb.errors import CheckpointError


def read_torch_file(
    path: str | PathLike[str], device: torch.device | str | None = None
) -> dict[Any, Any]:
    """Return the dictionary in a file of ``torch.save``, without running code from it.

    Raises:
        CheckpointError: the file is missing, damaged, or contains anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save stores entries as they are. A compressed one may take any amount of memory.
            is_plain = {each.compress_type for each in archive.infolist()} <= {zipfile.ZIP_STORED}
        content = torch.load(path, weights_only=True, map_location=device) if is_plain else None
    except Exception as error:  # torch raises five classes of errors for damaged files
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"cannot read {fspath(path)}: {why}") from error
    if not is_plain:
        raise CheckpointError(f"{fspath(path)} must not be compressed, got packed entries")
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{fspath(path)} must contain a dictionary, got a {type(content).__name__}"
        )
    return content
