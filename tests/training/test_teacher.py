import math

import pytest
import torch
from training.training_runs import GRID, ForkedContext, equal, grid, resumed_beside, take, trained

from gfn_rb.containers import Trajectories
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.rollout import Sampler
from gfn_rb.training import TeacherOptions, TeacherReward, Trainer
from gfn_rb.training.objectives import make_loss, make_optimizer
from gfn_rb.training.sources import Teacher

ONE = Trainer(GRID).source.sample(1)


@pytest.mark.parametrize(
    ("share", "batches"),
    [(0.5, "stst stst"), (1.0, "tttt tttt"), (0.25, "ssst ssst"), (1 / 3, "ssts stss")],
)
def test_the_teachers_batches_are_spread_evenly(share, batches, monkeypatch):
    source = Trainer(grid(teacher=TeacherOptions(share))).source
    drawn = []
    monkeypatch.setattr(source.parts["student"], "sample", lambda n: drawn.append("s") or ONE)
    monkeypatch.setattr(source.parts["teacher"], "sample", lambda n: drawn.append("t") or ONE)
    for _ in range(8):
        assert source.sample(1) is ONE
    assert drawn == list(batches.replace(" ", ""))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_it_learns_by_trajectory_balance_from_its_reward(alpha):
    """A step of its own is one of a plain loss and optimiser on rewards worked out by hand."""
    config = grid(
        teacher=TeacherOptions(0.5, alpha=alpha), log_z=0.5, clip_grad_norm=1.0, loss="db"
    )
    env = config.make_env()
    rows = Trainer(GRID).source.sample(8)
    residual = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    teacher = Teacher(config, env, seed=4)
    plain = make_loss(grid(log_z=0.5), env, 4)
    optimizer = make_optimizer(config, plain)
    reward = [
        math.log(math.log(1.001 + d * d * (20 if d < 0 else 1))) + alpha * log_reward
        for d, log_reward in zip(residual.tolist(), rows.log_reward.tolist(), strict=True)
    ]
    td = rows.to_tensordict().set("log_reward", torch.tensor(reward))
    before = rows.log_reward.clone()
    for _ in range(3):
        teacher.learn(rows, residual)
        optimizer.zero_grad()
        plain(Trajectories.from_tensordict(td)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert torch.equal(rows.log_reward, before)
    for one, other in zip(teacher.loss.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_its_log_z_starts_where_its_first_batch_fits_best():
    teacher = Teacher(grid(lr=1e-9, lr_log_z=1e-9, log_z=None), GRID.make_env(), 0)
    rows = Trainer(GRID).source.sample(8)
    residual = torch.linspace(-3, 3, 8)
    teacher.learn(rows, residual)
    td = rows.to_tensordict().set("log_reward", TeacherReward()(residual).log())
    with torch.no_grad():
        assert teacher.loss.residual(Trajectories.from_tensordict(td)).mean().abs() < 1e-4
    log_z = teacher.loss.log_z.value.item()
    teacher.learn(rows, 100 * residual)
    assert teacher.loss.log_z.value.item() == pytest.approx(log_z)


@pytest.mark.parametrize(
    "config", [grid(teacher=TeacherOptions(0.5)), grid(teacher=TeacherOptions(0.5), loss="subtb")]
)
def test_it_learns_from_every_batch_what_the_student_was_like_before(config):
    trainer = Trainer(config)
    told, fits = [], []
    learn = trainer._learn
    trainer.source.learn = lambda batch, residual: told.append((batch, residual))

    def note(*batches):
        fits.extend(trainer.loss.residual(batch).detach() for batch in batches)
        return learn(*batches)

    trainer._learn = note
    take(trainer, 2)
    assert [len(batch) for batch, _ in told] == [8] * 4
    for (_, residual), expected in zip(told, fits, strict=True):
        torch.testing.assert_close(residual, expected)


def test_it_has_weights_of_its_own_and_the_student_does_not_see_it():
    trainer = Trainer(grid(teacher=TeacherOptions(0.5)))
    teacher = trainer.source._learner
    assert type(teacher.loss) is TrajectoryBalance
    student = dict(trainer.loss.named_parameters())
    for name, p in teacher.loss.named_parameters():
        assert p is not student[name]
    name = "forward_policy.head.weight"
    assert not torch.equal(dict(teacher.loss.named_parameters())[name], student[name])
    assert not any("learner" in name for name in trainer.loss.state_dict())


def test_a_teacher_goes_where_the_student_comes_short():
    """A student that never learns leaves out one corner; its teacher samples it most."""
    config = grid(teacher=TeacherOptions(1.0), lr=1e-2)
    env = config.make_env()
    teacher = Teacher(config, env, 0)
    source = Trainer(grid(epsilon=0.5, batch_size=32)).source
    corner = torch.tensor([1, 1])
    for _ in range(120):
        rows = source.sample(32)
        short = (rows.terminating_states == corner).all(1)
        teacher.learn(rows, torch.where(short, -4.0, 0.1))
    drawn = Sampler(teacher.loss.forward_policy).sample_trajectories(env, 500)
    share = (drawn.terminating_states == corner).all(1).float().mean()
    # Reward log(321) there against log(1.011) at 35 other states.
    expected = math.log(321.001) / (math.log(321.001) + 35 * math.log(1.011))
    assert expected == pytest.approx(0.94, abs=0.01)
    assert 0.6 < float(share) < expected + 0.05


def test_workers_sample_for_both(monkeypatch, tmp_path):
    monkeypatch.setattr("gfn_rb.training.sources.worker._SpawnContext", ForkedContext)
    whole = trained(grid(teacher=TeacherOptions(0.5), workers=1, batch_size=6), 3)
    restored = resumed_beside(whole, tmp_path, 2)
    equal(restored.source.state_dict(), whole.source.state_dict())
    equal(restored.rb.storage[:].to_dict(), whole.rb.storage[:].to_dict())
