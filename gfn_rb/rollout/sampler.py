"""Rolling a policy out into actions and trajectories, forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from gfn_rb import keys
from gfn_rb.arguments import as_count
from gfn_rb.containers import Trajectories
from gfn_rb.envs.base import GFNEnv, require_env
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.rollout.categorical import exploration_from
from gfn_rb.rollout.outputs import ActionDraw, draw_actions, policy_outputs, require_direction
from gfn_rb.rollout.walk import Walk


class Sampler:
    """Samples actions and whole trajectories from a policy, in the policy's direction.

    Autograd records nothing; losses compute log-probabilities again.
    Saved log-probabilities are those of the distribution drawn from, exploration included, as in
    torchgfn. Saved estimator outputs are the policy's logits without exploration.

    Args:
        policy: TensorDict module from "state" (and "condition") to "logits", with an attribute
            ``is_backward``. A forward policy writes a logit for each action of the environment, and
            a backward policy for each action but the exit. For a
            :class:`~gfn_rb.envs.ContinuousEnv` it has a method ``get_dist(tensordict)``, as a
            ``ProbabilisticTensorDictSequential`` has. The method writes the logits of kinds and
            returns a distribution of parameters with batch shape [n], event shape [k] and a mean in
            its support.

    Raises:
        ArgumentError: ``policy`` has no ``is_backward``.
    """

    def __init__(self, policy: TensorDictModuleBase) -> None:
        require_direction(policy)
        self.policy = policy

    @property
    def estimator(self) -> TensorDictModuleBase:
        """The policy, under torchgfn's name."""
        return self.policy

    @property
    def is_backward(self) -> bool:
        """Whether trajectories run from the sink to the source."""
        return self.policy.is_backward

    @torch.no_grad()
    def sample_actions(
        self,
        env: GFNEnv,
        states: Tensor,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        **policy_kwargs: Any,
    ) -> ActionDraw:
        """Sample one action per state.

        Args:
            env: the environment.
            states: [n, *S], each with at least one legal action.
            conditions: one condition per state, [n, *C], if the environment has conditions.
            save_estimator_outputs: whether to return the policy's logits.
            save_logprobs: whether to return the log-probability of each action, in nats.
            **policy_kwargs: fields of an :class:`~gfn_rb.rollout.Exploration` by name: ``epsilon``,
                ``temperature``, ``exit_bias`` and ``generator``.

        Returns:
            A named tuple of action [n], log_prob [n] or None, estimator_output [n, A] or None.

        Raises:
            ArgumentError: a state has no legal action, or an option is unknown or out of range.
            ShapeError: a shape or dtype is not the environment's.
            NaNError: the logits are NaN.
        """
        require_env(env)
        exploration = exploration_from(policy_kwargs, self.is_backward)
        env.check_state(states, "states")
        check_conditions(env, states, conditions)
        drawn = draw_actions(
            exploration, states, *policy_outputs(self.policy, env, states, conditions)
        )
        return ActionDraw(
            drawn.action,
            drawn.log_prob if save_logprobs else None,
            drawn.estimator_output if save_estimator_outputs else None,
        )

    @torch.no_grad()
    def sample_trajectories(
        self,
        env: GFNEnv,
        n: int | None = None,
        states: Tensor | None = None,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        *,
        log_rewards: Tensor | None = None,
        **policy_kwargs: Any,
    ) -> Trajectories:
        """Sample trajectories until every row has ended.

        Rows that have ended cost nothing while the others continue.

        Args:
            env: the environment.
            n: number of trajectories from the source, for forward policies. Give ``n`` or
                ``states``.
            states: starting states, [n, *S]: any states but the sink for a forward policy,
                terminating states for a backward policy. A forward row begins with its given state.
            conditions: one condition per row, [n, *C], if the environment has conditions. Default
                with ``n``: ``env.sample_condition`` samples them.
            save_estimator_outputs: whether to save the policy's logits at each step.
            save_logprobs: whether to save the log-probability of each action, in nats.
            log_rewards: log R of ``states`` in nats, [n], if known; backward policies only.
                Default: the environment computes them once.
            **policy_kwargs: fields of an :class:`~gfn_rb.rollout.Exploration` by name: ``epsilon``,
                ``temperature``, ``exit_bias`` and ``generator``.

        Returns:
            Trajectories padded to the longest one; ``is_backward`` is set if the policy is
            backward.

        Raises:
            ArgumentError: not exactly one of ``n`` and ``states`` is given, a start does not fit
                the policy's direction, a state has no legal action, or an option is unknown or out
                of range.
            ShapeError: a shape or dtype is not the environment's.
            NaNError: the logits or a reward are NaN.
        """
        require_env(env)
        is_backward = self.policy.is_backward
        exploration = exploration_from(policy_kwargs, is_backward)
        start = starting_states(env, n, states, is_backward)
        if n is not None and conditions is None:
            conditions = env.sample_condition(n, exploration.generator)
        check_conditions(env, start, conditions)
        if log_rewards is not None and not is_backward:
            raise ArgumentError(
                "log_rewards must be None for a forward policy, whose terminating states are not "
                f"known beforehand, got shape {list(log_rewards.shape)}"
            )
        if log_rewards is not None and (
            log_rewards.shape != start.shape[:1] or not log_rewards.is_floating_point()
        ):
            raise ShapeError(
                f"log_rewards must be floating point of shape [{len(start)}], got "
                f"{log_rewards.dtype} of shape {list(log_rewards.shape)}"
            )
        walk = Walk(self.policy, env, exploration, save_logprobs, save_estimator_outputs)
        return walk.trajectories(start, conditions, log_rewards)


