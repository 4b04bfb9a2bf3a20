"""Log-probabilities of actions under a policy, with gradient."""

from __future__ import annotations

from typing import TypeGuard

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import Trajectories, Transitions
from gfn_rb.envs.base import GFNEnv
from gfn_rb.numerics.flat import is_readable
from gfn_rb.rollout.categorical import masked_log_softmax
from gfn_rb.rollout.outputs import (
    StateModule,
    policy_outputs,
    require_direction,
    require_entry,
)
from gfn_rb.shapes import Bool, ConditionBatch, Float, Int64, Shaped, StateBatch


def action_log_probs(
    policy: TensorDictModuleBase,
    env: GFNEnv,
    state: StateBatch,
    condition: ConditionBatch | None = None,
) -> Float[Tensor, "n actions"]:
    """Compute the log-probability of every action in each state, with gradient.

    Args:
        policy: forward or backward policy.
        env: environment that defines the legal actions.
        state: states with at least one legal action each.
        condition: one condition per state.

    Returns:
        log P(. | s) in nats, -inf at illegal actions, for ``env.n_actions`` actions of a forward
        policy and one less of a backward policy.

    Raises:
        KeyMismatchError, ShapeError: the policy wrote no logits, or a wrong number of them.
    """
    mask, logits, _ = policy_outputs(policy, env, state, condition)
    return masked_log_softmax(logits, mask)


def places(
    mask: Bool[Tensor, "*n"], may_wait: bool = False
) -> tuple[tuple[Int64[Tensor, "m"], ...], Bool[Tensor, "m"] | None]:
    """Return the indices of the True entries of a mask of one or two dimensions, and None.

    On a device, which would have to be waited for to count them, and in a graph, whose shapes are
    fixed, return the indices of all entries and the entries.
    """
    if is_readable(mask) or may_wait:
        return mask.nonzero(as_tuple=True), None
    at, width = torch.arange(mask.numel(), device=mask.device), mask.shape[-1]
    return (at // width, at % width)[2 - mask.ndim :], mask.flatten()


def taken_log_probs(
    policy: TensorDictModuleBase, env: GFNEnv, rows: Trajectories | Transitions
) -> Float[Tensor, "*actions"]:
    """Compute the log-probability of each action of rows under a policy, with gradient.

    A forward policy gives log P_F(s' | s) of every step s -> s'. A backward policy gives
    log P_B(s | s') of every step but the exit, where it is 0. Each value is at the position of its
    action, in forward and in backward rows. The network is called once, on the real steps alone.

    Args:
        policy: forward or backward policy.
        env: environment of the rows.
        rows: trajectories or transitions, forward and backward in any mixture.

    Returns:
        Log-probabilities in nats, -inf for an illegal action: [n, T] of trajectories, 0 after each
        row's length, or [n] of transitions.

    Raises:
        ArgumentError: the policy has no direction.
        KeyMismatchError, ShapeError: the policy wrote no logits, or a wrong number of them.
    """
    at, decided, state, condition = decisions(env, rows, require_direction(policy))
    action = rows.action[at]
    mask, logits, parameters = policy_outputs(policy, env, state, condition, active=decided)
    kind = env.kind(action)
    if decided is not None:
        kind = kind.where(decided, 0)
    chosen = masked_log_softmax(logits, mask).gather(1, kind.unsqueeze(1)).squeeze(1)
    if parameters is not None and len(chosen):  # densities of no rows cannot be reshaped
        chosen = chosen + parameters.log_prob(action)
    return chosen.new_zeros(rows.action.shape[: len(at)]).index_put(at, chosen)


def both_log_probs(
    forward: TensorDictModuleBase,
    backward: TensorDictModuleBase,
    env: GFNEnv,
    trajectories: Trajectories,
) -> tuple[Float[Tensor, "n T"], Float[Tensor, "n T"]]:
    """Compute ``taken_log_probs`` of two policies; a trunk they share is called once."""
    are_plain = _is_plain(forward) and _is_plain(backward) and not env.action_shape
    if not are_plain or not is_readable(trajectories.state):
        return (
            taken_log_probs(forward, env, trajectories),
            taken_log_probs(backward, env, trajectories),
        )
    # The steps are found once for both. The backward policy decides all but the exit, where the
    # action ends in forward time.
    at, _, state, condition = decisions(env, trajectories, is_backward=False)
    action, runs_backward = trajectories.action[at], trajectories.is_backward
    (moves,) = (action != env.exit_action).nonzero(as_tuple=True)
    row, step = at[0][moves], at[1][moves]
    is_turned = None if runs_backward is None else runs_backward[row]
    end = step + 1 if is_turned is None else step + (~is_turned).long()
    trunk = forward.plain_trunk()
    if trunk is None or backward.plain_trunk() is not trunk:
        ends = trajectories.state[row, end]
        there = None if condition is None else condition[moves]
        logits = forward.evaluate(state, condition), backward.evaluate(ends, there)
    else:  # it is where the next action of the same trajectory begins
        after = moves + 1 if is_turned is None else moves + 1 - 2 * is_turned.long()
        features, ends = forward.features(state, condition), state[after]
        logits = forward.head(features), backward.head(features[after])
    masks = env.forward_mask(state), env.backward_mask(ends)
    log_pf, log_pb = (
        masked_log_softmax(require_entry(policy, keys.LOGITS, value, mask.shape), mask)
        .gather(1, taken[:, None])
        .squeeze(1)
        for policy, value, mask, taken in zip(
            (forward, backward), logits, masks, (action, action[moves]), strict=True
        )
    )
    zeros = log_pf.new_zeros(trajectories.action.shape)
    return zeros.index_put(at, log_pf), zeros.index_put((row, step), log_pb)


def _is_plain(policy: TensorDictModuleBase) -> TypeGuard[StateModule]:
    """Return whether a policy is asked without a TensorDict."""
    return type(policy).forward is StateModule.forward


def decisions(
    env: GFNEnv, rows: Trajectories | Transitions, is_backward: bool
) -> tuple[
    tuple[Int64[Tensor, "m"], ...],
    Bool[Tensor, "m"] | None,
    Shaped[Tensor, "m *state"],
    Shaped[Tensor, "m *condition"] | None,
]:
    """Return ``places`` of the actions that a policy decides, the state where, the condition.

    In rows of the other direction it is the state after the action. P_B decides no exit.
    """
    state, runs_backward, condition = rows.state, rows.is_backward, rows.condition
    if isinstance(rows, Trajectories):
        decided, ends = rows.real_steps, (state[:, :-1], state[:, 1:])
    else:
        decided = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        ends = state, rows.next_state
    if is_backward:
        decided = decided & (env.kind(rows.action) != env.exit_action)
    # A density of parameters has no value for the padding.
    at, is_decided = places(decided, may_wait=len(env.action_shape) > 0)
    state = ends[is_backward][at]
    if runs_backward is not None:
        flip = runs_backward[at[0]].view(-1, *(1,) * (state.ndim - 1))
        state = ends[not is_backward][at].where(flip, state)
    if condition is not None:
        condition = condition[at[0]]
    return at, is_decided, state, condition


def edge_ends(transitions: Transitions) -> tuple[StateBatch, StateBatch]:
    """Return the end of each transition that is nearer the source, and the one further from it."""
    state, next_state = transitions.state, transitions.next_state
    is_backward = transitions.is_backward
    if is_backward is None:
        return state, next_state
    flip = is_backward.reshape(-1, *(1,) * (state.ndim - 1))
    return next_state.where(flip, state), state.where(flip, next_state)
