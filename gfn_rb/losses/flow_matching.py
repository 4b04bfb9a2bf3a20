"""Flow matching: what flows into a state flows out of it."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.containers import States, Trajectories
from gfn_rb.losses.base import SumLoss, require_finite_terms
from gfn_rb.rollout.log_probs import places
from gfn_rb.rollout.outputs import policy_outputs
from gfn_rb.shapes import ConditionBatch, Float, Floats, StateBatch


class FlowMatching(SumLoss[States]):
    """The flow matching loss (Bengio et al. 2021, arXiv:2106.04399), between log flows.

    The logits of the forward policy are the log flows log F(s, a) along the edges out of s, exit
    included, so that P_F(a | s) = F(s, a) / sum_a' F(s, a'). A state s other than the source has
    the residual

        delta(s) = log sum_{(s', a): s' -a-> s} F(s', a) - log sum_a F(s, a)

    and a terminating row also has

        delta_R(x) = log F(x, exit) - log R(x)

    The loss is the mean over rows of delta^2 + delta_R^2. The network is called once, on the states
    and all their parents.

    Further arguments are those of :class:`~gfn_rb.losses.Loss`.

    Args:
        forward_policy: module whose logits are log F(s, a), such as
            :class:`~gfn_rb.policies.ForwardPolicy`.
    """

    name = "fm"
    reads = States
    networks = ("forward_policy",)
    is_signed = False
    takes_parameters = False
    scales = ("forward_policy.head.bias",)

    def terms(
        self, batch: States | TensorDictBase
    ) -> tuple[Float[Tensor, "n 2"], Float[Tensor, "n 2"]]:
        """Return delta and delta_R of each row, 0 where a row has none, and their weights."""
        states = self._rows(batch)
        out_flow, in_flow = self._edge_flows(states)
        outflow, exit_flow = out_flow.logsumexp(1), out_flow[:, self.env.exit_action]
        inner, ends = ~self.env.is_source(states.state), states.is_terminating
        # The source has no parents. Replaced before logsumexp, not after: where all is -inf the
        # gradient of that is NaN, and NaN times 0 is NaN.
        inflow = in_flow.where(inner[:, None], 0).logsumexp(1)
        log_reward = self._floored(states.log_reward).to(outflow.dtype)
        at_exit = {"log_reward": log_reward.where(ends, 0), "log F(exit)": exit_flow.where(ends, 0)}
        flow = (inflow - outflow).where(inner, 0)
        delta = torch.stack([flow, at_exit["log F(exit)"] - at_exit["log_reward"]], 1)
        require_finite_terms(delta, {**at_exit, "log F": inflow + outflow})
        return delta, torch.stack([inner, ends], 1).to(delta.dtype)

    def _end_residual(self, fresh: Trajectories) -> Floats:
        states = fresh.to_states()
        return self.terms(states)[0][states.is_terminating, 1]

    def _source_log_flow(self, source: StateBatch, condition: ConditionBatch | None) -> Floats:
        return self._log_flows(source, condition).logsumexp(1)

    def _edge_flows(
        self, states: States
    ) -> tuple[Float[Tensor, "n actions"], Float[Tensor, "n moves"]]:
        """Return log F along the edges out of and into each state, -inf where there is none."""
        mask = self.env.backward_mask(states.state)
        (row, move), is_legal = places(mask)
        parent = self.env.undo(states.state[row], move)
        if is_legal is not None:  # an illegal move may lead anywhere
            at_source = ~is_legal.view(-1, *(1,) * (parent.ndim - 1))
            parent = torch.where(at_source, self.env.source_state, parent)
        condition = states.condition
        if condition is not None:
            condition = torch.cat([condition, condition[row]])
        flows = self._log_flows(torch.cat([states.state, parent]), condition)
        out, of_parents = flows.split([len(states), len(row)])
        into = of_parents.gather(1, move[:, None]).squeeze(1)
        if is_legal is not None:
            into = into.where(is_legal, -torch.inf)
        return out, out.new_full(mask.shape, -torch.inf).index_put((row, move), into)

    def _log_flows(
        self, state: StateBatch, condition: ConditionBatch | None
    ) -> Float[Tensor, "n actions"]:
        mask, logits, _ = policy_outputs(self.forward_policy, self.env, state, condition)
        return logits.where(mask, -torch.inf)
