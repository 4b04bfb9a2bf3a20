from itertools import product

import pytest
from training.training_runs import BITS, DNA, GRID, RNA, WARM_GRID, grid

from gfn_rb.errors import ArgumentError
from gfn_rb.training import LOSSES, REPLAY, BitSequenceConfig, RNABindingConfig, TrainConfig
from gfn_rb.training.config import CONFIGS

TOGETHER = {
    "tb": {"trajectories", "terminal"},
    "subtb": {"trajectories", "terminal"},
    "db": {"trajectories", "transitions", "terminal"},
    "mdb": {"trajectories", "transitions", "terminal"},
    "fm": {"trajectories", "transitions", "states", "terminal"},
}


@pytest.mark.parametrize(("loss", "replay"), [*product(LOSSES, REPLAY)])
def test_a_loss_needs_replay_that_it_can_read(loss, replay):
    config = grid(loss=loss, replay=replay)
    if replay in TOGETHER[loss]:
        config.validate()
    else:
        with pytest.raises(ArgumentError, match=f"^replay must be one of .* with loss {loss}"):
            config.validate()


def test_what_does_not_go_together_is_named():
    with pytest.raises(ArgumentError) as caught:
        grid(loss="tb", replay="states").validate()
    assert str(caught.value) == (
        "replay must be one of trajectories, terminal with loss tb, which reads trajectories, "
        "got 'states'"
    )
    with pytest.raises(ArgumentError) as caught:
        TrainConfig.from_dict({**DNA.to_dict(), "loss": "mdb"}).validate()
    assert str(caught.value) == (
        "loss must be one of tb, subtb, db, fm with tfbind8, where not every state is terminating, "
        "got 'mdb'"
    )


@pytest.mark.parametrize(("loss", "replay"), [("db", "transitions"), ("fm", "states")])
def test_episodes_taken_apart_are_not_kept_apart(loss, replay):
    with pytest.raises(ArgumentError) as caught:
        grid(loss=loss, replay=replay, keep="diverse").validate()
    assert str(caught.value) == (
        f"keep must be one of top, recent with replay {replay}, whose episodes pass through the "
        "same states, got 'diverse'"
    )


def test_states_are_rebuilt_from_trajectories_alone():
    with pytest.raises(ArgumentError, match="compact must be one of none, narrow with"):
        grid(replay="terminal", compact="rebuild").validate()
    grid(replay="trajectories", compact="rebuild").validate()


@pytest.mark.parametrize("config", [GRID, WARM_GRID, DNA, BITS, RNA], ids=lambda c: c.env)
def test_configurations_say_rightly_whether_every_state_terminates(config):
    env = config.make_env()
    state = env.source(1)
    assert bool(env.forward_mask(state)[0, env.exit_action]) is config.every_state_terminates


def test_every_environment_is_looked_at():
    assert {config.env for config in (GRID, WARM_GRID, DNA, BITS, RNA)} == set(CONFIGS)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("local_search", -1, "at least 0"),
        ("workers", -2, "at least 0"),
        ("back_ratio", 0.0, "in (0, 1]"),
        ("back_ratio", 1.5, "in (0, 1]"),
        ("rank_k", 0.0, "positive and finite"),
        ("subtb_lambda", -0.5, "positive and finite"),
        ("priority_alpha", -1.0, "at least 0 and finite"),
        ("top_fraction", 1.0, "above 0 and below 1"),
        ("top_share", 1.1, "in [0, 1]"),
        ("cutoff", float("nan"), "finite"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, expected):
    with pytest.raises(ArgumentError) as caught:
        grid(**{name: value}).validate()
    assert str(caught.value) == f"{name} must be {expected}, got {value!r}"


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (BitSequenceConfig, {"beta": "high"}, "beta must be a number, got 'high'"),
        (BitSequenceConfig, {"delta": 2.5}, "delta must be a whole number, got 2.5"),
        (RNABindingConfig, {"targets": "RNA1"}, "targets must be a list of words, got 'RNA1'"),
        (RNABindingConfig, {"targets": [3]}, "targets must be a list of words, got (3,)"),
    ],
)
def test_a_wrong_entry_of_an_environments_own_is_named(config, change, message):
    with pytest.raises(ArgumentError) as caught:
        TrainConfig.from_dict({**config().to_dict(), **change})
    assert str(caught.value) == message


def test_entries_that_need_not_be_given():
    assert (
        TrainConfig.from_dict({**BitSequenceConfig().to_dict(), "beta": 3.5, "delta": 5}).beta
        == 3.5
    )
    assert TrainConfig.from_dict(BitSequenceConfig().to_dict()).delta is None
