"""Sources of the fresh trajectories of a training run: a policy, or a teacher."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.keys import LOG_REWARD
from gfn_rb.rollout import Sampler
from gfn_rb.shapes import Float
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.objectives import (
    clip_at,
    make_loss,
    make_optimizer,
    mean_per_item,
    take_step,
)
from gfn_rb.training.replay import TeacherReward


class AdaptiveTemperature:
    r"""The temperature of exploring batches, at which about half of the fresh objects are new.

    After each batch, T is multiplied by :math:`\exp(g (r - 1/2))` with g = 0.05, where r is the
    share of its objects that were found before, and kept from 1/2 to 2. Trajectories get flatter
    where the policy repeats itself, and sharper where most of what it finds is new.

    Attributes:
        value: the temperature now, the only state, which checkpoints hold.
    """

    GAIN, RANGE = 0.05, (0.5, 2.0)

    def __init__(self) -> None:
        self.value = 1.0

    def update(self, share_new: float) -> None:
        """Adapt to a batch, given the share of its objects that are new."""
        lowest, highest = self.RANGE
        value = self.value * math.exp(self.GAIN * (0.5 - share_new))
        self.value = min(max(value, lowest), highest)


@dataclass(frozen=True)
class Source:
    """Gives trajectories of a policy as it is now, from the environment's source state."""

    env: GFNEnv
    sampler: Sampler
    generator: torch.Generator
    epsilon: Callable[[], float]
    temperature: Callable[[], float] = lambda: 1.0

    def sample(self, n: int) -> Trajectories:
        """Return ``n`` fresh forward trajectories, with their rewards."""
        return self.sampler.sample_trajectories(
            self.env,
            n=n,
            generator=self.generator,
            epsilon=self.epsilon(),
            temperature=self.temperature(),
        )


class TeacherSource:
    """Takes some batches from a policy that is trained to sample what another fits badly.

    The other policy is the student, and its source gives the other batches. The teacher has
    networks of its own. It learns by trajectory balance, from the same trajectories as the student.
    Its reward is log R_T(x) = log r(residual) + alpha log R(x), with r of ``TeacherReward`` and the
    student's residual (Kim et al. 2025, arXiv:2410.01432).
    """

    def __init__(
        self,
        student: Source,
        config: TrainConfig,
        env: GFNEnv,
        generator: torch.Generator,
        seed: int,
        epsilon: Callable[[], float],
    ) -> None:
        self._config = replace(config, loss="tb", regression="squared")
        self.loss = make_loss(self._config, env, seed)
        self.optimizer = make_optimizer(self._config, self.loss)
        self.reward = TeacherReward(config.teacher.c)
        self.student = student
        self.teacher = Source(env, Sampler(self.loss.forward_policy), generator, epsilon)
        self._is_new, self._n_batches = config.log_z is None, 0

    def sample(self, n: int) -> Trajectories:
        """Return a batch of either policy."""
        before, share = self._n_batches, self._config.teacher.share
        self._n_batches += 1
        is_taught = int(self._n_batches * share) > int(before * share)
        return (self.teacher if is_taught else self.student).sample(n)

    def learn(self, batch: Container, residual: Float[Tensor, "m"]) -> None:
        """Take an optimiser step of the teacher."""
        assert isinstance(batch, Trajectories)  # as the configuration has made sure
        reward = mean_per_item(batch, self.reward(residual))
        log_reward = reward.log() + self._config.teacher.alpha * batch.log_reward
        rows = Trajectories.from_tensordict(batch.to_tensordict().set(LOG_REWARD, log_reward))
        if self._is_new:
            self.loss.fit_log_z(rows)
            self._is_new = False
        clip = clip_at(self._config.clip_grad_norm)
        take_step(self.optimizer, self.loss, self.loss(rows), clip)

    def state_dict(self) -> dict[str, Any]:
        """Return what the teacher has learnt, and the number of batches."""
        return {
            "policies": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "is_new": self._is_new,
            "n_batches": self._n_batches,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.loss.load_state_dict(state_dict["policies"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._is_new, self._n_batches = state_dict["is_new"], state_dict["n_batches"]
