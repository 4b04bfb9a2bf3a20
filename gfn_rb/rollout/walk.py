"""Walks of a policy through an environment, many rows at once, and their layout as trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.arguments import require_device_of
from gfn_rb.containers import Trajectories
from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.core import host_form
from gfn_rb.errors import ArgumentError, NaNError, ShapeError
from gfn_rb.rollout.categorical import Exploration, draw, draw_on_host, explain_no_draw
from gfn_rb.rollout.outputs import (
    StateModule,
    drawn_log_probs,
    policy_outputs,
    require_entry,
)
from gfn_rb.shapes import Bool, ConditionBatch, Float, Float64, Int64, Shaped, StateBatch
from gfn_rb.torchrl_compat import assert_on_device, new_tensordict

_BLOCK = 32  # steps whose random numbers are drawn at once


class Steps:
    """States and draws of a rollout, step by step, each of the rows that were active then."""

    def __init__(self, n: int, first: int, device: torch.device) -> None:
        self.n, self.first, self.device = n, first, device
        # Rows, states and actions are arrays, the others tensors.
        self.row: list[Any] = []
        self.state: list[Any] = []
        self.action: list[Any] = []
        self.log_prob: list[Tensor] = []
        self.logits: list[Tensor] = []

    @property
    def n_steps(self) -> int:
        """Columns up to and with the last draw of all."""
        return self.first + len(self.row)

    def length(self) -> Int64[Tensor, "n"]:
        """Count each trajectory's columns up to and with its last draw."""
        return torch.from_numpy(np.bincount(self._index[0], minlength=self.n) + self.first)

    def spread(
        self, values: list[Any], fill: Shaped[Tensor, "*item"], extra: int = 0
    ) -> Shaped[Tensor, "n columns *item"]:
        """Write each step's values into their rows and column, and ``fill`` everywhere else."""
        shape = self.n, self.n_steps + extra, *fill.shape
        if not (values and isinstance(values[0], np.ndarray)):
            out = fill.expand(shape).clone()
            if values:
                out[tuple(map(torch.from_numpy, self._index))] = torch.cat(values)
            return out
        filled = np.empty(shape, values[0].dtype)
        filled[...] = fill.numpy()
        filled[self._index] = np.concatenate(values)
        return torch.from_numpy(filled)

    def over_zeros(self, values: list[Tensor], *shape: int) -> Float[Tensor, "n columns *item"]:
        """Spread values of items of one shape over zeros; see ``spread``."""
        dtype = values[0].dtype if values else None
        return self.spread(values, torch.zeros(shape, dtype=dtype, device=self.device))

    @cached_property
    def _index(self) -> tuple[Int64[np.ndarray, "m"], Int64[np.ndarray, "m"]]:
        """Row and column of each draw."""
        column = np.arange(self.first, self.n_steps).repeat([len(row) for row in self.row])
        return np.concatenate([np.empty(0, np.int64), *self.row]), column


