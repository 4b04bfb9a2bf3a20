"""Flow matching: what flows into a state flows out of it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import States
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout.log_probs import policy_logits, require_direction
from gfn_rb.shapes import Float, Int64, Shaped
from gfn_rb.training.losses.base import Penalty, SumLoss
from gfn_rb.training.losses.finite import require_finite
from gfn_rb.training.losses.flows import count


class _Edges(NamedTuple):
    """The edges into a batch of states: row of the child, move, and parent of each."""

    row: Tensor
    move: Tensor
    parent: Tensor


class FlowMatching(SumLoss[States]):
    """The flow matching loss (Bengio et al. 2021, arXiv:2106.04399), between log flows.

    The logits of the forward policy are the log flows log F(s, a) along the edges out of s, exit
    included, so that P_F(a | s) = F(s, a) / sum_a' F(s, a'). A state s has the residual

        delta(s) = log sum_{(s', a): s' -a-> s} F(s', a) - log sum_a F(s, a)

    but for the source, into which nothing flows; a row that is terminating has also

        delta_R(x) = log F(x, exit) - log R(x)

    and the loss is the mean over rows of delta^2 + reward_weight * delta_R^2.

    The network is called once, on the states and all their parents: as many rows as there are
    legal backward moves, and the states themselves.

    Args:
        forward_policy: its logits are log F(s, a), such as
            :class:`gfn_rb.training.policies.ForwardPolicy`.
        env: where the states come from; it does not become a submodule.
        reward_weight: weight of the rewards among the constraints, positive.
        penalty: what takes the place of the square.
        min_log_reward: floor under log R(x) in nats; none if None.

    Raises:
        ArgumentError: the policy goes backward or does not say which way, or ``reward_weight`` is
            not a positive number.
    """

    reads = States
    networks = ("forward_policy",)

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        env: GFNCore,
        *,
        reward_weight: float = 1.0,
        penalty: Penalty = torch.square,
        min_log_reward: float | None = None,
    ) -> None:
        super().__init__(env, penalty, min_log_reward)
        if require_direction(forward_policy):
            raise ArgumentError("forward_policy must have is_backward False, got True")
        if not 0 < reward_weight < math.inf:
            raise ArgumentError(f"reward_weight must be a positive number, got {reward_weight!r}")
        self.forward_policy, self.reward_weight = forward_policy, reward_weight

    def terms(
        self, batch: States | TensorDictBase
    ) -> tuple[Float[Tensor, "n 2"], Float[Tensor, "n 2"]]:
        """Return delta and delta_R of each row, 0 where it has none, and their weights.

        Args:
            batch: states.

        Raises:
            ArgumentError, NaNError: see ``residual``.
        """
        states = self._rows(batch)
        edges = _edges_into(self.env, states.state)
        out_flow, in_flow = self._edge_flows(states, edges)
        x = states.is_terminating.nonzero().squeeze(1)
        log_reward, exit_flow = self._floored(states.log_reward[x]), out_flow[x, -1]
        inner, inflow = _total(in_flow, edges, len(states))
        outflow = out_flow.logsumexp(1)
        flow, reward = inflow - outflow[inner], exit_flow - log_reward
        terms = {"log_reward": log_reward, "log F(exit)": exit_flow}
        every = torch.cat([outflow, in_flow])
        require_finite(torch.cat([flow, reward]), {**terms, "log F": every})
        delta = torch.stack([_spread(flow, inner, outflow), _spread(reward, x, outflow)], 1)
        ones = [torch.ones_like(inflow), torch.full_like(reward, self.reward_weight)]
        weight = [_spread(ones[0], inner, outflow), _spread(ones[1], x, outflow)]
        return delta, torch.stack(weight, 1)

    def estimate_log_z(
        self, condition: Shaped[Tensor, "n *condition"] | None = None
    ) -> Float[Tensor, "..."]:
        """Return log sum_a F(s_0, a). See the base class."""
        source = self.env.source(count(condition))
        flow = self._log_flows(source, condition).logsumexp(1)
        return flow[0] if condition is None else flow

    def _edge_flows(
        self, states: States, edges: _Edges
    ) -> tuple[Float[Tensor, "n actions"], Float[Tensor, "e"]]:
        """Return log F along each edge out of the states, and along those into them."""
        condition = states.condition
        if condition is not None:
            condition = torch.cat([condition, condition[edges.row]])
        every = torch.cat([states.state, edges.parent])
        out, parents = self._log_flows(every, condition).split([len(states), len(edges.row)])
        return out, parents.gather(1, edges.move[:, None]).squeeze(1)

    def _log_flows(
        self,
        state: Shaped[Tensor, "n *state"],
        condition: Shaped[Tensor, "n *condition"] | None,
    ) -> Float[Tensor, "n actions"]:
        logits = policy_logits(self.forward_policy, state, condition, self.env.n_actions)
        return logits.where(self.env.forward_mask(state), -torch.inf)


def _edges_into(env: GFNCore, state: Shaped[Tensor, "n *state"]) -> _Edges:
    row, move = env.backward_mask(state).nonzero(as_tuple=True)
    return _Edges(row, move, env.undo(state[row], move))


def _total(
    log_flow: Float[Tensor, "e"], edges: _Edges, n: int
) -> tuple[Int64[Tensor, "m"], Float[Tensor, "m"]]:
    """Return the rows with an edge into them, and the log of the sum of each one's flows."""
    highest = log_flow.new_full((n,), -torch.inf)
    highest.scatter_reduce_(0, edges.row, log_flow.detach(), "amax")
    inner = torch.bincount(edges.row, minlength=n).nonzero().squeeze(1)
    total = log_flow.new_zeros(n).index_add(0, edges.row, (log_flow - highest[edges.row]).exp())
    return inner, total[inner].log() + highest[inner]


def _spread(
    value: Float[Tensor, "m"], row: Int64[Tensor, "m"], like: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    return torch.zeros_like(like).index_put((row,), value.to(like.dtype))
