import pytest
import torch
from tensordict import TensorDict
from training.training_runs import grid

from gfn_rb.keys import LOG_REWARD
from gfn_rb.training import Trainer
from gfn_rb.training.replay import DRAW, KEEP, REPLAY


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("draw", DRAW)
@pytest.mark.parametrize("replay", REPLAY)
def test_every_choice_trains(keep, draw, replay):
    trainer = Trainer(grid(keep=keep, draw=draw, replay=replay))
    for _ in range(4):
        trainer.step()
    assert len(trainer.rb) == 24
    assert trainer.measure()["replay_loss"] > 0


@pytest.mark.parametrize("replay", REPLAY)
def test_temperature_reaches_the_draw(replay):
    trainer = Trainer(grid(replay=replay, temperature=0.25))
    assert trainer.rb.sampler.temperature == 0.25


@pytest.mark.parametrize(
    ("draw", "temperature", "expected"),
    [("softmax", 1.0, 0.75), ("softmax", 0.5, 0.9), ("uniform", 1.0, 0.5)],
)
def test_draws_follow_their_rule(draw, temperature, expected):
    """Rewards 1 and 3: shares 3/4, 9/10 at half the temperature, and 1/2 when all are alike."""
    options = {"replay": "terminal", "draw": draw, "temperature": temperature}
    trainer = Trainer(grid(**options, capacity=2))
    rows = {"state": torch.eye(2).long(), LOG_REWARD: torch.tensor([1.0, 3.0]).log()}
    trainer.rb.extend(TensorDict(rows, [2]))
    share = (trainer.rb.sample(4000)[LOG_REWARD] > 0).float().mean()
    assert float(share) == pytest.approx(
        expected, abs=4 * (expected * (1 - expected) / 4000) ** 0.5
    )
