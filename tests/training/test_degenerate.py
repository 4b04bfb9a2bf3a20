"""Tasks whose rewards are all 0, all equal, or 0 but for one object: what a run does on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from gfn_rb.envs.scored_sequences import ScoredSequenceEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.training import DRAW, SearchOptions, TeacherOptions, TrainConfig, Trainer

N, BEST = 64, 37
LOG_REWARDS = {"zero": [-math.inf] * N, "equal": [3.0] * N, "one": [-math.inf] * N}
LOG_REWARDS["one"][BEST] = 0.0


class Six(ScoredSequenceEnv):
    """Six bits with given log-rewards."""

    def __init__(self, rewards, device="cpu"):
        super().__init__(2, 6, "append", device=device)
        log_reward = torch.tensor(LOG_REWARDS[rewards], dtype=torch.float64)
        self._register_scores(log_reward.exp(), log_reward, torch.tensor([BEST]))


@dataclass(frozen=True, kw_only=True)
class SixConfig(TrainConfig):
    rewards: str = "zero"
    hidden: tuple[int, ...] = (16,)
    batch_size: int = 8

    def make_env(self):
        return Six(self.rewards, self.device)


RUNS = {
    "tb": {},
    "db": {"loss": "db"},
    "subtb": {"loss": "subtb"},
    "vargrad": {"loss": "vargrad"},
    "fm": {"loss": "fm"},
    "softmax": {"draw": DRAW["softmax"]()},
    "quantile": {"draw": DRAW["quantile"]()},
    "priority": {"draw": DRAW["priority"]()},
    "teacher": {"teacher": TeacherOptions(share=0.5)},
    "teacher with a power": {"teacher": TeacherOptions(share=0.5, alpha=0.5)},
    "search": {"search": SearchOptions(loops=1)},
}


def trained(steps, **options):
    trainer = Trainer(SixConfig(**options))
    for _ in range(steps):
        trainer.step()
    return trainer


@pytest.mark.parametrize("rewards", ["zero", "one"])
@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_rewards_of_0_end_a_run_at_once_unless_they_have_a_floor(rewards, options):
    with pytest.raises(ArgumentError, match="min_log_reward puts a floor under it"):
        trained(20, rewards=rewards, **options)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_with_a_floor_a_run_learns_on_rewards_that_are_all_0(options, caplog):
    trainer = trained(20, rewards="zero", min_log_reward=-10.0, **options)
    row = trainer.record()
    assert "every object of Six has reward 0" in caplog.text
    assert "total_variation" not in row  # of which target?
    assert "log_z_gap" not in row
    assert math.isfinite(row["log_z"])
    assert math.isfinite(row["loss"])
    assert row["distinct_reward_calls"] > 8


def test_log_z_is_then_that_of_the_floor():
    row = trained(60, rewards="zero", min_log_reward=-10.0, lr=1e-2).record()
    assert row["log_z"] == pytest.approx(math.log(N) - 10, abs=0.05)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_equal_rewards_are_learnt(options):
    trainer = trained(20, rewards="equal", **options)
    row = trainer.record()
    assert row["total_variation"] < 0.15
    assert row["loss"] < 10


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_the_one_object_with_a_reward_is_found(options):
    trainer = trained(25, rewards="one", min_log_reward=-10.0, **options)
    row = trainer.record()
    assert row["modes_found"] == 1
    assert row["total_variation"] < 1
    assert float(trainer.rb[:]["log_reward"].max()) == 0


def test_nothing_is_replayed_while_no_stored_object_can_be_drawn():
    options = {"min_log_reward": -10.0, "draw": DRAW["softmax"]()}
    row = trained(5, rewards="zero", **options).record()
    assert row["replay_loss"] == 0
    assert row["drawn"] == 0
    assert trained(40, rewards="one", **options).record()["drawn"] > 0
