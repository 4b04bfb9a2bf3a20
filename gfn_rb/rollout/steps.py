"""Walks of many rows at once, the record of a rollout, and its layout as trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout.categorical import Exploration, draw, explain_no_draw
from gfn_rb.rollout.log_probs import drawn_log_probs, legal_actions, policy_says
from gfn_rb.rollout.parameters import Parameters
from gfn_rb.rollout.recurrence import hidden_before
from gfn_rb.shapes import Float, Int64, Shaped


class ActionDraw(NamedTuple):
    """One draw from a policy.

    Attributes:
        action: drawn actions, [n, *A].
        log_prob: their log-probabilities under the distribution drawn from, [n], where kept.
        estimator_output: the policy's logits, [n, A], where kept.
    """

    action: Tensor
    log_prob: Tensor | None
    estimator_output: Tensor | None


class Steps:
    """States and draws of a rollout, step by step, each in the rows then under way.

    Args:
        n: number of trajectories.
        first: column of a trajectory at which its first draw stands.
        device: where the rows are.
    """

    def __init__(self, n: int, first: int, device: torch.device) -> None:
        self.n, self.first, self.device = n, first, device
        self.row: list[Tensor] = []
        self.state: list[Tensor] = []
        self.action: list[Tensor] = []
        self.log_prob: list[Tensor] = []
        self.estimator_output: list[Tensor] = []

    def add(
        self, row: Int64[Tensor, "k"], state: Shaped[Tensor, "k *state"], drawn: ActionDraw
    ) -> None:
        """Record one step of the rows under way: which they are, their states, what was drawn."""
        self.row.append(row)
        self.state.append(state)
        self.action.append(drawn.action)
        if drawn.log_prob is not None:
            self.log_prob.append(drawn.log_prob)
        if drawn.estimator_output is not None:
            self.estimator_output.append(drawn.estimator_output)

    @property
    def n_steps(self) -> int:
        """Columns up to and with the last draw of all."""
        return self.first + len(self.row)

    def length(self) -> Int64[Tensor, "n"]:
        """Count each trajectory's columns up to and with its last draw."""
        if self._together:
            return torch.full((self.n,), self.n_steps, device=self.device)
        return torch.bincount(self._index[0], minlength=self.n) + self.first

    def spread(
        self, values: list[Tensor], fill: Shaped[Tensor, "*item"], extra: int = 0
    ) -> Shaped[Tensor, "n columns *item"]:
        """Write each step's values into their rows and column, and ``fill`` everywhere else.

        Args:
            values: one tensor per step, with one item per row then under way.
            fill: the item that stands where nothing was drawn.
            extra: columns after the last draw.
        """
        if self._together:
            edge = fill.expand(self.n, *fill.shape)
            return torch.stack([edge] * self.first + values + [edge] * extra, 1)
        out = fill.expand(self.n, self.n_steps + extra, *fill.shape).clone()
        if values:
            out[self._index] = torch.cat(values)
        return out

    def over_zeros(self, values: list[Tensor], *shape: int) -> Float[Tensor, "n columns *item"]:
        """Spread values of items of one shape over zeros; see ``spread``."""
        dtype = values[0].dtype if values else None
        return self.spread(values, torch.zeros(shape, dtype=dtype, device=self.device))

    @property
    def _together(self) -> bool:
        """Whether all trajectories have the same length, which makes the layout a mere stack."""
        return bool(self.row) and len(self.row[-1]) == self.n

    @cached_property
    def _index(self) -> tuple[Int64[Tensor, "m"], Int64[Tensor, "m"]]:
        """Row and column of each draw."""
        counts = torch.tensor([len(row) for row in self.row], dtype=torch.int64)
        column = torch.arange(self.first, self.n_steps).repeat_interleave(counts).to(self.device)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        return torch.cat([none, *self.row]), column


