"""Restoring a buffer from its checkpoint and the journal that continues it."""

from __future__ import annotations

import logging
from os import PathLike
from pathlib import Path
from typing import Any

from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint.api import JOURNAL, load_checkpoint, load_state, resolved
from gfn_rb.checkpoint.atomic import link
from gfn_rb.checkpoint.changes import apply_record, check_counts
from gfn_rb.checkpoint.log import JournalLog
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.primitives import one_line
from gfn_rb.codec.secret import Secret
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    GfnRbError,
)
from gfn_rb.sharing import SlotState

_log = logging.getLogger(__name__)


def redo(log: JournalLog, checkpoint: Path, rb: ReplayBuffer, parts: list[SlotState]) -> bool:
    """Restore a buffer from checkpoint and journal, and return whether there are any.

    Both files are verified before the buffer changes.
    """
    content, has_checkpoint = log.content(), checkpoint.exists()
    if not len(content):
        if not has_checkpoint:
            return False
        raise CheckpointError(
            f"the journal {log.path} is empty or missing, which the checkpoint {checkpoint} "
            "needs: expected both, or neither"
        )
    try:
        for record in log.read(content):
            check_counts(rb, parts, record.meta)
        if not has_checkpoint and log.end.number == 0:
            return False  # killed before there was a checkpoint
        since = _position(checkpoint, log)
        if not log.first - 1 <= since <= log.end.number:
            raise CheckpointCorruptError(
                f"{log.path} is no sound journal: it holds records {log.first} to "
                f"{log.end.number}, and {checkpoint} ends with record {since}"
            )
        load_checkpoint(checkpoint, rb, secret=log.secret)
        for record in log.read(content):
            if record.meta["number"] > since:
                apply_record(rb, parts, record.rows, record.meta)
    except GfnRbError:
        raise
    except Exception as error:
        raise CheckpointCorruptError(
            f"{log.path} is no sound journal: its records do not fit the buffer: {one_line(error)}"
        ) from error
    if (torn := len(content) - log.end.nbytes) > 0:
        _log.warning("%s: %d bytes of a torn record are dropped", log.path, torn)
        log.truncate()
    return True


def recover(
    path: str | PathLike[str], target: str | PathLike[str], *, secret: Secret | None = None
) -> dict[str, Any]:
    """Write the valid part of a damaged journal, and its checkpoint, to new files.

    A :class:`Journal` can open the new files. The old files are unchanged.

    Args:
        path: the journal. Its checkpoint, ``path`` with ``.gfnrb`` appended, must be valid.
        target: new journal; an existing one is replaced.
        secret: :class:`~gfn_rb.checkpoint.Secret` that the files were made with; None for files
            without one.

    Returns:
        ``number`` of the last record in the new files; ``left_out``, the bytes of the journal that
        are not in them; and ``damage``, a description of the damage, or None.

    Raises:
        CheckpointError: no journal is at the path, its header or checkpoint is damaged, or writing
            to the disk failed.
        ArgumentError: another process uses one of the journals.

    Examples:
        >>> recover("rb.journal", "recovered.journal")
        {'number': 41, 'left_out': 3072, 'damage': None}
    """
    source, new = resolved(path), resolved(target)
    if not source.exists() or source == new:
        raise CheckpointError(f"path must name a journal other than target, got {path}")
    log, damage = JournalLog(source, secret), None
    try:
        content = log.content()
        try:
            for _ in log.read(content):
                pass
        except CheckpointCorruptError as error:
            if not log.name:
                raise
            damage = str(error)
        checkpoint, name = source.with_name(f"{source.name}.gfnrb"), f"{new.name}.gfnrb"
        load_state(checkpoint, secret=secret)  # which verifies it
        since = _position(checkpoint, log)
        with log.named_errors():
            link(checkpoint, new.with_name(name))
        log.copy_records(content, since, new)
    finally:
        log.close()
    left_out = max(0, len(content) - log.end.nbytes)
    return {"number": max(since, log.end.number), "left_out": left_out, "damage": damage}


def _position(checkpoint: Path, log: JournalLog) -> int:
    """Return the number of the last record that a checkpoint contains."""
    file = ValueFile(checkpoint, log.secret)
    position = file.outline(JOURNAL) if JOURNAL in file.nodes else None
    if not isinstance(position, dict) or position.get("journal") != log.name:
        raise CheckpointMismatchError(
            f"the journal {log.path} is of another buffer than the checkpoint {checkpoint}: "
            "expected two that were written together"
        )
    since: int = position["number"]
    return since
