"""Replay of known objects: drawn in their share, walked backward, and saved with the run."""

from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from training.training_runs import GRID, equal, grid, resumed_beside, timeless, trained

from gfn_rb import terminating_state_buffer
from gfn_rb.checkpoint import export_table
from gfn_rb.training import Trainer


@pytest.fixture
def known(tmp_path):
    """Ten objects of the grid with rewards that it does not have."""
    env, path = GRID.make_env(), tmp_path / "known.csv"
    state = env.terminating_states()[:10]
    rb = terminating_state_buffer(10)
    rb.extend({"state": state, "log_reward": torch.linspace(-3.5, -1.5, 10)})
    export_table(rb, path, env)
    return str(path)


@pytest.mark.parametrize("replay", ["terminal", "trajectories"])
def test_known_objects_are_drawn_in_their_share_with_their_rewards(known, replay):
    config = grid(replay=replay, offline_data=known, offline_share=0.4, replay_ratio=2.0)
    trainer = Trainer(config)
    trainer.step()
    batch = trainer.replayed.sample(2000)
    is_known = batch["buffer_id"] == 1
    assert binomtest(int(is_known.sum()), 2000, 0.4).pvalue > 1e-3
    rewards = batch["log_reward"][is_known].unique()
    torch.testing.assert_close(rewards, torch.linspace(-3.5, -1.5, 10))
    ends = batch["state"][torch.arange(2000), batch["length"] - 1][is_known]
    assert {*map(tuple, ends.tolist())} == {
        *map(tuple, GRID.make_env().terminating_states()[:10].tolist())
    }
    trainer.env.check_state(batch["state"].flatten(0, 1))
    assert (batch["state"][:, 0] == trainer.env.source_state).all()  # walked back to the source
    before = trainer.measure()
    assert before["reward_calls"] == config.batch_size  # known objects cost none
    assert trainer.replayed[1][:]["log_reward"].sort().values.tolist() == rewards.tolist()


def test_a_run_goes_on_with_the_objects_it_knew_though_their_file_has_changed(known, tmp_path):
    whole = trained(grid(replay="terminal", offline_data=known), 3)
    text = Path(known).read_text()
    Path(known).write_text(text.replace("-", "-1"))  # other rewards
    restored = resumed_beside(whole, tmp_path, 3)
    equal(whole.loss.state_dict(), restored.loss.state_dict())
    assert timeless(whole.measure()) == timeless(restored.measure())
    equal(restored.replayed[1][:].to_dict(), whole.replayed[1][:].to_dict())
    with pytest.raises(AssertionError):
        equal(Trainer(whole.config).replayed[1][:].to_dict(), whole.replayed[1][:].to_dict())
