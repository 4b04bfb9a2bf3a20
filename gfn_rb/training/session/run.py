"""Runs: a trainer at work in a folder, until its steps are done or it is told to stop."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from torchrl.data import ReplayBuffer
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from gfn_rb.buffers.summary import numbers_of
from gfn_rb.checkpoint.atomic import link
from gfn_rb.codec.primitives import one_line
from gfn_rb.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import RunFolder, write_metrics
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.training.trainer import FLOW, Row, Trainer

LINE_EVERY = 10.0  # seconds between lines where there is no terminal
_LINE = "{n_fmt}/{total_fmt} steps [{elapsed}<{remaining}, {rate_fmt}]{postfix}"
_BAR = "{percentage:3.0f}%|{bar}| " + _LINE
_NARROW, _BESIDE = 120, "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"  # columns


def check_installed(logger: str) -> None:
    """Check that what a run needs later on, its logger and what draws its report, is installed."""
    if find_spec("bokeh") is None:
        raise ArgumentError("bokeh is not installed: pip install '.[train]' in a clone of gfn_rb")
    if logger not in ("none", "csv") and find_spec(logger) is None:
        raise ArgumentError(f"logger {logger} is not installed: pip install {logger}")


class _Lines:
    """Prints each state of a progress bar on a line of its own."""

    encoding = "utf-8"

    def write(self, text: str) -> None:
        if text := text.strip():
            try:
                print(f"{text}\n", end="", file=sys.stderr, flush=True)  # a signal parts no line
            except BrokenPipeError:
                raise
            except OSError:  # of a log on a full disk, for which no run ends
                pass

    def flush(self) -> None:
        pass


@contextmanager
def progress(
    trainer: Trainer, describe: Callable[[Trainer, float], str], disable: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show progress on stderr, a bar or lines; yield what takes the loss of each step."""
    is_terminal = sys.stderr.isatty()
    is_narrow = shutil.get_terminal_size().columns < _NARROW
    shape: dict[str, Any] = {"dynamic_ncols": True, "bar_format": _BESIDE if is_narrow else _BAR}
    if not is_terminal:  # the delay is that of the first line, which says nothing
        shape = {"bar_format": _LINE, "file": _Lines(), "mininterval": LINE_EVERY, "delay": 1e-9}
    steps = {"total": trainer.config.steps, "initial": trainer.steps_done, "unit": "step"}
    # Lines that are logged, such as of compilation, stand above the bar and not behind it.
    above = logging_redirect_tqdm() if is_terminal else nullcontext()
    with above, tqdm(**steps, **shape, disable=disable) as bar:

        def advance(loss: float) -> None:
            bar.set_postfix_str(describe(trainer, loss), refresh=False)
            bar.update()

        try:
            yield advance
        except BaseException:
            bar.leave = is_terminal  # the error is the one line that is printed
            raise


def describe_progress(trainer: Trainer, loss: float) -> str:
    """Return how training stands, in a few words."""
    discovery, n_modes = trainer.discovery, trainer.env.n_modes
    modes = f"{discovery.modes_found}/{n_modes}" if n_modes else f"{discovery.modes_found:,}"
    best = "" if trainer.fit.method else f", best 100 {discovery.top_score:.3f}"
    # A narrow terminal cuts the end.
    return (
        f"loss {loss:.3f}, log Z {trainer.log_z:.2f}, modes {modes}, "
        f"{discovery.calls:,} reward calls{best}"
    )


def start_logger(
    config: TrainConfig, folder: RunFolder, history: Iterable[Row], rb: ReplayBuffer
) -> Callable[[Row], None]:
    """Log the history by a TorchRL logger, afresh; return what to call with each further row.

    Statistics of the buffer are logged as ``replay/NAME``, also those that the history lacks, and
    histograms of its keys and ages if the logger has histograms.
    """
    if config.logger == "none":
        return lambda _: None
    from torchrl.record.loggers import get_logger  # which take a while to load

    shutil.rmtree(folder.logs, ignore_errors=True)
    name = folder.path.resolve().name
    logger = get_logger(config.logger, str(folder.logs), name, wandb_kwargs={"project": "gfn_rb"})
    assert logger is not None

    def log(row: Row) -> None:
        for name, value in row.items():
            if value is not None and name != "step":
                of_buffer = name in FLOW or name == "buffer_size"
                logger.log_scalar(f"replay/{name}" if of_buffer else name, value, step=row["step"])

    def log_all(row: Row) -> None:
        log(row)
        step = row["step"]
        for name, value in rb.stats().items():
            if name not in row and math.isfinite(value):
                logger.log_scalar(f"replay/{name}", value, step=step)
        for name, numbers in numbers_of(rb).items():
            with suppress(NotImplementedError):  # such as of the CSV logger
                finite = numbers[numbers.isfinite()]
                logger.log_histogram(f"replay/{name}", finite, step=step, bins=64)

    for row in history:
        log(row)
    return log_all


