"""Start processes that are ranks of one transport, and collect what they print."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("conformance_rank.py")
SECONDS = 150  # then everything is killed
FOUND = list[dict[str, Any]]


def mpiexec() -> str:
    """The mpiexec beside this Python, or that of the system."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        pytest.skip("no mpiexec")
    pytest.importorskip("mpi4py")
    return found


def environment() -> dict[str, str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **allowed, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def under_mpiexec(size: int, program: Path, *arguments: str, options: tuple[str, ...] = ()) -> str:
    """Run a program on so many ranks, and return what they printed."""
    oversubscribe = () if size <= 2 else ("--oversubscribe",)
    command = [mpiexec(), *options, *oversubscribe, "-n", str(size), sys.executable]
    return _finished(_started([*command, str(program), *arguments]))


def side_by_side(size: int, program: Path, *arguments: str) -> str:
    """Run so many processes of a program, each told its rank and the size last."""
    ranks = [[*arguments, str(rank), str(size)] for rank in range(size)]
    running = [_started([sys.executable, str(program), *rank]) for rank in ranks]
    return "".join(map(_finished, running))


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _finished(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {SECONDS} s:\n{out}\n{err}") from None
    assert process.returncode == 0, f"exit code {process.returncode}:\n{out}\n{err}"
    return out


def reports(text: str) -> FOUND:
    """What each rank printed, by rank."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])
