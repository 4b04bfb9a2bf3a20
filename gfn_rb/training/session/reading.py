"""Bounded reading of the files of a run folder, which a stranger may have written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gfn_rb.errors import CheckpointCorruptError

_MAX_NBYTES = 1 << 26  # of any file of a run but its checkpoints: 200,000 rows of metrics
_MAX_COLUMNS = 1000


def read_text(path: Path) -> str:
    """Return the text of a file of a run."""
    from gfn_rb.codec.primitives import opened  # which loads torch, unlike the rest

    with opened(path) as stream:
        content = stream.read(_MAX_NBYTES + 1)
    if len(content) > _MAX_NBYTES:
        raise CheckpointCorruptError(f"{path} must have at most {_MAX_NBYTES} bytes, got more")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError(f"{path} is no text: {error.reason}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of a run holds, of any values: see :func:`named_damage`."""
    from gfn_rb.codec.primitives import from_text

    text = read_text(path)
    try:
        value = from_text(text.strip().encode())
    except ValueError as error:
        raise CheckpointCorruptError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointCorruptError(f"{path} is damaged: it must be an object, got {value!r:.80}")
    return value


@contextmanager
def named_damage(path: Path) -> Iterator[None]:
    """Raise errors by wrong values of a file as those of the file."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = printable(f"{type(error).__name__}: {error}")
        raise CheckpointCorruptError(f"{path} is damaged: {why:.200}") from None


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of metrics, as text; of a row cut short, the rest is None."""
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        rows = [*reader] if len(reader.fieldnames or ()) <= _MAX_COLUMNS else [{None: []}]
    except csv.Error as error:
        raise CheckpointCorruptError(f"{path} is no table: {error}") from None
    if any(None in row for row in rows):
        raise CheckpointCorruptError(
            f"{path} must have at most {_MAX_COLUMNS} cells in a row and none beyond its heading, "
            "got more"
        )
    return rows


def printable(value: Any) -> str:
    """Return a value as text of one line that cannot steer a terminal, cut where it is long."""
    text = str(value)
    if len(text) > 1000:
        text = f"{text[:1000]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