logger = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
        trainer: the trainer after its last step.
        folder: the run folder.
        row: last measured row, as of ``Trainer.measure``.
        stopped_by: signal that stopped the run before its end; None at its end.
    """

    trainer: Trainer
    folder: RunFolder
    row: Row
    stopped_by: signal.Signals | None


def restore(trainer: Trainer, folder: RunFolder) -> None:
    """Restore a trainer from the newest checkpoint of its run, if there is one."""
    if not folder.checkpoint.exists():
        return
    try:
        trainer.load(folder.checkpoint)
    except CheckpointCorruptError as error:
        if not folder.previous.exists():
            raise
        raise CheckpointCorruptError(
            f"{error}; to go on from the one before it: mv {folder.previous} {folder.checkpoint}"
        ) from error


def run_training(
    trainer: Trainer,
    folder: RunFolder,
    stop: StopSignals,
    describe: Callable[[Trainer, float], str] = describe_progress,
    stops: Callable[[], bool] | None = None,
) -> RunResult:
    """Train until the steps are done or a signal stops the run, and write everything down.

    What the disk does not take is logged, and written when the next is due; at the end it raises.
    One of several ranks ends at once: the checkpoints of all must be of the same steps. ``stops``
    tells whether all ranks stop after this step; None for a run of one rank, which a signal stops.
    """
    config = trainer.config
    saved = trainer.steps_done if folder.checkpoint.exists() else None

    def explain() -> str:
        what = "nothing is saved" if saved is None else f"step {saved:,} is saved"
        return f"interrupted: {what}; continue with: {folder.how_to_resume()}"

    if folder.rank == 0:
        stop.explain = explain
    if not trainer.history:
        trainer.record()
    # Logs begin anew: a killed run may have got further than its checkpoint.
    log = start_logger(config, folder, trainer.history, trainer.rb)
    write_metrics(folder.metrics, trainer.history)

    def write(row: Row) -> None:
        write_metrics(folder.metrics, [*(r for r in trainer.history if r is not row), row])
        log(row)

    def save() -> None:
        nonlocal saved
        if saved != trainer.steps_done:
            if folder.checkpoint.exists():  # killed at any time, a run has one
                link(folder.checkpoint, folder.previous)
            trainer.save(folder.checkpoint)
            saved = trainer.steps_done

    @contextmanager
    def written() -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as error:
            if stops is not None:
                raise
            logger.error("%s", one_line(error))

    def is_stopped() -> bool:
        return stop.received is not None if stops is None else stops()

    with progress(trainer, describe, disable=folder.rank > 0) as advance:
        while trainer.steps_done < config.steps and not is_stopped():
            advance(trainer.step())
            if config.is_measured(trainer.steps_done):
                row = trainer.record()
                with written():
                    write(row)
            is_last = trainer.steps_done == config.steps
            if trainer.steps_done % config.checkpoint_every == 0 and not is_last:
                with written():
                    save()
    save()
    if is_stopped():
        if folder.rank == 0:
            done = f"stopped after {trainer.steps_done:,} steps, which are saved"
            how = folder.how_to_resume()
            print(f"{done}; continue with: {how}", file=sys.stderr, flush=True)
        return RunResult(trainer, folder, trainer.history[-1], stop.received)
    row = trainer.history[-1]
    if is_new := row["step"] != trainer.steps_done:
        row = trainer.measure()  # not recorded: a longer run would not have it
    write(row) if is_new else write_metrics(folder.metrics, trainer.history)
    return RunResult(trainer, folder, row, None)
