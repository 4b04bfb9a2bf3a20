import math

import pytest
import torch
from training.training_runs import GRID, grid, take

from gfn_rb.containers import Trajectories
from gfn_rb.keys import INDEX
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.rollout import Sampler
from gfn_rb.training import TeacherOptions, TeacherReward, Trainer
from gfn_rb.training.objectives import make_loss, make_optimizer


def published_reward(residual, c=19.0):
    """As grid/models/teacher.py of the published code works it out, where d is -residual."""
    return math.log(1 + 1e-3 + residual**2 * (1 + int(residual < 0) * c))


@pytest.mark.parametrize(
    ("share", "batches"),
    [(0.5, "stst stst"), (1.0, "tttt tttt"), (0.25, "ssst ssst"), (1 / 3, "ssts stss")],
)
def test_the_teachers_batches_are_spread_evenly(share, batches):
    teacher = Trainer(grid(teacher=TeacherOptions(share))).teacher
    assert "".join("st"[teacher.is_next()] for _ in range(8)) == batches.replace(" ", "")


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_it_learns_by_trajectory_balance_from_its_reward(alpha):
    """A step of its own is one of a plain loss and optimiser on rewards worked out by hand."""
    config = grid(
        teacher=TeacherOptions(0.5, alpha=alpha), log_z=0.5, clip_grad_norm=1.0, loss="db"
    )
    rows = Trainer(GRID).sample(8)
    residual = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    teacher = Trainer(config).teacher
    plain = make_loss(grid(log_z=0.5), config.make_env(), 4)
    plain.load_state_dict(teacher.loss.state_dict())
    optimizer = make_optimizer(config, plain)
    reward = [
        math.log(published_reward(d)) + alpha * log_reward
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


def test_its_log_z_starts_where_its_first_batch_estimates_it():
    options = {"lr": 1e-9, "lr_log_z": 1e-9, "log_z": None}
    teacher = Trainer(grid(teacher=TeacherOptions(1.0), **options)).teacher
    rows = Trainer(GRID).sample(8)
    residual = torch.linspace(-3, 3, 8)
    teacher.learn(rows, residual)
    td = rows.to_tensordict().set("log_reward", TeacherReward()(residual).log())
    with torch.no_grad():
        residual_of_teacher = teacher.loss.residual(Trajectories.from_tensordict(td))
    assert (-residual_of_teacher).exp().mean().log().abs() < 1e-4
    log_z = teacher.loss.log_z.value.item()
    teacher.learn(rows, 100 * residual)
    assert teacher.loss.log_z.value.item() == pytest.approx(log_z)


@pytest.mark.parametrize("loss", ["tb", "subtb"])
def test_it_learns_from_every_batch_what_the_student_was_like_before(loss):
    trainer = Trainer(grid(teacher=TeacherOptions(0.5), loss=loss))
    told, fits, learn = [], [], trainer._learn
    trainer.teacher.learn = lambda batch, residual: told.append((len(batch), residual))

    def note(batch):
        fits.append((len(batch), trainer.loss.residual(batch).detach()))
        return learn(batch)

    trainer._learn = note
    take(trainer, 2)
    assert [n for n, _ in told] == [8] * 4
    torch.testing.assert_close(told, fits)


def test_it_has_weights_of_its_own_and_the_student_does_not_see_it():
    trainer = Trainer(grid(teacher=TeacherOptions(0.5)))
    teacher = trainer.teacher.loss
    assert type(teacher) is TrajectoryBalance
    assert not {*teacher.parameters()} & {*trainer.loss.parameters()}
    name = "forward_policy.head.weight"
    assert not torch.equal(teacher.state_dict()[name], trainer.loss.state_dict()[name])
    assert not any("teacher" in name for name in trainer.loss.state_dict())


def test_a_teacher_goes_where_the_student_comes_short():
    """A student that never learns leaves out one corner; its teacher samples it most."""
    config = grid(teacher=TeacherOptions(1.0), lr=1e-2, log_z=0.0)
    trainer = Trainer(config)
    teacher = trainer.teacher
    student = Trainer(grid(epsilon=0.5, batch_size=32))
    corner = torch.tensor([1, 1])
    for _ in range(160):
        rows = student.sample(32)
        short = (rows.terminating_states == corner).all(1)
        teacher.learn(rows, torch.where(short, -4.0, 0.1))
    drawn = Sampler(teacher.loss.forward_policy).sample_trajectories(trainer.env, 500)
    share = (drawn.terminating_states == corner).all(1).float().mean()
    # Reward log(321) there against log(1.011) at 35 other states.
    expected = math.log(321.001) / (math.log(321.001) + 35 * math.log(1.011))
    assert expected == pytest.approx(0.94, abs=0.01)
    assert 0.6 < float(share) < expected + 0.05


@pytest.mark.parametrize("residual", [6.0, 2.0, -0.5, -5.0])
@pytest.mark.parametrize(("rule", "c"), [(TeacherReward(), 19.0), (TeacherReward(2.0), 2.0)])
def test_the_teachers_reward_is_the_published_one(rule, c, residual):
    expected = published_reward(residual, c)
    assert rule(torch.tensor([residual])).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "loss"), [("priority", "tb"), ("priority", "db"), ("teacher", "db")]
)
def test_an_item_learnt_from_has_the_priority_of_its_rule(rule, loss):
    """With hardly any learning rate, the residuals can be computed afterwards."""
    options = {"replay_ratio": 0.5, "capacity": 500, "loss": loss, "lr": 1e-12}
    if loss == "tb":
        options["lr_log_z"] = 1e-12
    trainer = Trainer(grid(draw=rule, **options))
    drawn, sample = [], trainer.rb.sample
    trainer.rb.sample = lambda n: drawn.append(sample(n)) or drawn[-1]
    trainer.step()
    items, index = Trajectories.from_tensordict(drawn[0]), drawn[0][INDEX]
    steps, lengths = (items, [1] * 4) if loss == "tb" else (items.to_transitions(), items.length)
    each = trainer.loss.residual(steps).detach().split([*map(int, lengths)])
    by_hand = {"priority": abs, "teacher": published_reward}[rule]
    expected = [sum(map(by_hand, part.tolist())) / len(part) for part in each]
    held = trainer.rb.sampler._column.values(trainer.rb.storage)
    assert held[index].tolist() == pytest.approx(expected, rel=1e-3)
    never_drawn = torch.ones(len(held), dtype=torch.bool).index_fill(0, index, False)
    assert never_drawn.any()
    assert (held[never_drawn] == 1).all()
