import pytest
import torch
from remote.remote_runs import WELCOME, Driven, objects, owners_of
from tensordict import TensorDict

from gfn_rb.errors import TransportTimeoutError
from gfn_rb.remote.messages import DATA_TAG, Kind
from gfn_rb.transports.base import Deadline


class Scene(Driven):
    """A worker that sends to its managers without a greeting, and notes what it is fed."""

    def __init__(self, n_managers=1, **options):
        super().__init__(n_managers, **options)
        self.client, self.count, self.fed = self.worker, self.worker.statistics, []
        self.client._feed = self.fed.append

    def send(self, values):
        return self.client._send(objects(values), self.client.managers)


def of(owner, n=1, managers=(1, 2)):
    """The first values whose objects a manager owns, of these."""
    found = owners_of(objects(range(99)), managers)
    return [value for value in range(99) if found[value] == owner][:n]


def numbers(link):
    return link.receive().rows["state"][:, 0].tolist()


def test_answers_of_several_managers_are_one_reply():
    scene = Scene(2)
    (a, b), (c,) = of(1, 2), of(2)
    scene.send([a, c, b])
    each = [TensorDict({"each": torch.tensor(v)}, [len(v)]) for v in ([1.0, 3.0], [2.0])]
    scene.answer(
        2, outcomes={"rejected": 1}, baseline=5.0, by=2, per_row=each[1], scores={"mean": 4.0}
    )
    scene.client.collect()
    assert scene.client._replies == []
    outcomes = {"stored": 1, "rejected": 1}
    scene.answer(1, per_row=each[0], outcomes=outcomes, baseline=6.0, scores={"mean": 1.0})
    scene.client.collect()
    (reply,) = scene.client._replies
    assert (reply.managers, reply.n) == ((1, 2), 3)
    assert reply.outcomes == {"stored": 1, "rejected": 2}
    assert reply.scores["each"].tolist() == [1.0, 2.0, 3.0]
    assert reply.scores["mean"] == 2.0
    assert reply.baseline == 5.0
    assert (scene.count.replies, scene.count.rejected, scene.client.unanswered) == (2, 2, 0)


def test_rows_whose_manager_gave_no_scores_have_none():
    scene = Scene(2)
    (a,), (c,) = of(1), of(2)
    scene.send([a, c])
    scene.answer(1, outcomes={"stored": 1}, per_row=TensorDict({"each": torch.tensor([7])}, [1]))
    error = {"type": "ValueError", "message": "of a test"}
    scene.answer(2, outcomes={"stored": 1}, by=2, error=error)
    scene.client.collect()
    (reply,), (error,) = scene.client._replies, scene.client._errors
    assert reply.scores["each"].nan_to_num(-1.0).tolist() == [7.0, -1.0]
    assert reply.error is error
    assert scene.count.errors == 1


def test_items_are_taken_of_an_answer_to_what_was_given_up():
    scene = Scene()
    scene.send([1])
    scene.client._settle(Deadline(0.0))
    scene.answer(1, outcomes={"stored": 1}, rows=objects([7]))
    scene.client.collect()
    assert (scene.count.lost, scene.count.stored) == (1, 0)
    assert scene.fed[0]["state"].tolist() == [[7, 0]]


def test_rows_of_a_lost_manager_are_lost_and_then_skipped():
    scene = Scene(2)
    (a,), (c,) = of(1), of(2)
    scene.send([a, c])
    assert numbers(scene.links[2]) == [c]
    scene.client._lose(1, "of a test")
    assert (scene.count.sent, scene.count.lost, scene.client.unanswered) == (2, 1, 1)
    scores = TensorDict({"each": torch.tensor([2.0])}, [1])
    scene.answer(2, per_row=scores, by=2, outcomes={"stored": 1})
    scene.client.collect()
    (reply,) = scene.client._replies
    assert reply.scores["each"].nan_to_num(-1.0).tolist() == [-1.0, 2.0]
    assert (reply.managers, scene.count.stored, scene.client.unanswered) == ((2,), 1, 0)
    assert scene.send([a, c]) == 1
    assert numbers(scene.links[2]) == [c]


def test_the_baseline_is_the_lowest_of_the_managers_that_are_not_lost():
    scene, baselines = Scene(2), []
    (a,), (b,) = of(1), of(2)
    for first, second in ((3.0, None), (3.0, 2.0), (1.0, 2.0)):
        scene.send([a, b])
        number = max(scene.client.sent)
        scene.answer(number - 1, outcomes={"stored": 1}, baseline=first)
        scene.answer(number, outcomes={"stored": 1}, baseline=second, by=2)
        scene.client.collect()
        baselines.append(scene.client.baseline)
    scene.client._lose(1, "of a test")
    assert [*baselines, scene.client.baseline] == [None, 2.0, 1.0, 2.0]


def test_managers_feed_equal_parts_of_a_quota():
    scene = Scene(2)
    for link in scene.links.values():
        link.send(0, DATA_TAG, Kind.HELLO, WELCOME)
    scene.client._greet({"quota": 5, "policy": "top"})
    assert all(link.receive().kind == Kind.HELLO for link in scene.links.values())
    values, quotas = of(1) + of(2), []
    for _ in range(2):
        scene.send(values)
        quotas.append([link.receive().meta["quota"] for link in scene.links.values()])
    assert sorted(quotas) == [[2, 3], [3, 2]]


def test_an_answer_that_comes_too_late_answers_no_other_question():
    scene = Scene(timeout=0.05)
    for _ in range(2):
        with pytest.raises(TransportTimeoutError):
            scene.client.connect()
        scene.links[1].send(0, DATA_TAG, Kind.HELLO)
        scene.client.collect()
