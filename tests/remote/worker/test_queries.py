import pytest
from remote.remote_runs import LIMIT, group, objects, threads

from gfn_rb import fifo_buffer
from gfn_rb.errors import ArgumentError, PeerLostError, RemoteError, TransportTimeoutError
from gfn_rb.remote import ManagerQueries, NonBlocking, ReplayBufferManager, ReplayBufferWorker


def test_a_worker_can_ask_between_its_batches(tmp_path):
    transports = group(2)
    path = tmp_path / "manager.ckpt"
    manager = ReplayBufferManager(transports[0], fifo_buffer(9), checkpoint=path)
    worker = ReplayBufferWorker(transports[1], 0, mode=NonBlocking(), timeout=LIMIT)
    queries = ManagerQueries(transports[1])
    with threads(manager.run), worker:
        replies = [worker.extend(objects([1, 2])), worker.extend(objects([3]))]
        known = queries.metadata(0, LIMIT)
        assert (known["stored"], known["senders"]["1"]["items"]) == (3, 3)
        assert queries.checkpoint(0, LIMIT) == str(path)
        assert path.exists()
        replies += worker.drain(LIMIT)
        assert len([reply for reply in replies if reply is not None]) == 2


def test_what_a_manager_cannot_do_is_raised():
    transports = group(2)
    manager, message = ReplayBufferManager(transports[0]), "CheckpointError: the manager has no"
    with threads(lambda: manager.step(LIMIT)), pytest.raises(RemoteError, match=message):
        ManagerQueries(transports[1]).checkpoint(0, LIMIT)


def test_answers_that_came_late_are_not_taken_for_later_ones():
    transports = group(2)
    manager = ReplayBufferManager(transports[0], metadata=lambda manager: {"n": manager.batches})
    queries = ManagerQueries(transports[1])
    with pytest.raises(TransportTimeoutError, match="expected a running ReplayBufferManager"):
        queries.metadata(0, 0.01)
    manager.step()
    manager._handler.batches = 7
    with threads(lambda: manager.step(LIMIT)):
        assert queries.metadata(0, LIMIT)["n"] == 7


def test_bad_ranks_are_named():
    transports = group(2)
    queries = ManagerQueries(transports[1])
    with pytest.raises(ArgumentError, match=r"manager must be different ranks in 0 to 1.*\[2\]"):
        queries.metadata(2)
    transports[0].close()
    with pytest.raises(PeerLostError):
        queries.metadata(0, LIMIT)
