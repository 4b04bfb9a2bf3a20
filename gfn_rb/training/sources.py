"""How fresh trajectories of a training run are sampled: their temperature, and a teacher."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

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


def adapted(temperature: float, share_new: float) -> float:
    r"""Return the next temperature of exploring batches, given what share of objects was new.

    T is multiplied by :math:`\exp(g (1/2 - s))` with g = 0.05 and the share s, and kept from 1/2 to
    2, so that about half of the objects are new: trajectories get flatter where the policy repeats
    itself, and sharper where most of what it finds is new.
    """
    return min(max(temperature * math.exp(0.05 * (0.5 - share_new)), 0.5), 2.0)


class Teacher:
    """A policy that is trained to sample what another one, the student, fits badly.

    It has networks of its own, and learns by trajectory balance from the student's trajectories.
    Its reward is log R_T(x) = log r(residual) + alpha log R(x), with r of ``TeacherReward`` and the
    student's residual (Kim et al. 2025, arXiv:2410.01432).
    """

    def __init__(self, config: TrainConfig, env: GFNEnv, seed: int) -> None:
        self._config = replace(config, loss="tb", regression="squared")
        self.loss = make_loss(self._config, env, seed)
        self.optimizer = make_optimizer(self._config, self.loss)
        self.reward = TeacherReward(config.teacher.c)
        self.sampler = Sampler(self.loss.forward_policy)
        self._is_new, self._n_batches = config.log_z is None, 0

    def is_next(self) -> bool:
        """Count a batch, and return whether the teacher is to sample it."""
        before, share = self._n_batches, self._config.teacher.share
        self._n_batches += 1
        return int(self._n_batches * share) > int(before * share)

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
