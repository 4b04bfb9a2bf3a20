"""Frames that wait are stored by one call, and each has the reply that it would have had alone."""

import math
import random

import numpy as np
import pytest
import torch
from remote.remote_runs import managed, objects, trajectories, values_of

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.containers.objects import objects_in
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, OUTCOMES, Kind


def counted(rb, monkeypatch):
    """The sizes of the batches that a buffer is given from now on."""
    sizes, extend = [], rb.extend
    monkeypatch.setattr(rb, "extend", lambda rows: sizes.append(len(rows)) or extend(rows))
    return sizes


def post(clients, batches):
    """Send batches, one of each client in turn, numbered from 0, without a step of the manager."""
    for number, rows in enumerate(batches):
        client = clients[number % len(clients)]
        client.link.send(0, DATA_TAG, Kind.ITEMS, {"id": number}, rows)


def answers(clients):
    """All answers, by the number of the batch that they answer."""
    found = {}
    for client in clients:
        for frame in iter(lambda c=client: c.link.receive(), None):
            assert frame.meta["to"] not in found
            found[frame.meta["to"]] = frame
    return found


def settled(rb, n_clients, score=None, **options):
    """A manager that knows the layout of objects, and its clients."""
    manager, *clients = managed(rb, score, n=n_clients + 1, **options)
    post(clients[:1], [objects([-1]), objects([-2])])
    manager.step()
    assert len(answers(clients)) == 2
    return manager, clients


def test_frames_that_wait_are_stored_by_one_call_and_answered_one_by_one(monkeypatch):
    rb = fifo_buffer(100)
    score = lambda rows, sender: {"sender": float(sender), "each": rows["log_reward"] * 2}  # noqa: E731
    manager, clients = settled(rb, 5, score)
    sizes = counted(rb, monkeypatch)
    post(clients, [objects([10 * i, 10 * i + 1], [i, i + 0.5]) for i in range(10)])
    assert manager.step()
    assert not manager.step()
    assert sizes == [20]
    found = answers(clients)
    assert sorted(found) == [*range(10)]
    for number, frame in found.items():
        assert frame.kind == Kind.SCORES
        assert frame.meta["outcomes"] == {"stored": 2, "rejected": 0, "duplicates": 0}
        assert frame.meta["scores"] == {"sender": 1 + number % 5}
        assert frame.scores["each"].tolist() == [2 * number, 2 * number + 1]
    assert manager.batches == 12
    senders = manager.metadata()["senders"]
    assert [senders[str(rank)]["stored"] for rank in range(2, 6)] == [4] * 4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (objects([7], [math.nan]), "NaN"),
        (objects([7]).set("more", torch.zeros(1)), "more"),
        (objects([7]).set("log_reward", torch.zeros(1, dtype=torch.float64)), "float64"),
    ],
)
def test_an_error_costs_the_frame_alone_that_causes_it(bad, message, monkeypatch):
    rb = fifo_buffer(100)
    manager, clients = settled(rb, 3)
    sizes = counted(rb, monkeypatch)
    post(clients, [objects([1, 2]), bad, objects([3])])
    manager.step()
    found = answers(clients)
    assert found[1].meta["outcomes"] == {"refused": 1}
    assert message in found[1].meta["error"]["message"]
    for number, n in ((0, 2), (2, 1)):
        assert found[number].meta["outcomes"]["stored"] == n
        assert "error" not in found[number].meta
    assert values_of(rb) == [-2, -1, 1, 2, 3]
    assert sum(sizes) <= 4  # nothing is stored twice


def test_objects_of_several_frames_are_stored_once_and_known_to_all_their_senders():
    manager, clients = settled(fifo_buffer(100), 3)
    for client in clients:
        client.subscribe(quota=10)
    post(clients, [objects([1, 2]), objects([2, 3, 3]), objects([2, 4])])
    manager.step()
    found = answers(clients)
    counts = [[found[i].meta["outcomes"][name] for name in ("stored", "duplicates")] for i in found]
    assert counts == [[2, 0], [1, 2], [1, 1]]
    fed = [sorted(found[i].rows["state"][:, 0].tolist()) for i in range(3)]
    assert fed == [[3, 4], [-2, -1, 1, 4], [-2, -1, 1, 3]]  # two were sent by the first before


@pytest.mark.parametrize("make", [fifo_buffer, reward_prioritized_buffer])
def test_many_frames_at_once_leave_what_one_by_one_does(make, monkeypatch):
    dice = random.Random(0)
    batches = [
        objects([dice.randrange(300) for _ in range(dice.choice([1, 5, 20, 90]))])
        for _ in range(100)
    ]
    kept = {}
    for most in (1, 7, 64):
        monkeypatch.setattr("gfn_rb.remote.manager._MOST_MESSAGES", most)
        manager, *clients = managed(make(60), n=4)
        found = {}
        for start in range(0, 100, 20):
            post(clients, batches[start : start + 20])
            while manager.step():
                pass
            found |= {start + to: frame for to, frame in answers(clients).items()}
        for number, rows in enumerate(batches):
            outcomes = found[number].meta["outcomes"]
            assert sum(outcomes[name] for name in OUTCOMES if name in outcomes) == len(rows)
        index, values = manager._index, values_of(manager.buffer)
        number = index.find(objects_in(objects(values)))
        known = [index.sent.has(number, rank).tolist() for rank in (1, 2, 3)]
        assert np.any(known, axis=0).all()  # all that is held came from someone
        kept[most] = values
    assert kept[1] == kept[7] == kept[64]


def test_trajectories_of_other_lengths_are_joined_where_they_are_taken(monkeypatch):
    rb = fifo_buffer(100, max_length=6)
    manager, *clients = managed(rb, n=3)
    sizes = counted(rb, monkeypatch)
    for start in (0, 10):
        post(clients, [trajectories([start + i], length=[2, 5][i % 2]) for i in range(4)])
        manager.step()
    assert sizes == [1, 1, 2, 4]  # first each length by itself
    assert sorted(rb[:]["length"].tolist()) == [2] * 4 + [5] * 4


def test_rows_of_another_length_are_refused_beside_others_as_they_are_alone():
    manager, *clients = managed(fifo_buffer(100), n=4)
    post(clients, [trajectories([1], length=5)])
    manager.step()
    answers(clients)
    post(clients, [trajectories([2 + i], length=n) for i, n in enumerate([5, 3, 5])])
    manager.step()
    refused = {to: "error" in frame.meta for to, frame in answers(clients).items()}
    assert refused == {0: False, 1: True, 2: False}


def test_other_messages_find_what_came_before_them_stored():
    manager, clients = settled(fifo_buffer(100), 2)
    post(clients[:1], [objects([1]), objects([2])])
    clients[0].link.send(0, DATA_TAG, Kind.GOODBYE)
    clients[1].link.send(0, METADATA_TAG, Kind.METADATA)
    manager.step()
    kinds = [frame.kind for frame in iter(lambda: clients[0].link.receive(), None)]
    assert kinds == [Kind.SCORES, Kind.SCORES, Kind.GOODBYE]
    assert clients[1].link.receive(0, METADATA_TAG).meta["stored"] >= 2


def test_a_step_takes_a_bounded_number_of_messages():
    manager, clients = settled(fifo_buffer(1000), 2)
    post(clients, [objects([i]) for i in range(100)])
    manager.step()
    assert len(answers(clients)) == 64
