"""What shows how a run goes: progress and TorchRL's loggers."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.trainer import Row, Trainer
from gfn_rb.transports.launch import launched

_EXTRA = ("tqdm", "matplotlib")
LINE_EVERY = 10.0  # seconds between lines where there is no terminal
_LINE = "{n_fmt}/{total_fmt} steps [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def check_installed(logger: str) -> None:
    """Check that what a run will need at some point is there."""
    if missing := [name for name in _EXTRA if not _is_installed(name)]:
        raise GfnRbError(
            f"training runs need {missing[0]}: pip install '.[train]' in a clone of gfn_rb"
        )
    if logger not in ("none", "csv") and not _is_installed(logger):
        raise ArgumentError(f"logger {logger} is not installed: pip install {logger}")


@contextmanager
def progress(
    trainer: Trainer, describe: Callable[[Trainer, float], str], disable: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show progress on stderr; yield what is to be called after each step with its loss.

    On a terminal that is a bar; anywhere else a line every ten seconds, and one at the end.
    """
    from tqdm import tqdm

    loss = math.nan
    steps = {"total": trainer.config.steps, "initial": trainer.steps_done, "unit": "step"}
    is_bar = sys.stderr.isatty() and not disable
    start = shown = time.monotonic()

    def show_line(now: float) -> None:
        text = tqdm.format_meter(
            trainer.steps_done, elapsed=now - start, bar_format=_LINE, **steps,
            postfix=describe(trainer, loss),
        )  # fmt: skip
        print(text, file=sys.stderr, flush=True)

    def advance(new: float) -> None:
        nonlocal loss, shown
        loss, now = new, time.monotonic()
        if is_bar:
            bar.set_postfix_str(describe(trainer, new), refresh=False)
            bar.update()
        elif not disable and now >= shown + LINE_EVERY:
            shown = now
            show_line(now)

    with tqdm(**steps, dynamic_ncols=True, disable=not is_bar) as bar:
        yield advance
    if not is_bar and not disable:
        show_line(time.monotonic())


def tell(line: str) -> None:
    """Print a line on stderr; started by a launcher, on the terminal as well.

    An mpiexec that Ctrl-C ends prints nothing more of what its ranks say, and kills them in a
    moment.
    """
    print(line, file=sys.stderr, flush=True)
    if launched() is not None and not sys.stderr.isatty():
        with suppress(OSError), open("/dev/tty", "w") as terminal:  # there may be none
            print(line, file=terminal)


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
    from torchrl.record.loggers import get_logger  # which take a while to load

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
