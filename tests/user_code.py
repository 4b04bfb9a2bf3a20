"""A program of a user, which type checkers accept except where a line says ``# wrong``.

``tests/test_typing.py`` checks it with mypy and pyright."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import assert_type

from gfn_rb import (
    DiversityWriter,
    FIFOWriter,
    GroupSampler,
    MergedReplayBuffer,
    PrioritySampler,
    RaggedStorage,
    RankRewardSampler,
    RewardPrioritizedWriter,
    RowMemmapStorage,
    Sampler,
    SoftmaxRewardSampler,
    Trajectories,
    diverse_buffer,
    fifo_buffer,
    load_checkpoint,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.buffers import GFNReplayBuffer
from gfn_rb.buffers.summary import BufferSummary
from gfn_rb.checkpoint import Journal
from gfn_rb.envs import HyperGrid
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.training import train
from gfn_rb.training.config import TFBind8Config

env = HyperGrid(ndim=2, height=8)
keys = ["state"]  # a list of strings, not of nested keys
rb = reward_prioritized_buffer(100, env=env, compact="narrow", batch_size=4)
assert_type(rb, GFNReplayBuffer)
assert_type(rb.summary(), BufferSummary)
assert_type(rb.extend({"state": torch.zeros(3, 2), "log_reward": torch.zeros(3)}), Tensor)
assert_type(rb.can_sample(4), bool)
rb.add(TensorDict({"state": torch.zeros(2), "log_reward": torch.zeros(())}, []))
rb.sample(3).to_tensordict()
rows, info = rb.sample(3, return_info=True)
rows.to_tensordict()
rb.best(k=3).to_tensordict()

fifo_buffer(10, unique=keys, group=[("next", "prompt")], per_group=2, max_age=4)
fifo_buffer(10, sampler=GroupSampler("prompt", num_groups=2, weight="variance"))
fifo_buffer(10, sampler=PrioritySampler(alpha=1.0), storage=RowMemmapStorage(10))
fifo_buffer(10, storage=RaggedStorage(10, ragged={"tokens": 8}, text=["tokens"]))
diverse_buffer(10, cutoff_distance=0, features=lambda rows: rows["state"].float())
terminating_state_buffer(10, sampler=RankRewardSampler(k=0.01))
transition_buffer(10, writer=RewardPrioritizedWriter(key="episode_log_reward"))
merged = MergedReplayBuffer(rb, fifo_buffer(10), p="mass")
assert_type(merged, MergedReplayBuffer)
merged.sample(3).to_tensordict()

forward, backward = ForwardPolicy(env), UniformBackwardPolicy(env)
trajectories = Sampler(forward).sample_trajectories(env, n=8, epsilon=0.1)
assert_type(trajectories, Trajectories)
rb.extend(trajectories)
loss = TrajectoryBalance(forward, backward, env, LogZ())
loss(trajectories).backward()

save_checkpoint("rb.ckpt", rb)
load_checkpoint("rb.ckpt", rb)
open_buffer("rb.ckpt").sample(3)
Journal(rb, "rb.journal").close()
train(TFBind8Config(steps=10, hidden=(8, 8)))

fifo_buffer(10, unique=3)  # wrong
fifo_buffer("ten")  # wrong
fifo_buffer(10, prefetch="two")  # wrong
FIFOWriter(unique=3)  # wrong
RewardPrioritizedWriter(tie="new")  # wrong
DiversityWriter(cutof_distance=1.0)  # wrong
SoftmaxRewardSampler(temperature="high")  # wrong
GroupSampler("prompt", weight="variances")  # wrong
PrioritySampler(apha=1.0)  # wrong
HyperGrid(ndim="2", height=8)  # wrong
MergedReplayBuffer(rb, 3)  # wrong, which mypy does not see: torchrl has no types for it
TFBind8Config(steps="ten")  # wrong
rb.summry()  # wrong, which mypy does not see
