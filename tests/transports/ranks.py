"""Start processes that are ranks of one transport, and collect what they print."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("conformance_rank.py")
SECONDS = 240  # then everything is ended
FOUND = list[dict[str, Any]]


def mpiexec() -> str:
    """The mpiexec beside this Python, or that of the system."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        pytest.skip("no mpiexec")
    pytest.importorskip("mpi4py")
    return found


def mpi_kind() -> str:
    """The MPI library of this Python, "" for none; without starting it."""
    if importlib.util.find_spec("mpi4py") is None:
        return ""
    command = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    command += "print(MPI.get_vendor()[0])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    return done.stdout.strip()


def environment() -> dict[str, str]:
    """The environment of ranks, in which they say where they are when they are aborted."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "RL_LOGGING_LEVEL": "WARNING"}
    here = str(PROGRAM.parents[1])
    path = os.pathsep.join(filter(None, [os.getcwd(), here, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **allowed, **quiet, "PYTHONPATH": path}


def abort(process: subprocess.Popen) -> None:
    """End a command that hangs. Its ranks say where they are; mpiexec hands the signal on."""
    for number in (signal.SIGABRT, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)


def under_mpiexec(size: int, program: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """Run a program on so many ranks, and return what they printed.

    When it fails or hangs, it is ended, and all that it printed is in the error.
    """
    oversubscribe = () if size <= 2 else ("--oversubscribe",)
    command = [mpiexec(), *options, *oversubscribe, "-n", str(size), sys.executable]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [*command, str(program), *arguments],
            **{"env": environment(), "stdin": subprocess.DEVNULL, "stdout": out, "stderr": err},
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        code = process.poll()  # None while it hangs
        abort(process)
        for file in (out, err):
            file.seek(0)
        printed = out.read()
        assert code == 0, f"exit code {code}:\n{printed}\n{err.read()}"
        return printed


def reports(text: str) -> FOUND:
    """What each rank printed, by rank."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])
