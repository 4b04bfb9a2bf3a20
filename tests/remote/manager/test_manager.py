import logging
import time

import pytest
import torch
from remote.remote_runs import LIMIT, managed, objects, trajectories, values_of

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, PROTOCOL, Kind


def test_items_are_stored_and_accounted_for():
    rb = reward_prioritized_buffer(3)
    manager, one, other = managed(rb)
    assert one.send(objects([1, 2, 2])).meta["outcomes"] == {
        "stored": 2,
        "rejected": 0,
        "duplicates": 1,
    }
    assert other.send(objects([2, 0, 3, 4])).meta["outcomes"] == {
        "stored": 2,
        "rejected": 1,
        "duplicates": 1,
    }
    assert values_of(rb) == [2, 3, 4]
    senders = manager.metadata()["senders"]
    assert [senders["1"][name] for name in ("batches", "items", "stored", "duplicates")] == [
        *(1, 3, 2, 1)
    ]
    assert [senders["2"][name] for name in ("items", "stored", "rejected")] == [4, 2, 1]
    assert senders["1"]["bytes"] > 0
    assert senders["1"]["last_seen"] > 0


def test_an_object_kept_in_several_rows_is_one_to_those_it_was_sent_by_or_given_to():
    manager, one, other, third = managed(fifo_buffer(4), n=4, duplicates="keep")
    one.subscribe(quota=9)
    other.subscribe(quota=1)
    for sender, receiver, found in ((third, 2, [[7, 0]]), (third, 2, None), (one, 1, None)):
        assert sender.send(objects([7]), quota=0).meta["outcomes"]["stored"] == 1
        fed = manager._index.subscribers[receiver].next()
        assert (fed if fed is None else fed["state"].tolist()) == found


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_what_stands_for_no_object_is_refused_before_it_is_stored(duplicates):
    manager, one, _ = managed(fifo_buffer(4), duplicates=duplicates)
    assert one.send(trajectories([5, 6])).meta["outcomes"]["stored"] == 2
    bad = trajectories([7]).set("length", torch.tensor([9]))
    assert one.send(bad).meta["outcomes"] == {"refused": 1}
    assert len(manager.buffer) == 2
    assert one.send(trajectories([8])).meta["outcomes"]["stored"] == 1


def test_the_baseline_is_told():
    rb = fifo_buffer(3)
    manager, one, other = managed(rb)
    hello = one.ask(Kind.HELLO, {"protocol": PROTOCOL, "managers": [0], "subscription": None})
    assert hello.kind == Kind.HELLO
    assert hello.meta["baseline"] is None
    assert one.send(objects([4, 6])).meta["baseline"] == 4.0  # of batch minima
    assert other.send(objects([5, 7])).meta["baseline"] == 5.0  # of the full buffer: 5, 6, 7
    assert manager.baseline == 5.0
    late = other.ask(Kind.HELLO, {"protocol": PROTOCOL, "managers": [0], "subscription": None})
    assert late.meta["baseline"] == 5.0