class _Rows(NamedTuple):
    """The trajectories under way: which they are, where they are, and their conditions.

    Beside them stands what a recurrent policy carries.
    """

    row: Tensor
    state: Tensor
    condition: Tensor | None
    hidden: TensorDictBase | None

    def take(self, rest: Int64[Tensor, "l"]) -> _Rows:
        """Return the rows that go on; all of them without a copy."""
        if len(rest) == len(self.row):
            return self
        condition = None if self.condition is None else self.condition[rest]
        hidden = None if self.hidden is None else self.hidden[rest]
        return _Rows(self.row[rest], self.state[rest], condition, hidden)


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
        self,
        state: Shaped[Tensor, "k *state"],
        condition: Shaped[Tensor, "k *condition"] | None,
        hidden: TensorDictBase | None = None,
    ) -> ActionDraw:
        """Draw one action per state.

        Args:
            state: states with at least one legal action each.
            condition: one condition per state.
            hidden: see :func:`gfn_rb.rollout.log_probs.policy_says`.

        Raises:
            ArgumentError: a state has no legal action.
            NaNError: the logits give no distribution.
        """
        mask = legal_actions(self.policy, self.env, state)
        logits, parameters = policy_says(
            self.policy, self.env, state, condition, mask.shape[1], hidden
        )
        p = self.exploration.probabilities(logits, mask)
        kind = draw(p.detach(), self.exploration.generator)
        if kind is None:
            raise explain_no_draw(logits, mask, state)
        action = kind if parameters is None else parameters.draw(kind, self.exploration)
        return ActionDraw(
            action,
            self.log_prob(p, parameters, action) if self.save_logprobs else None,
            logits.detach() if self.save_estimator_outputs else None,
        )

    def log_prob(
        self,
        p: Float[Tensor, "n actions"],
        parameters: Parameters | None,
        action: Shaped[Tensor, "n *action"],
    ) -> Float[Tensor, "n"]:
        """Return the log-probability with which the walk draws actions.

        Args:
            p: of each kind.
            parameters: of the policy in the states, where actions have some.
            action: one for each state.
        """
        return drawn_log_probs(p, self.env.kind(action), parameters, action, self.exploration)

    def roll(
        self, state: Shaped[Tensor, "n *state"], condition: Shaped[Tensor, "n *condition"] | None
    ) -> Steps:
        """Draw and take actions; rows that have reached their end are left behind.

        Returns:
            Every state with the action drawn there, the last states left out.

        Raises:
            ArgumentError: a state has no legal action, a row has no end within
                ``env.max_length`` actions, or a recurrent policy cannot go this way.
            NaNError: the logits give no distribution.
        """
        is_backward = self.policy.is_backward
        steps = Steps(len(state), first=int(is_backward), device=state.device)
        row = torch.arange(len(state), device=state.device)
        at = _Rows(row, state, condition, hidden_before(self.policy, self.env, state))
        if is_backward:
            at = self._past_source(at)
        for _ in range(self.env.max_length + 1):
            if not len(at.row):
                return steps
            drawn = self.draw(at.state, at.condition, at.hidden)
            steps.add(at.row, at.state, drawn)
            at = (self._undo if is_backward else self._move)(at, drawn.action)
        raise ArgumentError(
            f"env must end every trajectory within max_length={self.env.max_length} actions, got "
            f"{at.state[0].tolist()} after them"
        )

    def _move(self, at: _Rows, action: Shaped[Tensor, "k *action"]) -> _Rows:
        """Take the actions; rows that exit are dropped first."""
        rest = (self.env.kind(action) != self.env.exit_action).nonzero().squeeze(1)
        if len(rest) < len(action):
            at, action = at.take(rest), action[rest]
        return at._replace(state=self.env.move(at.state, action))

    def _undo(self, at: _Rows, action: Shaped[Tensor, "k *action"]) -> _Rows:
        """Undo the actions; rows that thereby reach the source are dropped."""
        return self._past_source(at._replace(state=self.env.undo(at.state, action)))

    def _past_source(self, at: _Rows) -> _Rows:
        """Drop the rows in the source."""
        return at.take((~self.env.is_source(at.state)).nonzero().squeeze(1))
