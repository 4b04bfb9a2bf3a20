"""Detailed balance: one constraint per transition."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from gfn_rb import keys
from gfn_rb.arguments import require_kind
from gfn_rb.containers import Trajectories, Transitions
from gfn_rb.envs.base import GFNEnv
from gfn_rb.losses.base import BalanceLoss, C, require_finite_terms
from gfn_rb.rollout import action_log_probs, taken_log_probs
from gfn_rb.rollout.log_probs import edge_ends, places
from gfn_rb.rollout.outputs import entry_of
from gfn_rb.shapes import ConditionBatch, Floats, StateBatch


def log_flows(
    state_flow: TensorDictModuleBase, state: StateBatch, condition: ConditionBatch | None
) -> Floats:
    """Return log F(s) of each state, in nats, with gradient."""
    return entry_of(state_flow, keys.LOG_FLOW, state, condition, state.shape[:1], "state_flow")


class StateFlowLoss(BalanceLoss[C]):
    """A loss that learns the flow through states, by the network ``state_flow``."""

    scales = ("state_flow.head.bias", "state_flow.offset")

    def __init__(
        self,
        forward_policy: TensorDictModuleBase,
        backward_policy: TensorDictModuleBase,
        env: GFNEnv,
        state_flow: TensorDictModuleBase,
        **options: Any,
    ) -> None:
        super().__init__(forward_policy, backward_policy, env, **options)
        require_kind("state_flow", state_flow, TensorDictModuleBase)
        self.state_flow = state_flow

    def _source_log_flow(self, source: StateBatch, condition: ConditionBatch | None) -> Floats:
        return log_flows(self.state_flow, source, condition)

    def _end_residual(self, fresh: Trajectories) -> Floats:
        steps = fresh.to_transitions()
        networks = self.forward_policy, self.backward_policy, self.env, self.state_flow
        loss = DetailedBalance(*networks, min_log_reward=self.min_log_reward)
        return loss.residual(steps[steps.is_terminating])


class DetailedBalance(StateFlowLoss[Transitions]):
    """The detailed balance loss (Bengio et al. 2023, GFlowNet Foundations, arXiv:2111.09266).

    For a transition s -> s' with residual

        delta(s, s') = log F(s) + log P_F(s' | s) - log F(s') - log P_B(s | s')

    the loss is the mean of delta^2 over transitions. In the terminating transition x -> sink, log
    R(x) replaces log F(s') + log P_B(s | s'). A batch may contain forward and backward rows, and
    rows of incomplete episodes.

    Further arguments are those of :class:`~gfn_rb.losses.BalanceLoss`.

    Args:
        state_flow: module that gives log F in nats, such as :class:`~gfn_rb.policies.StateFlow`.
    """

    name = "db"
    reads = Transitions
    networks = ("forward_policy", "backward_policy", "state_flow")

    def residual(self, batch: Transitions | TensorDictBase) -> Floats:
        """Return delta(s, s') of each row, in nats, with gradient."""
        transitions = self._rows(batch)
        exits = self.env.kind(transitions.action) == self.env.exit_action
        # Rows that do not end an episode hold -inf, which would make all sums NaN.
        log_reward = self._floored(transitions.log_reward).where(exits, 0)
        log_pf = taken_log_probs(self.forward_policy, self.env, transitions)
        log_pb = taken_log_probs(self.backward_policy, self.env, transitions)
        # Both ends in one call: two would cost twice the overhead, which is most of the cost.
        (moves,), is_move = places(~exits)
        parent, child = edge_ends(transitions)
        state, condition = torch.cat([parent, child[moves]]), transitions.condition
        if condition is not None:
            condition = torch.cat([condition, condition[moves]])
        flow, moved = log_flows(self.state_flow, state, condition).split([len(exits), len(moves)])
        if is_move is not None:
            moved = moved.where(is_move, 0)
        next_flow = torch.zeros_like(flow).index_put((moves,), moved)  # 0 where s' is the sink
        # In this order a constant in log R and all flows leaves the residual as it is.
        residual = (flow - (log_reward + next_flow)) + (log_pf - log_pb)
        terms = {"log_reward": log_reward, "log P_F": log_pf, "log P_B": log_pb}
        require_finite_terms(residual, {**terms, "log F": flow + next_flow})
        return residual


class ModifiedDetailedBalance(BalanceLoss[Transitions]):
    """The modified detailed balance loss (Deleu et al. 2022, arXiv:2202.13903).

    If every state of an environment is terminating, F(s) = R(s) / P_F(sink | s), and no network of
    flows is needed. For a transition s -> s' the residual is

        delta(s, s') = log R(s) - log P_F(sink | s) + log P_F(s' | s)
                       - log R(s') + log P_F(sink | s') - log P_B(s | s')

    and 0 for the terminating transition. The loss is the mean of delta^2 over rows. The loss asks
    the environment for the rewards at both ends, because rows contain only the reward at the end of
    an episode. These are additional reward calls.

    Arguments are those of :class:`~gfn_rb.losses.BalanceLoss`.
    """

    name = "mdb"
    reads = Transitions
    networks = ("forward_policy", "backward_policy")
    every_state_terminates = True
    takes_parameters = False

    def residual(self, batch: Transitions | TensorDictBase) -> Floats:
        """Return delta(s, s') of each row, in nats, with gradient; 0 for terminating rows.

        Raises:
            ArgumentError: a state is not terminating, or the batch is not one of transitions.
        """
        transitions = self._rows(batch)
        is_move = transitions.action != self.env.exit_action
        (at,), _ = places(is_move)
        moves, is_move = transitions[at], is_move[at]
        every = torch.arange(len(moves), device=moves.device)
        parent, child = edge_ends(moves)
        after_exit = ~is_move.view(-1, *(1,) * (parent.ndim - 1))
        state = torch.cat([parent, torch.where(after_exit, parent, child)])
        condition = moves.condition
        condition = None if condition is None else torch.cat([condition, condition])
        log_p = action_log_probs(self.forward_policy, self.env, state, condition)
        log_exit = log_p[:, self.env.exit_action]
        log_pf = log_p[every, moves.action]
        log_pb = taken_log_probs(self.backward_policy, self.env, moves)
        log_reward = self._floored(self.env.log_reward(state, condition))
        here, there = log_reward.tensor_split(2)
        exit_here, exit_there = log_exit.tensor_split(2)
        residual = (here - there) + (exit_there - exit_here) + (log_pf - log_pb)
        terms = {"log P_F(exit)": log_exit, "log P_F": log_pf, "log P_B": log_pb}
        require_finite_terms(residual, {"log_reward": log_reward, **terms})
        delta = residual.where(is_move, 0)
        return delta.new_zeros(len(transitions)).index_put((at,), delta)

    def _source_log_flow(self, source: StateBatch, condition: ConditionBatch | None) -> Floats:
        log_pf = action_log_probs(self.forward_policy, self.env, source, condition)
        log_reward = self._floored(self.env.log_reward(source, condition))
        return log_reward - log_pf[:, self.env.exit_action]

    def n_reward_calls(self, rows: Transitions) -> int:
        """Return two reward calls for each move, one for either end."""
        return 2 * int((~rows.is_terminating).sum())
