"""Bounded, type-checked reading of the files of a run folder, which a stranger may have written."""

from __future__ import annotations

import csv
import io
import os
import stat
from pathlib import Path
from typing import Annotated, Any, TypedDict

from gfn_rb.checkpoint.atomic import kind_of
from gfn_rb.codec.primitives import from_text
from gfn_rb.errors import ArgumentError, CheckpointCorruptError
from gfn_rb.training.rules import Rule, check_value

MAX_RANKS = 1 << 16
_MAX_JSON = 1 << 24  # bytes
_MAX_TABLE = 1 << 28  # bytes
_MAX_ROWS, _MAX_COLUMNS = 1_000_000, 1000

_FEW = Rule(lambda values: len(values) <= MAX_RANKS, f"of at most {MAX_RANKS} ranks")
Size = Annotated[int, Rule(lambda n: 1 <= n <= MAX_RANKS, f"in [1, {MAX_RANKS}]")]


class Ranks(TypedDict):
    """ranks.json: how many processes a launcher started."""

    size: Size


class Process(TypedDict):
    """process.json: which process a rank was, since when in seconds of the clock."""

    host: str
    process: int
    time: float


class Sender(TypedDict):
    """What a manager received from a rank, and fed it."""

    items: int
    fed: int


class ManagerReport(TypedDict):
    """manager.json: what a manager did."""

    stored: int
    senders: Annotated[dict[str, Sender], _FEW]


class Counters(TypedDict, total=False):
    """What a rank sent to managers and was fed."""

    sent: int
    fed: int


class RankReport(TypedDict):
    """What a rank that trains did."""

    measured: dict[str, float | None]
    counters: Counters


class RunReport(TypedDict):
    """report.json: what the ranks of a run did."""

    lost: Annotated[dict[str, str], _FEW]
    managers: Annotated[list[int], _FEW]
    reward_calls: int
    modes_found: int
    ranks: Annotated[dict[str, RankReport], _FEW]


def read_text(path: Path, max_nbytes: int) -> str:
    """Return the text of a file of a run."""
    # A pipe would keep a reader waiting, and a device never end.
    flags = os.O_NONBLOCK | os.O_NOCTTY
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            kind = kind_of(status.st_mode)
            raise CheckpointCorruptError(f"{path} must be a regular file, got a {kind}")
        content = b"" if status.st_size > max_nbytes else stream.read(max_nbytes + 1)
    if max(status.st_size, len(content)) > max_nbytes:
        raise CheckpointCorruptError(f"{path} must have at most {max_nbytes} bytes, got more")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError(f"{path} is no text: {error.reason}") from None


def read_json(path: Path, kind: Any) -> Any:
    """Return what a file of a run holds, checked against a type such as those above."""
    text = read_text(path, _MAX_JSON)
    try:
        value = from_text(text.strip().encode())
    except ValueError as error:
        raise CheckpointCorruptError(f"{path} is no JSON: {error}") from None
    try:
        check_value("it", value, kind)
    except ArgumentError as error:
        raise CheckpointCorruptError(f"{path} is damaged: {error}") from None
    return value


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of metrics, as text; of a row cut short, the rest is None."""
    reader, rows = csv.DictReader(io.StringIO(read_text(path, _MAX_TABLE), newline="")), []
    try:
        n_columns = len(reader.fieldnames or ())
        for row in reader:
            rows.append(row)
            if None in row or max(n_columns / _MAX_COLUMNS, len(rows) / _MAX_ROWS) > 1:
                raise CheckpointCorruptError(
                    f"{path} must have at most {_MAX_ROWS} rows of {_MAX_COLUMNS} cells at most "
                    f"and none beyond its heading, got more in row {len(rows)}"
                )
    except csv.Error as error:
        raise CheckpointCorruptError(f"{path} is no table: {error}") from None
    return rows


def printable(value: Any) -> str:
    """Return a value as text of one line that cannot steer a terminal, cut where it is long."""
    text = str(value)
    if len(text) > 1000:
        text = f"{text[:1000]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
