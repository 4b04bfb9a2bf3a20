"""What ``gfn-rb inspect`` prints: the best objects first, then options and progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    GfnRbError,
    SecretError,
)
from gfn_rb.training.cli.tables import Lines, aligned_lines, described, number, ranks_lines
from gfn_rb.training.config import CONFIGS, FORMAT, TrainConfig, flat
from gfn_rb.training.options import GeneralOptions
from gfn_rb.training.session.folder import RunFolder, run_secret
from gfn_rb.training.session.reading import printable, read_json, read_metrics

if TYPE_CHECKING:
    import gfn_rb.envs


def inspection(path: Path, top: int | None = None, export: Path | None = None) -> Lines:
    """Yield what a run folder or a checkpoint holds; see the command ``inspect``."""
    if top is not None and top < 1:
        raise ArgumentError(f"top must be at least 1, got {top}")
    if export is not None and export.suffix not in (".csv", ".parquet"):
        raise ArgumentError(f"export must end in .csv or .parquet, got {export}")
    if not path.exists():
        raise ArgumentError(f"path must be a run folder or a checkpoint, got {path}, which is not")
    folder = RunFolder.open(path) if path.is_dir() else None
    options = {} if folder is None else read_json(folder.config)
    if isinstance(version := options.get("format"), int) and version > FORMAT:
        raise ArgumentError(
            f"path must be a run of this gfn_rb or an older one, got {path}, of format {version}: "
            f"expected {FORMAT} at most"
        )
    checkpoint = path if folder is None else folder.checkpoint
    if checkpoint.exists():
        yield from _checkpoint_lines(checkpoint, options, top, export)
    if folder is None:
        return
    yield from described(f"{path}: options that differ from the defaults", _changed(options))
    if folder.metrics.exists() and (rows := read_metrics(folder.metrics)):
        yield from described(f"{folder.metrics}: last of {len(rows)} rows", rows[-1])
    yield from ranks_lines(folder)


def _checkpoint_lines(
    path: Path, options: Mapping[str, Any], top: int | None, export: Path | None
) -> Lines:
    from gfn_rb.buffers.summary import summarize  # which loads TorchRL
    from gfn_rb.checkpoint import open_buffer
    from gfn_rb.checkpoint.api import outline
    from gfn_rb.checkpoint.database import is_database
    from gfn_rb.checkpoint.tables import table_of, write_table

    values = None if is_database(path) else outline(path, run_secret())
    options = options or (values or {}).get("config") or {}
    try:
        rb = open_buffer(path, secret=run_secret())
    except (CheckpointCorruptError, SecretError):
        raise
    except CheckpointError as error:  # such as for want of code that nobody trusts
        yield f"the buffer is not opened: {printable(error)}"
    else:
        env = _environment(options if isinstance(options, dict) else {})
        yield from map(printable, str(summarize(rb, env)).splitlines())
        yield ""
        if top is not None or export is not None:
            table = table_of(rb, env, top)
            if top is not None:
                yield from _listed(table)
            if export is not None:
                write_table(export, table)
    if values is not None:
        size = f"{path.stat().st_size / 1e6:,.1f} MB"
        yield from described(str(path), {"size": size, "values": ", ".join(map(str, values))})


def _environment(options: Mapping[str, Any]) -> gfn_rb.envs.GFNEnv | None:
    """Return a shipped environment with its options; None for the user's, whose code is not run."""
    if _kind(options) is None:
        return None
    try:
        return replace(TrainConfig.from_dict(options), device="cpu").make_env()
    except (GfnRbError, ArithmeticError, MemoryError, RuntimeError, TypeError, ValueError):
        return None  # its options are of no use


def _kind(options: Mapping[str, Any]) -> type[TrainConfig] | None:
    """Return the shipped configuration that options are of."""
    name = options.get("env")
    return CONFIGS.get(name) if isinstance(name, str) else None


def _changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that differ from the defaults, and its environment."""
    kind = _kind(options)
    usual = asdict(GeneralOptions()) if kind is None else kind().to_dict()
    defaults = flat(json.loads(json.dumps(usual, default=str)))
    changed = {
        name: value
        for name, value in flat(options).items()
        if name not in defaults or defaults[name] != value
    }
    return {"env": options.get("env"), **changed}


def _listed(table: Mapping[str, list[Any]]) -> Lines:
    heading = [name.replace("_", "-") for name in table]
    rows = zip(*table.values(), strict=True)
    yield from aligned_lines(
        [heading, *([printable(words), *map(number, rest)] for words, *rest in rows)]
    )
    yield ""
