"""Drawing actions and taking them, until every row has reached its end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout.categorical import Exploration, draw, explain_no_draw
from gfn_rb.rollout.log_probs import legal_actions, policy_logits
from gfn_rb.rollout.steps import Drawn, Steps
from gfn_rb.shapes import Bool, Int64, Shaped


@dataclass(frozen=True)
class Walk:
    """A policy at work in an environment.

    Args:
        policy: a forward or backward policy.
        env: the environment.
        exploration: how its distribution is changed.
        save_logprobs: whether draws hold log-probabilities.
        save_estimator_outputs: whether draws hold the policy's logits.
    """

    policy: TensorDictModuleBase
    env: GFNCore
    exploration: Exploration
    save_logprobs: bool
    save_estimator_outputs: bool

    def draw(
        self, state: Shaped[Tensor, "k *state"], condition: Shaped[Tensor, "k *condition"] | None
    ) -> Drawn:
        """Draw one action per state.

        Raises:
            ArgumentError: a state has no legal action.
            NaNError: the logits give no distribution.
        """
        mask = legal_actions(self.policy, self.env, state)
        logits = policy_logits(self.policy, state, condition, mask.shape[1])
        p = self.exploration.probabilities(logits, mask)
        action = draw(p, self.exploration.generator)
        if action is None:
            raise explain_no_draw(logits, mask, state)
        return Drawn(
            action,
            p.gather(1, action[:, None]).squeeze(1).log() if self.save_logprobs else None,
            logits if self.save_estimator_outputs else None,
        )

    def roll(
        self, state: Shaped[Tensor, "n *state"], condition: Shaped[Tensor, "n *condition"] | None
    ) -> Steps:
        """Draw and take actions; rows that have reached their end are left behind.

        Args:
            state: where each row starts.
            condition: one condition per row.

        Returns:
            Every state with the action drawn there, the last states left out.

        Raises:
            ArgumentError: a state has no legal action, or a row has no end within
                ``env.max_length`` actions.
            NaNError: the logits give no distribution.
        """
        is_backward = self.policy.is_backward
        steps = Steps(len(state), first=int(is_backward), device=state.device)
        row = torch.arange(len(state), device=state.device)
        going = ~self.env.is_source(state) if is_backward else torch.ones_like(row).bool()
        for _ in range(self.env.max_length + 1):
            rest = going.nonzero().squeeze(1)
            if len(rest) < len(row):
                row, state = row[rest], state[rest]
                condition = None if condition is None else condition[rest]
            if not len(row):
                return steps
            drawn = self.draw(state, condition)
            steps.add(row, state, drawn)
            state, going = self._take(state, drawn.action)
        raise ArgumentError(
            f"env must end every trajectory within max_length={self.env.max_length} actions, got "
            f"{state[0].tolist()} after them"
        )

    def _take(
        self, state: Shaped[Tensor, "k *state"], action: Int64[Tensor, "k"]
    ) -> tuple[Shaped[Tensor, "k *state"], Bool[Tensor, "k"]]:
        """Return the next states, and which rows have not reached their end."""
        if self.policy.is_backward:
            state = self.env.backward_step(state, action)
            return state, ~self.env.is_source(state)
        return self.env.forward_step(state, action), action != self.env.exit_action
