import pytest
import torch
from training.training_runs import GRID, WARM_GRID, grid

from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES, DetailedBalance, linex
from gfn_rb.policies import UniformBackwardPolicy
from gfn_rb.training import Trainer
from gfn_rb.training.objectives import (
    backward_policy,
    convert,
    make_loss,
    make_optimizer,
)


@pytest.fixture(scope="module")
def fresh():
    return Trainer(GRID).source.sample(16)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("config", [GRID, WARM_GRID], ids=lambda config: config.env)
def test_every_loss_is_made_with_its_networks(name, config):
    config = type(config)(**{**vars(config), "loss": name, "hidden": (8, 4)})
    env = config.make_env()
    loss = make_loss(config, env, seed=3)
    assert type(loss) is LOSSES[name]
    assert loss.env is env
    for network in loss.networks:
        assert getattr(loss, network) is not None
    assert loss.forward_policy.head.in_features == 4
    trajectories = Trainer(config).source.sample(4)
    assert loss(convert(trajectories, loss.reads)).isfinite()


def test_weights_come_from_the_seed_alone():
    env = GRID.make_env()
    torch.manual_seed(0)
    one = make_loss(GRID, env, 3).state_dict()
    torch.manual_seed(1)
    other, third = make_loss(GRID, env, 3).state_dict(), make_loss(GRID, env, 4).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    name = "forward_policy.head.weight"
    assert not torch.equal(one[name], third[name])


def test_options_reach_their_loss():
    env = GRID.make_env()
    assert make_loss(grid(loss="subtb", subtb_lambda=0.7), env, 0).subtb_lambda == 0.7
    assert make_loss(grid(log_z=2.5), env, 0).estimate_log_z().item() == 2.5
    assert make_loss(GRID, env, 0).penalty is torch.square
    assert make_loss(grid(regression="linex"), env, 0).penalty is linex
    db = make_loss(grid(loss="db", log_z=2.5), env, 0)
    assert db.state_flow.head.bias.item() == 2.5


def test_a_trunk_is_shared():
    config = grid(loss="subtb", backward="learned", share_trunk=True)
    config.validate()
    loss = make_loss(config, config.make_env(), 0)
    assert loss.forward_policy.trunk is loss.backward_policy.trunk is loss.state_flow.trunk
    with pytest.raises(ArgumentError, match="share_trunk has no effect unless backward is learned"):
        grid(share_trunk=True).validate()


@pytest.mark.parametrize("name", LOSSES)
def test_every_parameter_is_optimised_once(name):
    config = grid(loss=name, lr=0.25, lr_log_z=0.5)
    loss = make_loss(config, config.make_env(), 0)
    groups = make_optimizer(config, loss).param_groups
    rate = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rate)
    expected = {
        id(p): 0.5 if parameter == "log_z.value" else 0.25
        for parameter, p in loss.named_parameters()
    }
    assert rate == expected


@pytest.mark.parametrize("name", ["tb", "subtb", "db", "fm"])
def test_what_is_fitted_is_unbiased_at_the_end(name, fresh):
    loss = make_loss(grid(loss=name), GRID.make_env(), 0)
    loss.fit_log_z(fresh)
    with torch.no_grad():
        if name == "tb":
            residual = loss.residual(fresh)
        elif name == "fm":
            states = fresh.to_states()
            residual = loss.terms(states)[0][states.is_terminating, 1]
        else:
            steps = fresh.to_transitions()
            ends = steps[steps.is_terminating]
            log_pf = loss.forward_policy, loss.backward_policy, loss.env, loss.state_flow
            residual = DetailedBalance(*log_pf).residual(ends)
            assert len(ends) == 16
    assert residual.mean().abs() < 1e-5
    assert residual.abs().max() > 1e-3


def test_conditional_log_z_is_fitted_by_its_bias():
    trainer = Trainer(WARM_GRID)
    batch = trainer.source.sample(16)
    trainer.loss.fit_log_z(batch)
    assert trainer.loss.residual(batch).mean().abs() < 1e-5


def test_what_has_no_flow_is_not_fitted(fresh):
    loss = make_loss(grid(loss="mdb"), GRID.make_env(), 0)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    loss.fit_log_z(fresh)
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


def test_a_loss_without_backward_policy_goes_back_uniformly():
    env = GRID.make_env()
    assert isinstance(backward_policy(make_loss(grid(loss="fm"), env, 0)), UniformBackwardPolicy)
    loss = make_loss(GRID, env, 0)
    assert backward_policy(loss) is loss.backward_policy


@pytest.mark.parametrize("name", LOSSES)
def test_rewards_that_a_loss_asks_for_are_counted(name, fresh, monkeypatch):
    loss = make_loss(grid(loss=name), GRID.make_env(), 0)
    asked = []
    log_reward = loss.env.log_reward
    monkeypatch.setattr(
        loss.env, "log_reward", lambda x, *rest: asked.append(len(x)) or log_reward(x, *rest)
    )
    rows = convert(fresh, loss.reads)
    loss(rows)
    assert loss.n_reward_calls(rows) == sum(asked)
    assert (sum(asked) > 0) is (name == "mdb")


def test_conversions(fresh):
    assert convert(fresh, Trajectories) is fresh
    steps = convert(fresh, Transitions)
    assert torch.equal(steps.state, fresh.to_transitions().state)
    for rows in (fresh, steps):
        assert torch.equal(convert(rows, States).state, fresh.to_states().state)
