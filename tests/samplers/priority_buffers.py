"""Buffers that draw by a priority, and what their draws ought to be like."""

import numpy as np
import pytest
import torch
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.samplers import PrioritySampler

PRIORITY = [0.5, 2.0, 0.0, 8.0, 1.0]
# The two places where priorities can be.
places = pytest.mark.parametrize("key", [None, "loss"])


def rows(n, **entries):
    return TensorDict({"x": torch.arange(n), "log_reward": torch.zeros(n), **entries}, [n])


def buffer(priority=PRIORITY, key=None, capacity=None, storage=None, seed=0, **kwargs):
    """A buffer whose items have these priorities, however it keeps them."""
    sampler_kwargs = {
        name: kwargs.pop(name) for name in ("alpha", "beta", "eps", "replacement") if name in kwargs
    }
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity or len(priority)) if storage is None else storage,
        sampler=PrioritySampler(key, **sampler_kwargs),
        generator=torch.Generator().manual_seed(seed),
        **kwargs,
    )
    if len(priority):
        fill(rb, priority)
    return rb


def fill(rb, priority):
    priority = torch.as_tensor(priority)
    index = rb.extend(rows(len(priority), loss=priority))
    if rb.sampler.key is None:
        rb.update_priority(index, priority)


def law(priority, alpha=0.6, eps=1e-8):
    weight = (np.asarray(priority, float) + eps) ** alpha
    return weight / weight.sum()


def fits(rb, p, beta=None, n=20_000):
    """Whether draws have these probabilities, and are weighted and scored by them."""
    batch = rb.sample(n)
    index, p = batch["index"], np.asarray(p)
    np.testing.assert_allclose(batch["draw_log_prob"].exp(), p[index], rtol=1e-5)
    # The formula of Schaul et al., normalised by the largest weight that can occur.
    weight = (len(p) * p) ** -(rb.sampler.beta if beta is None else beta)
    np.testing.assert_allclose(batch["priority_weight"], (weight / weight.max())[index], rtol=1e-5)
    assert batch["priority_weight"].dtype == torch.float32
    return chi_square_p(np.bincount(index, minlength=len(p)), p) > 1e-3
