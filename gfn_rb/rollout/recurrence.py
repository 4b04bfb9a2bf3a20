"""Policies that carry a hidden state along a trajectory, by the keys of TorchRL's modules."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from gfn_rb import keys
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Shaped


def hidden_keys(policy: TensorDictModuleBase) -> list[str]:
    """Return what a recurrent policy reads that it wrote under "next" one step ago."""
    written = getattr(policy, "out_keys", ())
    return [key for key in getattr(policy, "in_keys", ()) if (keys.NEXT, key) in written]


def hidden_before(
    policy: TensorDictModuleBase, env: GFNCore, state: Shaped[torch.Tensor, "n *state"]
) -> TensorDict | None:
    """Return what a recurrent policy reads beside states at its first step; None for others.

    That is the mark "is_init" alone: without a hidden state it begins with its own.

    Args:
        policy: a policy.
        env: the environment.
        state: where trajectories begin.

    Raises:
        ArgumentError: the policy is recurrent, and goes backward, or not from the source, or
            actions have parameters.
    """
    if not hidden_keys(policy):
        return None
    if policy.is_backward or isinstance(env, ContinuousEnv) or not env.is_source(state).all():
        raise ArgumentError(
            f"policy must not be recurrent where it goes backward, from states other than the "
            f"source or with parameters of actions, got a {type(policy).__name__} that reads "
            f"{hidden_keys(policy)}"
        )
    is_init = torch.ones(len(state), 1, dtype=torch.bool, device=state.device)
    return TensorDict({keys.IS_INIT: is_init}, batch_size=state.shape[:1])


def advance(hidden: TensorDictBase, policy: TensorDictModuleBase, td: TensorDictBase) -> None:
    """Replace a hidden state by the one that a policy wrote.

    Args:
        hidden: see :func:`hidden_before`.
        policy: a recurrent policy.
        td: what it read and wrote.
    """
    hidden.set(keys.IS_INIT, torch.zeros_like(hidden.get(keys.IS_INIT)))
    for key in hidden_keys(policy):
        hidden.set(key, td.get((keys.NEXT, key)))


def require_memoryless(policy: TensorDictModuleBase) -> None:
    """Raise ArgumentError if a policy is recurrent."""
    if hidden_keys(policy):
        raise ArgumentError(
            f"policy must not be recurrent where states are read without those before them, got "
            f"a {type(policy).__name__} that reads {hidden_keys(policy)}"
        )
