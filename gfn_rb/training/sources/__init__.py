"""Sources of fresh trajectories: this process or others, a local search, a teacher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict.nn import TensorDictModuleBase

from gfn_rb.envs import GFNEnv
from gfn_rb.losses import Loss
from gfn_rb.rollout import LocalSearchSampler
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.objectives import backward_policy
from gfn_rb.training.sources.base import (
    LocalSearchSource,
    PolicySource,
    Source,
    Teacher,
    TeacherSource,
)
from gfn_rb.training.sources.worker import WorkerSource

__all__ = [
    "LocalSearchSource",
    "PolicySource",
    "Source",
    "Teacher",
    "TeacherSource",
    "WorkerSource",
    "make_source",
]


def make_source(
    config: TrainConfig,
    env: GFNEnv,
    loss: Loss,
    generator: torch.Generator,
    seeds: tuple[int, int],
    epsilon: Callable[[], float],
) -> Source:
    """Return the source that a configuration asks for."""
    initial, rollout = seeds

    def sampling(policy: TensorDictModuleBase, seed: int) -> Source:
        if not config.workers:
            return PolicySource(env, policy, generator, epsilon)
        return WorkerSource(
            config.make_env, policy, config.workers, seed=seed, device=config.device,
            epsilon=config.epsilon,
        )  # fmt: skip

    source = sampling(loss.forward_policy, rollout)
    if config.teacher.share:
        teacher = Teacher(config, env, initial)
        by_teacher = sampling(teacher.loss.forward_policy, rollout + 1)
        source = TeacherSource(source, by_teacher, teacher, config.teacher.share)
    if not config.search.loops:
        return source
    sampler, search = LocalSearchSampler(loss.forward_policy, backward_policy(loss)), config.search
    return LocalSearchSource(source, sampler, env, search.loops, search.back_ratio, generator)
