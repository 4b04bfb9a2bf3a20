"""Runs: a trainer at work in a folder, until its steps are done or it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, NamedTuple

import torch

from gfn_rb.errors import ArgumentError
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import MetricsFile, RunFolder
from gfn_rb.training.session.progress import check_installed, loggers, progress_bar
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.training.trainer import Row, Trainer

if TYPE_CHECKING:
    from gfn_rb.training.report import Others

Watch = Callable[[Trainer], AbstractContextManager[Callable[[float], None]]]


class Outcome(NamedTuple):
    """How a run ended, for now.

    Attributes:
        trainer: the trainer, after its last step.
        folder: where everything was written.
        row: what was measured last, see ``Trainer.measure``.
        stopped_by: the signal that stopped it before the end, None if it came to its end.
    """

    trainer: Trainer
    folder: RunFolder
    row: Row
    stopped_by: Signals | None


def train(config: TrainConfig) -> Outcome | None:
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
    from gfn_rb.training.session import distributed

    _get_ready(config)
    if distributed.is_distributed(config):
        return distributed.take_part(config, lambda: distributed.new_folder(config))
    with closing(Trainer(config)) as trainer:
        return carry_out(trainer, RunFolder.create(config))


def resume(path: Path, steps: int | None = None) -> Outcome | None:
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
    from gfn_rb.training.session import distributed

    folder = RunFolder.open(path)
    distributed.check_ranks(folder)
    config = folder.read_config()
    config = config if steps is None else config.with_steps(steps)
    _get_ready(config)

    def prepare() -> RunFolder:
        distributed.check_steps(folder, config.steps)
        folder.write_config(config)
        return folder

    if distributed.is_distributed(config):
        return distributed.take_part(config, prepare)
    with closing(Trainer(config)) as trainer:
        if folder.checkpoint.exists():  # otherwise it was killed before its first: start again
            restore(trainer, folder)
        folder.write_config(config)
        return carry_out(trainer, folder)


def restore(trainer: Trainer, folder: RunFolder) -> None:
    """Load the checkpoint of a run.

    Args:
        trainer: of the same configuration.
        folder: of the run.

    Raises:
        CheckpointError: it cannot be read, or is of another configuration.
        ArgumentError: it is of a later step than is to be trained to.
    """
    trainer.load(folder.checkpoint)
    require_enough(trainer.config.steps, trainer.steps_done)


def require_enough(steps: int, taken: int) -> None:
    """Raise if more steps were taken already than are to be taken in all.

    Args:
        steps: how many are to be trained to.
        taken: how many were taken already.

    Raises:
        ArgumentError: these are more.
    """
    if taken > steps:
        raise ArgumentError(f"steps must be at least the {taken} taken already, got {steps}")


def _get_ready(config: TrainConfig) -> None:
    config.validate()
    check_installed(config.logger)
    torch.set_num_threads(config.threads)


def write_report(
    trainer: Trainer, folder: RunFolder, last: Row, others: Others | None = None
) -> None:
    """Draw the report of a run into its folder.

    Args:
        trainer: at its end.
        folder: of the run.
        last: what was measured there.
        others: what other ranks did.
    """
    from gfn_rb.training import report  # matplotlib takes a while to load

    is_new = last["step"] != trainer.history[-1]["step"]
    rows = [*trainer.history, last] if is_new else trainer.history
    report.write_report(folder.report, report.Story(trainer, rows, others))


def carry_out(
    trainer: Trainer,
    folder: RunFolder,
    watch: Watch = progress_bar,
    conclude: Callable[[Trainer, RunFolder, Row], None] = write_report,
    stop: StopSignals | None = None,
) -> Outcome:
    """Train until the steps are done or a signal says stop, and write everything down.

    Args:
        trainer: new, or restored from the folder's checkpoint.
        folder: where to write, with the trainer's configuration inside.
        watch: shows how training goes, see :func:`gfn_rb.training.session.progress.progress_bar`.
        conclude: called with what was measured last, when the steps are done.
        stop: for those who want to know of signals as well.
    """
    with StopSignals() if stop is None else stop as stop:
        if not trainer.history:
            trainer.record()
        with closing(_Rows(trainer, folder)) as rows:
            _take_steps(trainer, folder, rows, stop, watch)
            trainer.save(folder.checkpoint)
            if stop.received is not None:
                return Outcome(trainer, folder, trainer.history[-1], stop.received)
            row = trainer.measure()
            if row["step"] != trainer.history[-1]["step"]:
                rows.append(row)  # not in the history: a longer run would not have it
        conclude(trainer, folder, row)
    return Outcome(trainer, folder, row, None)


def _take_steps(
    trainer: Trainer, folder: RunFolder, rows: _Rows, stop: StopSignals, watch: Watch
) -> None:
    config = trainer.config
    with watch(trainer) as advance:
        while trainer.steps_done < config.steps and stop.received is None:
            advance(trainer.step())
            if trainer.steps_done % config.eval_every == 0:
                rows.append(trainer.record())
            if trainer.steps_done % config.checkpoint_every == 0:
                trainer.save(folder.checkpoint)


class _Rows:
    """Where the rows of the history go: ``metrics.csv``, and a logger.

    Both are written anew from the history first: a killed run may have got further than its
    checkpoint.
    """

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        self._file = MetricsFile(folder.metrics, trainer.history)
        self._log = loggers(trainer.config, folder)
        for row in trainer.history:
            self._log(row)

    def append(self, row: Row) -> None:
        self._file.append(row)
        self._log(row)

    def close(self) -> None:
        self._file.close()
