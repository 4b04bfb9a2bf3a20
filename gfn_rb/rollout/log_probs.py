"""Log-probabilities of actions under a policy, with gradient."""

from __future__ import annotations

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
from gfn_rb.shapes import ActionBatch, Bool, ConditionBatch, Float, Int64, Shaped, StateBatch


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
        policy
        and one less of a backward policy.

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
    policy: TensorDictModuleBase,
    env: GFNEnv,
    state: StateBatch,
    condition: ConditionBatch | None,
    action: ActionBatch,
    decided: Bool[Tensor, "n"] | None = None,
) -> Float[Tensor, "n"]:
    """Compute the log-probability of one action in each state, with gradient; 0 if not decided."""
    mask, logits, parameters = policy_outputs(policy, env, state, condition, active=decided)
    log_prob, kind = masked_log_softmax(logits, mask), env.kind(action)
    if decided is not None:
        kind = kind.where(decided, 0)
    chosen = log_prob.gather(1, kind.unsqueeze(1)).squeeze(1)
    if parameters is None or not len(chosen):  # densities of no rows cannot be reshaped
        return chosen
    return chosen + parameters.log_prob(action)


def trajectory_log_probs(
    policy: TensorDictModuleBase, env: GFNEnv, trajectories: Trajectories
) -> Float[Tensor, "n T"]:
    """Compute the log-probability of each action of trajectories under a policy, with gradient.

    A forward policy gives log P_F(s_{t+1} | s_t) at every step. A backward policy gives log P_B(s_t
    | s_{t+1}) at every step but the exit, where it is 0. Each value is at the position of its
    action, in forward and in backward rows. The network is called once, on the real steps alone.

    Args:
        policy: forward or backward policy.
        env: environment of the trajectories.
        trajectories: forward and backward rows in any mixture.

    Returns:
        Log-probabilities in nats, 0 after each row's length, -inf for an illegal action.

    Raises:
        ArgumentError: the policy has no direction.
        KeyMismatchError, ShapeError: the policy wrote no logits, or a wrong number of them.
    """
    is_backward = require_direction(policy)
    at, decided, state, condition = decisions(env, trajectories, is_backward)
    action = trajectories.action
    chosen = taken_log_probs(policy, env, state, condition, action[at], decided)
    return chosen.new_zeros(action.shape[:2]).index_put(at, chosen)


def both_log_probs(
    forward: TensorDictModuleBase,
    backward: TensorDictModuleBase,
    env: GFNEnv,
    trajectories: Trajectories,
) -> tuple[Float[Tensor, "n T"], Float[Tensor, "n T"]]:
    """Compute ``trajectory_log_probs`` of two policies; a trunk they share is called once."""
    trunk, other = (
        policy.plain_trunk() if isinstance(policy, StateModule) else None
        for policy in (forward, backward)
    )
    if trunk is None or trunk is not other or not is_readable(trajectories.state):
        return (
            trajectory_log_probs(forward, env, trajectories),
            trajectory_log_probs(backward, env, trajectories),
        )
    (row, step), _, state, condition = decisions(env, trajectories, is_backward=False)
    action, runs_backward = trajectories.action[row, step], trajectories.is_backward
    (moves,) = (action != env.exit_action).nonzero(as_tuple=True)
    # The backward policy decides where the next action of the same trajectory begins.
    after = moves + 1
    if runs_backward is not None:
        after = torch.where(runs_backward[row[moves]], moves - 1, after)
    features = forward.features(state, condition)
    zeros = features.new_zeros(trajectories.action.shape)
    log_pf, log_pb = (
        masked_log_softmax(require_entry(policy, keys.LOGITS, policy.head(x), mask.shape), mask)
        .gather(1, taken[:, None])
        .squeeze(1)
        for policy, x, mask, taken in (
            (forward, features, env.forward_mask(state), action),
            (backward, features[after], env.backward_mask(state[after]), action[moves]),
        )
    )
    return (
        zeros.index_put((row, step), log_pf),
        zeros.index_put((row[moves], step[moves]), log_pb),
    )


def decisions(
    env: GFNEnv, trajectories: Trajectories, is_backward: bool
) -> tuple[
    tuple[Int64[Tensor, "m"], ...],
    Bool[Tensor, "m"] | None,
    Shaped[Tensor, "m *state"],
    Shaped[Tensor, "m *condition"] | None,
]:
    """Return ``places`` of the actions that a policy decides, the state where, the condition.

    In rows of the other direction it is the state after the action. P_B decides no exit.
    """
    decided, runs_backward = trajectories.real_steps, trajectories.is_backward
    if is_backward:
        decided = decided & (env.kind(trajectories.action) != env.exit_action)
    # A density of parameters has no value for the padding.
    (row, step), is_decided = places(decided, may_wait=len(env.action_shape) > 0)
    after: int | Bool[Tensor, "m"] = int(is_backward)
    if runs_backward is not None:
        after = runs_backward[row] != is_backward
    condition = trajectories.condition
    if condition is not None:
        condition = condition[row]
    return (row, step), is_decided, trajectories.state[row, step + after], condition


def transition_log_probs(
    policy: TensorDictModuleBase, env: GFNEnv, transitions: Transitions
) -> Float[Tensor, "n"]:
    """Compute the log-probability of each transition's action under a policy, with gradient.

    A forward policy gives log P_F(s' | s) and a backward policy log P_B(s | s'), for forward and
    backward rows. A backward policy gives 0 for the exit. The network is called once.

    Args:
        policy: forward or backward policy.
        env: environment of the transitions.
        transitions: forward and backward rows in any mixture.

    Returns:
        Log-probabilities in nats, -inf for an illegal action.

    Raises:
        ArgumentError: the policy has no direction.
        KeyMismatchError, ShapeError: the policy wrote no logits, or a wrong number of them.
    """
    is_backward, action = require_direction(policy), transitions.action
    parent, child = edge_ends(transitions)
    if not is_backward:
        return taken_log_probs(policy, env, parent, transitions.condition, action)
    decided = env.kind(action) != env.exit_action
    (row,), is_decided = places(decided, may_wait=len(env.action_shape) > 0)
    condition = None if transitions.condition is None else transitions.condition[row]
    chosen = taken_log_probs(policy, env, child[row], condition, action[row], is_decided)
    return chosen.new_zeros(len(action)).index_put((row,), chosen)


def edge_ends(transitions: Transitions) -> tuple[StateBatch, StateBatch]:
    """Return the end of each transition that is nearer the source, and the one further from it."""
    state, next_state = transitions.state, transitions.next_state
    is_backward = transitions.is_backward
    if is_backward is None:
        return state, next_state
    flip = is_backward.reshape(-1, *(1,) * (state.ndim - 1))
    return next_state.where(flip, state), state.where(flip, next_state)
