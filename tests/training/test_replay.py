from dataclasses import replace

import pytest
import torch
from training.training_runs import DNA, grid, timeless, trained

from gfn_rb.containers import Trajectories
from gfn_rb.keys import INDEX, LOG_REWARD
from gfn_rb.training import DRAW, REPLAY, KeepDiverse, Trainer
from gfn_rb.training.config import CONFIGS

LOSS = {"trajectories": "tb", "transitions": "db", "states": "fm", "terminal": "subtb"}


@pytest.mark.parametrize(
    ("replay", "keep", "compact"),
    [
        ("trajectories", "diverse", "rebuild"),
        ("transitions", "recent", "narrow"),
        ("states", "top", "narrow"),
        ("terminal", "diverse", "narrow"),
    ],
)
def test_how_rows_are_stored_changes_nothing(replay, keep, compact):
    options = {"replay": replay, "keep": keep, "loss": LOSS[replay]}
    runs = [trained(grid(compact=each, **options), 3) for each in (compact, "none")]
    assert timeless(runs[0].measure()) == timeless(runs[1].measure())


def ends(trainer):
    """The terminating states in the buffer."""
    rows = trainer.rb.storage[:]
    if trainer.config.replay_name == "terminal":
        return rows["state"]
    return Trajectories.from_tensordict(rows).terminating_states


@pytest.mark.parametrize("replay", ["trajectories", "terminal"])
@pytest.mark.parametrize(
    ("config", "p"), [(grid(ndim=3), 1), (DNA, 0)], ids=["steps on a grid", "places that differ"]
)
def test_a_diverse_buffer_holds_what_is_far_apart(config, p, replay):
    options = {"keep": KeepDiverse(cutoff=2.0), "replay": replay, "capacity": 500}
    trainer = trained(type(config)(**{**vars(config), **options}), 5)
    x = ends(trainer).double()
    distance = torch.cdist(x, x, p=p) + 100 * torch.eye(len(x))
    assert len(x) > 5
    assert distance.min() == 3


@pytest.mark.parametrize("replay", REPLAY)
@pytest.mark.parametrize(
    ("draw", "options"),
    [
        ("softmax", {"temperature": 0.25}),
        ("rank", {"k": 0.5}),
        ("quantile", {"top_fraction": 0.2, "top_share": 0.75}),
        ("priority", {"alpha": 0.9}),
    ],
)
def test_options_reach_the_draw(draw, options, replay):
    config = grid(replay=replay, draw=DRAW[draw](**options), loss=LOSS[replay])
    sampler = Trainer(config).rb.sampler
    assert {name: getattr(sampler, name) for name in options} == options


def test_steps_are_drawn_by_what_their_episode_came_to():
    """An episode of reward 3 and one of reward 1, of 4 steps each: 3/16 and 1/16 of the draws."""
    trainer = Trainer(grid(loss="db", replay="transitions", draw="softmax", capacity=1000))
    batch = trainer.sample(200)
    short = batch[(batch.length == 4).nonzero()[:2, 0]].to_tensordict()
    short.set(LOG_REWARD, torch.tensor([3.0, 1.0]).log())
    trainer.rb.extend(short)
    drawn = trainer.rb.sample(4000)
    share = torch.bincount(drawn[INDEX], minlength=8) / 4000
    expected = torch.tensor([3 / 16] * 4 + [1 / 16] * 4)
    torch.testing.assert_close(share, expected, rtol=0, atol=4 * (3 / 16 * 13 / 16 / 4000) ** 0.5)


@pytest.mark.parametrize("replay", ["transitions", "states"])
def test_single_steps_are_replayed_as_often_as_they_are_sampled(replay):
    trainer = Trainer(grid(loss=LOSS[replay], replay=replay, replay_ratio=2.0, capacity=1000))
    asked, sample = [], trainer.rb.sample
    trainer.rb.sample = lambda n: asked.append(n) or sample(n)
    trainer.step()
    assert asked == [2 * len(trainer.rb)]


def test_regenerated_rows_know_their_place():
    """So that priorities reach terminating states, too."""
    trainer = trained(grid(replay="terminal", draw="priority"), 2)
    rows = trainer.rb.sample(12)
    stored = trainer.rb.storage[:]["state"]
    batch = trainer.replay.gives.from_tensordict(rows)
    assert torch.equal(batch.terminating_states, stored[rows[INDEX]])


@pytest.mark.parametrize("config", [kind() for kind in CONFIGS.values()], ids=CONFIGS)
def test_by_default_an_object_is_one_narrow_row(config):
    trainer = trained(replace(config, batch_size=6, hidden=(8,)), 2)
    again = trainer.rb[:].clone()
    n = len(trainer.rb)
    trainer.rb.extend(again.clone())
    assert len(trainer.rb) == n  # each found its row
    held = trainer.rb.storage[:]
    state = held["packed_state" if "packed_state" in held.keys(True) else "state"]
    as_they_are = 8 * state.shape[0] * trainer.env.state_shape.numel()
    assert state.is_floating_point() or state.nbytes < as_they_are
    came = Trajectories.from_tensordict(again)
    at_end = trainer.env.fingerprint(came.terminating_states)
    if config.env != "conditional_hypergrid":
        assert len(at_end.unique()) == n
