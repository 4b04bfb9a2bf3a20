"""Walks of a policy through an environment, many rows at once, and their layout as trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.arguments import require_device_of
from gfn_rb.containers import Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout.categorical import Exploration, draw, draw_any, explain_no_draw
from gfn_rb.rollout.checks import check_rewards
from gfn_rb.rollout.outputs import drawn_log_probs, hidden_before, policy_outputs
from gfn_rb.shapes import Bool, ConditionBatch, Float, Int64, Shaped, StateBatch


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
    """States and draws of a rollout, step by step, each of the rows that were active then."""

    def __init__(self, n: int, first: int, device: torch.device) -> None:
        self.n, self.first, self.device = n, first, device
        self.row: list[Tensor] = []
        self.state: list[Tensor] = []
        self.draws: list[ActionDraw] = []

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
        self, values: list[Any], fill: Shaped[Tensor, "*item"], extra: int = 0
    ) -> Shaped[Tensor, "n columns *item"]:
        """Write each step's values into their rows and column, and ``fill`` everywhere else."""
        if self._together:
            edge = fill.expand(self.n, *fill.shape)
            return torch.stack([edge] * self.first + values + [edge] * extra, 1)
        out = fill.expand(self.n, self.n_steps + extra, *fill.shape).clone()
        if values:
            out[self._index] = torch.cat(values)
        return out

    def over_zeros(self, values: list[Any], *shape: int) -> Float[Tensor, "n columns *item"]:
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


class PaddedSteps(Steps):
    """Steps of all rows, those that have ended included, so that nothing waits for their device.

    ``row`` holds which rows were active at each step.
    """

    def __init__(self, n: int, first: int, device: torch.device) -> None:
        super().__init__(n, first, device)
        self.outputs: list[tuple[Tensor, Tensor]] = []  # logits and legal actions of each step
        self.sound: list[Tensor] = []  # whether each active row had something to draw from

    def finish(self, state: StateBatch, active: Bool[Tensor, "n"], max_length: int) -> None:
        """Raise if a step was unsound or a row has not ended; else leave idle steps out.

        It waits for the device, once.
        """
        counts = [each.any() for each in self.row]
        endless, *known = torch.stack([active.any(), *self.sound, *counts]).tolist()
        n_taken = len(counts)
        if not all(known[:n_taken]):
            step = known.index(False)
            row, (logits, mask) = self.row[step], self.outputs[step]
            raise explain_no_draw(logits[row], mask[row], self.state[step][row])
        if endless:
            raise _endless(state[active], max_length)
        n_steps = sum(known[n_taken:])
        del self.row[n_steps:], self.state[n_steps:], self.draws[n_steps:], self.outputs[:]

    def length(self) -> Int64[Tensor, "n"]:
        """Count each trajectory's columns up to and with its last draw."""
        first = torch.full((1, self.n), self.first, device=self.device)
        return torch.cat([first, *(row[None] for row in self.row)]).sum(0)

    def spread(
        self, values: list[Any], fill: Shaped[Tensor, "*item"], extra: int = 0
    ) -> Shaped[Tensor, "n columns *item"]:
        """Stack each step's values, and ``fill`` where a row had ended."""
        edge = fill.expand(self.n, *fill.shape)
        kept = [
            value.where(row.view(-1, *(1,) * fill.ndim), fill)
            for row, value in zip(self.row, values, strict=True)
        ]
        columns = [edge] * self.first + kept + [edge] * extra
        return torch.stack(columns, 1) if columns else fill.new_empty(self.n, 0, *fill.shape)


