from gfn_rb.remote.worker.accounts import WorkerStatistics


def test_bandwidth_is_of_the_time_spent_sending_and_waiting():
    assert WorkerStatistics().bandwidth == 0.0
    counts = WorkerStatistics(bytes_sent=600, seconds_sending=1.0, seconds_blocked=2.0)
    assert counts.bandwidth == 200.0