class PaddedSteps(Steps):
    """Steps of all rows, so that none waits for their device; ``row`` holds the active ones."""

    def __init__(self, n: int, first: int, device: torch.device) -> None:
        super().__init__(n, first, device)
        self.mask: list[Tensor] = []
        self.sound: list[Tensor] = []  # whether each active row had something to draw from

    def finish(self, state: StateBatch, active: Bool[Tensor, "n"], max_length: int) -> None:
        """Raise if a step was unsound or a row has not ended; else leave idle steps out."""
        counts = [each.any() for each in self.row]
        endless, *known = torch.stack([active.any(), *self.sound, *counts]).tolist()
        n_taken = len(counts)
        if not all(known[:n_taken]):
            step = known.index(False)
            row, steps = self.row[step], (self.logits, self.mask, self.state)
            raise explain_no_draw(*(each[step][row] for each in steps))
        if endless:
            left = active.nonzero()[0]
            raise _endless(self.state[0], state, int(left), int(left), max_length, self.first > 0)
        n_steps = sum(known[n_taken:])
        for each in (self.row, self.state, self.action, self.log_prob, self.logits):
            del each[n_steps:]

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
    env: GFNEnv
    exploration: Exploration
    save_logprobs: bool = False
    save_estimator_outputs: bool = False

    def roll(self, start: StateBatch, condition: ConditionBatch | None) -> Steps:
        """Draw and take actions; rows that have reached their end are left behind."""
        # All but the policy is computed by NumPy: a step of few rows costs what its calls cost.
        env, explored, is_backward = self.env, self.exploration, self.policy.is_backward
        move, undo, is_source = host_form(env.move), host_form(env.undo), host_form(env.is_source)
        masks = host_form(env.backward_mask if is_backward else env.forward_mask)
        evaluate = None
        if type(self.policy).forward is StateModule.forward and not env.action_shape:
            evaluate = self.policy.evaluator()
        is_plain = explored.temperature == 1 and not (explored.epsilon or explored.exit_bias)
        steps, chances = Steps(len(start), first=int(is_backward), device=start.device), []
        row, state = np.arange(len(start)), start.detach().numpy()
        action, goes_on = row, np.ones(len(start), np.bool_)
        if is_backward:
            goes_on = ~is_source(state)
        for u in self._uniforms(len(start)):
            rest = goes_on.nonzero()[0]
            if len(rest) < len(row):
                row, state, action = row[rest], state[rest], action[rest]
                at = torch.from_numpy(rest)
                condition = None if condition is None else condition[at]
            if not len(row):
                break
            if steps.row and not is_backward:
                state = move(state, action)
            if evaluate is None:
                at = torch.from_numpy(state)
                legal, logits, parameters = policy_outputs(self.policy, env, at, condition)
            else:
                legal, logits = torch.from_numpy(masks(state)), evaluate(state, condition)
                parameters = None
                if logits.shape != legal.shape:
                    require_entry(self.policy, keys.LOGITS, logits, legal.shape)
            if is_plain:
                p = logits.where(legal, -torch.inf).softmax(1)
            else:
                p = explored.probabilities(logits, legal)
            kind = draw_on_host(p.detach().double().numpy(), u[: len(row)])
            if kind is None:
                raise explain_no_draw(logits, legal, torch.from_numpy(state))
            action = kind
            if parameters is not None:
                action = parameters.draw(torch.from_numpy(kind), explored).numpy()
            steps.row.append(row)
            steps.state.append(state)
            steps.action.append(action)
            if self.save_logprobs:
                chances.append((p, kind, parameters))
            if self.save_estimator_outputs:
                steps.logits.append(logits)
            if is_backward:
                state = undo(state, action)
                goes_on = ~is_source(state)
            else:
                goes_on = kind != env.exit_action
        else:
            raise _endless(
                start, torch.from_numpy(state), int(row[0]), 0, env.max_length, is_backward
            )
        if chances:
            steps.log_prob = self._log_probs(chances, steps.action)
        return steps

    def _uniforms(self, n: int) -> Iterator[Float64[np.ndarray, "n 1"]]:
        """Return uniform numbers for one step more than there may be, drawn for several at once."""
        n_steps, generator = self.env.max_length + 1, self.exploration.generator

        def block(start: int) -> np.ndarray:
            shape = min(_BLOCK, n_steps - start), n, 1
            return torch.rand(shape, dtype=torch.float64, generator=generator).numpy()

        return chain.from_iterable(map(block, range(0, n_steps, _BLOCK)))

    def _log_probs(self, chances: list[Any], actions: list[np.ndarray]) -> list[Tensor]:
        """Return the log-probabilities of all actions, without parameters in one operation."""
        p, kinds, parameters = zip(*chances, strict=True)
        if parameters[0] is None:
            kind = torch.from_numpy(np.concatenate(kinds))
            return [drawn_log_probs(torch.cat(p), kind, None, kind, self.exploration)]
        return [
            drawn_log_probs(
                each, torch.from_numpy(kind), density, torch.from_numpy(action), self.exploration
            )
            for each, kind, density, action in zip(p, kinds, parameters, actions, strict=True)
        ]

    def roll_together(self, state: StateBatch, condition: ConditionBatch | None) -> PaddedSteps:
        """Do as :meth:`roll` does, all rows at every step, with one wait for their device."""
        env, explored, is_backward = self.env, self.exploration, self.policy.is_backward
        if explored.generator is not None:
            require_device_of(explored.generator, state.device, "states")
        take = env.backward_step if is_backward else env.forward_step
        steps = PaddedSteps(len(state), first=int(is_backward), device=state.device)
        active = torch.ones(len(state), dtype=torch.bool, device=state.device)
        if is_backward:
            active = ~env.is_source(state)
        for _ in range(env.max_length - is_backward):
            mask, logits, parameters = policy_outputs(
                self.policy, env, state, condition, active=active
            )
            p = explored.probabilities(logits, mask)
            kind, is_drawn = draw(p.detach(), explored.generator)
            action = kind if parameters is None else parameters.draw(kind, explored)
            if self.save_logprobs:
                steps.log_prob.append(drawn_log_probs(p, kind, parameters, action, explored))
            steps.row.append(active)
            steps.state.append(state)
            steps.action.append(action)
            steps.logits.append(logits)
            steps.mask.append(mask)
            steps.sound.append((is_drawn | ~active).all())
            active = active & is_drawn
            taken = active.view(-1, *(1,) * len(env.action_shape))
            state = take(state, action.where(taken, env.dummy_action))
            active = active & (~env.is_source(state) if is_backward else kind != env.exit_action)
        steps.finish(state, active, env.max_length)
        return steps

    def _lead_back(
        self, moves: Shaped[Tensor, "n T *action"]
    ) -> tuple[Shaped[Tensor, "n T2 *state"], Shaped[Tensor, "n T1 *action"], Int64[Tensor, "n"]]:
        """Return states, actions and lengths of the only walks back from terminating states.

        They are those of :meth:`roll`, without a step for each column: every probability is 1. As
        many random numbers are drawn, so that what is drawn next does not depend on the way here.
        """
        n, n_moves = moves.shape[:2]
        for _ in zip(range(n_moves + 1), self._uniforms(n), strict=False):
            pass
        length = torch.full((n,), n_moves + 1)
        action = torch.cat([moves, self.env.exits(n)[:, None]], 1)
        return self.env.states_of(action, length).flip(1), action.flip(1), length

    def trajectories(
        self,
        start: StateBatch,
        condition: ConditionBatch | None,
        log_reward: Float[Tensor, "n"] | None,
    ) -> Trajectories:
        """Roll out, pad the rows to trajectories, and ask for their rewards."""
        env, is_backward, row = self.env, self.policy.is_backward, torch.arange(len(start))
        on_cpu = start.is_cpu and start.dtype != torch.bfloat16  # which NumPy does not have
        keeps = self.save_logprobs or self.save_estimator_outputs
        log_prob = estimator_output = moves = None
        if is_backward and on_cpu and not keeps:
            moves = env.only_moves(start)
        if moves is not None and len(start):
            state, action, length = self._lead_back(moves)
        else:
            steps = (self.roll if on_cpu else self.roll_together)(start, condition)
            length, row = steps.length(), torch.arange(len(start), device=steps.device)
            state = steps.spread(steps.state, env.sink_state, extra=1)
            padding = torch.full(
                env.action_shape, env.dummy_action, dtype=env.action_dtype, device=steps.device
            )
            action = steps.spread(steps.action, padding)
            if is_backward:
                state[row, length] = env.source_state
                action[:, 0] = env.exits(steps.n)
            if self.save_logprobs:
                log_prob = steps.over_zeros(steps.log_prob)
            if self.save_estimator_outputs:
                estimator_output = steps.over_zeros(steps.logits, env.n_actions - is_backward)
        if log_reward is None:
            x = start if is_backward else state[row, length - 1]
            with torch.no_grad():
                log_reward = env.log_reward(x, condition)
            check_rewards(log_reward, x)
        values = {
            keys.STATE: state,
            keys.ACTION: action,
            keys.LENGTH: length,
            keys.LOG_REWARD: log_reward.float(),
            keys.LOG_PROB: log_prob,
            keys.ESTIMATOR_OUTPUT: estimator_output,
            keys.CONDITION: condition,
            keys.IS_BACKWARD: torch.ones_like(row, dtype=torch.bool) if is_backward else None,
        }
        given = {key: value for key, value in values.items() if value is not None}
        return Trajectories.wrap(new_tensordict(given, row.shape))