@pytest.mark.parametrize(
    ("kind", "meta", "message"),
    [
        (Kind.SCORES, {}, "a frame of kind 3 means nothing to a manager"),
        (99, {}, "a frame of kind 99 means nothing to a manager"),
        (Kind.ITEMS, {}, "a frame of items holds none"),
        (Kind.HELLO, {"protocol": 99}, f"it speaks protocol 99, this manager speaks {PROTOCOL}"),
        (Kind.HELLO, {}, "it speaks protocol None"),
        (
            Kind.HELLO,
            {"protocol": PROTOCOL, "managers": [0], "subscription": 3},
            "subscription must be terms",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(caplog, kind, meta, message):
    manager, one, other = managed(fifo_buffer(3))
    answer = one.ask(kind, meta)
    assert answer.kind == Kind.ERROR
    assert message in answer.meta["error"]["message"]
    assert "manager 0: refused what rank 1 sent" in caplog.text
    assert other.send(objects([1])).meta["outcomes"]["stored"] == 1
    assert not manager.finished


def test_a_worker_of_another_version_is_not_listened_to_until_it_is_replaced(caplog):
    rb = fifo_buffer(3)
    manager, one = managed(rb, n=2)
    one.ask(Kind.HELLO, {"protocol": 99})
    assert manager.metadata()["senders"]["1"]["state"] == "refused"
    assert manager.finished
    assert one.send(objects([1])) is None
    assert len(rb) == 0
    one.ask(Kind.HELLO, {"protocol": PROTOCOL, "managers": [0]})
    assert one.send(objects([1])).meta["outcomes"]["stored"] == 1


def test_a_rank_that_is_no_worker_is_refused_but_may_ask(caplog):
    manager, one, other = managed(fifo_buffer(2), workers=[1])
    assert "rank 2 is no worker of this" in other.send(objects([1])).meta["error"]["message"]
    assert other.ask(Kind.METADATA, tag=METADATA_TAG).meta["stored"] == 0
    assert one.ask(Kind.GOODBYE, tag=7) is None  # nobody reads that tag
    assert "rank 1 sent: ArgumentError: tag 7 from rank 1 is not expected" in caplog.text
    other.link.transport.close()
    while manager.step():
        pass
    assert not manager.finished


def test_it_is_finished_when_all_workers_have_said_goodbye():
    manager, one, other = managed(fifo_buffer(2))
    one.send(objects([1]))
    bye = one.ask(Kind.GOODBYE)
    assert bye.kind == Kind.GOODBYE
    assert bye.meta["stored"] == 1
    assert not manager.finished
    one.ask(Kind.METADATA, tag=METADATA_TAG)  # who asks does not come back
    other.ask(Kind.GOODBYE)
    assert manager.finished
    manager.run()


def test_silent_workers_are_lost(caplog):
    manager, one, _ = managed(worker_timeout=0.05)
    one.ask(Kind.HELLO, {"protocol": PROTOCOL, "managers": [0]})
    manager.run(timeout=LIMIT)
    assert manager.finished
    assert "worker 1 is lost: it has been silent for too long; going on with" in caplog.text
    assert "worker 2 is lost" in caplog.text


def test_workers_are_not_silent_while_their_manager_is_busy(monkeypatch):
    monkeypatch.setattr("gfn_rb.remote.manager._MOST_MESSAGES", 2)
    now = 100.0

    def slow(rows, sender):
        nonlocal now
        now += 10.0
        return {}

    manager, *clients = managed(fifo_buffer(9), slow, worker_timeout=5.0)
    manager._workers._clock = lambda: now
    manager._workers.restart_silence()
    for value in range(3):
        for client in clients:
            client.link.send(0, DATA_TAG, Kind.ITEMS, {"id": value}, objects([value]))
    for _ in range(3):
        manager.step()
        assert manager._workers.present == [1, 2]


def test_silence_before_a_run_does_not_count():
    manager = managed(worker_timeout=60.0)[0]
    manager._workers._seen = dict.fromkeys([1, 2], -1e9)
    manager.run(timeout=0.01)
    assert not manager.finished


def test_a_worker_whose_endpoint_closes_is_lost_once(caplog):
    manager, one, other = managed(fifo_buffer(3))
    one.send(objects([1]))
    one.link.transport.close()
    assert manager.step()
    assert not manager.step()
    assert manager.metadata()["senders"]["1"]["state"] == "lost"
    assert caplog.text.count("worker 1 is lost") == 1
    assert "going on with 1 of 2 workers" in caplog.text
    assert other.send(objects([2])).meta["outcomes"]["stored"] == 1


def test_a_manager_waits_for_lost_workers_that_have_not_closed_their_endpoints():
    manager, *clients = managed(fifo_buffer(3))
    for client in clients:
        client.link.transport.close()
    start = time.monotonic()
    manager.run(linger=LIMIT)
    assert time.monotonic() < start + LIMIT / 2
    manager = managed(worker_timeout=0.05)[0]
    start = time.monotonic()
    manager.run(linger=0.5)
    assert time.monotonic() > start + 0.5


def test_answers_that_cannot_be_sent_are_refused(caplog):
    wide = lambda items, sender: {"wide": torch.zeros(len(items), 1000)}  # noqa: E731
    manager, one = managed(None, wide, n=2)
    manager.transport.max_nbytes = 4000
    answer = one.send(objects([1, 2]), number=3)
    assert answer.kind == Kind.ERROR
    assert answer.meta["to"] == 3
    assert "the answer cannot be sent" in answer.meta["error"]["message"]
    assert one.send(objects([])).kind == Kind.SCORES


@pytest.mark.parametrize("buffer", [True, False])
def test_a_restored_manager_goes_on(tmp_path, buffer):
    def new():
        rb = reward_prioritized_buffer(5) if buffer else None
        return managed(rb, checkpoint=tmp_path / "manager.ckpt")

    def act(one, other, steps):
        found = []
        for step in steps:
            one.post(Kind.ITEMS, {"id": step}, objects([step, 9 - step]))
            other.post(Kind.ITEMS, {"id": step}, objects([2 * step]))
            for client in (one, other):
                while (answer := client.link.receive(0)) is not None:
                    rows = None if answer.rows is None else answer.rows["state"].tolist()
                    found.append((answer.kind, answer.meta, rows))
        return found

    def greet(*clients):
        for client in clients:
            if buffer:
                client.subscribe(quota=1, fresh=False)

    manager, *clients = new()
    greet(*clients)
    act(*clients, range(4))
    manager.save()
    expected = act(*clients, range(4, 7))
    again, *clients = new()
    again.load()
    assert act(*clients, range(4, 7)) == expected
    if buffer:
        assert any(rows is not None for _, _, rows in expected)
    known, restored = (
        {k: v for k, v in each.metadata().items() if k != "seconds"} for each in (manager, again)
    )
    for each in (known, restored):
        for sender in each["senders"].values():
            del sender["last_seen"]
    assert restored == known


def test_checkpoints_are_made_every_so_often_on_request_and_at_the_end(tmp_path):
    path = tmp_path / "manager.ckpt"
    manager, one, other = managed(fifo_buffer(9), checkpoint=path, checkpoint_every=2)
    one.send(objects([1]))
    assert not path.exists()
    one.send(objects([2]))
    assert path.exists()
    path.unlink()
    assert one.ask(Kind.CHECKPOINT, tag=METADATA_TAG).meta == {"path": str(path)}
    assert path.exists()
    path.unlink()
    for client in (one, other):
        client.ask(Kind.GOODBYE)
    manager.run()
    again = managed(fifo_buffer(9))[0]
    again.load(path)
    assert again.batches == 2
    assert again.metadata()["seconds"]["store"] > 0
    assert values_of(again.buffer) == [1, 2]
    assert not again.finished


def test_a_failing_periodic_save_is_logged_and_tried_again_later(tmp_path, caplog):
    path = tmp_path / "manager.ckpt"
    path.mkdir()
    manager, one, _ = managed(fifo_buffer(9), checkpoint=path, checkpoint_every=2)
    for value in range(3):
        assert one.send(objects([value])).meta["outcomes"]["stored"] == 1
    assert caplog.text.count("manager 0: could not save, going on: ") == 1
    path.rmdir()
    one.send(objects([3]))
    assert path.is_file()
    assert manager.batches == 4


def test_run_ends_in_time_and_says_where_the_time_went(caplog):
    caplog.set_level(logging.INFO)
    manager = managed()[0]
    manager.run(timeout=0.05)
    assert not manager.finished
    assert "manager 0: 0 batches; idle" in caplog.text
