"""The page of finished runs, from their folders alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchrl.data import ReplayBuffer

from gfn_rb.checkpoint import open_buffer
from gfn_rb.errors import CheckpointError
from gfn_rb.page import view
from gfn_rb.training.comparison import compare_runs
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import RunFolder, run_secret
from gfn_rb.training.session.reading import printable, read_json

logger = logging.getLogger(__name__)


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
        buffers, out or paths[0] / "view.html",
        env=None if first is None else first.make_env(),
        batch_size=None if first is None else first.n_replayed or None,
        curves={label: [run.columns for run in runs] for label, runs in curves.items()},
        title=f"{comparison.env} after {comparison.calls:,} reward calls",
    )  # fmt: skip
