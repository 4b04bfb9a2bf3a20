"""Drawing actions and taking them, until every row has reached its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout.categorical import Exploration, draw, explain_no_draw
from gfn_rb.rollout.log_probs import legal_actions, policy_logits
from gfn_rb.rollout.steps import ActionDraw, Steps
from gfn_rb.shapes import Int64, Shaped


class _Rows(NamedTuple):
    """The trajectories under way: which they are, where they are, and their conditions."""

    row: Tensor
    state: Tensor
    condition: Tensor | None

    def take(self, rest: Int64[Tensor, "l"]) -> _Rows:
        """Return the rows that go on; all of them without a copy."""
        if len(rest) == len(self.row):
            return self
        condition = None if self.condition is None else self.condition[rest]
        return _Rows(self.row[rest], self.state[rest], condition)


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
    ) -> ActionDraw:
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
        return ActionDraw(
            action,
            p.gather(1, action[:, None]).squeeze(1).log() if self.save_logprobs else None,
            logits if self.save_estimator_outputs else None,
        )

    def roll(
        self, state: Shaped[Tensor, "n *state"], condition: Shaped[Tensor, "n *condition"] | None
    ) -> Steps:
        """Draw and take actions; rows that have reached their end are left behind.

        Returns:
            Every state with the action drawn there, the last states left out.

        Raises:
            ArgumentError: a state has no legal action, or a row has no end within
                ``env.max_length`` actions.
            NaNError: the logits give no distribution.
        """
        is_backward = self.policy.is_backward
        steps = Steps(len(state), first=int(is_backward), device=state.device)
        at = _Rows(torch.arange(len(state), device=state.device), state, condition)
        if is_backward:
            at = self._past_source(at)
        for _ in range(self.env.max_length + 1):
            if not len(at.row):
                return steps
            drawn = self.draw(at.state, at.condition)
            steps.add(at.row, at.state, drawn)
            at = (self._undo if is_backward else self._move)(at, drawn.action)
        raise ArgumentError(
            f"env must end every trajectory within max_length={self.env.max_length} actions, got "
            f"{at.state[0].tolist()} after them"
        )

    def _move(self, at: _Rows, action: Int64[Tensor, "k"]) -> _Rows:
        """Take the actions; rows that exit are dropped first."""
        rest = (action != self.env.exit_action).nonzero().squeeze(1)
        if len(rest) < len(action):
            at, action = at.take(rest), action[rest]
        return at._replace(state=self.env.move(at.state, action))

    def _undo(self, at: _Rows, action: Int64[Tensor, "k"]) -> _Rows:
        """Undo the actions; rows that thereby reach the source are dropped."""
        return self._past_source(at._replace(state=self.env.undo(at.state, action)))

    def _past_source(self, at: _Rows) -> _Rows:
        """Drop the rows in the source."""
        return at.take((~self.env.is_source(at.state)).nonzero().squeeze(1))
