"""The commands of ``gfn-rb``: functions, of which tyro makes command lines.

A new command is a function in ``COMMANDS``. Words are parsed without torch: each function imports
what it runs.
"""

from __future__ import annotations

import ast
import gc
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import copy
from dataclasses import fields, make_dataclass, replace
from difflib import get_close_matches
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import tyro

from gfn_rb.errors import ArgumentError
from gfn_rb.training import rules
from gfn_rb.training.cli.completion import completion_script
from gfn_rb.training.config import CONFIGS, TrainConfig, find_config, group_named
from gfn_rb.training.options import MAIN_OPTIONS, GeneralOptions, TransportName
from gfn_rb.training.session.signals import Interrupt

if TYPE_CHECKING:
    import gfn_rb.training.session.run


@contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with status 130, while modules are imported."""
    # Within the import of an extension module, KeyboardInterrupt may become another error or get
    # lost. A process that ignores SIGINT, as under nohup, keeps to that.
    before = signal.getsignal(signal.SIGINT)
    is_default = before is signal.default_int_handler or isinstance(before, Interrupt)
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    gc.freeze()  # collections need not look again at what imports have made


def train(config: TrainConfig) -> int:
    """Train a GFlowNet with replay, and write a report."""
    with importing():
        from gfn_rb.training.session import launch
    return _conclude(launch.train(config))


def resume(
    run: Path,
    /,
    *,
    steps: int | None = None,
    transport: TransportName = "auto",
    trust: bool = False,
) -> int:
    """Continue a run from its last checkpoint, exactly.

    Args:
        run: Folder of the run.
        steps: Train up to this many steps in all, instead of those configured.
        transport: Connection of the ranks, see gfn-rb train.
        trust: Run code outside gfn_rb that the folder names, such as an environment of your own,
            and follow links in the folder.
    """
    with importing():
        from gfn_rb.training.session import launch
    return _conclude(launch.resume(run, steps, transport, trust))


def inspect(path: Path, /, *, top: int | None = None, export: Path | None = None) -> int:
    """Show the best objects, the options and the progress of a run or a checkpoint.

    Args:
        path: Folder of a run, a checkpoint, or a journal that no process uses.
        top: Number of objects to list, best first. Default: the five of the summary.
        export: Table to write of these objects, or else of all: a .csv or .parquet file.
    """
    with importing():
        from gfn_rb.training.cli.tables import inspection
    print(*inspection(path, top, export), sep="\n")
    return 0


def compare(
    runs: tuple[Path, ...],
    /,
    *,
    metrics: tuple[str, ...] = (),
    calls: int | None = None,
) -> int:
    """Compare runs of one environment; seeds of one configuration are averaged.

    Args:
        runs: Folders of the runs.
        metrics: Columns of metrics.csv to compare by. Default: three that are usual.
        calls: Reward calls after which to compare. Default: those of the shortest run.
    """
    with importing():
        from gfn_rb.training.cli.tables import aligned_lines
        from gfn_rb.training.comparison import compare_runs
    comparison = compare_runs(runs, metrics, calls)
    for run in comparison.ignored:
        print(f"gfn-rb: ignored {run}", file=sys.stderr)
    for note in comparison.notes:
        print(f"gfn-rb: {note}", file=sys.stderr)
    print(comparison.title, *aligned_lines(comparison.rows()), sep="\n")
    return 0


def view(paths: tuple[Path, ...], /, *, out: Path | None = None, trust: bool = False) -> int:
    """Write one HTML page that shows what runs found and what buffers hold.

    Args:
        paths: Folders of runs, checkpoints or journals. The rows of the first one are shown.
        out: File to write. Default: view.html in the first folder, or the first file and .html.
        trust: Run code outside gfn_rb that a folder names, such as an environment of your own.
    """
    from gfn_rb.training.session.folder import RunFolder

    for path in paths:  # before imports that take seconds
        if not path.is_file():
            RunFolder.open(path)
    with importing():
        from gfn_rb.training.page import write_page
    print(f"page     {write_page(paths, out, trust)}")
    return 0


def recover(path: Path, /, *, to: Path | None = None) -> int:
    """Write the sound part of a damaged journal, and its checkpoint, to new files.

    Args:
        path: The journal, which is not changed.
        to: New journal; an existing one is replaced. Default: PATH with .recovered appended.
    """
    with importing():
        from gfn_rb import checkpoint
        from gfn_rb.training.session.folder import run_secret
    target = to or path.with_name(f"{path.name}.recovered")
    if to is None and target.is_symlink():
        raise ArgumentError(f"to must be given where {target} is a link, got none")
    found = checkpoint.recover(path, target, secret=run_secret())
    print(f"written   {target}, up to transaction {found['number']}")
    print(f"left out  {found['left_out']} rows: {found['damage'] or 'no damage'}")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    each.__name__: each for each in (train, resume, inspect, compare, view, recover)
}
_HELP = "-h", "--help"
_COMPLETION = "--print-completion"


def parse(arguments: Sequence[str] | None) -> Callable[[], int]:
    """Return what runs the command that a command line asks for, and returns the exit status."""
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or [""]
    if name in ("", *_HELP):
        title = "usage: gfn-rb COMMAND [OPTIONS]\n\nReplay for GFlowNets.\n\ncommands:"
        end = (
            "gfn-rb COMMAND --help shows its options, gfn-rb --version the version, and gfn-rb "
            f"{_COMPLETION} a script that completes words in bash and zsh."
        )
        return partial(_print_summaries, title, COMMANDS, end)
    if [name, *words] == [_COMPLETION]:
        return partial(_print, completion_script(COMMANDS, CONFIGS))
    rules.check_name("command", name or None, [*COMMANDS, "--help", "--version", _COMPLETION])
    if name == "train":
        return _parse_train(words)

    @wraps(COMMANDS[name])
    def deferred(*values: Any, **options: Any) -> Callable[[], int]:
        return partial(COMMANDS[name], *values, **options)

    command: Callable[[], int] = _parsed(deferred, f"gfn-rb {name}", words)
    return command


def _print(text: str) -> int:
    print(text, end="")
    return 0


def _print_summaries(title: str, named: Mapping[str, Any], end: str) -> int:
    """Print the first line of the docstring of each of several functions or classes."""
    columns, width = shutil.get_terminal_size().columns, 4 + max(map(len, named))
    print(title)
    for name, each in named.items():
        summary = f"  {name}".ljust(width) + each.__doc__.splitlines()[0]
        print(textwrap.fill(summary, columns, subsequent_indent=" " * width))
    print(f"\n{textwrap.fill(end, columns)}")
    return 0


def _parse_train(words: list[str]) -> Callable[[], int]:
    """Parse the environment and its options, of which it may be before or after."""
    at = [i for i, word in enumerate(words) if i == 0 or words[i - 1] != "--out"]
    # A word in front is meant as an environment. Among options, one that names an environment is.
    is_named = (i for i in at if words[i].lower() in CONFIGS or ":" in words[i])
    place = 0 if words[:1] and not words[0].startswith("-") else next(is_named, None)
    if place is None:
        if {*_HELP, "--help-all"} & {*words}:
            title = "usage: gfn-rb train ENV [OPTIONS]\n\nenvironments:"
            end = (
                "gfn-rb train ENV --help shows the options of an environment. One of your own is "
                "named by its configuration: mypackage.module:MyConfig"
            )
            return partial(_print_summaries, title, CONFIGS, end)
        raise ArgumentError(f"train must name an environment: {', '.join(CONFIGS)}, got none")
    env, options = words[place], words[:place] + words[place + 1 :]
    default = _chosen(find_config(env)(), options)
    kind, is_all = type(default), "--help-all" in options
    text = str(kind.__doc__)
    if {*_HELP} & {*options} and not is_all:
        kind = _with_main_options(kind)
        text += "\n\nThese are the main options: --help-all shows all."
    options = ["--help" if word == "--help-all" else word for word in options]
    markers = (tyro.conf.AvoidSubcommands,)
    try:
        default = _parsed(
            kind, f"gfn-rb train {env}", options, default=default, config=markers, description=text
        )
    except tyro.constructors.UnsupportedTypeAnnotationError as error:
        raise ArgumentError(f"{env} must have options that tyro can parse: {error}") from error
    rules.check_options(default)
    return partial(train, default)


def _with_main_options(kind: type[TrainConfig]) -> type[TrainConfig]:
    """Return a subclass whose help shows its own options and the main ones alone."""
    hidden = {f.name for f in fields(GeneralOptions)} - MAIN_OPTIONS
    suppress: Any = tyro.conf.Suppress
    hints = get_type_hints(kind, include_extras=True)
    # Copies: a field belongs to one class.
    again = [(f.name, suppress[hints[f.name]], copy(f)) for f in fields(kind) if f.name in hidden]
    return make_dataclass(kind.__name__, again, bases=(kind,), frozen=True, kw_only=True)


def _parsed(kind: Any, prog: str, words: Sequence[str], **options: Any) -> Any:
    """Return what tyro makes of words; raise in one line what it would print in a box."""
    said, shown = io.StringIO(), io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(shown):
            return tyro.cli(kind, prog=prog, args=words, **options)
    except SystemExit as end:
        if not end.code:  # after --help
            print(plain_help(shown.getvalue()), end="")
            raise
    _, *lines = (line.strip("╭╮╰╯│─ ") for line in said.getvalue().splitlines())
    lines = [line for line in lines if line.strip("-")]  # rules are dashes where output is piped
    text, _, near = " ".join(lines).partition(" Perhaps you meant: ")
    if choice := re.match(r"invalid choice '(.*)' for argument '--(\S+)'.* one of (\(.*?\))", text):
        rules.check_name(choice[2], choice[1], ast.literal_eval(choice[3]))
    if wrong := re.match(
        r"Error parsing --(\S+): .*?(\[.*?\]|'.*?').* helptext: --\S+ (.*?\S) ", text
    ):
        kind = re.sub(r"\{None\}\|(.*)", r"\1 or None", wrong[3])
        raise ArgumentError(f"{wrong[1]} must be {kind}, got {wrong[2].strip('[]')}")
    text = re.split(" Argument helptext: | For full helptext", text)[0].rstrip(".")
    names = re.findall(r"--[\w.-]+", near.partition(" For full helptext")[0])
    names = get_close_matches(text.split(" ")[2].rstrip(","), dict.fromkeys(names), 2)
    hint = f": did you mean {' or '.join(names)}?" if names else f": see {prog} --help"
    raise ArgumentError(f"{text}{hint}")


_PLAIN = (
    (r"\[\[(\w+) \[\1 \.\.\.\]\]\]", r"\1 [\1 ...]"),  # at least one
    (r"\[(\S+) \[(?:\1 )?\.\.\.\]\]", r"\1 ..."),  # any number
    (r"\{None\}\|(\S+)", r"\1"),
    (r" ?\(default:\ +(None)?\)", ""),
)
_NO_DEFAULT = re.compile(r"\s*\(default: *\n +None\)")  # in two lines
_IN_COLUMN = re.compile(r"\(default:( .*\n +)None\)")  # the same, with another column beside it


def plain_help(text: str) -> str:
    """Return the help that tyro prints, with values as people write them."""
    text = _IN_COLUMN.sub(r"         \1     ", _NO_DEFAULT.sub("", text))
    usage, gap, rest = text.partition("\n\n")
    for pattern, value in _PLAIN:
        usage = re.sub(pattern, value, usage)
        rest = re.sub(pattern, partial(_of_same_width, value), rest)  # columns stay
    return "\n".join(line.rstrip() for line in f"{usage}{gap}{rest}".split("\n"))


def _of_same_width(value: str, match: re.Match[str]) -> str:
    return match.expand(value).ljust(len(match[0]))


def _chosen(config: TrainConfig, words: Sequence[str]) -> TrainConfig:
    """Return a configuration with the kinds of groups that words such as --draw softmax choose.

    tyro then shows and takes the options of these kinds alone.
    """
    hints, chosen = get_type_hints(type(config)), {}
    split = (word.partition("=") for word in words)
    given = {
        option.replace("_", "-"): value or following
        for (option, _, value), following in zip(split, [*words[1:], ""], strict=False)
        if option.startswith("--")
    }
    for name, groups in ((f.name, rules.groups_of(hints[f.name])) for f in fields(config)):
        if len(groups) < 2:
            continue
        kind = given.get(f"--{name}") or getattr(config, name).kind  # "" is tyro's to complain of
        if kind != getattr(config, name).kind:
            chosen[name] = group_named(name, groups, kind)()
        own = {f.name for f in fields(chosen.get(name, getattr(config, name)))}
        for group in groups:
            for other in (f.name for f in fields(group) if f.name not in own):
                option = f"--{name}.{other}".replace("_", "-")
                short = f"--{other}".replace("_", "-")
                if option in given or (short in given and other not in hints):
                    raise ArgumentError(
                        f"{option} belongs to --{name} {group().kind}, got --{name} {kind}"
                    )
    return replace(config, **chosen)


def _conclude(result: gfn_rb.training.session.run.RunResult | None) -> int:
    if result is None:  # another rank speaks for this one
        return 0
    from gfn_rb.training.cli.tables import ranks_lines, result_lines, warning_lines

    folder = result.folder
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    print(*result_lines(result.trainer, result.row), *ranks_lines(folder), sep="\n")
    for line in warning_lines([*result.trainer.history, result.row]):
        print(line, file=sys.stderr)
    print(f"report   {folder.report}")
    print(f"metrics  {folder.metrics}")
    print(f"go on    {folder.how_to_resume()} --steps {2 * result.trainer.steps_done}")
    return 0
