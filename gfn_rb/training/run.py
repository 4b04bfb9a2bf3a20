"""Runs: a trainer at work in a folder, until its steps are done or it is told to stop."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from signal import Signals
from typing import NamedTuple

import torch

from gfn_rb.errors import ArgumentError
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.folder import MetricsFile, RunFolder
from gfn_rb.training.loop import Row, Trainer
from gfn_rb.training.watchers import StopSignals, check_installed, loggers, progress_bar


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


def train(config: TrainConfig) -> Outcome:
    """Train, and write everything into a new folder.

    Args:
        config: what to train; ``config.threads`` holds for the whole process.

    Raises:
        ArgumentError: an option cannot be honoured, or the folder exists. Nothing is written.
        NaNError: the loss is no longer finite.
    """
    config.validate()
    check_installed(config.logger)
    torch.set_num_threads(config.threads)
    with closing(Trainer(config)) as trainer:
        return carry_out(trainer, RunFolder.create(config))


def resume(path: Path, steps: int | None = None) -> Outcome:
    """Continue a run from its last checkpoint, as if it had never stopped.

    Args:
        path: its folder.
        steps: train up to this many steps instead of those configured.

    Raises:
        ArgumentError: there is no run, or ``steps`` are fewer than were taken already.
        CheckpointCorruptError: the checkpoint is damaged.
        CheckpointMismatchError: the checkpoint is of another configuration.
    """
    folder = RunFolder.open(path)
    config = folder.read_config()
    config = config if steps is None else config.with_steps(steps)
    config.validate()
    check_installed(config.logger)
    torch.set_num_threads(config.threads)
    with closing(Trainer(config)) as trainer:
        if folder.checkpoint.exists():  # otherwise it was killed before its first: start again
            trainer.load(folder.checkpoint)
        if trainer.steps_done > config.steps:
            raise ArgumentError(
                f"steps must be at least the {trainer.steps_done} taken already, got {config.steps}"
            )
        folder.write_config(config)
        return carry_out(trainer, folder)


def carry_out(trainer: Trainer, folder: RunFolder) -> Outcome:
    """Train until the steps are done or a signal says stop, and write everything down.

    Args:
        trainer: new, or restored from the folder's checkpoint.
        folder: where to write, with the trainer's configuration inside.
    """
    with StopSignals() as stop:
        if not trainer.history:
            trainer.record()
        with closing(_Rows(trainer, folder)) as rows:
            _take_steps(trainer, folder, rows, stop)
            trainer.save(folder.checkpoint)
            if stop.received is not None:
                return Outcome(trainer, folder, trainer.history[-1], stop.received)
            row = trainer.measure()
            if row["step"] != trainer.history[-1]["step"]:
                rows.append(row)  # not in the history: a longer run would not have it
        _write_report(trainer, folder, row)
    return Outcome(trainer, folder, row, None)


def _take_steps(trainer: Trainer, folder: RunFolder, rows: _Rows, stop: StopSignals) -> None:
    config = trainer.config
    with progress_bar(trainer) as advance:
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


def _write_report(trainer: Trainer, folder: RunFolder, last: Row) -> None:
    from gfn_rb.training.report import write_report  # matplotlib takes a while to load

    is_new = last["step"] != trainer.history[-1]["step"]
    write_report(folder.report, trainer, [*trainer.history, last] if is_new else trainer.history)
