"""TensorDict module that draws actions from a policy, for TorchRL's rollouts and collectors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, exploration_type

from gfn_rb import keys
from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, KeyMismatchError
from gfn_rb.rollout.categorical import draw, explain_no_draw, exploration_from
from gfn_rb.rollout.outputs import (
    drawn_log_probs,
    policy_outputs,
    require_direction,
    require_memoryless,
)


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
            ``temperature``, ``noise``, ``exit_bias`` and ``generator``.

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
        require_memoryless(policy)
        self.policy = policy
        self._env = (env,)  # in a tuple, so that it does not become a submodule
        self.exploration = exploration_from(policy_kwargs, is_backward=False)
        self.save_estimator_outputs, self.save_logprobs = save_estimator_outputs, save_logprobs
        self.in_keys: list[NestedKey] = list(
            dict.fromkeys([*policy.in_keys, keys.STATE, keys.FORWARD_MASK])
        )
        self.out_keys: list[NestedKey] = [
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
        p = self.exploration.probabilities(logits, mask)
        is_random = exploration_type() in (None, ExplorationType.RANDOM)
        if is_random or p.isnan().any():
            chosen, is_drawn = draw(p, self.exploration.generator)
            if not is_drawn.all():
                raise explain_no_draw(logits, mask, state)
        else:
            chosen = p.argmax(1)
        action = kind = chosen
        if parameters is not None:
            action = parameters.draw(kind, self.exploration) if is_random else parameters.mean(kind)
        written = {keys.ACTION: action}
        if self.save_logprobs:
            written[keys.LOG_PROB] = drawn_log_probs(p, kind, parameters, action, self.exploration)
        if self.save_estimator_outputs:
            written[keys.ESTIMATOR_OUTPUT] = logits
        for key, value in written.items():
            tensordict.set(key, value.reshape(tensordict.batch_size + value.shape[1:]))
        return tensordict

    def _rows(self, tensordict: TensorDictBase, key: str) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            held = sorted(map(str, tensordict.keys(True, True)))
            raise KeyMismatchError(f"tensordict must have {key!r}, got {held}")
        return value.reshape(tensordict.batch_size.numel(), *value.shape[tensordict.ndim :])
