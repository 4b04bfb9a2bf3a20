"""The temperature of fresh trajectories, which follows how many of their objects are new."""

import math

import pytest

from gfn_rb.training import BoxConfig, HyperGridConfig, Trainer
from gfn_rb.training.sources import AdaptiveTemperature


def test_half_of_a_batch_new_leaves_the_temperature():
    temperature = AdaptiveTemperature()
    temperature.update(8 / 16)
    assert temperature.value == 1.0
    temperature.update(4 / 16)  # three quarters were found before: a quarter more than half
    assert temperature.value == pytest.approx(math.exp(0.05 * 0.25))


@pytest.mark.parametrize(("n_new", "bound"), [(16, 0.5), (0, 2.0)])
def test_the_temperature_stays_in_its_range(n_new, bound):
    temperature = AdaptiveTemperature()
    for _ in range(100):
        temperature.update(n_new / 16)
    assert temperature.value == bound


def used_by(config, n_steps=3):
    """The temperatures that trajectories of a run were sampled at."""
    trainer, used = Trainer(config), []
    sample = trainer.source.sampler.sample_trajectories

    def watched(*args, temperature, **options):
        used.append(temperature)
        return sample(*args, temperature=temperature, **options)

    trainer.source.sampler.sample_trajectories = watched
    for _ in range(n_steps):
        trainer.step()
    return trainer, used


def test_fresh_trajectories_are_sampled_at_the_temperature():
    trainer, used = used_by(HyperGridConfig(ndim=2, height=3, hidden=(8,)), 11)
    assert used[1::2] == [1.0] * 5  # every other batch is of the policy itself
    assert used[0] == 1.0
    assert used[-1] > 1.0  # nine objects are soon found
    assert trainer.temperature.value > used[-1]
    assert used_by(HyperGridConfig(ndim=2, height=3, hidden=(8,), temperature=1.5))[1] == [1.5] * 3


def test_continuous_states_are_sampled_at_1():
    assert used_by(BoxConfig(hidden=(8,)))[1] == [1.0] * 3
