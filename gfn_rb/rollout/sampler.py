"""Rolling a policy out into actions and trajectories, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.rollout import checks
from gfn_rb.rollout.log_probs import require_direction
from gfn_rb.rollout.steps import ActionDraw, Steps, Walk
from gfn_rb.shapes import Float, Shaped


class Sampler:
    """Draws actions and whole trajectories from a policy, in the direction the policy goes.

    Nothing here is recorded by autograd, unless log-probabilities with gradient are asked for:
    losses compute them anew, see :func:`gfn_rb.rollout.trajectory_log_probs`. ``**policy_kwargs``
    are the fields of :class:`gfn_rb.rollout.Exploration`: epsilon, temperature, noise, exit_bias,
    generator. Log-probabilities that are kept are those of the distribution drawn from, these
    options included, as in torchgfn; estimator outputs are the policy's bare logits.

    Args:
        policy: a TensorDict module from "state" (and "condition") to "logits", with an attribute
            ``is_backward``. A forward policy writes a logit for each of the environment's actions,
            a backward policy for each but the exit action. For a
            :class:`~gfn_rb.envs.ContinuousEnv` it has a method ``get_dist(tensordict)``, as a
            ``ProbabilisticTensorDictSequential`` has, which writes the logits of kinds and returns
            a distribution of parameters, batch shape [n], event shape [k], its mean in its support.
            A forward policy may be recurrent, as one with TorchRL's ``GRUModule`` is: what it
            writes under "next" and reads, beside "is_init", is carried from step to step from the
            source on. Losses on trajectories call it once, on [n, T] states in TorchRL's recurrent
            mode.

    Raises:
        ArgumentError: ``policy`` does not say which way it goes.
    """

    def __init__(self, policy: TensorDictModuleBase) -> None:
        require_direction(policy)
        self.policy = policy

    @property
    def is_backward(self) -> bool:
        """Whether trajectories run from the sink to the source."""
        return self.policy.is_backward

    @torch.no_grad()
    def sample_actions(
        self,
        env: GFNCore,
        states: Tensor,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        **policy_kwargs: Any,
    ) -> ActionDraw:
        """Draw one action per state.

        Args:
            env: the environment.
            states: [n, *S], each with at least one legal action.
            conditions: one condition per state, [n, *C].
            save_estimator_outputs: whether to return the policy's logits.
            save_logprobs: whether to return the log-probability of each action.
            **policy_kwargs: see the class.

        Returns:
            A named tuple of action [n], log_prob [n] or None, estimator_output [n, A] or None.

        Raises:
            ArgumentError: a state has no legal action, or an option is unknown or out of range.
            ShapeError: a shape or dtype is not the environment's.
            NaNError: the logits give no distribution.
        """
        exploration = checks.exploration_from(policy_kwargs, self.is_backward)
        checks.check_states(env, states)
        checks.check_conditions(env, states, conditions)
        walk = Walk(self.policy, env, exploration, save_logprobs, save_estimator_outputs)
        return walk.draw(states, conditions)

    def sample_trajectories(
        self,
        env: GFNCore,
        n: int | None = None,
        states: Tensor | None = None,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        *,
        log_rewards: Tensor | None = None,
        requires_grad: bool = False,
        **policy_kwargs: Any,
    ) -> Trajectories:
        """Roll the policy out until every row has reached its end.

        Rows that have reached it cost nothing: the others go on without them.

        Args:
            env: the environment.
            n: number of trajectories from the source; forward policies only.
            states: where to start instead, [n, *S]: any states but the sink for a forward policy,
                terminating states for a backward one. A forward row begins with its given state.
            conditions: one condition per row, [n, *C]. Where the environment has conditions and
                only ``n`` is given, ``env.sample_condition`` draws them.
            save_estimator_outputs: whether to keep the policy's logits at each step.
            save_logprobs: whether to keep the log-probability of each action.
            log_rewards: log R of ``states`` in nats, [n], where already known; backward policies
                only. Without it ``env.log_reward`` is asked, once.
            requires_grad: whether log-probabilities, which must be kept then, have a gradient, for
                losses with ``log_pf="stored"``. The policy cannot explore: they would not be its
                own.
            **policy_kwargs: see the class.

        Returns:
            Trajectories padded to the longest of them; ``is_backward`` is set if the policy is.

        Raises:
            ArgumentError: not exactly one of ``n`` and ``states`` is given, a start does not fit
                the policy's direction, a state on the way has no legal action, an option is
                unknown or out of range, or does not go with ``requires_grad``.
            ShapeError: a shape or dtype is not the environment's.
            NaNError: the logits give no distribution, or a reward is NaN.
        """
        exploration = checks.exploration_from(policy_kwargs, self.is_backward)
        if requires_grad:
            checks.check_gradients(exploration, save_logprobs)
        start = checks.starting_states(env, n, states, self.is_backward)
        if n is not None and conditions is None:
            conditions = env.sample_condition(n, exploration.generator)
        checks.check_conditions(env, start, conditions)
        checks.check_log_rewards(log_rewards, start, self.is_backward)
        walk = Walk(self.policy, env, exploration, save_logprobs, save_estimator_outputs)
        with torch.set_grad_enabled(requires_grad):
            return _laid_out(walk, walk.roll(start, conditions), start, conditions, log_rewards)


def _laid_out(
    walk: Walk,
    steps: Steps,
    start: Shaped[Tensor, "n *state"],
    condition: Shaped[Tensor, "n *condition"] | None,
    log_reward: Float[Tensor, "n"] | None,
) -> Trajectories:
    """Pad the steps of a rollout to trajectories, and ask for their rewards."""
    env, is_backward = walk.env, walk.policy.is_backward
    length, row = steps.length(), torch.arange(steps.n, device=steps.device)
    state = steps.spread(steps.state, env.sink_state, extra=1)
    padding = torch.full(env.action_shape, env.dummy_action, dtype=env.action_dtype)
    action = steps.spread(steps.action, padding.to(steps.device))
    if is_backward:
        state[row, length] = env.source_state
        action[:, 0] = env.exits(steps.n)
    x = start if is_backward else state[row, length - 1]
    n_logits = env.n_actions - is_backward
    return Trajectories(
        state=state,
        action=action,
        length=length,
        log_reward=_log_reward(env, x, condition) if log_reward is None else log_reward.float(),
        log_prob=steps.over_zeros(steps.log_prob) if walk.save_logprobs else None,
        estimator_output=(
            steps.over_zeros(steps.estimator_output, n_logits)
            if walk.save_estimator_outputs
            else None
        ),
        condition=condition,
        is_backward=torch.ones_like(row, dtype=torch.bool) if is_backward else None,
    )


@torch.no_grad()
def _log_reward(
    env: GFNCore, x: Shaped[Tensor, "n *state"], condition: Shaped[Tensor, "n *condition"] | None
) -> Float[Tensor, "n"]:
    log_reward = env.log_reward(x) if env.condition_shape is None else env.log_reward(x, condition)
    checks.check_rewards(log_reward, x)
    return log_reward
