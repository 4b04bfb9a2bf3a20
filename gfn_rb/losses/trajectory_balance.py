"""Trajectory balance, one constraint per trajectory, and sub-trajectory balance, one per part."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from gfn_rb.arguments import require_kind
from gfn_rb.containers import Trajectories
from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.losses.base import BalanceLoss, SumLoss, require_finite_terms
from gfn_rb.losses.detailed_balance import StateFlowLoss, log_flows
from gfn_rb.rollout.log_probs import both_log_probs, places
from gfn_rb.shapes import ConditionBatch, Float, Floats, StateBatch


class TrajectoryBalance(BalanceLoss[Trajectories]):
    """The trajectory balance loss (Malkin et al. 2022, arXiv:2201.13259).

    For a trajectory tau = (s_0, ..., s_m = x, sink) with residual

        delta(tau) = log Z_theta + sum_t log P_F(s_{t+1} | s_t)
                     - log R(x) - sum_t log P_B(s_t | s_{t+1})

    the loss is the mean of delta^2 over trajectories from any source. A batch may contain forward
    and backward rows.

    A trajectory with R(x) = 0 has no finite residual and raises an error, unless ``min_log_reward``
    is set.

    Further arguments are those of :class:`~gfn_rb.losses.BalanceLoss`.

    Args:
        log_z: module that gives log Z_theta when called with the conditions [n, *C] of n
            trajectories, or with None if they have none. It returns one number, as
            :class:`~gfn_rb.policies.LogZ` does, or one per trajectory, as
            :class:`~gfn_rb.policies.ConditionalLogZ` does.
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

    def residual(self, batch: Trajectories | TensorDictBase) -> Floats:
        """Return delta(tau) of each row, in nats, with gradient.

        Raises:
            ShapeError: ``log_z`` gives neither one number nor one per row, or the rows do not fit.
        """
        trajectories = self._rows(batch)
        log_z, n = self.log_z(trajectories.condition), len(trajectories)
        if log_z.shape not in ((), (n,)):
            raise ShapeError(
                f"log_z must give one number or one for each of {n} rows, got shape "
                f"{list(log_z.shape)}"
            )
        log_z = log_z.expand(n)
        terms = self._terms(trajectories)
        log_reward, log_pf, log_pb = terms.values()
        # In this order a constant in log R and log Z leaves the residual as it is.
        residual = (log_z - log_reward) + (log_pf - log_pb)
        require_finite_terms(residual, {**terms, "log_z": log_z})
        return residual

    def _source_log_flow(self, source: StateBatch, condition: ConditionBatch | None) -> Floats:
        return self.log_z(condition).expand(len(source))


class VarGrad(BalanceLoss[Trajectories]):
    """The VarGrad loss: trajectory balance with log Z estimated from each batch.

    It is the variance over the batch of log P_F(tau) - log P_B(tau | x) - log R(x), which has the
    gradient of the log-variance divergence (Richter et al. 2020, arXiv:2010.10436; Zhang et al.
    2023, arXiv:2305.19843; Sendera et al. 2024, arXiv:2402.05098). The residual of a row is its
    difference from the mean, which has no gradient. Rows of a batch share one log Z, so rewards
    must not depend on a condition.

    Attributes:
        log_z: mean estimate of log Z over about the last 100 batches, in nats.

    Raises:
        ArgumentError: as by the base class, or the environment has conditions.
    """

    name = "vargrad"
    reads = Trajectories
    networks = ("forward_policy", "backward_policy")
    log_z: Tensor
    _n_batches: Tensor

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNEnv,
        **options: Any,
    ) -> None:
        super().__init__(forward_policy, backward_policy, env, **options)
        if env.condition_shape is not None:
            raise ArgumentError(
                f"env must have no conditions for VarGrad, got a {type(env).__name__}"
            )
        self.register_buffer("log_z", torch.tensor(0.0))
        self.register_buffer("_n_batches", torch.tensor(0))

    def residual(self, batch: Trajectories | TensorDictBase) -> Floats:
        """Return each row's difference from the batch's estimate of log Z, in nats, with gradient.

        That of a row without others is 0: nothing is learnt from it.
        """
        trajectories = self._rows(batch)
        terms = self._terms(trajectories)
        log_reward, log_pf, log_pb = terms.values()
        excess = (log_pf - log_pb) - log_reward
        require_finite_terms(excess, terms)
        mean = excess.detach().mean()
        if self.training and torch.is_grad_enabled():
            self._n_batches += 1
            self.log_z -= (self.log_z + mean) / self._n_batches.clamp(max=100)
        return excess - mean

    def _source_log_flow(self, source: StateBatch, condition: ConditionBatch | None) -> Floats:
        return self.log_z.expand(len(source))


