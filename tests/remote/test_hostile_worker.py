"""A flood of hostile messages beside a worker that trains: it learns the same.

``GFN_RB_HOSTILE=100000 pytest --all tests/remote/test_hostile_worker.py`` sends so many.
"""

import math
import os
import random
import time

import pytest
import torch
from factories import linear_policy, seeded
from remote.remote_runs import group, objects, threads, trajectories

from gfn_rb import Sampler, reward_prioritized_buffer
from gfn_rb.envs import HyperGrid
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription
from gfn_rb.remote.protocol.channel import FrameChannel
from gfn_rb.remote.protocol.messages import DATA_TAG, METADATA_TAG, PROTOCOL, Kind

MESSAGES = int(os.environ.get("GFN_RB_HOSTILE", "2000"))
STEPS = 40
ENV = HyperGrid(2, 8)


def found(policy, generator):
    rows = Sampler(policy).sample_trajectories(ENV, 16, generator=generator)
    return rows.drop("log_prob").to_tensordict()


def high(rows, value=1.7e308):
    return rows.set("log_reward", torch.full([len(rows)], value, dtype=torch.float64))


def hostile_messages(pick, honest):
    """Yield kind, metadata, rows and tag of messages, valid in type and hostile in content."""
    terms = {"quota": 9, "policy": "softmax", "own": True, "fresh": True}
    asks = [Kind.METADATA, Kind.HELD, Kind.CHECKPOINT]
    while True:
        spoilt = honest.clone().set("log_reward", torch.full([len(honest)], math.nan))
        alone = {"id": 2, "store": False}
        yield from pick.sample(
            [
                (Kind.ITEMS, {"id": 1}, spoilt, DATA_TAG),
                (Kind.ITEMS, {"id": 1}, high(honest.clone(), math.inf), DATA_TAG),
                (Kind.ITEMS, alone, high(objects(range(10))), DATA_TAG),
                (Kind.ITEMS, {"id": 2, "store": True}, objects(range(10)), DATA_TAG),
                (Kind.ITEMS, {"id": 10**30}, honest, DATA_TAG),
                (Kind.ITEMS, {"id": 3, "quota": -1}, honest, DATA_TAG),
                (Kind.ITEMS, {"id": 4}, trajectories([1, 2], length=9), DATA_TAG),
                (Kind.ITEMS, {"id": 5}, None, DATA_TAG),
                (Kind.HELLO, {"protocol": PROTOCOL, "subscription": terms}, None, DATA_TAG),
                (Kind.HELLO, {"protocol": PROTOCOL, "subscription": [terms]}, None, DATA_TAG),
                (Kind.HELLO, {"protocol": 99}, None, DATA_TAG),
                (Kind.ITEMS, {"id": 6, "quota": 4096}, honest, DATA_TAG),
                (Kind.GOODBYE, {}, None, DATA_TAG),
                (pick.choice([0, 99, *Kind]), {"to": 1, "x": "y" * 999}, None, pick.choice(TAGS)),
                *[(kind, {}, None, METADATA_TAG) for kind in asks],
            ],
            17,
        )


TAGS = (DATA_TAG, METADATA_TAG, 77)


class Run:
    """A worker of rank 2 that trains beside a hostile rank 1."""

    def __init__(self, path, n_hostile):
        mine, hostile, theirs = group(3, timeout=60.0)
        rb, fed = (reward_prioritized_buffer(64, max_length=ENV.max_length) for _ in range(2))
        policy, generator = linear_policy(ENV, False), seeded()
        declared = found(policy, seeded())
        score = lambda rows, _: {"each": rows["log_reward"]}  # noqa: E731
        manager = ReplayBufferManager(mine, rb, score, checkpoint=path, rows=declared)
        worker = ReplayBufferWorker(theirs, 0, subscription=Subscription(fed, 8, own=True))
        flood, pick = FrameChannel(hostile), random.Random(0)
        messages, self.results = hostile_messages(pick, declared), []
        with threads(manager.run), worker:
            for step in range(STEPS):
                # From the second step: the rows of the first that are sent again are duplicates.
                for _ in range(n_hostile // STEPS if step else 0):
                    if pick.random() < 0.05:
                        hostile.isend([pick.randbytes(200)], 0, pick.choice(TAGS))
                        continue
                    kind, meta, rows, tag = next(messages)
                    flood.send(0, tag, kind, meta, rows)
                rows = found(policy, generator)
                reply = worker.extend(rows)
                self.results.append((reply.scores["each"].tolist(), reply.outcomes, reply.baseline))
                given = worker.take_fed()
                self.train(policy, rows if given is None else given)
                while n_hostile and step % 2 and flood.receive(0) is not None:
                    pass
            while len(mine._mailbox):
                time.sleep(0.01)
            hostile.close()
        self.weight, self.kept = policy.weight.detach(), rb[:]["log_reward"].sort().values
        self.results.append(manager.baseline)

    @staticmethod
    def train(policy, rows):
        """Raise the probability of the first actions, in proportion to the reward."""
        logits = ENV.encode(rows["state"][:, 0]) @ policy.weight
        log_prob = logits.log_softmax(1).gather(1, rows["action"][:, :1].reshape(-1, 1).long())
        (-(log_prob[:, 0] * rows["log_reward"].exp()).mean()).backward()
        with torch.no_grad():
            policy.weight -= 0.1 * policy.weight.grad
            policy.weight.grad = None


@pytest.mark.slow
def test_hostile_messages_change_nothing_for_a_worker_that_trains(tmp_path, caplog):
    plain, flooded = Run(tmp_path / "plain", 0), Run(tmp_path / "flooded", MESSAGES)
    assert flooded.results == plain.results
    assert torch.equal(flooded.weight, plain.weight)
    assert torch.equal(flooded.kept, plain.kept)
    assert len(caplog.messages) < 200
