"""Losses on trajectories."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from gfn_rb.containers import Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.rollout import trajectory_log_probs
from gfn_rb.rollout.log_probs import require_direction
from gfn_rb.shapes import Float


class TrajectoryBalance(nn.Module):
    """The trajectory balance loss (Malkin et al. 2022, arXiv:2201.13259).

    For a trajectory tau = (s_0, ..., s_m = x, sink) with residual

        delta(tau) = log Z_theta + sum_t log P_F(s_{t+1} | s_t)
                     - log R(x) - sum_t log P_B(s_t | s_{t+1})

    the loss is the mean of delta^2 over trajectories, from wherever they come: their stored
    log-probabilities are not used. Forward and backward rows can be mixed.

    A trajectory with R(x) = 0 has no finite residual. It is refused unless ``min_log_reward`` says
    what to take for log R(x), which then holds for every lower value too.

    Args:
        forward_policy: P_F.
        backward_policy: P_B.
        env: where the trajectories come from; it does not become a submodule.
        log_z: gives log Z_theta when called, such as :class:`gfn_rb.training.policies.LogZ`.
        penalty: what is averaged over rows, as a function of the residuals; a Huber loss, say,
            in place of the square.
        min_log_reward: floor under log R(x) in nats; none if None.

    Raises:
        ArgumentError: a policy goes the wrong way or does not say which.
    """

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNCore,
        log_z: nn.Module,
        *,
        penalty: Callable[[Tensor], Tensor] = torch.square,
        min_log_reward: float | None = None,
    ) -> None:
        super().__init__()
        if require_direction(forward_policy) or not require_direction(backward_policy):
            raise ArgumentError(
                "forward_policy must have is_backward False and backward_policy True, got "
                f"{forward_policy.is_backward} and {backward_policy.is_backward}"
            )
        self.forward_policy, self.backward_policy = forward_policy, backward_policy
        self.log_z, self.penalty, self.min_log_reward = log_z, penalty, min_log_reward
        self._env = (env,)  # in a tuple, so that an environment's buffers stay out of state_dict

    def forward(self, trajectories: Trajectories | TensorDictBase) -> Float[Tensor, ""]:
        """Return the mean penalty of the residuals.

        Args:
            trajectories: see ``residual``; at least one row.

        Raises:
            ArgumentError, NaNError: see ``residual``; also if there is no row.
        """
        if not len(trajectories):
            raise ArgumentError("trajectories must have at least one row, got none")
        return self.penalty(self.residual(trajectories)).mean()

    def residual(self, trajectories: Trajectories | TensorDictBase) -> Float[Tensor, "n"]:
        """Return delta(tau) of each row, in nats, with gradient.

        Args:
            trajectories: forward and backward rows in any mixture, as a container or as the
                TensorDict a replay buffer gives.

        Raises:
            ArgumentError: a row's log R(x) is infinite, or an action is illegal where it stands.
            NaNError: a log-reward or a log-probability is NaN.
            KeyMismatchError, ShapeError: a TensorDict does not hold trajectories.
        """
        if isinstance(trajectories, TensorDictBase):
            trajectories = Trajectories.from_tensordict(trajectories)
        (env,) = self._env
        log_z, log_reward = self.log_z(), trajectories.log_reward
        if self.min_log_reward is not None:
            log_reward = log_reward.clamp(min=self.min_log_reward)
        log_pf = trajectory_log_probs(self.forward_policy, env, trajectories).sum(1)
        log_pb = trajectory_log_probs(self.backward_policy, env, trajectories).sum(1)
        residual = log_z + log_pf - log_reward - log_pb
        if not residual.isfinite().all():
            terms = {"log_reward": log_reward, "log P_F": log_pf, "log P_B": log_pb}
            raise _not_finite({**terms, "log_z": log_z.expand(len(log_pf)), "residual": residual})
        return residual


_HINTS = {
    "log_reward": "min_log_reward puts a floor under it",
    "log P_F": "-inf stands for an action that is illegal in its state",
    "log P_B": "-inf stands for an action that is illegal in its state",
    "log_z": "it is the same for every row",
    "residual": "its terms overflow together",
}


def _not_finite(terms: dict[str, Float[Tensor, "n"]]) -> ArgumentError | NaNError:
    """Return the error that names the first term with a value that is not finite."""
    name = next(name for name, value in terms.items() if not value.isfinite().all())
    value = terms[name].detach()
    bad = value[~value.isfinite()]
    kind = NaNError if bad[0].isnan() else ArgumentError
    return kind(
        f"{name} must be finite, got {float(bad[0])} in {len(bad)} of {len(value)} rows; "
        f"{_HINTS[name]}"
    )
