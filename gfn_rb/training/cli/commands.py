"""The commands of ``gfn-rb``, as dataclasses that tyro turns into a command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Union

import tyro
from rich.console import Console
from rich.live import Live
from rich.text import Text

from gfn_rb.training import RunResult, resume, train
from gfn_rb.training.cli.comparing import comparison_lines, comparison_table
from gfn_rb.training.cli.option_groups import grouped, ungrouped
from gfn_rb.training.cli.tables import inspection, ranks_tables, result_table
from gfn_rb.training.cli.watching import RunWatch
from gfn_rb.training.config import CONFIGS, find_config
from gfn_rb.training.options import TransportName

DESCRIPTION = (
    "Replay for GFlowNets: training runs, to resume, to watch, to inspect and to compare. "
    "gfn-rb --version tells the version."
)
_READ_EVERY = 2.0  # seconds; ranks write every five


def _one_of(choices: Mapping[str, type]) -> Any:
    """Return the type of which tyro makes subcommands of these names."""
    named = (
        Annotated[choice, tyro.conf.subcommand(name, prefix_name=False)]
        for name, choice in choices.items()
    )
    return Union[tuple(named)]  # noqa: UP007 (as many as there are)


class Train:
    """Train a GFlowNet with replay, and write a report.

    An environment of your own is named by its configuration: mypackage.module:MyConfig
    """

    groups: Any

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        return _conclude(train(ungrouped(self.groups)))


@dataclass
class Resume:
    """Continue a run from its last checkpoint, exactly."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    steps: int | None = None
    """Train up to this many steps in all, instead of those configured."""
    transport: TransportName = "auto"
    """What joins the ranks started, see gfn-rb train."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        return _conclude(resume(self.run, self.steps, self.transport))


@dataclass
class Inspect:
    """Show what a run or a checkpoint holds."""

    path: tyro.conf.Positional[Path]
    """Folder of a run, or a checkpoint file."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        _print(*inspection(self.path))
        return 0


@dataclass
class Compare:
    """Compare runs of one environment: seeds of one configuration are averaged."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of the runs."""
    metrics: tuple[str, ...] = ()
    """Columns of metrics.csv to compare by; by default three that are usual."""
    calls: int | None = None
    """Reward calls after which to compare; by default as many as the shortest run took."""
    out: Path = Path("comparison.png")
    """Picture to make or replace, in any format that matplotlib writes."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        # matplotlib takes a while to load
        from gfn_rb.training.report import comparison_picture
        from gfn_rb.training.report.comparison import compare_runs

        comparison_picture.check_format(self.out)
        comparison = compare_runs(self.runs, self.metrics, self.calls)
        comparison_picture.write_comparison(self.out, comparison)
        console = Console(markup=False, emoji=False)
        if console.is_terminal:
            console.print(comparison_table(comparison))
        else:
            print("\n".join(comparison_lines(comparison)))
        print(f"picture  {self.out}")
        return 0


@dataclass
class Watch:
    """Show how the ranks of a run stand: live on a terminal, once anywhere else."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    once: bool = False
    """Show it once and end."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        watch, console = RunWatch(self.run), Console(markup=False, emoji=False)
        watch.read()
        if self.once or not console.is_terminal:
            print("\n".join(watch.lines()))
            return 0
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            live.update(Text("\n".join(watch.lines())), refresh=True)
            while not watch.has_ended:
                time.sleep(_READ_EVERY)
                watch.read()
                live.update(Text("\n".join(watch.lines())), refresh=True)
        return 0


COMMANDS = {"resume": Resume, "inspect": Inspect, "compare": Compare, "watch": Watch}  # and train

Command = Train | Resume | Inspect | Compare | Watch


def parse(arguments: Sequence[str] | None) -> Command:
    """Return the command that a command line asks for.

    Args:
        arguments: the words after the program's name, ``sys.argv`` if None.

    Raises:
        SystemExit: after ``--help``, and after words that make no sense.
        ArgumentError: an import path leads to no configuration.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command: Command = tyro.cli(
        _one_of({"train": _train_on(words), **COMMANDS}),
        prog="gfn-rb",
        description=DESCRIPTION,
        args=words,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
    )
    return command


def _train_on(words: Sequence[str]) -> type[Train]:
    """Return the command of which tyro makes a subcommand for each environment."""
    configs = dict(CONFIGS)
    if words[:1] == ["train"]:
        configs |= {word: find_config(word) for word in words[1:2] if ":" in word}
    environments = _one_of({name: grouped(config) for name, config in configs.items()})
    return make_dataclass(
        "Train",
        [("groups", Annotated[environments, tyro.conf.arg(name="")])],
        bases=(Train,),
        namespace={"__doc__": Train.__doc__},
    )


def _conclude(result: RunResult | None) -> int:
    if result is None:  # another rank speaks for this one
        return 0
    folder = result.folder
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    _print(result_table(result.trainer, result.row), *ranks_tables(folder))
    print(f"report   {folder.report}")
    print(f"metrics  {folder.metrics}")
    print(f"go on    {folder.how_to_resume()} --steps {2 * result.trainer.steps_done}")
    for why in result.unwritten:
        print(f"gfn-rb: not written at the end: {why}", file=sys.stderr)
    return int(bool(result.unwritten))


def _print(*tables: Any) -> None:
    # Names of folders and keys are shown as they are, brackets and colons in them included.
    Console(markup=False, emoji=False).print(*tables)
