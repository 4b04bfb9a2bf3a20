"""What a thousand ranks take: memory of a manager, and the start of many processes."""

import pytest

from benchmarks import many_ranks

pytestmark = pytest.mark.slow


def test_a_manager_takes_less_than_a_byte_per_row_and_subscriber():
    """Beyond a manager of as many rows whose workers are not fed."""
    rows, subscribers = 100_000, 1_000
    more = many_ranks.manager_bytes(rows, subscribers) - many_ranks.manager_bytes(rows, 0)
    assert 0.25 < more / (rows * subscribers) < many_ranks.MOST_BYTES  # two flags each at least


def test_sixty_four_processes_meet_over_tcp_in_five_seconds_of_cpu():
    """Without their imports: they are forked from a process that has imported all."""
    cpu, _, n_threads = many_ranks.start_ranks(64)
    assert 0 < cpu < many_ranks.MOST_SECONDS
    assert 2 <= n_threads <= many_ranks.MOST_THREADS  # the program, and one that receives
