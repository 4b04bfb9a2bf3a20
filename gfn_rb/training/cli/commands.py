"""The commands of ``gfn-rb``, as dataclasses that tyro turns into a command line."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from gfn_rb.checkpoint import recover
from gfn_rb.errors import ArgumentError
from gfn_rb.training import RunResult, resume, train
from gfn_rb.training.cli.tables import aligned_lines, inspection, ranks_lines, result_lines
from gfn_rb.training.comparison import compare_runs
from gfn_rb.training.config import CONFIGS, TrainConfig, find_config, group_named
from gfn_rb.training.options import TransportName
from gfn_rb.training.rules import groups_of
from gfn_rb.training.trainer import run_secret

DESCRIPTION = (
    "Replay for GFlowNets: training runs, to resume, to inspect and to compare. "
    "gfn-rb --version tells the version."
)


@dataclass
class Train:
    """Train a GFlowNet with replay, and write a report.

    gfn-rb train ENV --help shows the options of an environment. One of your own is named by its
    configuration: mypackage.module:MyConfig
    """

    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar=f"{{{','.join(CONFIGS)}}}")]
    """Environment, followed by its options."""

    def __post_init__(self) -> None:
        self.config = find_config(self.env)()

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
        print(*inspection(self.path), sep="\n")
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

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        comparison = compare_runs(self.runs, self.metrics, self.calls)
        print(comparison.title, *aligned_lines(comparison.rows()), sep="\n")
        return 0


@dataclass
class Recover:
    """Write what is sound of a damaged journal, and its checkpoint, to new files."""

    path: tyro.conf.Positional[Path]
    """The journal, which is not changed."""
    to: Path | None = None
    """New journal, replaced if there is one; by default PATH with .recovered behind it."""

    def __call__(self) -> int:
        """Do it, and return the exit code."""
        target = self.to or self.path.with_name(f"{self.path.name}.recovered")
        found = recover(self.path, target, secret=run_secret())
        print(f"written   {target}, up to record {found['number']}")
        print(f"left out  {found['left_out']} bytes: {found['damage'] or 'no damage'}")
        return 0


Command = Train | Resume | Inspect | Recover | Compare


def parse(arguments: Sequence[str] | None) -> Command:
    """Return the command that a command line asks for."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] != ["train"] or words[1:2] in ([], ["-h"], ["--help"]):
        command: Command = _parsed(
            Command,
            prog="gfn-rb",
            description=DESCRIPTION,
            args=words,
            config=(tyro.conf.OmitSubcommandPrefixes,),
        )
        return command
    env, *options = words[1:]
    training = Train(env)
    default = _chosen(training.config, options)
    try:
        training.config = _parsed(
            type(default),
            prog=f"gfn-rb train {env}",
            args=options,
            default=default,
            config=(tyro.conf.AvoidSubcommands,),
        )
    except tyro.constructors.UnsupportedTypeAnnotationError as error:
        raise ArgumentError(f"{env} must have options that tyro can parse: {error}") from error
    return training


def _parsed(kind: Any, **options: Any) -> Any:
    """Return what tyro makes of words; raise in one line what it would print in a box."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, **options)
    except SystemExit as end:
        if not end.code:  # after --help
            raise
    title, *lines = (line.strip("╭╮╰╯│─ ") for line in said.getvalue().splitlines())
    lines = [line for line in lines if line.strip("-")]  # rules are dashes where output is piped
    text, _, near = " ".join(lines).partition(" Perhaps you meant: ")
    text = re.split(" Argument helptext: | For full helptext", text)[0].rstrip(".")
    names = dict.fromkeys(re.findall(r"--[\w.-]+", near.partition(" For full helptext")[0]))
    hint = f": did you mean {' or '.join(names)}?" if names else f": see {options['prog']} --help"
    title = "" if text.startswith((title, "Error", "invalid")) else f"{title}: "
    raise ArgumentError(f"{title}{text}{hint}")


def _chosen(config: TrainConfig, words: Sequence[str]) -> TrainConfig:
    """Return a configuration with the kinds of groups that words such as --draw softmax choose.

    tyro then shows and takes the options of these kinds alone.
    """
    hints, chosen = get_type_hints(type(config)), {}
    for name, groups in ((f.name, groups_of(hints[f.name])) for f in fields(config)):
        if len(groups) < 2:
            continue
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(f"--{name}", dest="kind", nargs="?")  # without a value tyro complains
        kind = parser.parse_known_args(words)[0].kind
        if kind not in (None, getattr(config, name).kind):
            chosen[name] = group_named(name, groups, kind)()
    return replace(config, **chosen)


def _conclude(result: RunResult | None) -> int:
    if result is None:  # another rank speaks for this one
        return 0
    folder = result.folder
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    print(*result_lines(result.trainer, result.row), *ranks_lines(folder), sep="\n")
    print(f"report   {folder.report}")
    print(f"metrics  {folder.metrics}")
    print(f"go on    {folder.how_to_resume()} --steps {2 * result.trainer.steps_done}")
    for why in result.unwritten:
        print(f"gfn-rb: not written at the end: {why}", file=sys.stderr)
    return int(bool(result.unwritten))