def _endless(
    start: Tensor, state: Tensor, row: int, at: int, max_length: int, is_backward: bool
) -> ArgumentError:
    """Return the error that a row of ``start``, now ``state[at]``, has not ended."""
    if is_backward:
        return ArgumentError(
            f"states must lead back to the source within max_length={max_length} actions, got "
            f"{start[row].tolist()} in row {row}, which came to {state[at].tolist()}"
        )
    return ArgumentError(
        f"env must end every trajectory within max_length={max_length} actions, got "
        f"{state[at].tolist()} after them"
    )


def check_rewards(log_reward: Tensor, states: Tensor) -> None:
    """Raise unless an environment's log-rewards of terminating states are one number per state."""
    if log_reward.shape != states.shape[:1]:
        raise ShapeError(
            f"env.log_reward must return one number for each of {len(states)} states, got shape "
            f"{list(log_reward.shape)}"
        )
    if not log_reward.is_cpu:  # the device raises, so as not to wait for it
        message = "env.log_reward must return numbers or -inf, got nan or inf"
        assert_on_device((log_reward < torch.inf).all(), message)
    elif not (log_reward < torch.inf).all():
        row = int((~(log_reward < torch.inf)).nonzero()[0])
        raise NaNError(
            f"env.log_reward must return numbers or -inf, got {float(log_reward[row])} for state "
            f"{states[row].tolist()} in row {row}"
        )
