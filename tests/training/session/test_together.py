"""Ranks that train together, in threads: averaged gradients, and the steps at which they meet."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from training.session.test_star import together

from gfn_rb.training.session import rank_hooks
from gfn_rb.training.session.joining import Star
from gfn_rb.training.session.rank_hooks import GradientAverage, Meetings
from gfn_rb.training.session.run import StopSignals
from gfn_rb.training.trainer import Trainer
from gfn_rb.transports import LocalTransport


def module(rank):
    found = nn.Linear(3, 2).requires_grad_(True)
    with torch.no_grad():
        found.weight.fill_(rank)
        found.bias.fill_(10.0 * rank)
    return found


def graded(found, value):
    for parameter in found.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return found


@pytest.fixture
def three():
    transports = LocalTransport.group(3, timeout=5.0)
    return [GradientAverage(Star(each, range(3), 5.0)) for each in transports]


def averaged(averages, modules, values):
    def one(average, found, value):
        average(graded(found, value))
        return found.weight.grad[0, 0].item(), found.bias.grad[0].item()

    return together(lambda row: one(*row), *zip(averages, modules, values, strict=True))


def test_all_have_the_mean_and_from_the_first_round_on_the_same_parameters(three):
    averages = three
    modules = [module(rank) for rank in range(3)]
    assert averaged(averages, modules, [1.0, 2.0, 6.0]) == [(3.0, 3.0)] * 3
    assert all((each.weight == 1.0).all() and (each.bias == 10.0).all() for each in modules)
    with torch.no_grad():
        modules[0].weight.fill_(7.0)
    assert averaged(averages, modules, [0.0, -3.0, 0.0]) == [(-1.0, -1.0)] * 3
    assert [each.weight[0, 0].item() for each in modules] == [7.0, 1.0, 1.0]
    # Clipping in place changes no message that is still on its way.
    assert all(each.weight.grad.untyped_storage().nbytes() == 4 * 6 for each in modules)


def test_without_a_gradient_a_parameter_counts_as_zero_and_a_frozen_one_is_each_ranks_own(three):
    averages = three
    modules = [graded(module(rank), 3.0) for rank in range(3)]
    modules[1].weight.grad = None
    for each in modules:
        each.bias.requires_grad_(False)
        each.bias.grad = None
    together(lambda i: averages[i](modules[i]), *range(3))
    assert [each.weight.grad[0, 0].item() for each in modules] == [2.0] * 3
    assert [each.bias[0].item() for each in modules] == [0.0, 10.0, 20.0]
    assert all(each.bias.grad is None for each in modules)


def test_a_rank_alone_keeps_its_gradients():
    average, found = GradientAverage(Star(LocalTransport.group(1)[0], [0], 5.0)), module(0)
    average(graded(found, 4.0))
    assert found.weight.grad[0, 0] == 4.0


def found(step, n_modes):
    return SimpleNamespace(calls=8 * step, modes_found=n_modes)


def trainer_of(**attributes):
    trainer = object.__new__(Trainer)
    vars(trainer).update(attributes)
    return trainer


class Ranks:
    """Ranks that take steps and meet, as many as asked for, each in a thread."""

    def __init__(self, size, steps=20, save_every=6):
        self.steps, self.stop = steps, [StopSignals() for _ in range(size)]
        transports = LocalTransport.group(size, timeout=5.0)
        stars = [Star(each, range(size), 5.0) for each in transports]
        pairs = zip(stars, self.stop, strict=True)
        self.meetings = [Meetings(*each, save_every) for each in pairs]

    def taken(self, rank, told=()):
        """How many steps a rank takes; it is told to stop after some."""
        meetings, config = self.meetings[rank], SimpleNamespace(steps=self.steps)
        for step in range(1, self.steps + 1):
            if (rank, step) in told:
                self.stop[rank].request()
            meetings.stepped(
                trainer_of(config=config, steps_done=step, discovery=found(step, rank))
            )
            if meetings.stops:
                return step
        return self.steps


def test_all_ranks_stop_after_the_same_step_though_one_alone_was_told():
    ranks = Ranks(3)
    found = together(lambda rank: ranks.taken(rank, {(1, 7)}), *range(3))
    assert len({*found}) == 1
    assert 7 <= found[0] <= 12  # at the latest when the next checkpoint is due
    assert all(each.received is not None for each in ranks.stop)
    assert Ranks(1).taken(0, {(0, 7)}) == 7  # alone, at once


def test_ranks_meet_when_a_checkpoint_is_due_and_know_the_progress_of_all(monkeypatch):
    monkeypatch.setattr(rank_hooks, "_EVERY", 1e9)
    ranks, steps = Ranks(2), []
    share = ranks.meetings[0]._star.share
    ranks.meetings[0]._star.share = lambda meta: (steps.append(meta["next"]), share(meta))[1]
    assert together(ranks.taken, 0, 1) == [20, 20]
    assert steps == [6, 12, 18, 24, 24]  # after the first step, and then at each checkpoint
    trainer = trainer_of(discovery=found(125, 3), env=SimpleNamespace(n_modes=4))
    assert ranks.meetings[0].describe(trainer, 1.25) == (
        "modes 3|1 of 4, 1,160 reward calls, loss 1.250"
    )
