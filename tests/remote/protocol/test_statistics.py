import pytest

from gfn_rb.remote.protocol.messages import OUTCOMES, Outcomes, SenderStatistics
from gfn_rb.remote.worker.accounts import WorkerStatistics


def test_outcomes_add_up():
    counts = Outcomes()
    counts.count(stored=2, duplicates=1)
    counts.count(stored=1, refused=4)
    assert counts.outcomes == 8
    assert [getattr(counts, name) for name in OUTCOMES] == [3, 0, 1, 0, 4]


@pytest.mark.parametrize("kind", [SenderStatistics, WorkerStatistics])
def test_counters_survive_plain_values(kind):
    counts = kind()
    counts.count(stored=2, batches=3, fed=1)
    other = kind()
    other.restore(counts.to_json())
    assert other == counts != kind()


def test_bandwidth_is_of_the_time_spent_sending_and_waiting():
    assert WorkerStatistics().bandwidth == 0.0
    counts = WorkerStatistics(bytes_sent=600, seconds_sending=1.0, seconds_blocked=2.0)
    assert counts.bandwidth == 200.0
