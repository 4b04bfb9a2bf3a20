"""One suite on every transport: threads, Gloo processes, and MPI under a real mpiexec."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transports.ranks import FOUND, PROGRAM, reports, side_by_side, under_mpiexec

from gfn_rb.transports import LocalTransport
from gfn_rb.transports.conformance import CHECKS, run

Runner = Callable[[int, Path], FOUND]


def in_threads(size: int, _: Path) -> FOUND:
    group = LocalTransport.group(size, timeout=30.0)
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(run, group))
    return [{"rank": rank, "found": each} for rank, each in enumerate(found)]


def in_gloo(size: int, folder: Path) -> FOUND:
    return reports(side_by_side(size, PROGRAM, "gloo", str(folder / "store")))


def in_mpi(size: int, _: Path) -> FOUND:
    return reports(under_mpiexec(size, PROGRAM, "mpi"))


RUNS: list[tuple[str, int, Runner]] = [
    ("local", 1, in_threads),
    ("local", 4, in_threads),
    ("gloo", 1, in_gloo),
    ("gloo", 3, in_gloo),
    ("mpi", 1, in_mpi),
    ("mpi", 2, in_mpi),
    ("mpi", 4, in_mpi),
]


@pytest.mark.parametrize(("kind", "size", "runner"), RUNS, ids=[f"{k}-{n}" for k, n, _ in RUNS])
def test_transport_conforms(kind: str, size: int, runner: Runner, tmp_path: Path) -> None:
    found = runner(size, tmp_path)
    expected = {check.__name__: "" for check in CHECKS}
    assert found == [{"rank": rank, "found": expected} for rank in range(size)]
