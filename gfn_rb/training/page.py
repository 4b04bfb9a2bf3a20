"""The page of a run at its end, and of finished runs from their folders alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint import open_buffer
from gfn_rb.errors import CheckpointError
from gfn_rb.page import view
from gfn_rb.page.curves import CALLS, USUAL
from gfn_rb.training.comparison import Columns, compare_runs, read_columns
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import RunFolder, run_secret
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
    """Write the page of runs of one environment, see :func:`gfn_rb.view`.

    If a buffer cannot be opened, the reason is logged, and the page shows the curves of its run.

    Args:
        paths: run folders. The page shows the rows of the first one.
        out: file to write. Default: ``view.html`` in the first folder.
        trust: whether to run code outside gfn_rb that a folder names, such as an environment.

    Raises:
        ArgumentError: a path is no run folder, a run is of another format or has measured nothing,
            or the runs are of several environments.
        CheckpointCorruptError: a file of a run is damaged.
    """
    comparison = compare_runs(paths)
    for ignored in comparison.ignored:
        logger.warning("ignored %s", ignored)
    for note in comparison.notes:
        logger.warning("%s", note)
    curves = {each.label: each.runs for each in comparison.configurations}
    several = len(curves) > 1
    buffers: dict[str, ReplayBuffer] = {}
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
    return view(
        buffers, out or RunFolder(paths[0]).report,
        env=None if first is None else first.make_env(),
        batch_size=None if first is None else first.n_replayed or None,
        curves={label: [_usual(run.columns) for run in runs] for label, runs in curves.items()},
        title=f"{comparison.env} after {comparison.calls:,} reward calls",
    )  # fmt: skip


def _usual(columns: Columns) -> Columns:
    """Return the columns of a run that pages of runs show: not times and counts of rows."""
    return {name: column for name, column in columns.items() if name in {*USUAL, CALLS}}
