"""Base classes of losses: residuals of the rows of one container, and their mean penalty."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from gfn_rb.arguments import require_number
from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs.base import GFNEnv, require_env
from gfn_rb.errors import ArgumentError, NaNError, ShapeError
from gfn_rb.gone import NamesGoneOptions
from gfn_rb.numerics.flat import is_readable
from gfn_rb.rollout.log_probs import both_log_probs
from gfn_rb.rollout.outputs import require_direction
from gfn_rb.shapes import ConditionBatch, Float, Floats, StateBatch
from gfn_rb.torchrl_compat import assert_on_device

_ILLEGAL = "-inf stands for an action that is illegal in its state"
_HINTS = {
    "log_reward": "min_log_reward puts a floor under it",
    "log P_F": _ILLEGAL,
    "log P_F(exit)": "-inf stands for a state that is not terminating",
    "log P_B": _ILLEGAL,
    "log F": "it is what the network of flows gives",
    "log F(exit)": "-inf stands for a state that is not terminating",
    "log_z": "it is what the module log_z gives",
    "residual": "its terms overflow together",
}


def require_finite_terms(residual: Float[Tensor, "..."], terms: Mapping[str, Tensor]) -> None:
    """Raise unless residuals are finite, naming the first of their terms that is not."""
    named = {**terms, "residual": residual}
    if not is_readable(residual):  # the device raises, so as not to wait for it
        for name, value in named.items():
            assert_on_device(value.isfinite().all(), f"{name} must be finite; {_HINTS[name]}")
        return
    if residual.isfinite().all():
        return
    name = next(name for name, value in named.items() if not value.isfinite().all())
    is_bad = ~named[name].isfinite()
    first = float(named[name].detach()[is_bad][0])
    n_bad = int(is_bad.reshape(len(is_bad), -1).any(1).sum())
    kind = NaNError if math.isnan(first) else ArgumentError
    raise kind(
        f"{name} must be finite, got {first} in {n_bad} of {len(is_bad)} rows; {_HINTS[name]}"
    )


LOSSES: dict[str, type[Loss]] = {}
"""The losses, by name."""

C = TypeVar("C", bound=Container)
Penalty = Callable[[Tensor], Tensor]


def linex(
    residual: Float[Tensor, "..."], alpha: float = 1.0, limit: float = 10.0
) -> Float[Tensor, "..."]:
    r"""Return the Linex cost :math:`(e^{\alpha t} - \alpha t - 1) / \alpha^2` of residuals -t.

    t is log(backward flow / forward flow), the negative residual of a loss. The cost punishes too
    little flow more than too much; at alpha = 1 it has the gradient of the forward KL divergence
    (Hu et al. 2025, "Beyond Squared Error", arXiv:2410.02596). Near 0 it is half the square.

    Above alpha t = limit it continues along its tangent, because early residuals of hundreds of
    nats have an infinite exponential. A limit of 2 fits simple targets sooner, as Adam takes small
    steps after large gradients; but it finds rare goals with fewer seeds.

    Args:
        residual: residuals of a loss, in nats.
        alpha: asymmetry, above 0. Near 0 the cost approaches half the square.
        limit: largest alpha t with an exponential cost, above 0.
    """
    shortfall = -alpha * residual
    beyond = (shortfall - limit).clamp(min=0)
    cost = shortfall.clamp(max=limit).expm1() + math.exp(limit) * beyond - shortfall
    return cost / alpha**2


class Loss(NamesGoneOptions, nn.Module, ABC, Generic[C]):
    """Base class of losses: constraints that hold in every row once the policy is right.

    ``residual`` returns by how much each row violates its constraint, in nats, ``evaluate`` returns
    its cost too, and a call returns the mean cost. Rows may come from any policy.

    A subclass defines ``reads``, ``networks`` and ``residual``. A subclass with a ``name`` is
    available under that name in configurations.

    Attributes:
        name: name in configurations.
        reads: container class that the loss reads.
        networks: names of the constructor's arguments that are modules.
        options: fields of a configuration that the constructor accepts.
        every_state_terminates: whether the loss requires that every state terminates.
        takes_parameters: whether moves may have parameters.
        is_signed: whether the sign of a residual tells too much flow from too little, as Linex and
            the adaptive teacher need.
        scales: parameters that each shift all log flows; see :meth:`fit_log_z`.

    Args:
        forward_policy: module that gives P_F.
        env: environment of the rows; not a submodule of the loss.
        penalty: callable from residuals [n] in nats to costs [n], such as ``torch.square`` or
            :func:`linex`.
        min_log_reward: lower bound that replaces smaller log-rewards, in nats. None for no bound: a
            log-reward of -inf raises an error.

    Raises:
        ArgumentError: a policy has the wrong direction or none.
    """

    name: str
    reads: type[C]
    networks: tuple[str, ...]
    options: tuple[str, ...] = ()
    every_state_terminates: bool = False
    takes_parameters: bool = True
    is_signed: bool = True
    scales: tuple[str, ...] = ()
    env: GFNEnv

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in vars(cls):
            return
        known = LOSSES.setdefault(cls.name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ArgumentError(
                f"name of {cls.__name__} must be new, got {cls.name!r}, as {known.__name__} has"
            )
        LOSSES[cls.name] = cls  # defined anew, as in a notebook

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        env: GFNEnv,
        *,
        penalty: Penalty = torch.square,
        min_log_reward: float | None = None,
    ) -> None:
        super().__init__()
        if require_direction(forward_policy, "forward_policy"):
            raise ArgumentError("forward_policy must have is_backward False, got True")
        require_env(env)
        if env.action_shape and not self.takes_parameters:
            raise ArgumentError(
                f"env must have numbered actions for {type(self).__name__}, got a "
                f"{type(env).__name__}, whose moves have parameters"
            )
        if not callable(penalty):
            raise ArgumentError(f"penalty must be a callable, got {penalty!r}")
        if min_log_reward is not None:
            require_number("min_log_reward", min_log_reward)
        self.forward_policy = forward_policy
        self.penalty, self.min_log_reward = penalty, min_log_reward
        vars(self)["env"] = env  # not as a submodule: it is not saved with the loss

    def forward(self, batch: C | TensorDictBase) -> Float[Tensor, ""]:
        """Return the mean cost of the rows, at least one; arguments are as of :meth:`residual`."""
        if not hasattr(batch, "__len__") or not len(batch):
            self._rows(batch)  # which raises for what is no batch
            name = self.reads.__name__.lower()
            raise ArgumentError(f"{name} must have at least one row, got none")
        return self.evaluate(batch)[0].mean()

    def evaluate(self, batch: C | TensorDictBase) -> tuple[Floats, Floats]:
        """Return each row's cost and its residual, both with gradient. See :meth:`residual`."""
        residual = self.residual(batch)
        return self.penalty(residual), residual

    @abstractmethod
    def residual(self, batch: C | TensorDictBase) -> Floats:
        """Return by how much each row violates its constraint, in nats, with gradient.

        It is above 0 if the flow of the policies is larger than the reward requires, and below 0 if
        it is smaller.

        Args:
            batch: container, or TensorDict of its fields, such as a draw from a buffer.

        Raises:
            ArgumentError: another container, an infinite log-reward, or an illegal action.
            NaNError: a log-reward or an output of a network is NaN.
            KeyMismatchError, ShapeError: the TensorDict does not have the container's fields.
        """

    def estimate_log_z(self, condition: ConditionBatch | None = None) -> Float[Tensor, "..."]:
        """Return the learned log Z in nats, log F(s_0).

        Args:
            condition: conditions, if the environment has them.

        Returns:
            One number for each condition; a tensor without dimension if there are none.
        """
        source = self.env.source(1 if condition is None else len(condition))
        flow = self._source_log_flow(source, condition)
        return flow[0] if condition is None else flow

    @abstractmethod
    def _source_log_flow(self, source: StateBatch, condition: ConditionBatch | None) -> Floats:
        """Return log F(s_0), given the source state n times and a condition for each, if any."""

    @torch.no_grad()
    def fit_log_z(self, fresh: Trajectories) -> None:
        """Set log Z, or the scale of all flows, to what some trajectories estimate.

        The log-mean-exp of log R + log P_B - log P_F estimates log Z, and hardly depends on objects
        of next to no reward. It moves with a constant in log R, which then changes nothing else. A
        loss without flows is unchanged.

        Args:
            fresh: trajectories of the policy with new networks.
        """
        if self.scales:
            shortfall = -self._end_residual(fresh)
            excess = math.log(len(shortfall)) - shortfall.logsumexp(0)
            for name, parameter in self.named_parameters():
                if name in self.scales:
                    parameter.sub_(excess)

    def _end_residual(self, fresh: Trajectories) -> Floats:
        """Return residuals that a shift of ``scales`` shifts by as much."""
        return self.residual(fresh)

    def n_reward_calls(self, rows: C) -> int:
        """Return how many reward calls the loss makes for some rows."""
        return 0

    def _rows(self, batch: C | TensorDictBase) -> C:
        if isinstance(batch, TensorDictBase):
            batch = self.reads.from_tensordict(batch)
        if not isinstance(batch, self.reads):
            raise ArgumentError(
                f"{type(self).__name__} reads {self.reads.__name__}, got {type(batch).__name__}"
            )
        state, env = batch.state, self.env
        shape, dtype = env.state_shape, env.state_dtype
        if state.shape[state.ndim - len(shape) :] != shape or state.dtype != dtype:
            raise ShapeError(
                f"batch must hold states of env, {dtype} of shape {list(shape)}, "
                f"got {state.dtype} of shape {list(state.shape)} in all"
            )
        action = getattr(batch, "action", None)
        if action is not None and action.is_floating_point() != env.action_dtype.is_floating_point:
            raise ShapeError(f"batch must hold actions of {env.action_dtype}, got {action.dtype}")
        return batch

    def _floored(self, log_reward: Floats) -> Floats:
        if self.min_log_reward is None:
            return log_reward
        return log_reward.clamp(min=self.min_log_reward)


