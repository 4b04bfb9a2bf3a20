"""What a local search has walked: the proposal it makes, and whether to accept it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.rollout.log_probs import legal_actions, policy_says
from gfn_rb.rollout.steps import Walk
from gfn_rb.shapes import Bool, Float, Float64, Int64, Shaped

BackStepsRule = Callable[[Tensor], Tensor]
"""Maps the number of moves that led to each object, int64 [n], to how many of them to undo, [n]."""


class Scored(NamedTuple):
    """What a policy says of the actions of trajectories.

    Attributes:
        log_prob: of each action, in nats, [n, T]; 0 after each length, and at the exit for P_B.
        estimator_output: the policy's logits where it was asked, zeros elsewhere, [n, T, A].
    """

    log_prob: Tensor
    estimator_output: Tensor


@dataclass(frozen=True)
class BackAndForth:
    """A walk from objects x back to the source, and one from states s on it forward to x'.

    Args:
        way: the way back turned forward, source -> s -> x, with the log P_B of each move.
        onward: s -> x', with log P_F, and logits where kept.
        junction: column of s in ``way``, [n].
        pf: the forward policy at work.
        pb: the backward policy at work.
    """

    way: Trajectories
    onward: Trajectories
    junction: Tensor
    pf: Walk
    pb: Walk

    @cached_property
    def way_pf(self) -> Scored:
        """What the forward policy says of ``way``."""
        return rescored(self.pf, self.way)

    @cached_property
    def onward_pb(self) -> Scored:
        """What the backward policy says of ``onward``."""
        return rescored(self.pb, self.onward)

    def proposal(self, save_estimator_outputs: bool, save_logprobs: bool) -> Trajectories:
        """Join source -> s and s -> x', with what the forward policy says of both if wanted."""
        way, onward = self.way, self.onward.pad_to(self.onward.n_steps + 1)
        length = self.junction + self.onward.length
        n_steps = int(length.max()) if len(length) else 0

        def joined(head: Tensor, tail: Tensor | None) -> Tensor:
            assert tail is not None  # the walk kept what is wanted
            return spliced(head, tail, self.junction, n_steps)

        return Trajectories(
            state=spliced(way.state, onward.state, self.junction, n_steps + 1),
            action=joined(way.action, onward.action),
            length=length,
            log_reward=onward.log_reward,
            log_prob=joined(self.way_pf.log_prob, onward.log_prob) if save_logprobs else None,
            estimator_output=(
                joined(self.way_pf.estimator_output, onward.estimator_output)
                if save_estimator_outputs
                else None
            ),
            condition=onward.condition,
        )


def spliced(
    head: Shaped[Tensor, "n a *item"],
    tail: Shaped[Tensor, "n b *item"],
    at: Int64[Tensor, "n"],
    n_columns: int,
) -> Shaped[Tensor, "n columns *item"]:
    """Follow the first ``at`` columns of each row of ``head`` by the same row of ``tail``.

    Args:
        head: what comes first.
        tail: what comes next; its last column is repeated as often as needed.
        at: how many columns to take from ``head``, at most a.
        n_columns: how many columns to return.
    """
    column, at = torch.arange(n_columns, device=at.device), at[:, None]
    in_tail = head.shape[1] + (column - at).clamp(max=tail.shape[1] - 1)
    row = torch.arange(len(at), device=at.device)[:, None]
    return torch.cat([head, tail], 1)[row, column.where(column < at, in_tail)]


def rescored(walk: Walk, trajectories: Trajectories) -> Scored:
    """Ask a policy about every action of forward trajectories, with the walk's exploration.

    Unlike ``trajectory_log_probs``, which is about the policy as it is, this gives the
    log-probabilities of the distribution that the walk would draw from.

    Args:
        walk: a forward policy, asked in the state before each action, or a backward one, asked in
            the state after it but not about the exit.
        trajectories: forward rows, from the source or from any other state.
    """
    policy, env, action = walk.policy, walk.env, trajectories.action
    steps = trajectories.real_steps
    if policy.is_backward:
        steps = steps & (env.kind(action) != env.exit_action)
    row, step = steps.nonzero(as_tuple=True)
    state = trajectories.state[row, step + int(policy.is_backward)]
    condition = None if trajectories.condition is None else trajectories.condition[row]
    mask = legal_actions(policy, env, state)
    logits, parameters = policy_says(policy, env, state, condition, mask.shape[1])
    p = walk.exploration.probabilities(logits, mask)
    log_p = walk.log_prob(p, parameters, action[row, step])
    zeros = logits.new_zeros(*steps.shape, mask.shape[1])
    return Scored(
        zeros[..., 0].index_put((row, step), log_p),
        zeros.index_put((row, step), logits),
    )


def back_steps_rule(
    back_steps: int | Tensor | None, back_ratio: float | None, n: int
) -> BackStepsRule:
    """Return the rule that says how far each of ``n`` rows goes back.

    Args:
        back_steps: a number of moves for all rows, or int64 [n].
        back_ratio: a share of the moves in (0, 1], rounded up.
        n: number of rows.

    Raises:
        ArgumentError: not exactly one of the two is given, or one is out of its range.
        ShapeError: a tensor of another shape or dtype.
    """
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
    """Return how many of each row's moves the rule undoes.

    Raises:
        ArgumentError: more than there are.
    """
    back = rule(moves)
    if (back > moves).any():
        row = int((back > moves).nonzero()[0])
        raise ArgumentError(
            f"back_steps must be at most the moves of each trajectory (back_ratio always is), got "
            f"{int(back[row])} in row {row}, which has {int(moves[row])}"
        )
    return back


def log_acceptance(search: BackAndForth, rule: BackStepsRule) -> Float64[Tensor, "n"]:
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
    way, onward = search.way, search.onward
    assert way.log_prob is not None
    assert onward.log_prob is not None
    half = torch.arange(way.n_steps, device=way.device) >= search.junction[:, None]
    log_new = _total(search.onward_pb.log_prob) + _total(search.way_pf.log_prob * half)
    log_old = _total(way.log_prob * half) + _total(onward.log_prob)
    log_alpha = (onward.log_reward + log_new - way.log_reward - log_old).clamp(max=0)
    log_alpha = log_alpha.where(way.log_reward > -torch.inf, 0)
    moves = search.junction + onward.length - 1
    return log_alpha.where(rule(moves) == onward.length - 1, -torch.inf)


def metropolis_hastings(
    search: BackAndForth, rule: BackStepsRule, generator: torch.Generator | None
) -> Bool[Tensor, "n"]:
    """Accept each proposal with the probability of :func:`log_acceptance`."""
    log_alpha = log_acceptance(search, rule)
    u = torch.rand(
        log_alpha.shape, dtype=log_alpha.dtype, device=log_alpha.device, generator=generator
    )
    return u.log() < log_alpha


def _total(log_prob: Float[Tensor, "n T"]) -> Float64[Tensor, "n"]:
    return log_prob.sum(1, dtype=torch.float64)