@dataclass(frozen=True)
class Walk:
    """A policy at work in an environment."""

    policy: TensorDictModuleBase
    env: GFNCore
    exploration: Exploration
    save_logprobs: bool = False
    save_estimator_outputs: bool = False

    def draw(
        self,
        state: Shaped[Tensor, "k *state"],
        condition: Shaped[Tensor, "k *condition"] | None,
        hidden: TensorDictBase | None = None,
    ) -> ActionDraw:
        """Draw one action per state."""
        explored = self.exploration
        mask, logits, parameters = policy_outputs(self.policy, self.env, state, condition, hidden)
        p = explored.probabilities(logits, mask)
        kind = draw(p.detach(), explored.generator)
        if kind is None:
            raise explain_no_draw(logits, mask, state)
        action = kind if parameters is None else parameters.draw(kind, explored)
        log_prob = None
        if self.save_logprobs:
            log_prob = drawn_log_probs(p, kind, parameters, action, explored)
        return ActionDraw(
            action, log_prob, logits.detach() if self.save_estimator_outputs else None
        )

    def roll(self, state: StateBatch, condition: ConditionBatch | None) -> Steps:
        """Draw and take actions; rows that have reached their end are left behind."""
        env, is_backward = self.env, self.policy.is_backward
        steps = Steps(len(state), first=int(is_backward), device=state.device)
        row, action = torch.arange(len(state), device=state.device), None
        hidden = hidden_before(self.policy, env, state)
        goes_on = ~env.is_source(state) if is_backward else torch.ones_like(row, dtype=torch.bool)
        for _ in range(env.max_length + 1):
            rest = goes_on.nonzero().squeeze(1)
            if len(rest) < len(goes_on):
                row, state = row[rest], state[rest]
                action = None if action is None else action[rest]
                condition = None if condition is None else condition[rest]
                hidden = None if hidden is None else hidden[rest]
            if not len(row):
                return steps
            if action is not None:
                state = env.move(state, action)
            drawn = self.draw(state, condition, hidden)
            steps.row.append(row)
            steps.state.append(state)
            steps.draws.append(drawn)
            if is_backward:
                state = env.undo(state, drawn.action)
                goes_on = ~env.is_source(state)
            else:
                action = drawn.action
                goes_on = env.kind(action) != env.exit_action
        raise _endless(state, env.max_length)

    def roll_together(self, state: StateBatch, condition: ConditionBatch | None) -> PaddedSteps:
        """Do as :meth:`roll` does, all rows at every step, with one wait for their device.

        Each step has the same shapes: rows that have ended stay in the sink.
        """
        env, explored, is_backward = self.env, self.exploration, self.policy.is_backward
        if explored.generator is not None:
            require_device_of(explored.generator, state.device, "states")
        take = env.backward_step if is_backward else env.forward_step
        steps = PaddedSteps(len(state), first=int(is_backward), device=state.device)
        hidden = hidden_before(self.policy, env, state)
        active = torch.ones(len(state), dtype=torch.bool, device=state.device)
        if is_backward:
            active = ~env.is_source(state)
        any_legal = torch.arange(env.n_actions - is_backward, device=state.device) == 0
        for _ in range(env.max_length - is_backward):
            mask = env.backward_mask(state) if is_backward else env.forward_mask(state)
            drawable = torch.where(active[:, None], mask, any_legal)
            _, logits, parameters = policy_outputs(
                self.policy, env, state, condition, hidden, drawable
            )
            p = explored.probabilities(logits, drawable)
            kind, is_drawn = draw_any(p.detach(), explored.generator)
            action = kind if parameters is None else parameters.draw(kind, explored)
            log_prob = None
            if self.save_logprobs:
                log_prob = drawn_log_probs(p, kind, parameters, action, explored)
            kept = logits.detach() if self.save_estimator_outputs else None
            steps.row.append(active)
            steps.state.append(state)
            steps.draws.append(ActionDraw(action, log_prob, kept))
            steps.outputs.append((logits.detach(), mask))
            steps.sound.append((is_drawn | ~active).all())
            active = active & is_drawn
            taken = active.view(-1, *(1,) * len(env.action_shape))
            state = take(state, action.where(taken, env.dummy_action))
            active = active & (~env.is_source(state) if is_backward else kind != env.exit_action)
        steps.finish(state, active, env.max_length)
        return steps

    def trajectories(
        self,
        start: StateBatch,
        condition: ConditionBatch | None,
        log_reward: Float[Tensor, "n"] | None,
    ) -> Trajectories:
        """Roll out, pad the rows to trajectories, and ask for their rewards."""
        env, is_backward = self.env, self.policy.is_backward
        steps = (self.roll if start.is_cpu else self.roll_together)(start, condition)
        length, row = steps.length(), torch.arange(steps.n, device=steps.device)
        state = steps.spread(steps.state, env.sink_state, extra=1)
        padding = torch.full(
            env.action_shape, env.dummy_action, dtype=env.action_dtype, device=steps.device
        )
        action = steps.spread([drawn.action for drawn in steps.draws], padding)
        if is_backward:
            state[row, length] = env.source_state
            action[:, 0] = env.exits(steps.n)
        log_prob = estimator_output = None
        if self.save_logprobs:
            log_prob = steps.over_zeros([drawn.log_prob for drawn in steps.draws])
        if self.save_estimator_outputs:
            logits = [drawn.estimator_output for drawn in steps.draws]
            estimator_output = steps.over_zeros(logits, env.n_actions - is_backward)
        if log_reward is None:
            x = start if is_backward else state[row, length - 1]
            with torch.no_grad():
                conditions = () if env.condition_shape is None else (condition,)
                log_reward = env.log_reward(x, *conditions)
            check_rewards(log_reward, x)
        return Trajectories(
            state=state,
            action=action,
            length=length,
            log_reward=log_reward.float(),
            log_prob=log_prob,
            estimator_output=estimator_output,
            condition=condition,
            is_backward=torch.ones_like(row, dtype=torch.bool) if is_backward else None,
        )


def _endless(state: StateBatch, max_length: int) -> ArgumentError:
    return ArgumentError(
        f"env must end every trajectory within max_length={max_length} actions, got "
        f"{state[0].tolist()} after them"
    )
