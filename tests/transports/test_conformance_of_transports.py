"""One suite on every transport: threads, Gloo processes, and MPI under a real mpiexec.

GFN_RB_TEST_RANKS=4 tries MPI on four ranks, three and one, instead of three, two and one.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from transports.conformance import CHECKS, run
from transports.ranks import FOUND, PROGRAM, reports, under_mpiexec

from gfn_rb.transports import LocalTransport, TCPTransport, Transport

MPI_RANKS = int(os.environ.get("GFN_RB_TEST_RANKS", "3"))


def assert_conforms(found: list[dict[str, str]], size: int) -> None:
    assert found == [{check.__name__: "" for check in CHECKS}] * size


def in_threads(transports: list[Transport]) -> list[dict[str, str]]:
    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(run, transports))


def of_one_run(lines: FOUND, name: str) -> list[dict[str, str]]:
    return [line["found"] for line in lines if line["name"] == name]


@pytest.mark.parametrize("size", [1, 4])
def test_the_local_transport_conforms(size: int) -> None:
    assert_conforms(in_threads(LocalTransport.group(size, timeout=30.0)), size)


@pytest.mark.parametrize("size", [1, 3])
def test_tcp_conforms_between_threads(size: int) -> None:
    store = dist.HashStore()

    def make(rank: int) -> Any:
        return TCPTransport(store, rank, size, timeout=30.0)

    with ThreadPoolExecutor(size) as pool:
        transports = list(pool.map(make, range(size)))
    assert_conforms(in_threads(transports), size)


@pytest.fixture(scope="module")
def mpi_lines() -> FOUND:
    """What the ranks of a single job say, as starting one costs more than the suite."""
    return reports(under_mpiexec(MPI_RANKS, PROGRAM))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, MPI_RANKS - 1, MPI_RANKS])
def test_mpi_conforms(size: int, mpi_lines: FOUND) -> None:
    assert_conforms(of_one_run(mpi_lines, f"mpi-{size}"), size)
