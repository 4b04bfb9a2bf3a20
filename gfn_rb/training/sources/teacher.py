"""The adaptive teacher: a second policy, which samples what the first one fits badly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.keys import LOG_REWARD
from gfn_rb.shapes import Float
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.objectives import make_loss, make_optimizer, take_step
from gfn_rb.training.priority_rules import TeacherReward, mean_per_item
from gfn_rb.training.sources.base import Source


class Teacher:
    """A policy with networks of its own, trained to sample what another one fits badly.

    With the residual of that other policy, the student, and r from
    :class:`~gfn_rb.training.priority_rules.TeacherReward`, it learns to sample in proportion to

        log R_T(x) = log r(residual) + alpha log R(x)

    by trajectory balance, from all that the student learns from (Kim et al. 2025,
    arXiv:2410.01432).
    """

    def __init__(self, config: TrainConfig, env: GFNEnv, seed: int) -> None:
        self._config = replace(config, loss="tb", regression="squared")
        self.loss = make_loss(self._config, env, seed)
        self.optimizer = make_optimizer(self._config, self.loss)
        self.reward = TeacherReward(config.teacher.c)
        self._is_new = config.log_z is None

    def learn(self, batch: Trajectories, residual: Float[Tensor, "m"]) -> None:
        """Take an optimiser step."""
        reward = mean_per_item(batch, self.reward(residual))
        log_reward = reward.log() + self._config.teacher.alpha * batch.log_reward
        rows = Trajectories.from_tensordict(batch.to_tensordict().set(LOG_REWARD, log_reward))
        if self._is_new:
            self.loss.fit_log_z(rows)
            self._is_new = False
        take_step(self.optimizer, self.loss, self.loss(rows), self._config.clip_grad_norm)

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learnt."""
        return {
            "policies": self.loss.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "is_new": self._is_new,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.loss.load_state_dict(state_dict["policies"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self._is_new = state_dict["is_new"]


class TeacherSource(Source):
    """Takes some batches from a teacher's policy, the others from the student's."""

    def __init__(self, student: Source, teacher: Source, learner: Teacher, share: float) -> None:
        self.parts = {"student": student, "teacher": teacher}
        self._learner, self._share, self._n_batches = learner, share, 0

    def sample(self, n: int) -> Trajectories:
        """Return a batch of either policy."""
        before, self._n_batches = self._n_batches, self._n_batches + 1
        is_taught = int(self._n_batches * self._share) > int(before * self._share)
        return self.parts["teacher" if is_taught else "student"].sample(n)

    def learn(self, batch: Container, residual: Float[Tensor, "m"]) -> None:
        """Have the teacher learn."""
        assert isinstance(batch, Trajectories)  # as the configuration has made sure
        self._learner.learn(batch, residual)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both, and of the teacher."""
        own = {"learner": self._learner.state_dict(), "n_batches": self._n_batches}
        return super().state_dict() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        super().load_state_dict(state_dict)
        self._learner.load_state_dict(state_dict["learner"])
        self._n_batches = state_dict["n_batches"]
