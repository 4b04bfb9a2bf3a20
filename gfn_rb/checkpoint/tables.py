"""Objects of a buffer as a table of texts and log-rewards, and back."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from gfn_rb.arguments import kind_of, shown
from gfn_rb.buffers.summary import table_of as table_of
from gfn_rb.checkpoint.atomic import published
from gfn_rb.codec.primitives import is_out_of_memory
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import LOG_REWARD, STATE

_HIGHEST = torch.finfo(torch.float32).max
OBJECT, SUFFIXES = "object", (".csv", ".parquet")
_FORMULA = "=", "+", "-", "@"

_log = logging.getLogger(__name__)


def export_table(
    rb: ReplayBuffer, path: str | PathLike[str], env: Any = None, k: int | None = None
) -> int:
    """Write the best objects of a buffer to a .csv or .parquet file; return their number.

    The columns are ``object`` (texts), ``condition`` (numbers) where rows have one, ``log_reward``
    in nats, and ``age`` in policy versions where rows have one. Each object is listed once under
    each condition, with its highest log-reward, best first. Texts are written as they are. Texts in
    a .csv file that a spreadsheet would run as formulas are counted in the log.

    Args:
        rb: the buffer, or a merged one.
        path: file to create or replace.
        env: environment with a method ``describe``, or callable from objects [n, *S] to a text for
            each. Default: print the numbers.
        k: number of objects, at least 1. Default: all.

    Raises:
        ArgumentError: the name ends otherwise, or ``env`` does not describe the objects.
        CheckpointError: writing to the disk failed.
    """
    table = table_of(rb, env, k)
    write_table(path, table)
    return len(table[OBJECT])


def write_table(path: str | PathLike[str], table: Mapping[str, list[Any]]) -> None:
    """Write a table as :func:`export_table` does."""
    # What may be missing is looked for before a file is made.
    path = _checked(path)
    modules = _pyarrow("export to") if path.suffix == ".parquet" else None
    with published(path) as stream:
        if modules is not None:
            pyarrow, parquet = modules
            parquet.write_table(pyarrow.table(dict(table)), stream)
            return
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="", write_through=True)
        csv.writer(text).writerows([list(table), *zip(*table.values(), strict=True)])
        text.detach()  # or it would close the file before that is published
    if formulas := [each for each in table.get(OBJECT, ()) if _is_formula(each)]:
        _log.warning(
            "%s has %d texts that a spreadsheet takes for formulas, such as %s: import the column "
            "as text",
            *(path, len(formulas), shown(formulas[0])),
        )


def _is_formula(text: str) -> bool:
    """Return whether a spreadsheet would compute a text of a .csv file, other than a number."""
    if not text.startswith(_FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


def import_table(path: str | PathLike[str], env: Any) -> TensorDict:
    """Return the objects of a table as rows that buffers of terminating states take.

    Args:
        path: .csv or .parquet file with the columns ``object``, in the words of ``env.describe``,
            and finite ``log_reward`` in nats, or ``reward``, above 0. Other columns are ignored.
        env: environment with a method ``parse``.

    Returns:
        ``state`` [n, *S] and ``log_reward`` [n], in the order of the table.

    Raises:
        ArgumentError: the file is no such table, or a text describes no object.

    Examples:
        >>> rb = terminating_state_buffer(1000)
        >>> rb.extend(import_table("measured.csv", TFBind8()))
    """
    path = _checked(path)
    if not callable(getattr(env, "parse", None)):
        raise ArgumentError(f"env must be an environment with a method parse, got {kind_of(env)}")
    try:
        if path.suffix == ".parquet":
            _, parquet = _pyarrow("import of")
            read = parquet.read_table(path)
            names, columns = read.column_names, [each.to_pylist() for each in read.columns]
        else:
            with path.open(newline="", encoding="utf-8-sig") as stream:
                names, *rows = [row for row in csv.reader(stream, strict=True) if row] or [[]]
            for i, row in enumerate(rows, 1):
                if len(row) != (n := len(names)):
                    raise ArgumentError(f"{path}: row {i} must have {n} fields, got {len(row)}")
            columns = [*zip(*rows, strict=True)] if rows else [()] * len(names)
    except ArgumentError:
        raise
    except Exception as error:  # of files that are no tables
        if is_out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or shown(str(error))
        raise ArgumentError(f"{path} cannot be read: {reason}") from error
    if len({*names}) < len(names):
        raise ArgumentError(f"{path} must have each column once, got {shown(names)}")
    table = dict(zip(names, columns, strict=True))
    known = [name for name in (LOG_REWARD, "reward") if name in table]
    if OBJECT not in table or not known or not table[OBJECT]:
        raise ArgumentError(
            f"{path} must have the columns object and log_reward or reward, and a row, got "
            f"{shown([*table])} and {len(columns[0]) if columns else 0} rows"
        )
    values = [_log_reward(path, known[0], i, value) for i, value in enumerate(table[known[0]], 1)]
    words = list(map(str, table[OBJECT]))
    try:
        state = env.parse(words)
    except Exception as whole:  # of texts that are no objects
        if is_out_of_memory(whole):
            raise
        for i, text in enumerate(words, 1):
            try:
                env.parse([text])
            except Exception as error:
                raise ArgumentError(f"{path}: object of row {i}: {error}") from error
        raise ArgumentError(f"{path}: {whole}") from whole
    log_reward = torch.tensor(values, dtype=torch.float32, device=state.device)
    return TensorDict({STATE: state, LOG_REWARD: log_reward}, [len(values)])


def _log_reward(path: Path, name: str, row: int, value: Any) -> float:
    try:
        number = float(value)
        log_reward = number if name == LOG_REWARD else math.log(number)
    except (TypeError, ValueError):
        log_reward = math.nan
    if not abs(log_reward) <= _HIGHEST:
        rule = "a finite float32 number" if name == LOG_REWARD else "a finite number above 0"
        raise ArgumentError(f"{path}: {name} of row {row} must be {rule}, got {shown(value)}")
    return log_reward


def _checked(path: str | PathLike[str]) -> Path:
    if (path := Path(path)).suffix not in SUFFIXES:
        raise ArgumentError(f"path must end in .csv or .parquet, got {path}")
    return path


def _pyarrow(what: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ArgumentError(f"{what} .parquet needs pyarrow: {error}") from error
    return pyarrow, parquet
