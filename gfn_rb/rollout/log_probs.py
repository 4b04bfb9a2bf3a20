"""What a policy says of states, and of the actions in trajectories."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.modules import set_recurrent_mode

from gfn_rb import keys
from gfn_rb.containers import Trajectories, Transitions
from gfn_rb.containers.convert import flipped
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.rollout.categorical import Exploration, masked_log_softmax
from gfn_rb.rollout.parameters import Parameters
from gfn_rb.rollout.recurrence import advance, hidden_before, hidden_keys, require_memoryless
from gfn_rb.shapes import Bool, Float, Int64, Shaped


def require_direction(policy: TensorDictModuleBase, name: str = "policy") -> bool:
    """Return ``policy.is_backward``.

    Args:
        policy: what was given as a policy.
        name: of the argument.

    Raises:
        ArgumentError: it is none, or does not say which way it goes.
    """
    if not isinstance(policy, TensorDictModuleBase):
        raise ArgumentError(
            f"{name} must be a TensorDictModule that reads {keys.STATE!r} and writes "
            f"{keys.LOGITS!r}, got a {type(policy).__name__}"
        )
    is_backward = getattr(policy, "is_backward", None)
    if not isinstance(is_backward, bool):
        raise ArgumentError(
            f"{name} must have an attribute is_backward, True or False, got {is_backward!r} "
            f"from {type(policy).__name__}"
        )
    return is_backward


def legal_actions(
    policy: TensorDictModuleBase, env: GFNCore, state: Shaped[Tensor, "n *state"]
) -> Bool[Tensor, "n actions"]:
    """Return the actions that a policy, forward or backward, may take in each state."""
    return env.backward_mask(state) if policy.is_backward else env.forward_mask(state)


def policy_logits(
    policy: TensorDictModuleBase,
    state: Shaped[Tensor, "n *state"],
    condition: Shaped[Tensor, "n *condition"] | None,
    n_actions: int,
) -> Float[Tensor, "n actions"]:
    """Return the ``n_actions`` logits that a policy writes for each state.

    Raises:
        KeyMismatchError: the policy wrote no "logits".
        ShapeError: it wrote another number of them.
    """
    require_memoryless(policy)
    return _logits(policy, policy(_asked(state, condition)), n_actions)


def policy_says(
    policy: TensorDictModuleBase,
    env: GFNCore | None,
    state: Shaped[Tensor, "n *state"],
    condition: Shaped[Tensor, "n *condition"] | None,
    n_actions: int,
    hidden: TensorDictBase | None = None,
) -> tuple[Float[Tensor, "n actions"], Parameters | None]:
    """Return the logits of a policy, and the parameters of actions where these have some.

    Args:
        policy: a forward or backward policy.
        env: the environment.
        state: what the policy is asked about.
        condition: one condition per state.
        n_actions: how many logits it writes.
        hidden: what a recurrent policy carries, which is changed to what it carries on. See
            :func:`gfn_rb.rollout.recurrence.hidden_before`.

    Raises:
        KeyMismatchError, ShapeError: see :func:`policy_logits`; or the density is of another shape.
        ArgumentError: the policy gives none.
    """
    if hidden is not None:
        td = policy(_asked(state, condition).update(hidden))
        advance(hidden, policy, td)
        return _logits(policy, td, n_actions), None
    if not isinstance(env, ContinuousEnv):
        return policy_logits(policy, state, condition, n_actions), None
    require_memoryless(policy)
    if not hasattr(policy, "get_dist"):
        raise ArgumentError(
            f"policy must have a method get_dist, as a ProbabilisticTensorDictSequential has, for "
            f"{type(env).__name__}, whose moves have parameters, got a {type(policy).__name__}"
        )
    td = _asked(state, condition)
    density = policy.get_dist(td)
    is_backward = require_direction(policy)
    return _logits(policy, td, n_actions), Parameters(env, state, density, is_backward)


def _asked(
    state: Shaped[Tensor, "*n_state"],
    condition: Shaped[Tensor, "*n_condition"] | None,
    batch_dims: int = 1,
) -> TensorDict:
    source = {keys.STATE: state}
    if condition is not None:
        source[keys.CONDITION] = condition
    return TensorDict(source, batch_size=state.shape[:batch_dims])


def _logits(
    policy: TensorDictModuleBase, td: TensorDictBase, n_actions: int
) -> Float[Tensor, "*n actions"]:
    logits = td.get(keys.LOGITS, None)
    if logits is None:
        raise KeyMismatchError(
            f"policy must write {keys.LOGITS!r}, {type(policy).__name__} did not"
        )
    if logits.shape != (*td.batch_size, n_actions):
        raise ShapeError(
            f"policy must write {keys.LOGITS!r} of shape {[*td.batch_size, n_actions]}, got "
            f"{list(logits.shape)} from {type(policy).__name__}"
        )
    return logits


def drawn_log_probs(
    p: Float[Tensor, "n actions"],
    kind: Int64[Tensor, "n"],
    parameters: Parameters | None,
    action: Shaped[Tensor, "n *action"],
    by: Exploration,
) -> Float[Tensor, "n"]:
    """Return the log-probabilities with which actions were drawn.

    Args:
        p: of each kind.
        kind: of each action.
        parameters: of the policy in the states, where actions have some.
        action: one for each state.
        by: how the policy explored.
    """
    log_p = p.gather(1, kind[:, None]).squeeze(1).log()
    return log_p if parameters is None else log_p + parameters.log_prob(action, by)


def action_log_probs(
    policy: TensorDictModuleBase,
    env: GFNCore,
    state: Shaped[Tensor, "n *state"],
    condition: Shaped[Tensor, "n *condition"] | None = None,
) -> Float[Tensor, "n actions"]:
    """Compute the log-probability of every action in each state, with gradient.

    Args:
        policy: a forward or backward policy.
        env: says which actions are legal.
        state: states with at least one legal action each.
        condition: one condition per state.

    Returns:
        log P(. | s) in nats, -inf at illegal actions; A is ``env.n_actions`` for a forward policy
        and one less for a backward one.

    Raises:
        KeyMismatchError, ShapeError: the policy wrote no logits, or a wrong number of them.
    """
    mask = legal_actions(policy, env, state)
    return masked_log_softmax(policy_logits(policy, state, condition, mask.shape[1]), mask)


def taken_log_probs(
    policy: TensorDictModuleBase,
    env: GFNCore,
    state: Shaped[Tensor, "n *state"],
    condition: Shaped[Tensor, "n *condition"] | None,
    action: Shaped[Tensor, "n *action"],
) -> Float[Tensor, "n"]:
    """Compute the log-probability of one action in each state, with gradient.

    Args:
        policy: a forward or backward policy.
        env: says which actions are legal.
        state: states with at least one legal action each.
        condition: one condition per state.
        action: taken there, or undone.

    Raises:
        ArgumentError, KeyMismatchError, ShapeError: see :func:`policy_says`.
    """
    mask = legal_actions(policy, env, state)
    logits, parameters = policy_says(policy, env, state, condition, mask.shape[1])
    log_prob = masked_log_softmax(logits, mask)
    chosen = log_prob.gather(1, env.kind(action).unsqueeze(1)).squeeze(1)
    return chosen if parameters is None else chosen + parameters.log_prob(action)


def trajectory_log_probs(
    policy: TensorDictModuleBase, env: GFNCore, trajectories: Trajectories
) -> Float[Tensor, "n T"]:
    """Compute the log-probability of each action of trajectories under a policy, with gradient.

    A forward policy gives log P_F(s_{t+1} | s_t) at every step; a backward policy
    log P_B(s_t | s_{t+1}) at every step but the exit, where it is 0, as the sink has no other
    way back. Each value stands at the action's own place in its row, whichever way that row runs.
    The network is called once, on the real steps alone; a recurrent one on whole rows.

    Args:
        policy: a forward or backward policy.
        env: where the trajectories come from.
        trajectories: forward and backward rows in any mixture.

    Returns:
        Log-probabilities in nats, 0 after each row's length; -inf for an illegal action.

    Raises:
        ArgumentError: the policy has no direction.
        KeyMismatchError, ShapeError: it wrote no logits, or a wrong number of them.
    """
    is_backward = require_direction(policy)
    if hidden_keys(policy):
        return _recurrent_log_probs(policy, env, trajectories)
    action, steps = trajectories.action, trajectories.real_steps
    if is_backward:
        steps = steps & (env.kind(action) != env.exit_action)
    row, step = steps.nonzero(as_tuple=True)
    state = trajectories.state[row, step + _state_offset(trajectories, is_backward, row)]
    condition = None if trajectories.condition is None else trajectories.condition[row]
    chosen = taken_log_probs(policy, env, state, condition, action[row, step])
    return chosen.new_zeros(steps.shape).index_put((row, step), chosen)


def _recurrent_log_probs(
    policy: TensorDictModuleBase, env: GFNCore, trajectories: Trajectories
) -> Float[Tensor, "n T"]:
    """Compute what ``trajectory_log_probs`` does: all steps at once, in TorchRL's recurrent mode.

    Padding comes after the real steps, so that these do not depend on it.
    """
    rows = trajectories.forward()
    hidden_before(policy, env, rows.state[:, 0])  # raises
    condition, shape = rows.condition, rows.action.shape[:2]
    if condition is not None:
        condition = condition[:, None].expand(*shape, *condition.shape[1:])
    td = _asked(rows.state[:, :-1], condition, batch_dims=2)
    first = torch.arange(shape[1], device=rows.device) == 0
    td.set(keys.IS_INIT, first[:, None].expand(*shape, 1))
    with set_recurrent_mode(True):
        logits = _logits(policy, policy(td), env.n_actions)
    row, step = rows.real_steps.nonzero(as_tuple=True)
    log_p = masked_log_softmax(logits[row, step], env.forward_mask(rows.state[row, step]))
    chosen = log_p.gather(1, rows.action[row, step][:, None]).squeeze(1)
    out = chosen.new_zeros(shape).index_put((row, step), chosen)
    if trajectories.is_backward is None:
        return out
    return flipped(out, rows.length, trajectories.is_backward)


def transition_log_probs(
    policy: TensorDictModuleBase, env: GFNCore, transitions: Transitions
) -> Float[Tensor, "n"]:
    """Compute the log-probability of each transition's action under a policy, with gradient.

    A forward policy gives log P_F(s' | s), a backward policy log P_B(s | s'), whichever way the row
    itself runs; 0 for the exit under a backward policy, as the sink has no other way back. The
    network is called once.

    Args:
        policy: a forward or backward policy.
        env: where the transitions come from.
        transitions: forward and backward rows in any mixture.

    Returns:
        Log-probabilities in nats; -inf for an illegal action.

    Raises:
        ArgumentError: the policy has no direction.
        KeyMismatchError, ShapeError: it wrote no logits, or a wrong number of them.
    """
    is_backward, action = require_direction(policy), transitions.action
    parent, child = edge_ends(transitions)
    if not is_backward:
        return taken_log_probs(policy, env, parent, transitions.condition, action)
    (row,) = (env.kind(action) != env.exit_action).nonzero(as_tuple=True)
    condition = None if transitions.condition is None else transitions.condition[row]
    chosen = taken_log_probs(policy, env, child[row], condition, action[row])
    return chosen.new_zeros(len(action)).index_put((row,), chosen)


def edge_ends(
    transitions: Transitions,
) -> tuple[Shaped[Tensor, "n *state"], Shaped[Tensor, "n *state"]]:
    """Return the end of each transition that is nearer the source, and the one further from it."""
    state, next_state = transitions.state, transitions.next_state
    is_backward = transitions.is_backward
    if is_backward is None:
        return state, next_state
    flip = is_backward.reshape(-1, *(1,) * (state.ndim - 1))
    return next_state.where(flip, state), state.where(flip, next_state)


def _state_offset(
    trajectories: Trajectories, is_backward: bool, row: Int64[Tensor, "m"]
) -> int | Bool[Tensor, "m"]:
    """Tell whether an action is decided in the state before it (0) or after it (1).

    Before it in the rows that run the policy's own way, after it in the others.
    """
    if trajectories.is_backward is None:
        return int(is_backward)
    return trajectories.is_backward[row] != is_backward
