"""Proposals of a local search, and the Metropolis-Hastings rule that accepts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import Trajectories
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.rollout.log_probs import decisions
from gfn_rb.rollout.outputs import drawn_log_probs, policy_outputs
from gfn_rb.rollout.walk import Walk
from gfn_rb.shapes import Bool, Float64, Int64, Shaped

_EXACT = torch.float64  # in which log-probabilities of steps are summed
BackStepsRule = Callable[[Tensor], Tensor]
"""Maps the number of moves that led to each object, int64 [n], to how many of them to undo, [n]."""


class Scored(NamedTuple):
    """Log-probabilities [n, T] and logits [n, T, A] of a policy for actions; elsewhere 0."""

    log_prob: Tensor
    estimator_output: Tensor


@dataclass(frozen=True)
class Proposal:
    """A proposal: a walk from objects x back to the source, and one from a state s on it to x'."""

    backtracked: Trajectories
    reconstructed: Trajectories
    junction: Tensor
    pf: Walk
    pb: Walk

    @cached_property
    def backtracked_pf(self) -> Scored:
        """The forward policy's log-probabilities and logits on ``backtracked``."""
        return rescored(self.pf, self.backtracked)

    def trajectories(self, save_estimator_outputs: bool, save_logprobs: bool) -> Trajectories:
        """Join source -> s and s -> x', with what the forward policy says of both if wanted."""
        old, new = self.backtracked, self.reconstructed.pad_to(self.reconstructed.n_steps + 1)
        length = self.junction + new.length
        n_steps = int(length.max()) if len(length) else 0

        def joined(head: Tensor, tail: Tensor | None) -> Tensor:
            assert tail is not None  # the walk kept what is wanted
            return spliced(head, tail, self.junction, n_steps)

        return Trajectories(
            state=spliced(old.state, new.state, self.junction, n_steps + 1),
            action=joined(old.action, new.action),
            length=length,
            log_reward=new.log_reward,
            log_prob=joined(self.backtracked_pf.log_prob, new.log_prob) if save_logprobs else None,
            estimator_output=(
                joined(self.backtracked_pf.estimator_output, new.estimator_output)
                if save_estimator_outputs
                else None
            ),
            condition=new.condition,
        )

    def log_there(self) -> Float64[Tensor, "n"]:
        """Return log P_B(b | x) + log P_F(f | s) of :func:`log_acceptance`, as drawn."""
        assert self.backtracked.log_prob is not None
        assert self.reconstructed.log_prob is not None
        back = self.backtracked.log_prob * self._undone
        return back.sum(1, dtype=_EXACT) + self.reconstructed.log_prob.sum(1, dtype=_EXACT)

    def log_return(self) -> Float64[Tensor, "n"]:
        """Return log P_B(f | x') + log P_F(b | s), of the reverse proposal."""
        forth = self.backtracked_pf.log_prob * self._undone
        back = rescored(self.pb, self.reconstructed).log_prob
        return back.sum(1, dtype=_EXACT) + forth.sum(1, dtype=_EXACT)

    @property
    def _undone(self) -> Bool[Tensor, "n T"]:
        steps = torch.arange(self.backtracked.n_steps, device=self.junction.device)
        return steps >= self.junction[:, None]

    def check(self, found: Trajectories) -> None:
        """Raise AssertionError unless a plain loop over rows and steps joins the walks alike."""
        old, new = self.backtracked, self.reconstructed
        parts: dict[str, Any] = {
            keys.STATE: (old.state, new.state),
            keys.ACTION: (old.action, new.action),
        }
        if found.log_prob is not None:
            parts[keys.LOG_PROB] = self.backtracked_pf.log_prob, new.log_prob
        for i, junction in enumerate(self.junction.tolist()):
            n_steps = junction + int(new.length[i])
            assert int(found.length[i]) == n_steps, f"length of row {i}"
            for name, (head, tail) in parts.items():
                for step in range(n_steps + (name == keys.STATE)):
                    expected = head[i, step] if step < junction else tail[i, step - junction]
                    joined = getattr(found, name)[i, step]
                    assert joined.equal(expected), f"{name} {step} of row {i}"


def spliced(
    head: Shaped[Tensor, "n a *item"],
    tail: Shaped[Tensor, "n b *item"],
    at: Int64[Tensor, "n"],
    n_columns: int,
) -> Shaped[Tensor, "n columns *item"]:
    """Follow the first ``at`` columns of each row of ``head`` by the same row of ``tail``."""
    column, at = torch.arange(n_columns, device=at.device), at[:, None]
    in_tail = head.shape[1] + (column - at).clamp(max=tail.shape[1] - 1)
    row = torch.arange(len(at), device=at.device)[:, None]
    return torch.cat([head, tail], 1)[row, column.where(column < at, in_tail)]


