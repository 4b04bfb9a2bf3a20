from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from training.training_runs import DNA, equal, grid

from gfn_rb.training import BoxConfig, HyperGridConfig, SearchOptions, Trainer
from gfn_rb.training.objectives import adapted


def test_the_policy_is_sampled_as_told():
    trainer = Trainer(grid(epsilon=0.25))
    options = {"epsilon": 0.25, "generator": torch.Generator().manual_seed(3)}
    trainer.generator.manual_seed(3)
    expected = trainer.sampler.sample_trajectories(trainer.env, n=9, **options)
    equal(trainer.sample(9).to_tensordict().to_dict(), expected.to_tensordict().to_dict())


def searched(config, loops, back_ratio):
    """Fresh trajectories of a step, and the proposals of searches around them."""
    trainer, found = Trainer(replace(config, search=SearchOptions(loops, back_ratio))), []
    store = trainer.discovery.add
    trainer.discovery.add = lambda fresh: found.append(fresh) or store(fresh)
    trainer.step()
    return trainer, found[0]


def test_a_search_undoes_the_share_it_is_told():
    """8-mers have 8 moves: with a quarter undone, the first 6 letters stay."""
    _, found = searched(DNA, 1, 0.25)
    before, after = found.terminating_states.chunk(2)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before, after)


def test_half_of_a_batch_new_leaves_the_temperature():
    assert adapted(1.0, 8 / 16) == 1.0
    # Three quarters were found before: a quarter more than half.
    assert adapted(1.0, 4 / 16) == pytest.approx(math.exp(0.05 * 0.25))
    assert (adapted(0.5, 1.0), adapted(2.0, 0.0)) == (0.5, 2.0)


def used_by(config, n_steps=3):
    """The temperatures that trajectories of a run were sampled at."""
    trainer, used = Trainer(config), []
    sample = trainer.sampler.sample_trajectories

    def watched(*args, temperature, **options):
        used.append(temperature)
        return sample(*args, temperature=temperature, **options)

    trainer.sampler.sample_trajectories = watched
    for _ in range(n_steps):
        trainer.step()
    return trainer, used


def test_fresh_trajectories_are_sampled_at_the_temperature():
    trainer, used = used_by(HyperGridConfig(ndim=2, height=3, hidden=(8,)), 11)
    assert used[1::2] == [1.0] * 5  # every other batch is of the policy itself
    assert used[0] == 1.0
    assert used[-1] > 1.0  # nine objects are soon found
    assert trainer.temperature > used[-1]
    assert used_by(HyperGridConfig(ndim=2, height=3, hidden=(8,), temperature=1.5))[1] == [1.5] * 3


def test_continuous_states_are_sampled_at_1():
    assert used_by(BoxConfig(hidden=(8,)))[1] == [1.0] * 3
