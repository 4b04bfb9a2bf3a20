"""torchgfn's estimators as our policies: sampled from, trained and searched with."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from gfn_rb import LocalSearchSampler, Sampler
from gfn_rb.losses import DetailedBalance, FlowMatching, ModifiedDetailedBalance, TrajectoryBalance
from gfn_rb.policies import LogZ, Networks
from gfn_rb.rollout import action_log_probs
from gfn_rb.training import TrainConfig, Trainer

gym = pytest.importorskip("gfn.gym")

import gfn.samplers  # noqa: E402
from gfn.estimators import DiscretePolicyEstimator, ScalarEstimator  # noqa: E402
from gfn.gflownet import FMGFlowNet, ModifiedDBGFlowNet  # noqa: E402
from gfn.preprocessors import EnumPreprocessor, KHotPreprocessor  # noqa: E402
from gfn.utils.modules import MLP, Tabular  # noqa: E402
from interop import torchgfn_items as items  # noqa: E402

from gfn_rb.interop.torchgfn import adapt_env, adapt_estimator, rows_of  # noqa: E402

GRID = gym.HyperGrid(2, 5, validate_modes=False)
KHOT = KHotPreprocessor(5, 2)
ENV = adapt_env(GRID, KHOT)
estimator = partial(items.estimator, GRID)


def flow() -> ScalarEstimator:
    return ScalarEstimator(MLP(KHOT.output_dim, 1, hidden_dim=16), KHOT)


def test_training_by_trajectory_balance_reaches_the_target() -> None:
    torch.manual_seed(0)
    grid = gym.HyperGrid(2, 3, validate_modes=False)
    env = adapt_env(grid)
    table = Tabular(n_states=9, output_dim=env.n_actions)
    indices = EnumPreprocessor(grid.get_states_indices)
    pf = adapt_estimator(DiscretePolicyEstimator(table, env.n_actions, indices), env)
    pb = adapt_estimator(DiscretePolicyEstimator.uniform(env.n_actions, indices), env)
    loss = TrajectoryBalance(pf, pb, env, LogZ())
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    for _ in range(150):
        batch = Sampler(pf).sample_trajectories(env, n=16, epsilon=0.2)
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
    p = env.policy_log_prob(lambda state: action_log_probs(pf, env, state)).exp()
    assert float((p - env.target_log_prob().exp()).abs().sum()) < 0.05
    assert float(loss.log_z.value.detach()) == pytest.approx(env.log_partition(), abs=0.05)


def test_residuals_are_those_of_torchgfn() -> None:
    logits, back = estimator(), estimator(True)
    pf, pb = adapt_estimator(logits, ENV), adapt_estimator(back, ENV)
    theirs = gfn.samplers.Sampler(logits).sample_trajectories(GRID, n=32)
    moves, states = theirs.to_transitions(), theirs.to_states_container()
    # torchgfn averages each constraint over the rows that have it.
    delta, has = FlowMatching(pf, ENV).terms(rows_of(states))
    flows, rewards = delta.square().sum(0) / has.sum(0)
    expected = FMGFlowNet(logits, alpha=0.3).loss(GRID, states)
    torch.testing.assert_close(flows + 0.3 * rewards, expected)
    rows = rows_of(moves)
    moved = ~rows["next", "done"].squeeze(1)
    residual = ModifiedDetailedBalance(pf, pb, ENV).residual(rows)
    expected = ModifiedDBGFlowNet(logits, back).loss(GRID, moves)
    torch.testing.assert_close(residual[moved].square().mean(), expected)


def test_flows_are_trained_and_rows_searched() -> None:
    pf, pb = adapt_estimator(estimator(), ENV), adapt_estimator(estimator(True), ENV)
    batch = Sampler(pf).sample_trajectories(ENV, n=8)
    loss = DetailedBalance(pf, pb, ENV, adapt_estimator(flow(), ENV))(batch.to_transitions())
    loss.backward()
    assert all(p.grad is not None for p in [*pf.parameters(), *pb.parameters()])
    back = Sampler(pb).sample_trajectories(ENV, states=batch.terminating_states)
    assert ENV.is_source(back.reverse().state[:, 0]).all()
    found = LocalSearchSampler(pf, pb).sample_trajectories(
        ENV, n=8, n_local_search_loops=2, back_ratio=0.5
    )
    assert len(found) >= 8


@dataclass(frozen=True, kw_only=True)
class GridOfTorchGFN(TrainConfig):
    """A run on torchgfn's environment with torchgfn's estimators."""

    def make_env(self):
        return adapt_env(gym.HyperGrid(2, 5, validate_modes=False), KHOT)

    def make_networks(self, env):
        return Networks(adapt_estimator(estimator(), env), adapt_estimator(estimator(True), env))


def test_the_trainer_runs_on_them() -> None:
    trainer = Trainer(GridOfTorchGFN(steps=4, batch_size=8, capacity=32, eval_every=2))
    before = [p.clone() for p in trainer.loss.parameters()]
    for _ in range(4):
        trainer.step()
    record = trainer.record()
    assert all(not a.equal(b) for a, b in zip(before, trainer.loss.parameters(), strict=True))
    assert len(trainer.rb) > 0
    assert record is None or record["step"] == 4