def rescored(walk: Walk, trajectories: Trajectories) -> Scored:
    """Return the log-probabilities with which a walk, explorations included, takes actions."""
    policy, env = walk.policy, walk.env
    at, decided, state, condition = decisions(env, trajectories, policy.is_backward)
    action = trajectories.action[at]
    mask, logits, parameters = policy_outputs(policy, env, state, condition, active=decided)
    p = walk.exploration.probabilities(logits, mask)
    kind = env.kind(action)
    if decided is not None:
        kind, logits = kind.where(decided, 0), logits.where(decided[:, None], 0)
    log_p = drawn_log_probs(p, kind, parameters, action, walk.exploration)
    zeros = logits.new_zeros(*trajectories.action.shape[:2], mask.shape[1])
    return Scored(zeros[..., 0].index_put(at, log_p), zeros.index_put(at, logits))


def back_steps_rule(
    back_steps: int | Tensor | None, back_ratio: float | None, n: int
) -> BackStepsRule:
    """Return the rule that says how far each of ``n`` rows goes back."""
    if (back_steps is None) == (back_ratio is None):
        given = "neither" if back_steps is None else "both"
        raise ArgumentError(f"exactly one of back_steps and back_ratio must be given, got {given}")
    if back_ratio is not None:
        if not 0 < back_ratio <= 1:
            raise ArgumentError(f"back_ratio must be in (0, 1], got {back_ratio}")
        # A product such as 0.07 * 100 may exceed the whole number it stands for.
        return lambda moves: (moves.double() * back_ratio - 1e-9).ceil().long()
    steps = torch.as_tensor(back_steps)
    if steps.dtype != torch.int64 or steps.shape not in [(), (n,)]:
        raise ShapeError(
            f"back_steps must be an int or int64 of shape [{n}], got {steps.dtype} of shape "
            f"{list(steps.shape)}"
        )
    if (steps < 0).any():
        raise ArgumentError(f"back_steps must be at least 0, got {int(steps.min())}")
    return lambda moves: steps.to(moves.device).expand_as(moves)


def moves_back(rule: BackStepsRule, moves: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    """Return how many of each row's moves the rule undoes."""
    back = rule(moves)
    if (back > moves).any():
        row = int((back > moves).nonzero()[0])
        raise ArgumentError(
            f"back_steps must be at most the moves of each trajectory (back_ratio always is), got "
            f"{int(back[row])} in row {row}, which has {int(moves[row])}"
        )
    return back


def log_acceptance(proposal: Proposal, rule: BackStepsRule) -> Float64[Tensor, "n"]:
    """Return the log-probability with which Metropolis-Hastings accepts each proposal.

    A search draws a way b back from x to s, goes on by a way p to the source, and draws a way f
    forward from s to x'. The chance to propose (b, p, f) from x is

        q(b, p, f | x) = P_B(b | x) P_B(p | s) P_F(f | s)

    where P_F(f | s) includes the exit action at x'. The reverse proposal from x' goes back along f
    to the same s, has the same p, and comes forward along b to x: (f, p, b). As reversing twice
    changes nothing, R(x) / Z is invariant if each pair of proposals balances on its own,
    R(x) q(b, p, f | x) alpha = R(x') q(f, p, b | x') alpha', which Metropolis' rule achieves
    (Zhang et al. 2022, arXiv:2202.01361); P_B(p | s) cancels:

        alpha = min(1, R(x') P_B(f | x') P_F(b | s) / (R(x) P_B(b | x) P_F(f | s)))

    All factors are those of the distributions drawn from. From x' the search stops at s only if the
    number of moves it undoes there is that of f. So where the rule gives another number for x' (a
    fixed number of back steps, and f of another length) the reverse proposal is impossible and
    alpha = 0. With a fixed number the chain thus never changes an object's number of moves; with a
    ratio it may. From an object of reward 0, which the target excludes, every such move is taken.
    """
    old, new = proposal.backtracked, proposal.reconstructed
    log_return, log_there = proposal.log_return(), proposal.log_there()
    log_alpha = (new.log_reward + log_return - old.log_reward - log_there).clamp(max=0)
    log_alpha = log_alpha.where(old.log_reward > -torch.inf, 0)
    moves = proposal.junction + new.length - 1
    return log_alpha.where(rule(moves) == new.length - 1, -torch.inf)


def metropolis_hastings(
    proposal: Proposal, rule: BackStepsRule, generator: torch.Generator | None
) -> Bool[Tensor, "n"]:
    """Accept each proposal with the probability of :func:`log_acceptance`."""
    log_alpha = log_acceptance(proposal, rule)
    u = torch.rand(
        log_alpha.shape, dtype=log_alpha.dtype, device=log_alpha.device, generator=generator
    )
    return u.log() < log_alpha
