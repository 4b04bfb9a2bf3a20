"""A run's folder: its configuration, its table of metrics, its checkpoint and its report."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gfn_rb.checkpoint.atomic import published, try_lock
from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.training.config import CONFIGS, TrainConfig
from gfn_rb.training.session.reading import named_damage, printable, read_json
from gfn_rb.transports.launch import Launch

if TYPE_CHECKING:
    import gfn_rb.codec.primitives
    import gfn_rb.envs

Row = dict[str, int | float | None]  # of the table of metrics
RUNS = Path("runs")
MAX_RANKS = 1 << 16
# The commands of gfn_rb.transports.launch. What else a file tells to run is not repeated.
_COMMAND = re.compile(
    r"(mpiexec(?: --oversubscribe)?|srun) -n [0-9]+ gfn-rb|[0-9]+ processes of gfn-rb"
    r"|torchrun (--nnodes [0-9]+ --rdzv-endpoint HOST:PORT )?--nproc-per-node [0-9]+ -m gfn_rb"
)


class RunFolder:
    """Names the files of a run."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        of_rank = f"-rank{rank}" if rank else ""
        self.path, self.rank = path, rank
        self.config = path / "config.json"
        self.metrics = path / f"metrics{of_rank}.csv"
        self.checkpoint = path / f"checkpoint{of_rank}.gfnrb"
        self.journal = path / f"journal{of_rank}"
        self.previous = path / f"previous{of_rank}.gfnrb"
        self.manager = path / f"manager{of_rank}.json"
        self.report = path / "view.html"
        self.ranks = path / "ranks.json"
        self.ranks_report = path / "report.json"
        self.logs = path / f"logs{of_rank}"

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """Make the folder of a new run, with its configuration inside, in one step."""
        if config.out is not None:
            folder = cls(config.out)
            try:
                if _make(config.out, config):
                    return folder
            except OSError as error:  # which may name a temporary file
                raise ArgumentError(
                    f"out must be where a folder can be made, got {config.out}: {error.strerror}"
                ) from error
            is_run = folder.config.exists()
            hint = f"; to continue a run: {folder.how_to_resume()}" if is_run else ""
            raise ArgumentError(
                f"out must be a new or an empty folder, got {config.out}, which exists{hint}"
            )
        names = (RUNS / f"{config.env}-seed{config.seed}-{n:03d}" for n in count(1))
        return cls(next(path for path in names if not path.exists() and _make(path, config)))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of an earlier run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise ArgumentError(f"run must be a folder that holds a config.json, got {path}")
        return folder

    def require_own(self) -> None:
        """Raise if the folder names code outside gfn_rb, or has a link that a run writes through.

        Only who trusts the folder may continue such a run.
        """
        if self._names_code():
            raise ArgumentError(
                f"run must be of an environment of gfn_rb, got one of {self.config} that is "
                "outside: --trust imports and runs it"
            )
        for each in sorted(self.path.iterdir()):
            if each.is_symlink():
                raise ArgumentError(
                    f"run must be a folder without links, got {each}: --trust follows them"
                )

    def _names_code(self) -> bool:
        env = read_json(self.config).get("env")
        return isinstance(env, str) and ":" in env

    def take_back(self) -> None:
        """Put the checkpoint before the newest in its place; the first gives way to none."""
        if self.previous.exists():
            os.replace(self.previous, self.checkpoint)
        else:
            self.checkpoint.unlink()

    def read_config(self) -> TrainConfig:
        """Return the run's configuration."""
        values = read_json(self.config)
        try:
            return TrainConfig.from_dict(values)
        except ArgumentError as error:
            raise ArgumentError(f"{self.config}: {error}") from error

    def write_config(self, config: TrainConfig) -> None:
        """Replace the run's configuration."""
        write_json(self.config, config.to_dict())

    def write_ranks(self, started: Launch | None) -> None:
        """Write down how many processes a launcher started for the run, where one did."""
        if started is not None:
            write_json(self.ranks, {"size": started.size, "command": started.command})

    def n_ranks(self) -> int:
        """Return how many processes a launcher started for the run, 1 where none did."""
        return self._read_ranks()[0] if self.ranks.exists() else 1

    def _read_ranks(self) -> tuple[int, str]:
        """Return how many processes a launcher started, and by which command."""
        with named_damage(self.ranks):
            known = read_json(self.ranks)
            if type(size := known["size"]) is not int or not 1 <= size <= MAX_RANKS:
                raise ValueError(f"size must be in [1, {MAX_RANKS}], got {size!r:.80}")
            return size, str(known.get("command"))

    def how_to_resume(self) -> str:
        """Return the command that continues the run."""
        command = "gfn-rb"
        if self.ranks.exists():
            size, given = self._read_ranks()
            command = given if _COMMAND.fullmatch(given) else f"mpiexec -n {size} gfn-rb"
        trust = " --trust" if self.config.is_file() and self._names_code() else ""
        return f"{command} resume {shlex.quote(printable(self.path))}{trust}"


class RunLock(ExitStack):
    """Keeps other processes from going on with a run until the block, or this process, ends."""

    def take(self, folder: RunFolder) -> None:
        """Lock a run by its configuration, anew after that was written."""
        stream = self.enter_context(folder.config.open("r+b"))  # NFS locks no file only read
        if not try_lock(stream):
            raise ArgumentError(
                f"run must not be going on already, got {folder.path}, which another process has "
                "locked"
            )


def saved_env(options: Any) -> gfn_rb.envs.GFNEnv | None:
    """Return the shipped environment that options of a run are of; None for all else.

    No code outside gfn_rb runs.
    """
    name = options.get("env") if isinstance(options, dict) else None
    if not isinstance(name, str) or name not in CONFIGS:
        return None
    useless = GfnRbError, ArithmeticError, MemoryError, RuntimeError, TypeError, ValueError
    with suppress(*useless):
        return replace(TrainConfig.from_dict(options), device="cpu").make_env()
    return None


def run_secret() -> gfn_rb.codec.primitives.Secret | None:
    """Return the secret of all files and frames of a run, None if the environment names none."""
    from gfn_rb.codec.primitives import Secret

    path = os.environ.get("GFN_RB_SECRET_FILE")
    return Secret.read(path) if path else None


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Write a table of rows anew, in CSV."""
    with published(path) as stream:
        text = io.TextIOWrapper(stream, newline="", write_through=True)
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        text.detach()  # or it would close the file before that is published


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a file by one that holds values, of kinds that JSON knows."""
    with published(path) as stream:
        stream.write(json.dumps(values, indent=2).encode() + b"\n")


def _make(path: Path, config: TrainConfig) -> bool:
    """Make a folder with a configuration inside; False if there is something in its place."""
    # Renamed when complete, so that no run is killed before its folder can be resumed, and of two
    # runs that want the same name one gets the next.
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        write_json(RunFolder(temporary).config, config.to_dict())
        os.rename(temporary, target)  # refuses to replace anything but an empty folder
    except OSError:
        if not target.exists():
            raise
        return False
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True
