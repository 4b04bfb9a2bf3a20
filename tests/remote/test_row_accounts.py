"""Accounts of every row: none is lost, stored twice or fed twice, and merged draws are exact.

Ranks are threads, or processes under mpiexec, torchrun or none. ``GFN_RB_SCENARIOS=20 pytest
--all tests/remote/test_row_accounts.py`` plays so many scenarios with each of them, 160 in all.
"""

import os
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from remote import accounts_rank
from remote.accounts_rank import play, scenario
from transports.ranks import environment, reports, under_mpiexec

from gfn_rb.transports import LocalTransport

pytestmark = pytest.mark.slow
N = int(os.environ.get("GFN_RB_SCENARIOS", "2"))  # of each launcher
PROGRAM = Path(accounts_rank.__file__)


def in_threads(numbers, size, folder):
    for number in numbers:
        with ThreadPoolExecutor(size) as pool:
            ranks = LocalTransport.group(size, timeout=120.0)
            yield from pool.map(lambda each, number=number: play(each, number), ranks)


def under_mpi(numbers, size, folder):
    return reports(under_mpiexec(size, PROGRAM, "mpi", *map(str, numbers)))


def as_processes(numbers, size, folder):
    common = [sys.executable, str(PROGRAM), f"file://{folder / 'store'}"]
    started = []
    for rank in range(size):
        command = [*common, str(rank), str(size), *map(str, numbers)]
        with open(folder / f"said{rank}", "w") as said:  # a pipe that nobody reads has an end
            started.append(subprocess.Popen(command, env=environment(), stdout=said))
    try:
        assert [each.wait(600.0) for each in started] == [0] * size
        return reports("".join(path.read_text() for path in folder.glob("said*")))
    finally:
        for each in started:
            each.kill()
            each.wait()


def under_torchrun(numbers, size, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--master-port", str(free_port()), str(PROGRAM), "env://", *map(str, numbers)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return reports(done.stdout)


def free_port():
    with socket.socket() as place:
        place.bind(("localhost", 0))
        return place.getsockname()[1]


LAUNCHERS = [
    (in_threads, 2), (in_threads, 4), (under_mpi, 2), (under_mpi, 4), (under_mpi, 8),
    (as_processes, 3), (as_processes, 5), (under_torchrun, 4),
]  # fmt: skip


@pytest.mark.parametrize("turn", range(len(LAUNCHERS)))
def test_every_row_is_accounted_for(turn, tmp_path):
    launcher, size = LAUNCHERS[turn]
    numbers = range(turn * N, (turn + 1) * N)
    found = [*launcher(numbers, size, tmp_path)]
    assert len(found) == size * N
    for number in numbers:
        ranks = sorted((e for e in found if e["number"] == number), key=lambda e: e["rank"])
        check(scenario(number, size), ranks)


def check(what, ranks):
    managers, workers = ranks[: what.n_managers], ranks[what.n_managers :]
    held = Counter(value for each in managers for value in each["held"])
    passed = Counter(value for each in workers for value in each["passed"])
    assert held == (Counter({*passed}) if what.are_objects else passed), what
    for each in workers:
        counts = each["counts"]
        assert counts["offered"] == len(each["own"]) == counts["sent"] + counts["filtered"], what
        assert counts["sent"] == len(each["passed"]) == counts["stored"] + counts["duplicates"]
        assert counts["lost"] == counts["skipped"] == counts["resent"] == 0
        fed = Counter(each["fed"])
        assert {*fed.values()} <= {1}, what
        assert fed.keys() <= held.keys(), what
        assert each["p"] is None or each["p"] > 1e-5, what
    assert sum(each["counts"]["stored"] for each in workers) == held.total()
    if what.feed and what.are_objects and len(workers) > 1 and what.mode == "awaited":
        assert any(each["fed"] for each in workers), what
