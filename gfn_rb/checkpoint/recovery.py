"""Giving a buffer what its checkpoint and the journal behind it hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint.api import load_checkpoint, outline
from gfn_rb.checkpoint.changes import put_back
from gfn_rb.checkpoint.log import CHANGED, FORMAT, HEADER, JournalLog
from gfn_rb.checkpoint.parts import is_count, is_text
from gfn_rb.codec.frames import Frame
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    GfnRbError,
)
from gfn_rb.shapes import Shaped
from gfn_rb.sharing import SlotState

log = logging.getLogger(__name__)

Position = dict[str, Any]


def recover(
    journal: JournalLog, checkpoint: Path, rb: ReplayBuffer, parts: list[SlotState]
) -> Position | None:
    """Give a buffer what checkpoint and journal hold, up to the last whole record.

    The whole file is verified before anything in the buffer changes.

    Args:
        journal: the file, which is read on from where this ends.
        checkpoint: what it continues.
        rb: the buffer.
        parts: of it, see :func:`~gfn_rb.checkpoint.changes.slot_states`.

    Returns:
        The name of the ``journal`` and the ``number`` of its last record; None where there is
        nothing yet.

    Raises:
        CheckpointError: the checkpoint cannot be read, or one of the two is missing.
        CheckpointCorruptError: a record is damaged or missing.
        CheckpointMismatchError: the two do not belong together, or not to this buffer, or are of
            another version.
        SecretError: one of them was not made with the secret of the journal.
    """
    content = journal.content()
    header, last, end = _verified(journal, content)
    if not checkpoint.exists() and (header is None or last == 0):
        return None  # killed before there was a checkpoint
    if header is None:
        raise CheckpointError(
            f"the journal {journal.path} is empty or missing, which the checkpoint {checkpoint} "
            "needs: expected both, or neither"
        )
    since = _last_in(checkpoint, journal, header, last)
    load_checkpoint(checkpoint, rb, secret=journal.secret)
    try:
        for frame, _ in journal.frames(content[:end]):
            if frame.kind == CHANGED and frame.meta["number"] > since:
                put_back(rb, parts, frame.rows, frame.meta)
    except GfnRbError:
        raise
    except Exception as error:
        _refuse(journal, f"its records do not fit the buffer: {one_line(error)}")
    if end < len(content):
        log.warning("%s: %d bytes of a torn record are dropped", journal.path, len(content) - end)
    journal.nbytes = end
    return {"journal": header["journal"], "number": last}


def _verified(
    journal: JournalLog, content: Shaped[np.ndarray, "n"]
) -> tuple[dict[str, Any] | None, int, int]:
    """Return the header, the number of the last record, and where it ends."""
    header, last, end = None, 0, 0
    for frame, end in journal.frames(content):  # noqa: B007
        number = frame.meta.get("number")
        if header is None:
            header = _header(journal, frame)
            last = header["first"] - 1
        elif frame.kind != CHANGED or number != last + 1:
            _refuse(journal, f"there is a gap: record {number!r:.80} follows record {last}")
        else:
            last += 1
    return header, last, end


def _header(journal: JournalLog, frame: Frame) -> dict[str, Any]:
    meta = frame.meta
    if frame.kind == HEADER and meta.get("format") != FORMAT:
        raise CheckpointMismatchError(
            f"the journal {journal.path} is of format {meta.get('format')!r:.80}, expected {FORMAT}"
        )
    counts = meta.get("first"), meta.get("whole")
    if frame.kind != HEADER or not is_text(meta.get("journal")) or not all(map(is_count, counts)):
        _refuse(journal, f"it begins with a record of kind {frame.kind} that says {meta!r:.80}")
    return meta


def _last_in(checkpoint: Path, journal: JournalLog, header: dict[str, Any], last: int) -> int:
    """Return the number of the last record that the checkpoint holds already."""
    known = outline(checkpoint, journal.secret).get("journal")
    if not isinstance(known, dict) or known.get("journal") != header["journal"]:
        raise CheckpointMismatchError(
            f"the journal {journal.path} is of another buffer than the checkpoint {checkpoint}: "
            "expected two that were written together"
        )
    since: int = known["number"]
    needed = max(since, header["whole"])
    if header["first"] > since + 1:
        _refuse(
            journal,
            f"there is a gap: it begins with record {header['first']}, and {checkpoint} ends with "
            f"record {since}",
        )
    if last < needed:
        _refuse(journal, f"it ends with record {last}, and {checkpoint} needs record {needed}")
    return since


def _refuse(journal: JournalLog, what: str) -> NoReturn:
    raise CheckpointCorruptError(f"{journal.path} is no sound journal: {what}")