def starting_states(env: GFNEnv, n: int | None, states: Tensor | None, is_backward: bool) -> Tensor:
    """Return the states that trajectories start from: those given, or ``n`` times the source."""
    if is_backward and (states is None or n is not None):
        raise ArgumentError(
            f"states alone must be given for a backward policy, which starts from terminating "
            f"states, got n={n} and {'no' if states is None else len(states)} states"
        )
    if (n is None) == (states is None):
        given = "neither" if n is None else "both"
        raise ArgumentError(f"exactly one of n and states must be given, got {given}")
    if states is None:
        return env.source(as_count("n", n, 0))
    env.check_state(states, "states")
    # A device would have to be waited for.
    if states.is_cpu and not (is_known := env.is_in_range(states)).all():
        row = int((~is_known).nonzero()[0])
        raise ArgumentError(
            f"states must hold numbers within {env.state_range}, got {states[row].tolist()} in "
            f"row {row}"
        )
    if is_backward:
        env.check_terminating(states, "states")
        return states
    if (wrong := env.is_sink(states)).any():
        row = int(wrong.nonzero()[0])
        raise ArgumentError(
            f"states must be other than the sink for a forward policy, got "
            f"{states[row].tolist()} in row {row}"
        )
    return states


def check_conditions(env: GFNEnv, states: Tensor, conditions: Tensor | None) -> None:
    """Raise unless there is one condition per state where the environment has conditions."""
    if conditions is not None or env.condition_shape is not None:
        env.checked_condition(conditions, len(states), name="conditions")


class ActionSampler(TensorDictModuleBase):
    """Samples a legal action from a policy's logits, for ``env.rollout`` and collectors.

    It reads "state", "action_mask" and the policy's other inputs, at any batch size, and writes
    "action". Rows in the sink get the exit action, as from ``env.rand_action``. If TorchRL's
    ``exploration_type`` is not random, it takes the most likely action, with the mean of its
    parameters. Autograd records nothing.

    Args:
        policy: forward policy: TensorDict module from "state" (and "condition") to "logits", one
            for each action of the environment, with ``is_backward`` False. It is a submodule: a
            collector sends its weights to its workers.
        save_estimator_outputs: whether to write the policy's logits, "estimator_output".
        save_logprobs: whether to write "log_prob", in nats, of the distribution drawn from.
        env: the environment; required for a :class:`~gfn_rb.envs.ContinuousEnv`, which makes
            actions of parameters.
        **policy_kwargs: fields of an :class:`~gfn_rb.rollout.Exploration` by name: ``epsilon``,
            ``temperature``, ``exit_bias`` and ``generator``.

    Raises:
        ArgumentError: the policy is not forward, or an option is unknown or out of range.

    Examples:
        >>> policy = ActionSampler(ForwardPolicy(env), epsilon=0.1)
        >>> collector = Collector(env, policy, frames_per_batch=256, replay_buffer=rb)
    """

    def __init__(
        self,
        policy: TensorDictModuleBase,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        *,
        env: GFNEnv | None = None,
        **policy_kwargs: Any,
    ) -> None:
        super().__init__()
        if require_direction(policy):
            raise ArgumentError("policy must be a forward one, got one with is_backward=True")
        self.policy = policy
        self._env = (env,)  # in a tuple, so that it does not become a submodule
        self.exploration = exploration_from(policy_kwargs, is_backward=False)
        self.in_keys: list[NestedKey] = list(
            dict.fromkeys([*policy.in_keys, keys.STATE, keys.FORWARD_MASK])
        )
        self.out_keys: list[str] = [
            keys.ACTION,
            *[keys.LOG_PROB] * save_logprobs,
            *[keys.ESTIMATOR_OUTPUT] * save_estimator_outputs,
        ]

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write one action per row.

        Args:
            tensordict: output of an environment's ``reset`` or ``step``, of any batch size.

        Raises:
            NaNError: the logits are NaN.
            KeyMismatchError: a key is missing, or the policy wrote no logits.
            ShapeError: the number of logits is not the number of actions, or a density has another
                shape than the parameters.
            ArgumentError: the policy gives no density of parameters.
        """
        state, mask = self._rows(tensordict, keys.STATE), self._rows(tensordict, keys.FORWARD_MASK)
        condition = None
        if keys.CONDITION in self.in_keys:
            condition = self._rows(tensordict, keys.CONDITION)
        has_ended = ~mask.any(1, keepdim=True)
        mask = torch.cat([mask[:, :-1], mask[:, -1:] | has_ended], 1)
        _, logits, parameters = policy_outputs(
            self.policy, self._env[0], state, condition, mask=mask
        )
        logits = logits.masked_fill(has_ended, 0)  # TorchRL fills these rows with zeros
        is_random = exploration_type() in (None, ExplorationType.RANDOM)
        drawn = draw_actions(self.exploration, state, mask, logits, parameters, is_random)
        for key in self.out_keys:
            value = getattr(drawn, key)
            tensordict.set(key, value.reshape(tensordict.batch_size + value.shape[1:]))
        return tensordict

    def _rows(self, tensordict: TensorDictBase, key: str) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            held = sorted(map(str, tensordict.keys(True, True)))
            raise KeyMismatchError(f"tensordict must have {key!r}, got {held}")
        return value.reshape(tensordict.batch_size.numel(), *value.shape[tensordict.ndim :])
