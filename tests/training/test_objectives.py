import math
import os
import shutil
import subprocess
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from training.training_runs import GRID, WARM_GRID, grid

import gfn_rb
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.losses import LOSSES, DetailedBalance, TrajectoryBalance, linex
from gfn_rb.policies import UniformBackwardPolicy
from gfn_rb.training import Hooks, RankDraw, TrainConfig, Trainer
from gfn_rb.training.cli import main
from gfn_rb.training.objectives import (
    AdaptiveClip,
    FallingRates,
    backward_policy,
    make_loss,
    make_optimizer,
)
from gfn_rb.training.session import launch


@pytest.fixture(scope="module")
def fresh():
    return Trainer(GRID).sample(16)


def read_by(loss, rows):
    name = loss.reads.__name__.lower()
    return rows if name == "trajectories" else getattr(rows, f"to_{name}")()


# VarGrad is refused with conditions, each of which has another log Z.
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "vargrad"])
def test_every_loss_is_made_with_its_networks(name):
    config = replace(WARM_GRID, loss=name, hidden=(8, 4))
    env = config.make_env()
    loss = make_loss(config, env, seed=3)
    assert type(loss) is LOSSES[name]
    assert loss.env is env
    assert all(getattr(loss, network) is not None for network in loss.networks)
    assert loss.forward_policy.head.in_features == 4
    assert loss(read_by(loss, Trainer(config).sample(4))).isfinite()


def test_options_reach_their_loss():
    env = GRID.make_env()
    assert make_loss(grid(loss="subtb", subtb_lambda=0.7), env, 0).subtb_lambda == 0.7
    assert make_loss(grid(log_z=2.5), env, 0).estimate_log_z().item() == 2.5
    assert make_loss(GRID, env, 0).penalty is torch.square
    default, steep = grid(regression="auto"), grid(regression="linex", linex_alpha=1.0)
    residual = torch.tensor([-2.0, 3.0])
    for config, alpha in ((default, 0.5), (steep, 1.0)):
        cost = make_loss(config, env, 0).penalty(residual)
        torch.testing.assert_close(cost, linex(residual, alpha))
    assert make_loss(grid(loss="fm", regression="auto"), env, 0).penalty is torch.square
    db = make_loss(grid(loss="db", log_z=2.5), env, 0)
    assert db.state_flow.head.bias.item() == 2.5
    assert backward_policy(db) is db.backward_policy
    assert isinstance(backward_policy(make_loss(grid(loss="fm"), env, 0)), UniformBackwardPolicy)


def test_a_trunk_is_shared():
    config = grid(loss="subtb", backward="learned", share_trunk=True)
    config.validate()
    loss = make_loss(config, config.make_env(), 0)
    assert loss.forward_policy.trunk is loss.backward_policy.trunk is loss.state_flow.trunk


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


@pytest.mark.parametrize("config", [GRID, WARM_GRID], ids=lambda config: config.env)
def test_log_z_is_the_estimate_of_a_batch(config):
    trainer = Trainer(config)
    batch = trainer.sample(16)
    trainer.loss.fit_log_z(batch)
    assert (-trainer.loss.residual(batch)).exp().mean().log().abs() < 1e-5
    assert trainer.loss.residual(batch).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["subtb", "db", "fm"])
def test_flows_are_the_estimate_of_a_batch_at_the_end(name, fresh):
    loss = make_loss(grid(loss=name), GRID.make_env(), 0)
    loss.fit_log_z(fresh)
    if name == "fm":
        states = fresh.to_states()
        residual = loss.terms(states)[0][states.is_terminating, 1]
    else:
        steps = fresh.to_transitions()
        log_pf = loss.forward_policy, loss.backward_policy, loss.env, loss.state_flow
        residual = DetailedBalance(*log_pf).residual(steps[steps.is_terminating])
        assert len(residual) == 16
    assert (-residual).exp().mean().log().abs() < 1e-5
    assert residual.abs().max() > 1e-3


def test_what_has_no_flow_is_not_fitted(fresh):
    loss = make_loss(grid(loss="mdb"), GRID.make_env(), 0)
    before = {name: value.clone() for name, value in loss.state_dict().items()}
    loss.fit_log_z(fresh)
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


@pytest.mark.parametrize("name", LOSSES)
def test_rewards_that_a_loss_asks_for_are_counted(name, fresh, monkeypatch):
    loss = make_loss(grid(loss=name), GRID.make_env(), 0)
    asked = []
    log_reward = loss.env.log_reward
    monkeypatch.setattr(
        loss.env, "log_reward", lambda x, *rest: asked.append(len(x)) or log_reward(x, *rest)
    )
    rows = read_by(loss, fresh)
    loss(rows)
    assert loss.n_reward_calls(rows) == sum(asked)
    assert (sum(asked) > 0) is (name == "mdb")


MODULE = """
from gfn_rb.losses.trajectory_balance import TrajectoryBalance

class Absolute(TrajectoryBalance):
    name = "absolute"
    is_signed = False

    def evaluate(self, batch):
        residual = self.residual(batch)
        return residual.abs(), residual
"""


@pytest.fixture
def absolute():
    namespace = {"__name__": "mine"}
    exec(MODULE, namespace)
    yield namespace["Absolute"]
    del LOSSES["absolute"]


