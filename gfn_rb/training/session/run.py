"""Runs: a trainer at work in a folder, until its steps are done or it is told to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from gfn_rb.training.session.folder import MetricsFile, RunFolder
from gfn_rb.training.session.progress import progress_bar, start_logger
from gfn_rb.training.trainer import Row, Trainer

if TYPE_CHECKING:
    from gfn_rb.training.report import OtherRanks

Progress = Callable[[Trainer], AbstractContextManager[Callable[[float], None]]]


class StopSignals:
    """Turns the first SIGINT or SIGTERM into a request to stop; a second SIGINT acts at once.

    It may be read before it is entered, by what is made earlier than that.

    Attributes:
        received: the signal, once there was one.
    """

    _signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # others cannot handle signals
            self._before = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def wanted(self) -> bool:
        """Whether there was a signal."""
        return self.received is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


class RunResult(NamedTuple):
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
    stopped_by: signal.Signals | None


def write_report(
    trainer: Trainer, folder: RunFolder, last: Row, others: OtherRanks | None = None
) -> None:
    """Draw the report of a run into its folder; ``last`` was measured at its end."""
    from gfn_rb.training import report  # matplotlib takes a while to load

    is_new = last["step"] != trainer.history[-1]["step"]
    rows = [*trainer.history, last] if is_new else trainer.history
    report.write_report(folder.report, report.ReportData(trainer, rows, others))


def run_training(
    trainer: Trainer,
    folder: RunFolder,
    progress: Progress = progress_bar,
    conclude: Callable[[Trainer, RunFolder, Row], None] = write_report,
    stop: StopSignals | None = None,
) -> RunResult:
    """Train until the steps are done or a signal stops the run, and write everything down.

    Args:
        trainer: new, or restored from the folder's checkpoint.
        folder: where to write, with the trainer's configuration inside.
        progress: shows how training goes, see
            :func:`gfn_rb.training.session.progress.progress_bar`.
        conclude: called with what was measured last, when the steps are done.
        stop: for those who want to know of signals as well.
    """
    with StopSignals() if stop is None else stop as stop:
        if not trainer.history:
            trainer.record()
        # Both are written anew from the history: a killed run may have got further than its
        # checkpoint.
        log = start_logger(trainer.config, folder, trainer.history)
        with closing(MetricsFile(folder.metrics, trainer.history)) as metrics:

            def write(row: Row) -> None:
                metrics.append(row)
                log(row)

            _take_steps(trainer, folder, stop, progress, write)
            trainer.save(folder.checkpoint)
            if stop.received is not None:
                return RunResult(trainer, folder, trainer.history[-1], stop.received)
            row = trainer.measure()
            if row["step"] != trainer.history[-1]["step"]:
                write(row)  # not in the history: a longer run would not have it
        conclude(trainer, folder, row)
    return RunResult(trainer, folder, row, None)


def _take_steps(
    trainer: Trainer,
    folder: RunFolder,
    stop: StopSignals,
    progress: Progress,
    write: Callable[[Row], None],
) -> None:
    config = trainer.config
    with progress(trainer) as advance:
        while trainer.steps_done < config.steps and stop.received is None:
            advance(trainer.step())
            if trainer.steps_done % config.eval_every == 0:
                write(trainer.record())
            if trainer.steps_done % config.checkpoint_every == 0:
                trainer.save(folder.checkpoint)
