"""What a thousand ranks take: memory of a manager, and the start of many processes."""

import subprocess
import sys

import pytest
from transports.ranks import environment

from benchmarks import many_ranks
from benchmarks.records import ROOT

pytestmark = pytest.mark.slow


def test_a_manager_takes_less_than_a_byte_per_row_and_subscriber():
    """Beyond a manager of as many rows whose workers are not fed."""
    rows, subscribers = 100_000, 1_000
    more = many_ranks.manager_bytes(rows, subscribers) - many_ranks.manager_bytes(rows, 0)
    assert 0.25 < more / (rows * subscribers) < many_ranks.MOST_BYTES  # two flags each at least


def test_sixty_four_processes_meet_over_tcp_in_five_seconds_of_cpu():
    """Without their imports. A process without checks of annotations starts them."""
    code = "from benchmarks.many_ranks import start_ranks; print(*start_ranks(64))"
    command = [sys.executable, "-c", code]
    found = subprocess.check_output(command, text=True, env=environment(), cwd=ROOT)
    cpu, _, n_threads = map(float, found.split())
    assert 0 < cpu < many_ranks.MOST_SECONDS
    assert 2 <= n_threads <= many_ranks.MOST_THREADS  # the program, and one that receives
