import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from training.training_runs import GRID, grid

from gfn_rb.containers import Trajectories
from gfn_rb.keys import INDEX
from gfn_rb.training import HyperGridConfig, TeacherDraw, TeacherReward, Trainer
from gfn_rb.training.priority_rules import mean_per_item

GRID_OF_TEACHER = grid(draw="teacher")


@dataclass(frozen=True, kw_only=True)
class OwnRule(HyperGridConfig):
    env: ClassVar[str] = "hypergrid"

    def make_priority_rule(self):
        return lambda residual: (residual - 2).square()


def published_reward(log_reward, log_pb, log_z, log_pf, c=19.0):
    """As grid/models/teacher.py of the published code works it out, with d of opposite sign."""
    d = log_reward + log_pb - log_z - log_pf
    return math.log(1 + 1e-3 + d**2 * (1 + int(d > 0) * c))


@pytest.mark.parametrize("log_reward", [-4.0, 0.0, 2.5, 7.0])
def test_the_teachers_reward_is_the_published_one(log_reward):
    log_pb, log_z, log_pf = -1.5, 3.0, -2.5
    residual = torch.tensor([log_z + log_pf - log_reward - log_pb])
    expected = published_reward(log_reward, log_pb, log_z, log_pf)
    assert TeacherReward()(residual).item() == pytest.approx(expected, rel=1e-6)
    assert GRID_OF_TEACHER.make_priority_rule()(residual).item() == pytest.approx(
        expected, rel=1e-6
    )
    expected = published_reward(log_reward, log_pb, log_z, log_pf, c=2.0)
    rule = grid(draw=TeacherDraw(c=2.0)).make_priority_rule()
    assert rule(residual).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", ["tb", "subtb", "db"])
def test_too_little_flow_counts_more_with_every_loss(loss):
    """A state of much reward, which an untrained policy seldom ends in."""
    trainer = Trainer(grid(loss=loss))
    rows = trainer.source.sample(32)
    rows = rows[(rows.length > 2).nonzero()[:8, 0]]
    reward = rows.log_reward.clone()
    reward[0] += 50.0
    td = rows.to_tensordict().set("log_reward", reward)
    rows = Trajectories.from_tensordict(td)
    parts = rows if trainer.loss.reads is Trajectories else rows.to_transitions()
    residual = trainer.loss.residual(parts)
    first = residual[0] if loss != "db" else residual[rows.length[0] - 1]
    assert first < -10


def test_the_mean_of_an_item_is_over_its_steps():
    items = Trainer(GRID).source.sample(5)
    step = torch.arange(float(items.length.sum()))
    expected = [part.mean() for part in step.split(items.length.tolist())]
    torch.testing.assert_close(mean_per_item(items, step), torch.stack(expected))
    value = torch.rand(5)
    assert mean_per_item(items, value) is value


@pytest.mark.parametrize("rule", ["priority", "teacher", "own"])
def test_an_item_learnt_from_has_the_priority_of_its_rule(rule):
    options = {"replay_ratio": 0.5, "capacity": 500, "loss": "db"}
    config = grid(lr=1e-12, draw="priority" if rule == "own" else rule, **options)
    trainer = Trainer(OwnRule(**vars(config)) if rule == "own" else config)
    drawn, sample = [], trainer.rb.sample
    trainer.rb.sample = lambda n: drawn.append(sample(n)) or drawn[-1]
    trainer.step()
    items = Trajectories.from_tensordict(drawn[0])
    each = trainer.loss.residual(items.to_transitions()).detach().split(items.length.tolist())
    by_hand = {
        "priority": lambda r: abs(r),
        "teacher": lambda r: math.log(1.001 + r * r * (20 if r < 0 else 1)),
        "own": lambda r: (r - 2) ** 2,
    }[rule]
    expected = [sum(map(by_hand, part.tolist())) / len(part) for part in each]
    held = trainer.rb.sampler._column.values(trainer.rb.storage)[drawn[0][INDEX]]
    assert held.tolist() == pytest.approx(expected, rel=1e-3)
