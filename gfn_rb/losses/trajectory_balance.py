"""Trajectory balance: one constraint per trajectory."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from gfn_rb.arguments import require_kind
from gfn_rb.containers import Trajectories
from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ShapeError
from gfn_rb.losses.base import BalanceLoss, require_finite
from gfn_rb.shapes import ConditionBatch, Float, StateBatch


class TrajectoryBalance(BalanceLoss[Trajectories]):
    """The trajectory balance loss (Malkin et al. 2022, arXiv:2201.13259).

    For a trajectory tau = (s_0, ..., s_m = x, sink) with residual

        delta(tau) = log Z_theta + sum_t log P_F(s_{t+1} | s_t)
                     - log R(x) - sum_t log P_B(s_t | s_{t+1})

    the loss is the mean of delta^2 over trajectories from any source. A batch may contain forward
    and backward rows.

    A trajectory with R(x) = 0 has no finite residual and raises an error, unless ``min_log_reward``
    is set.

    Args:
        forward_policy: module that gives P_F, such as :class:`~gfn_rb.policies.ForwardPolicy`.
        backward_policy: module that gives P_B, such as :class:`~gfn_rb.policies.BackwardPolicy` or
            :class:`~gfn_rb.policies.UniformBackwardPolicy`.
        env: environment of the rows, a :class:`~gfn_rb.envs.GFNEnv`; not a submodule of the loss.
        log_z: module that gives log Z_theta when called with the conditions [n, *C] of n
            trajectories, or with None if they have none. It returns one number, as
            :class:`~gfn_rb.policies.LogZ` does, or one per trajectory, as
            :class:`~gfn_rb.policies.ConditionalLogZ` does.
        **options: keywords below.

    Keyword Args:
        penalty: callable from residuals [n] in nats to costs [n]. Default: ``torch.square``;
            :func:`~gfn_rb.losses.linex` is another.
        min_log_reward: lower bound that replaces smaller log-rewards, in nats. Default: None, and a
            log-reward of -inf raises an error.
        log_pf: "computed" evaluates the forward policy, and "stored" uses the rows' ``log_prob``
            with the gradient of ``Sampler.sample_trajectories(..., save_logprobs=True,
            requires_grad=True)``. Default: "computed".

    Raises:
        ArgumentError: a policy has the wrong direction or none, or an option is out of range.
    """

    name = "tb"
    reads = Trajectories
    networks = ("forward_policy", "backward_policy", "log_z")
    scales = ("log_z.value", "log_z.head.bias")

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNEnv,
        log_z: nn.Module,
        **options: Any,
    ) -> None:
        super().__init__(forward_policy, backward_policy, env, **options)
        require_kind("log_z", log_z, nn.Module)
        self.log_z = log_z

    def residual(self, batch: Trajectories | TensorDictBase) -> Float[Tensor, "n"]:
        """Return delta(tau) of each row, in nats, with gradient.

        Raises:
            ShapeError: ``log_z`` gives neither one number nor one per row, or the rows do not fit.
        """
        trajectories = self._rows(batch)
        log_z = self._log_z_of(trajectories)
        log_reward = self._floored(trajectories.log_reward)
        log_pf, log_pb = (each.sum(1) for each in self._log_probs(trajectories))
        residual = log_z + (log_pf - log_reward - log_pb)
        terms = {"log_reward": log_reward, "log P_F": log_pf, "log P_B": log_pb, "log_z": log_z}
        require_finite(residual, terms)
        return residual

    def _end_residual(self, fresh: Trajectories) -> Float[Tensor, "n"]:
        return self.residual(fresh)

    def _source_log_flow(
        self, source: StateBatch, condition: ConditionBatch | None
    ) -> Float[Tensor, "n"]:
        return self.log_z(condition).expand(len(source))

    def _log_z_of(self, trajectories: Trajectories) -> Float[Tensor, "n"]:
        log_z = self.log_z(trajectories.condition)
        if log_z.shape not in ((), (len(trajectories),)):
            raise ShapeError(
                f"log_z must give one number or one for each of {len(trajectories)} rows, got "
                f"shape {list(log_z.shape)}"
            )
        return log_z.expand(len(trajectories))