class BalanceLoss(Loss[C]):
    """A loss that compares forward flows with backward flows.

    Args:
        forward_policy: module that gives P_F, such as :class:`~gfn_rb.policies.ForwardPolicy`.
        backward_policy: module that gives P_B, such as :class:`~gfn_rb.policies.BackwardPolicy` or
            :class:`~gfn_rb.policies.UniformBackwardPolicy`.
        env: environment of the rows; not a submodule of the loss.
        **options: ``penalty`` and ``min_log_reward``; see :class:`~gfn_rb.losses.Loss`.

    Raises:
        ArgumentError: a policy has the wrong direction or none, or an option is out of range.
    """

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNEnv,
        **options: Any,
    ) -> None:
        super().__init__(forward_policy, env, **options)
        if not require_direction(backward_policy, "backward_policy"):
            raise ArgumentError("backward_policy must have is_backward True, got False")
        self.backward_policy = backward_policy

    def _terms(self, rows: Trajectories) -> dict[str, Floats]:
        """Return log R, log P_F and log P_B of whole trajectories, with gradient."""
        log_pf, log_pb = both_log_probs(self.forward_policy, self.backward_policy, self.env, rows)
        log_reward = self._floored(rows.log_reward)
        return {"log_reward": log_reward, "log P_F": log_pf.sum(1), "log P_B": log_pb.sum(1)}


class SumLoss(Loss[C]):
    """A loss whose rows have several weighted constraints each.

    With residuals delta_k of weight w_k, the cost of a row is sum_k w_k penalty(delta_k) and its
    ``residual`` sqrt(sum_k w_k delta_k^2), with the sign of sum_k w_k delta_k.
    """

    @abstractmethod
    def terms(self, batch: C | TensorDictBase) -> tuple[Float[Tensor, "n k"], Float[Tensor, "n k"]]:
        """Return each row's residuals, in nats, with gradient, and their weights, at least 0."""

    def evaluate(self, batch: C | TensorDictBase) -> tuple[Floats, Floats]:
        """Return each row's weighted sum of penalties, and its residual. See the base class."""
        delta, weight = self.terms(batch)
        size = torch.linalg.vector_norm(weight.sqrt() * delta, dim=1)  # has a gradient at 0, too
        whole = (weight * delta).sum(1).detach()
        return (weight * self.penalty(delta)).sum(1), torch.copysign(size, whole)

    def residual(self, batch: C | TensorDictBase) -> Floats:
        """Return the signed root of each row's weighted sum of squares. See the base class."""
        return self.evaluate(batch)[1]
