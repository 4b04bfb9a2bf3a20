"""Rolling a policy out into actions and trajectories, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.rollout import checks
from gfn_rb.rollout.categorical import exploration_from
from gfn_rb.rollout.outputs import require_direction, require_memoryless
from gfn_rb.rollout.walk import ActionDraw, Walk


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
        require_memoryless(self.policy)
        exploration = exploration_from(policy_kwargs, self.is_backward)
        env.check_state(states, "states")
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
        exploration = exploration_from(policy_kwargs, self.is_backward)
        if requires_grad:
            checks.check_gradients(exploration, save_logprobs)
        start = checks.starting_states(env, n, states, self.is_backward)
        if n is not None and conditions is None:
            conditions = env.sample_condition(n, exploration.generator)
        checks.check_conditions(env, start, conditions)
        checks.check_log_rewards(log_rewards, start, self.is_backward)
        walk = Walk(self.policy, env, exploration, save_logprobs, save_estimator_outputs)
        with torch.set_grad_enabled(requires_grad):
            return walk.trajectories(start, conditions, log_rewards)
