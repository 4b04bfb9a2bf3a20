"""What shows how a run goes: the progress bar and TorchRL's loggers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from torchrl.record.loggers import get_logger

from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.trainer import Row, Trainer

_EXTRA = ("tqdm", "matplotlib")


def check_installed(logger: str) -> None:
    """Check that what a run will need at some point is there.

    Raises:
        GfnRbError: part of the "train" extra is missing.
        ArgumentError: the logger is.
    """
    if missing := [name for name in _EXTRA if not _is_installed(name)]:
        raise GfnRbError(
            f"training runs need {missing[0]}: pip install '.[train]' in a clone of gfn_rb"
        )
    if logger not in ("none", "csv") and not _is_installed(logger):
        raise ArgumentError(f"logger {logger} is not installed: pip install {logger}")


@contextmanager
def progress_bar(
    trainer: Trainer, describe: Callable[[Trainer, float], str], disable: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on stderr; yield what is to be called after each step with its loss.

    Args:
        trainer: whose steps are shown.
        describe: returns how training stands, such as :func:`describe_progress`.
        disable: show nothing.
    """
    from tqdm import tqdm

    steps = {"total": trainer.config.steps, "initial": trainer.steps_done, "unit": "step"}
    with tqdm(**steps, dynamic_ncols=True, disable=disable) as bar:

        def advance(loss: float) -> None:
            if not disable:
                bar.set_postfix_str(describe(trainer, loss), refresh=False)
                bar.update()

        yield advance


def describe_progress(trainer: Trainer, loss: float) -> str:
    """Return how training stands, in a few words."""
    discovery, n_modes = trainer.discovery, trainer.env.n_modes
    modes = f"{discovery.modes_found}/{n_modes}" if n_modes else f"{discovery.modes_found:,}"
    best = "" if trainer.fit.method else f"best 100 {discovery.top_score:.3f}, "
    return (
        f"loss {loss:.3f}, log Z {trainer.log_z:.2f}, modes {modes}, {best}"
        f"{discovery.calls:,} reward calls"
    )


def start_logger(
    config: TrainConfig, folder: RunFolder, history: Iterable[Row]
) -> Callable[[Row], None]:
    """Log the history by a TorchRL logger, afresh; return what to call with each further row."""
    if config.logger == "none":
        return lambda _: None
    shutil.rmtree(folder.logs, ignore_errors=True)
    name = folder.path.resolve().name
    logger = get_logger(config.logger, str(folder.logs), name, wandb_kwargs={"project": "gfn_rb"})
    assert logger is not None

    def log(row: Row) -> None:
        for name, value in row.items():
            if value is not None and name != "step":
                logger.log_scalar(name, value, step=row["step"])

    for row in history:
        log(row)
    return log


def _is_installed(name: str) -> bool:
    return find_spec(name) is not None
