"""Checks of the arguments of rollouts."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, NaNError, ShapeError
from gfn_rb.rollout.categorical import Exploration
from gfn_rb.torchrl_compat import assert_on_device


def check_gradients(exploration: Exploration, save_logprobs: bool) -> None:
    """Raise ArgumentError unless log-probabilities are kept, and those of the policy itself."""
    if not save_logprobs:
        raise ArgumentError("save_logprobs must be True with requires_grad, got False")
    if exploration != Exploration(generator=exploration.generator):
        options = {f.name: getattr(exploration, f.name) for f in fields(Exploration)[:-1]}
        raise ArgumentError(
            f"policy_kwargs must leave the policy as it is with requires_grad, got {options}"
        )


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
    if is_backward:
        env.check_terminating(states, "states")
        return states
    env.check_state(states, "states")
    if (wrong := env.is_sink(states)).any():
        row = int(wrong.nonzero()[0])
        raise ArgumentError(
            f"states must be other than the sink for a forward policy, got "
            f"{states[row].tolist()} in row {row}"
        )
    return states


def check_conditions(env: GFNEnv, states: Tensor, conditions: Tensor | None) -> None:
    """Raise unless there is one condition per state, of the environment's shape if it has any."""
    shape = env.condition_shape
    if conditions is None:
        if shape is not None:
            raise ArgumentError(f"conditions must be given for {type(env).__name__}, got None")
        return
    fits = shape is None or conditions.shape[1:] == shape
    if conditions.shape[:1] != states.shape[:1] or not fits:
        row = ["..."] if shape is None else map(str, shape)
        raise ShapeError(
            f"conditions must have shape [{', '.join([str(len(states)), *row])}], one row per "
            f"state, got {list(conditions.shape)}"
        )


def check_log_rewards(log_rewards: Tensor | None, states: Tensor, is_backward: bool) -> None:
    """Raise unless log-rewards, if any, are one float per state a backward policy starts from."""
    if log_rewards is None:
        return
    if not is_backward:
        raise ArgumentError(
            "log_rewards must be None for a forward policy, whose terminating states are not "
            f"known beforehand, got shape {list(log_rewards.shape)}"
        )
    if log_rewards.shape != states.shape[:1] or not log_rewards.is_floating_point():
        raise ShapeError(
            f"log_rewards must be floating point of shape [{len(states)}], got "
            f"{log_rewards.dtype} of shape {list(log_rewards.shape)}"
        )


def check_rewards(log_reward: Tensor, states: Tensor) -> None:
    """Raise unless an environment's log-rewards of terminating states are one number per state."""
    if log_reward.shape != states.shape[:1]:
        raise ShapeError(
            f"env.log_reward must return one number for each of {len(states)} states, got shape "
            f"{list(log_reward.shape)}"
        )
    if not log_reward.is_cpu:  # the device raises, so as not to wait for it
        message = "env.log_reward must return numbers, got nan"
        assert_on_device(~log_reward.isnan().any(), message)
    elif log_reward.isnan().any():
        row = int(log_reward.isnan().nonzero()[0])
        raise NaNError(
            f"env.log_reward must return numbers, got nan for state {states[row].tolist()} "
            f"in row {row}"
        )
