"""Starting a benchmark's ranks under mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gfn_rb.errors import TransportError

_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def mpiexec() -> str:
    """Return the mpiexec beside this Python, or that of the system.

    Raises:
        TransportError: there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise TransportError("no mpiexec is installed: pip install '.[mpi]' in a clone of gfn_rb")
    return found


def command(size: int, words: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts ranks of this Python.

    Args:
        size: how many.
        words: what each is given.
        options: of mpiexec.
    """
    return [mpiexec(), "--oversubscribe", *options, "-n", str(size), sys.executable, *words]


def environment() -> dict[str, str]:
    """Return the environment to start ranks in."""
    return {**os.environ, **_ENVIRONMENT}


def run(size: int, words: Sequence[str]) -> int:
    """Start ranks of this Python, wait for them, and return the exit code.

    Args:
        size: how many.
        words: what each is given.
    """
    return subprocess.run(command(size, words), env=environment(), check=False).returncode