def test_it_is_trained_with_by_name(absolute, monkeypatch):
    trainer = Trainer(grid(loss="absolute"))
    assert type(trainer.loss) is absolute
    assert trainer.step() > 0
    assert TrainConfig.from_dict(trainer.config.to_dict()) == trainer.config
    trained = []
    monkeypatch.setattr(launch, "train", trained.append)
    assert main(["train", "hypergrid", "--loss", "absolute"]) == 0
    assert trained[0].loss == "absolute"
    with pytest.raises(ArgumentError, match="got 'absolut': did you mean absolute"):
        grid(loss="absolut").validate()


def test_what_it_says_of_itself_decides_what_goes_with_it(absolute):
    with pytest.raises(
        ArgumentError, match="regression must be auto or squared with loss absolute"
    ):
        grid(loss="absolute", regression="linex").validate()
    absolute.every_state_terminates = True
    grid(loss="absolute").validate()
    absolute.options = ("subtb_lambda",)
    absolute.__init__ = lambda self, *args, subtb_lambda, **options: TrajectoryBalance.__init__(
        self, *args, **options
    )
    with pytest.raises(ArgumentError, match="no effect unless loss is subtb or absolute"):
        grid(loss="tb", subtb_lambda=0.5).validate()
    assert Trainer(grid(loss="absolute", subtb_lambda=0.5)).step() > 0


def test_a_name_stands_for_one_loss(absolute):
    exec(MODULE, {"__name__": "mine"})  # as a cell of a notebook that is run again
    assert LOSSES["absolute"] is not absolute
    with pytest.raises(ArgumentError, match="name of Absolute must be new, got 'absolute', as"):
        exec(MODULE, {"__name__": "theirs"})


@pytest.mark.slow
def test_a_file_among_the_losses_is_enough(tmp_path):
    package = tmp_path / "gfn_rb"
    shutil.copytree(Path(gfn_rb.__file__).parent, package)
    (package / "losses" / "absolute.py").write_text(MODULE)
    words = ["train", "hypergrid", "--ndim", "2", "--loss", "absolute", "--steps", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "gfn_rb", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_rates_fall_once_nothing_is_new_and_the_loss_stays():
    optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))], "lr": 1.0}])

    def rate():
        return optimizer.param_groups[0]["lr"]

    rates = FallingRates(optimizer)
    for _ in range(600):  # there is more to find
        rates.observe(0.2, 1.0)
    assert rate() == 1.0
    for n in range(1200):  # the loss halves every 200 steps
        rates.observe(0.0, 0.5 ** (n / 200))
    assert rate() == 1.0
    for _ in range(700):
        rates.observe(0.0, math.exp(rates.log_loss))
    before = rate()
    assert before in (0.5**3, 0.5**4)
    restored = FallingRates(optimizer)
    restored.load_state_dict(rates.state_dict())
    for _ in range(200):
        restored.observe(0.0, math.exp(restored.log_loss))
    assert rate() == before / 2
    for _ in range(5000):
        restored.observe(0.0, math.exp(restored.log_loss))
    assert rate() == 0.01


def test_one_infinite_loss_does_not_lower_rates():
    rates = FallingRates(torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1.0))
    for loss in (1.0, math.inf, math.nan, 1.0):
        rates.observe(0.0, loss)
    assert rates.log_loss == 0


def test_huge_gradients_are_clipped_at_ten_times_the_usual_norm():
    weights = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.ones(2)),
    ]

    def clipped(clip, norm):
        weights[0].grad, weights[1].grad = torch.full((3,), norm / 2), torch.full((1,), norm / 2)
        clip(weights)  # of which one has no gradient
        return float(torch.cat([each.grad for each in weights[:2]]).norm())

    clip = AdaptiveClip()
    for norm in (2.0, 8.0, 4.0, 2.0, 8.0, 4.0):
        assert clipped(clip, norm) == norm
    assert clipped(clip, 39.0) == 39.0
    usual = 4.0 * (39.0 / 4.0) ** (1 / 7)
    assert clipped(clip, 1e6) == pytest.approx(10 * usual)
    restored = copy(clip)
    assert clipped(restored, 1e6) == clipped(clip, 1e6) == pytest.approx(10 * usual * 10 ** (1 / 8))
    for _ in range(2000):  # norms that stay are usual in the end
        clipped(clip, 1e3)
    assert clipped(clip, 1e3) == 1e3
    assert clipped(clip, 0.0) == 0.0


def test_vargrad_trains_on_batches_of_one_row_beside_others():
    trainer = Trainer(replace(GRID, loss="vargrad", replay_ratio=1 / 8))
    assert math.isfinite(trainer.step())


def test_ranks_that_share_gradients_keep_their_rates():
    alone, shared = (Trainer(GRID, hooks=Hooks(gradients=each)) for each in (None, lambda _: None))
    assert type(alone.schedule) is FallingRates
    before = shared.schedule.get_last_lr()
    for _ in range(3):
        shared.step()
    assert shared.schedule.get_last_lr() == before


@pytest.mark.parametrize("name", LOSSES)
def test_a_first_batch_without_reward_needs_a_floor(name, monkeypatch):
    def nothing(env, state, condition=None):
        return torch.full((len(state),), -torch.inf)

    monkeypatch.setattr(HyperGrid, "log_reward", nothing)
    config = replace(GRID, loss=name, replay="auto", draw=RankDraw())
    with pytest.raises(ArgumentError, match=r"got -inf in .* min_log_reward puts a floor under it"):
        Trainer(config).step()
    trainer = Trainer(replace(config, min_log_reward=-20.0))
    assert math.isfinite(trainer.step())
