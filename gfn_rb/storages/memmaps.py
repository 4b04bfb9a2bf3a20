"""Storages of rows in memory-mapped files, which are on disk in whole before rows are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from torchrl.data.replay_buffers.storages import LazyMemmapStorage, Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import ArgumentError
from gfn_rb.storages.tensors import RowAccess

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class RowMemmapStorage(RowAccess, LazyMemmapStorage):
    """A ``LazyMemmapStorage`` that reads and writes batches of rows in less time.

    Content and files are those of ``LazyMemmapStorage``. The first write allocates all bytes of the
    files, and raises :class:`~gfn_rb.errors.ArgumentError` if the disk has no room for them.

    Args:
        max_size: number of rows, at least 1.
        scratch_dir: folder of the files. Default: a temporary folder.
        device: device of the rows, "cpu". None takes that of the first batch.
        ndim: number of leading dimensions that count as rows. The writers of gfn_rb need 1.
        compilable: whether ``torch.compile`` may trace it. It cannot be shared between processes
            then.
        existsok: whether existing files may be overwritten. Otherwise they raise an error.
        shared_init: whether several processes may write the first batch. One lays the rows out, and
            the others wait for it.
        auto_cleanup: whether the files are deleted when the process ends. Default: only in a
            temporary folder.
    """

    def _init(self, data: Any) -> None:
        super()._init(data)
        _reserve(self)


def lay_out(storage: Storage, row: Any) -> None:
    """Allocate a storage for rows such as this, as its first write would.

    Raises:
        ArgumentError: the disk has no room for all rows.
        Exception: TorchRL's error for such rows. No new file is left then.
    """
    found = files_of(storage)
    try:
        compat.allocate(storage, row)
        compat.set_last_cursor(storage, 0)  # which a checkpoint of TorchRL needs
        if isinstance(storage, LazyMemmapStorage):
            _reserve(storage)
    except BaseException:
        compat.forget_layout(storage)
        remove_but(found, storage)
        raise


def files_of(storage: Storage) -> set[Path]:
    """Return the files in the folder of a storage that other processes do not lay out."""
    folder = getattr(storage, "scratch_dir", None)
    if not folder or getattr(storage, "shared_init", False):
        return set()
    return {path for path in Path(folder).rglob("*") if not path.is_dir()}


def remove_but(found: set[Path], storage: Storage) -> None:
    """Remove the files of a layout that failed, which would be in the way of the next one."""
    for path in files_of(storage) - found:
        path.unlink()


def _reserve(storage: LazyMemmapStorage) -> None:
    """Have the disk keep room for all rows: a write into a hole of a full disk is a SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        return
    for leaf in compat.leaves_of(compat.all_slots(storage)):
        nbytes = leaf.numel() * leaf.element_size()
        try:
            with compat.memmap_descriptor(leaf) as descriptor:
                os.posix_fallocate(descriptor, 0, max(nbytes, 1))
        except OSError as error:
            if error.errno in NO_ROOM:
                raise ArgumentError(
                    f"storage must fit on the disk, got {storage.max_size} rows, of which one "
                    f"entry has {nbytes} bytes: {error.strerror}"
                ) from error
