"""What an operator sees: metrics of managers and workers, and ranks that are missing."""

import logging
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from remote.remote_runs import LIMIT, group, managed, objects, threads

from gfn_rb import fifo_buffer
from gfn_rb.errors import ArgumentError
from gfn_rb.remote import MetricsServer, ReplayBufferManager, ReplayBufferWorker
from gfn_rb.remote.messages import DATA_TAG, Kind
from gfn_rb.remote.metrics import as_numbers


def scraped(port):
    """The samples that a server returns, as numbers by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        text = answer.read().decode()
    return {
        (each.name, frozenset(each.labels.items())): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_prometheus_reads_rows_by_sender_and_outcome():
    manager, one, other = managed(fifo_buffer(5))
    with MetricsServer(manager.metrics, rank=0) as server:
        one.send(objects([1, 2, 2]))
        for i in range(3):
            other.link.send(0, DATA_TAG, Kind.ITEMS, {"id": i}, objects([i + 1]))
        manager.step()
        found = scraped(server.port)
        rows = {
            tuple(sorted(dict(labels).items())): value
            for (name, labels), value in found.items()
            if name == "gfn_rb_rows_total" and value
        }
        assert rows == {
            (("outcome", "duplicates"), ("rank", "0"), ("sender", "1")): 1,
            (("outcome", "duplicates"), ("rank", "0"), ("sender", "2")): 2,
            (("outcome", "stored"), ("rank", "0"), ("sender", "1")): 2,
            (("outcome", "stored"), ("rank", "0"), ("sender", "2")): 1,
        }
        mine = frozenset({("rank", "0")})
        assert found["gfn_rb_waiting_messages", mine] == 3
        assert found["gfn_rb_stored_rows", mine] == 3
        assert found["gfn_rb_batches_total", mine] == 4
        assert 0 < found["gfn_rb_service_seconds", mine] < LIMIT
        assert 0 <= found["gfn_rb_silence_seconds", mine | {("sender", "2")}] < LIMIT
        manager._lose(2, "gone")
        assert scraped(server.port)["gfn_rb_present", mine | {("sender", "2")}] == 0
    with pytest.raises(OSError, match="refused"):
        scraped(server.port)


def test_a_worker_can_be_scraped_while_it_works():
    transports = group(2)
    manager = ReplayBufferManager(transports[0], fifo_buffer(100))
    worker = ReplayBufferWorker(transports[1], 0, mode="deferred")
    with (
        MetricsServer(worker.metrics, rank=1) as server,
        threads(manager.run),
        worker,
    ):
        worker.extend(objects([1, 2]))
        found = scraped(server.port)
        mine = frozenset({("rank", "1")})
        assert found["gfn_rb_worker_sent_total", mine] == 2
        assert found["gfn_rb_worker_unanswered", mine] == 1
        worker.drain(LIMIT)
        found = scraped(server.port)
        assert found["gfn_rb_worker_stored_total", mine] == 2
        assert found["gfn_rb_worker_unanswered", mine] == 0


def test_numbers_have_names_that_tell_them_apart():
    manager, one, _ = managed(fifo_buffer(5))
    one.send(objects([1, 2]))
    found = as_numbers(manager.metrics())
    assert len(found) == len(manager.metrics())
    assert found["rows{outcome=stored,sender=1}"] == 2
    assert found["capacity_rows"] == 5


def test_a_port_that_is_taken_is_named():
    with (
        MetricsServer(list, rank=0) as server,
        pytest.raises(ArgumentError, match=rf"port {server.port} of '127.0.0.1' cannot be list"),
    ):
        MetricsServer(list, rank=1, port=server.port)


def test_workers_that_do_not_connect_are_named(monkeypatch, caplog):
    monkeypatch.setattr("gfn_rb.remote.manager._NAMED_AFTER", 0.05)
    manager, one, _, _ = managed(fifo_buffer(5), n=4, worker_timeout=1.0)
    one.link.send(0, DATA_TAG, Kind.ITEMS, {"id": 1}, objects([1]))
    with caplog.at_level(logging.WARNING):
        manager.run(LIMIT)
    lines = [line for line in caplog.messages if "not connected" in line]
    assert lines[0] == (
        "manager 0: ranks 2, 3 of workers= have not connected within 0.05 s: a worker has to name "
        "rank 0 as its manager"
    )
    assert "worker 2 is lost: it has never connected; going on with" in caplog.text
    assert "worker 1 is lost: it has been silent for too long" in caplog.text


def test_a_rank_that_is_no_worker_is_told_so(caplog):
    transports = group(3)
    manager = ReplayBufferManager(transports[0], fifo_buffer(5), workers=[1])
    worker = ReplayBufferWorker(transports[2], 0, timeout=LIMIT)
    message = r"rank 2 is no worker of this manager: workers= has \[1\]"
    with threads(lambda: manager.step(LIMIT)), pytest.raises(Exception, match=message):
        worker.connect()
