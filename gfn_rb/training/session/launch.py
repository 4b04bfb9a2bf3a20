"""New and earlier runs, alone or as one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session import distributed
from gfn_rb.training.session.folder import RunFolder, write_json
from gfn_rb.training.session.progress import check_installed
from gfn_rb.training.session.run import RunResult, StopSignals, run_training, write_report
from gfn_rb.training.trainer import Trainer


def train(config: TrainConfig) -> RunResult | None:
    """Train, and write everything into a new folder.

    Started by an MPI launcher, this is one rank of the run, and all of them call it.

    Args:
        config: what to train; ``config.threads`` holds for the whole process.

    Returns:
        How the run ended; None on all ranks but the first.

    Raises:
        ArgumentError: an option cannot be honoured, or the folder exists. Nothing is written.
        NaNError: the loss is no longer finite.
        TransportError: the ranks of the run cannot be connected.
        WorkerError: this rank of several failed.
    """

    def prepare() -> RunFolder:
        folder, size = RunFolder.create(config), distributed.n_ranks()
        if size > 1:
            write_json(folder.ranks, {"size": size})
        return folder

    return _run(config, prepare)


def resume(path: Path, steps: int | None = None) -> RunResult | None:
    """Continue a run from its last checkpoint, as if it had never stopped.

    A run of several ranks goes on from the last checkpoint of each, with as many ranks.

    Args:
        path: its folder.
        steps: train up to this many steps instead of those configured.

    Returns:
        How the run ended; None on all ranks but the first.

    Raises:
        ArgumentError: there is no run, it had another number of ranks, or ``steps`` are fewer than
            were taken already.
        CheckpointCorruptError: the checkpoint is damaged.
        CheckpointMismatchError: the checkpoint is of another configuration.
    """
    folder = RunFolder.open(path)
    distributed.check_ranks(folder)
    config = folder.read_config()
    config = config if steps is None else replace(config, steps=steps)

    def prepare() -> RunFolder:
        distributed.check_steps(folder, config.steps)
        folder.write_config(config)
        return folder

    return _run(config, prepare, folder)


def _run(
    config: TrainConfig, prepare: Callable[[], RunFolder], earlier: RunFolder | None = None
) -> RunResult | None:
    # All that can be refused is refused before the folder is made: a trainer validates too late
    # where there are several ranks.
    config.validate()
    check_installed(config.logger)
    torch.set_num_threads(config.threads)
    if config.managers or distributed.n_ranks() > 1:
        return distributed.run_distributed(config, prepare)
    with closing(Trainer(config)) as trainer:
        if earlier is not None and earlier.checkpoint.exists():
            trainer.load(earlier.checkpoint)  # otherwise it was killed before its first one
        folder = prepare()
        with StopSignals() as stop:
            result = run_training(trainer, folder, stop)
            if result.stopped_by is None:
                write_report(result)
        return result
