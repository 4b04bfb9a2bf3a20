"""The page of a run at its end, and of runs and saved buffers from their files alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint import open_buffer
from gfn_rb.checkpoint.api import outline
from gfn_rb.checkpoint.database import is_database
from gfn_rb.errors import ArgumentError, CheckpointError
from gfn_rb.page import view
from gfn_rb.page.curves import CALLS, USUAL
from gfn_rb.training.comparison import Columns, compare_runs, read_columns
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import RunFolder, run_secret, saved_env
from gfn_rb.training.session.reading import printable, read_json
from gfn_rb.training.trainer import Trainer

logger = logging.getLogger(__name__)


def write_report(folder: RunFolder, trainer: Trainer) -> None:
    """Write the page of a run that came to its end into its folder."""
    config, columns = trainer.config, read_columns(folder.metrics)
    if (log_z := trainer.fit.log_z) is not None:
        columns["true_log_z"] = np.full_like(columns["reward_calls"], log_z)
    view(
        trainer.replayed, folder.report, env=trainer.env, batch_size=config.n_replayed or None,
        curves={config.env: [_usual(columns)]},
        title=f"{config.env}, seed {config.seed}, {trainer.steps_done:,} steps",
    )  # fmt: skip


def write_page(paths: Sequence[Path], out: Path | None = None, trust: bool = False) -> Path:
    """Write the page of runs of one environment and of saved buffers, see :func:`gfn_rb.view`.

    If the buffer of a run cannot be opened, the reason is logged, and the page shows its curves.

    Args:
        paths: run folders, checkpoints and journals. The page shows the rows of the first one.
        out: file to write. Default: ``view.html`` in the first folder, or the first file with
            ``.html`` appended.
        trust: whether to run code outside gfn_rb that a file names, such as an environment.

    Raises:
        ArgumentError: a path is neither of them, a run is of another format or has measured
            nothing, or the runs are of several environments.
        CheckpointError: a file is damaged, or the buffer in it cannot be opened.
    """
    if not paths:
        raise ArgumentError("paths must be at least one run, checkpoint or journal, got none")
    first, runs = paths[0], [path for path in paths if path.is_dir()]
    target = out or (RunFolder(first).report if first in runs else Path(f"{first}.html"))
    buffers: dict[str, ReplayBuffer] = {}
    shown: dict[str, Any] = {"curves": None, "title": printable(first.name)}
    if runs:
        shown = _runs(runs, trust, buffers)
    for path in paths:
        if path not in runs:
            # A journal does not say which run it is of; a checkpoint of a run has its options.
            known = {} if is_database(path) else outline(path, run_secret())
            env = saved_env(known.get("config"))
            buffers[printable(path)] = open_buffer(path, env=env, trust=trust, secret=run_secret())
            shown.setdefault("env", env)
    names = sorted(buffers, key=lambda name: not name.startswith(printable(first)))
    return view({name: buffers[name] for name in names}, target, **shown)


def _runs(paths: Sequence[Path], trust: bool, buffers: dict[str, ReplayBuffer]) -> dict[str, Any]:
    """Add the buffers of runs to those given, and return what a page shows beside them."""
    comparison = compare_runs(paths)
    for ignored in comparison.ignored:
        logger.warning("ignored %s", ignored)
    for note in comparison.notes:
        logger.warning("%s", note)
    curves = {each.label: each.runs for each in comparison.configurations}
    several = len(curves) > 1
    configs: list[TrainConfig] = []
    for label, run in ((label, run) for label, runs in curves.items() for run in runs):
        folder = RunFolder.open(run.path)
        is_known = trust or ":" not in read_json(folder.config)["env"]
        if is_known:
            configs.append(replace(folder.read_config(), device="cpu"))
        else:
            logger.warning("%s names code outside gfn_rb: --trust runs it", folder.config)
        env = configs[-1].make_env() if is_known else None
        name = f"{run.path}, {label}" if several else str(run.path)
        try:
            rb = open_buffer(run.path, env=env, trust=trust, secret=run_secret())
            buffers[printable(name)] = rb
        except CheckpointError as error:
            logger.warning("%s", error)
    first = configs[0] if configs else None
    return {
        "env": None if first is None else first.make_env(),
        "batch_size": None if first is None else first.n_replayed or None,
        "curves": {label: [_usual(run.columns) for run in runs] for label, runs in curves.items()},
        "title": f"{comparison.env} after {comparison.calls:,} reward calls",
    }


def _usual(columns: Columns) -> Columns:
    """Return the columns of a run that pages of runs show: not times and counts of rows."""
    return {name: column for name, column in columns.items() if name in {*USUAL, CALLS}}