class SubTrajectoryBalance(StateFlowLoss[Trajectories], SumLoss[Trajectories]):
    """The sub-trajectory balance loss SubTB(lambda) (Madan et al. 2022, arXiv:2209.12782).

    For a trajectory s_0, ..., s_{L-1} = x, s_L = sink, each part i < j has the residual

        delta_ij = log F(s_i) + sum_{i<=t<j} log P_F(s_{t+1} | s_t)
                   - log F(s_j) - sum_{i<=t<j} log P_B(s_t | s_{t+1})

    with log F(s_L) = log R(x). The loss of the trajectory is the weighted mean of delta_ij^2, in
    which a part of j - i steps has weight lambda^(j-i). A small lambda approaches detailed balance,
    a large lambda trajectory balance. With cumulative sums c_t of log P_F - log P_B, one
    subtraction gives all parts: delta_ij = (log F(s_i) - c_i) - (log F(s_j) - c_j).

    A batch may contain forward and backward rows. Memory grows with the square of the padded
    length.

    Further arguments are those of :class:`~gfn_rb.losses.BalanceLoss`.

    Args:
        state_flow: module that gives log F in nats, such as :class:`~gfn_rb.policies.StateFlow`.
        subtb_lambda: weight of each further step, above 0.
    """

    name = "subtb"
    reads = Trajectories
    networks = ("forward_policy", "backward_policy", "state_flow")
    options = ("subtb_lambda",)

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNEnv,
        state_flow: TensorDictModuleBase,
        *,
        subtb_lambda: float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(forward_policy, backward_policy, env, state_flow, **options)
        if not 0 < subtb_lambda < math.inf:
            raise ArgumentError(f"subtb_lambda must be a positive number, got {subtb_lambda!r}")
        self.subtb_lambda = float(subtb_lambda)

    def terms(
        self, batch: Trajectories | TensorDictBase
    ) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Return delta_ij of each row, k = (T+1)^2 of them, and their weights, which sum to 1.

        Pairs that are no part of a row (i >= j, or beyond its end) have weight 0.
        """
        trajectories = self._rows(batch).forward()
        potential = self._potentials(trajectories)
        delta = potential[:, :, None] - potential[:, None, :]
        at = torch.arange(potential.shape[1], device=potential.device)
        n_steps = at - at[:, None]
        is_part = (n_steps > 0) & (at <= trajectories.length[:, None, None])
        log_weight = (n_steps * math.log(self.subtb_lambda)).to(potential.dtype)
        masked = log_weight.where(is_part, -torch.inf)
        weight = masked.flatten(1).softmax(1).view_as(delta)
        # What is no part is cleared: a penalty of it might overflow, and infinity times 0 is NaN.
        return delta.where(weight > 0, 0).flatten(1), weight.flatten(1)

    def _potentials(self, trajectories: Trajectories) -> Float[Tensor, "n T1"]:
        """Return log F(s_t) - c_t of forward rows; beyond the sink, any finite number."""
        log_reward = self._floored(trajectories.log_reward)
        log_pf, log_pb = both_log_probs(
            self.forward_policy, self.backward_policy, self.env, trajectories
        )
        # The network is called on real steps alone: padding costs as much, and need be no state.
        (row, step), _ = places(trajectories.real_steps)
        condition = None if trajectories.condition is None else trajectories.condition[row]
        flow = log_flows(self.state_flow, trajectories.state[row, step], condition)
        sums = (log_pf - log_pb).cumsum(1)
        log_flow = sums.new_zeros(trajectories.state.shape[:2])
        log_flow = log_flow.index_put((row, step), flow.to(sums.dtype))
        last = torch.arange(len(trajectories), device=row.device), trajectories.length
        log_flow = log_flow.index_put(last, log_reward.to(sums.dtype))
        potential = torch.cat([log_flow[:, :1], log_flow[:, 1:] - sums], 1)
        terms = {"log_reward": log_reward, "log P_F": log_pf, "log P_B": log_pb, "log F": flow}
        require_finite_terms(potential, terms)
        return potential
