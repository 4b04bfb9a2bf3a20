import threading
import time
from functools import partial

import pytest
from remote.remote_runs import LIMIT, group, objects, threads

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import PeerLostError, RemoteError, TransportTimeoutError
from gfn_rb.remote import ManagerQueries, ReplayBufferManager, ReplayBufferWorker


def test_a_worker_can_ask_between_its_batches(tmp_path):
    transports = group(2)
    path = tmp_path / "manager.ckpt"
    buffer = fifo_buffer(9, statistics=True)
    manager = ReplayBufferManager(transports[0], buffer, checkpoint=path)
    worker = ReplayBufferWorker(transports[1], 0, mode="nonblocking", timeout=LIMIT)
    queries = ManagerQueries(transports[1])
    with threads(manager.run), worker:
        replies = [worker.extend(objects([1, 2])), worker.extend(objects([3]))]
        known = queries.metadata(0, LIMIT)
        assert (known["stored"], known["senders"]["1"]["items"]) == (3, 3)
        assert known["replay"] == buffer.stats()
        assert known["replay"]["offered"] == 3
        assert queries.checkpoint(0, LIMIT) == str(path)
        assert path.exists()
        replies += worker.drain(LIMIT)
        assert len([reply for reply in replies if reply is not None]) == 2


def test_what_a_manager_cannot_do_is_raised():
    transports = group(2)
    manager, message = ReplayBufferManager(transports[0]), "CheckpointError: the manager has no"
    with threads(lambda: manager.step(LIMIT)), pytest.raises(RemoteError, match=message):
        ManagerQueries(transports[1]).checkpoint(0, LIMIT)


@pytest.mark.parametrize(("late", "n_steps"), [("metadata", 1), ("metadata", 2), ("items", 2)])
def test_answers_that_come_late_are_not_taken_for_later_ones(late, n_steps):
    transports = group(2)
    manager = ReplayBufferManager(transports[0], metadata=lambda manager: {"n": manager.batches})
    queries = ManagerQueries(transports[1])
    with pytest.raises(TransportTimeoutError, match="expected a running ReplayBufferManager"):
        getattr(queries, late)(0, 0.01)
    if n_steps == 1:
        manager.step()
    manager.batches = 7

    def answer():
        time.sleep(0.05)  # while it is asked again
        for _ in range(n_steps):
            manager.step(LIMIT)

    with threads(answer):
        assert queries.metadata(0, LIMIT)["n"] == 7


def test_a_lost_manager_is_named():
    transports = group(2)
    queries = ManagerQueries(transports[1])
    transports[0].close()
    with pytest.raises(PeerLostError):
        queries.metadata(0, LIMIT)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("filled", ["before", "after"])
def test_an_object_that_two_managers_hold_is_one(together, filled):
    transports, managers = group(3), []
    buffers = [reward_prioritized_buffer(4) for _ in range(2)]
    for transport, rb in zip(transports[:2], buffers, strict=True):
        if filled == "before":
            rb.extend(objects([1, 2, 3, 4]))
        roles = {"managers": [0, 1] if together else None, "workers": [2]}
        managers.append(ReplayBufferManager(transport, rb, **roles))
        if filled == "after":
            rb.extend(objects([1, 2, 3, 4]))
    for _ in range(4):  # so that each knows what the other has
        for manager in managers:
            manager.step()
    queries, asked = ManagerQueries(transports[2]), threading.Event()

    def serve(manager):
        while not asked.is_set():
            manager.step(0.02)

    with threads(*(partial(serve, manager) for manager in managers)):
        try:
            assert queries.items([0, 1], LIMIT)["log_reward"].tolist() == [4, 3, 2, 1]
        finally:
            asked.set()
