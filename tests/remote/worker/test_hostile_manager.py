"""Whatever a manager answers, a worker raises nothing but this project's errors, and goes on."""

import math

import pytest
import torch
from remote.manager.test_attacks import SPOILT
from remote.remote_runs import (
    LIMIT,
    WELCOME,
    Driven,
    group,
    objects,
    threads,
    trajectories,
    values_of,
)
from tensordict import TensorDict

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.errors import RemoteError
from gfn_rb.remote import (
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, Kind


class Scene(Driven):
    """A worker of rank 0 whose answers are there before it asks."""

    def __init__(self, n_managers=1, local=None, **options):
        self.fed = reward_prioritized_buffer(9)
        super().__init__(n_managers, local, subscription=Subscription(self.fed, 2), **options)
        self.greet()


STORED = {"stored": 2}
NONSENSE = {
    "outcomes": [
        *(None, [1], {"stored": "2"}, {"stored": 2.0}, {"stored": True, "rejected": 1}),
        *({"stored": 3, "rejected": -1}, {"stored": 10**400}, {"stored": 3}, {"stored": 1}),
        {"eaten": 2},
    ],
    "scores": [None, [1], {"a": "1"}, {"a": 10**400}, {"a": {"b": 1}}],
    "baseline": ["1", math.nan, math.inf, 10**400, [[0.0]]],
}


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, each in NONSENSE.items() for v in each])
def test_an_answer_that_makes_no_sense_is_the_managers_error(name, value):
    local = fifo_buffer(9)
    scene = Scene(local=local)
    scene.answer(1, **{"outcomes": STORED, name: value})
    with pytest.raises(RemoteError, match="rank 1: its answer makes no sense: "):
        scene.worker.extend(objects([1, 2]))
    assert values_of(local) == [1, 2]
    assert scene.worker.statistics.lost == 2
    scene.answer(2, outcomes=STORED)
    assert scene.worker.extend(objects([3, 4])).outcomes == {"stored": 2}
    assert scene.worker.baseline is None
    assert scene.worker.managers == [1]


def scores(n, **columns):
    return TensorDict(columns or {"each": torch.zeros(n)}, [n])


@pytest.mark.parametrize(
    "per_row", [scores(3), scores(0), scores(2, each=scores(2)), scores(2, each=torch.zeros(2, 0))]
)
def test_scores_of_other_rows_are_the_managers_error(per_row):
    scene = Scene(on_error="log")
    scene.answer(1, per_row=per_row, outcomes=STORED)
    reply = scene.worker.extend(objects([1, 2]))
    assert reply is None or reply.scores["each"].shape == (2, 0)
    assert scene.worker.unanswered == 0


def test_scores_that_do_not_fit_together_are_the_managers_error():
    scene = Scene(2)
    rows = objects(range(20))
    scene.worker.mode = "nonblocking"
    scene.worker.extend(rows)
    for by, shape in enumerate([(3,), (4, 4)], start=1):
        sent = next(m for m in iter(scene.links[by].receive, None) if m.kind == Kind.ITEMS)
        n = len(sent.rows)
        found = scores(n, each=torch.zeros(n, *shape))
        scene.answer(sent.meta["id"], per_row=found, by=by, outcomes={"stored": n})
    with pytest.raises(RemoteError, match="its scores do not fit those of the other managers"):
        scene.worker.drain(LIMIT)
    assert scene.worker.unanswered == 0


FEEDS = {
    **SPOILT,
    "no state": objects([3]).exclude("state"),
    "another layout": objects([3]).set("state", torch.zeros(1, 3)),
    "another kind": trajectories([3]),
    "nothing": TensorDict({}, [2]),
}


def test_a_feed_that_cannot_be_stored_costs_nothing_else():
    scene = Scene(on_error="raise")
    scene.fed.extend(objects([7]))
    for number, (what, rows) in enumerate(FEEDS.items(), start=1):
        scene.answer(number, rows, outcomes=STORED)
        with pytest.raises(RemoteError, match="rank 1: its answer makes no sense: "):
            scene.worker.extend(objects([1, 2]))
        assert scene.worker.statistics.stored == 2 * number, what  # its rows were answered for
        assert values_of(scene.fed) == [7], what
    scene.answer(number + 1, objects([8]), outcomes=STORED)
    scene.worker.extend(objects([3, 4]))
    assert values_of(scene.fed) == [7, 8]


@pytest.mark.parametrize(
    ("kind", "welcome", "message"),
    [
        *((each, {}, f"HELLO with a frame of kind {int(each)}") for each in (Kind.GOODBYE, 99, 0)),
        *((Kind.HELLO, each, "expected protocol") for each in ({}, {"protocol": [1]})),
        *((Kind.HELLO, {**WELCOME, "baseline": each}, "no sense") for each in ("x", math.nan)),
    ],
)
def test_a_welcome_that_makes_no_sense_is_the_managers_error(kind, welcome, message):
    mine, theirs = group(2)
    FrameChannel(theirs).send(0, DATA_TAG, kind, welcome)
    with pytest.raises(RemoteError, match=message):
        ReplayBufferWorker(mine, 1, timeout=LIMIT).connect()


def test_a_manager_that_is_lost_does_not_come_back_with_nonsense(caplog):
    scene = Scene(2, mode="nonblocking")
    scene.worker._lose(1, "of a test")
    scene.answer(None, kind=Kind.HELLO, **{**WELCOME, "baseline": "x"})
    scene.worker.extend(objects([1]))
    assert scene.worker.managers == [2]
    assert "manager 1 stays lost: its answer makes no sense" in caplog.text


def test_a_manager_does_not_answer_for_another():
    scene = Scene(2, mode="nonblocking")
    scene.worker.extend(objects(range(20)))
    assert len({link.receive().kind for link in scene.links.values()}) == 1  # their greetings
    of_another = scene.links[2].receive().meta["id"]
    scene.answer(of_another, kind=Kind.ERROR, error=3)
    scene.answer(of_another, outcomes=STORED)
    scene.worker.collect()
    assert scene.worker.statistics.lost == 0
    assert scene.worker.unanswered == 1


# One worker after another on a transport.


def test_a_worker_after_another_was_closed_is_answered():
    mine, theirs, third = group(3)
    rb = fifo_buffer(99)
    manager = ReplayBufferManager(mine, rb)
    with threads(manager.run):
        for value in range(4):
            with ReplayBufferWorker(theirs, 0, timeout=LIMIT) as worker:
                assert worker.extend(objects([value])).outcomes["stored"] == 1
                assert worker.statistics.lost == 0
        with ReplayBufferWorker(third, 0, timeout=LIMIT):
            pass
    assert values_of(rb) == [0, 1, 2, 3]
