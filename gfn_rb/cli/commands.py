"""The commands of ``gfn-rb``, as dataclasses that tyro turns into a command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro
from rich.console import Console

from gfn_rb.cli.tables import inspection, ranks_tables, result_table
from gfn_rb.training import RunResult, resume, train
from gfn_rb.training.config import CONFIGS, TrainConfig


def _one_of(choices: Mapping[str, type]) -> Any:
    """Return the type of which tyro makes subcommands of these names."""
    named = (
        Annotated[choice, tyro.conf.subcommand(name, prefix_name=False)]
        for name, choice in choices.items()
    )
    return Union[tuple(named)]  # noqa: UP007 (as many as there are)


if TYPE_CHECKING:
    Environment = TrainConfig
else:
    Environment = _one_of(CONFIGS)


@dataclass
class Train:
    """Train a GFlowNet with replay, and write a report."""

    config: Annotated[Environment, tyro.conf.arg(name="")]

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        return _conclude(train(self.config))


@dataclass
class Resume:
    """Continue a run from its last checkpoint, exactly."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    steps: int | None = None
    """Train up to this many steps in all, instead of those configured."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        return _conclude(resume(self.run, self.steps))


@dataclass
class Inspect:
    """Show what a run or a checkpoint holds."""

    path: tyro.conf.Positional[Path]
    """Folder of a run, or a checkpoint file."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        _print(*inspection(self.path))
        return 0


Command = Train | Resume | Inspect


def parse(arguments: Sequence[str] | None) -> Command:
    """Return the command that a command line asks for.

    Args:
        arguments: the words after the program's name, ``sys.argv`` if None.

    Raises:
        SystemExit: after ``--help``, and after words that make no sense.
    """
    command: Command = tyro.cli(
        _one_of({"train": Train, "resume": Resume, "inspect": Inspect}),
        prog="gfn-rb",
        description="Replay for GFlowNets: training runs with a report, to resume and to inspect.",
        args=arguments,
        config=(tyro.conf.OmitSubcommandPrefixes,),
    )
    return command


def _conclude(result: RunResult | None) -> int:
    if result is None:  # another rank speaks for this one
        return 0
    folder = result.folder
    if result.stopped_by is not None:
        done = result.trainer.steps_done
        print(
            f"stopped after {done:,} steps; continue with: {folder.how_to_resume()}",
            file=sys.stderr,
        )
        return 128 + result.stopped_by
    _print(result_table(result.trainer, result.row), *ranks_tables(folder))
    print(f"report   {folder.report}")
    print(f"metrics  {folder.metrics}")
    print(f"go on    {folder.how_to_resume()} --steps {2 * result.trainer.steps_done}")
    return 0


def _print(*tables: Any) -> None:
    # Names of folders and keys are shown as they are, brackets and colons in them included.
    Console(markup=False, emoji=False).print(*tables)
