"""Members and rows shared by the tests of merged buffers."""

import itertools

import numpy as np
import torch
from factories import buffer_of, seeded

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.samplers import SoftmaxRewardSampler


def member(log_reward=(), sampler=None, capacity=None, **kwargs):
    sampler = SoftmaxRewardSampler(**kwargs) if sampler is None else sampler
    return buffer_of(sampler, log_reward, capacity, seed=None)


def merged(log_rewards, p="mass", seed=0, batch_size=None, **kwargs):
    """One member per list of log-rewards, with a seeded generator."""
    members = [member(each, **kwargs) for each in log_rewards]
    return MergedReplayBuffer(*members, p=p, batch_size=batch_size, generator=seeded(seed))


def counts_of(log_rewards, batch):
    """How often each row was drawn, members one after another."""
    start = np.cumsum([0, *map(len, log_rewards)])
    drawn = start[batch["buffer_id"].numpy()] + batch["index"].numpy()
    return np.bincount(drawn, minlength=start[-1])


def softmax(log_rewards, temperature=1.0):
    flat = torch.tensor(list(itertools.chain(*log_rewards)), dtype=torch.float64)
    return torch.softmax(flat / temperature, 0).numpy()
