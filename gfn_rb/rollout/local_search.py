"""Local search: walk back from an object, build it up anew, keep the better one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.arguments import as_count, require_kind
from gfn_rb.containers import States, Trajectories
from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.rollout.categorical import exploration_from
from gfn_rb.rollout.metropolis_hastings import (
    Proposal,
    back_steps_rule,
    metropolis_hastings,
    moves_back,
)
from gfn_rb.rollout.outputs import require_direction
from gfn_rb.rollout.sampler import Sampler
from gfn_rb.rollout.walk import Walk
from gfn_rb.shapes import Bool


class LocalSearchSampler(Sampler):
    """Improves objects by undoing their last moves and making new ones (back and forth).

    One search undoes K moves of an object x, sampled from the backward policy, and samples a
    proposal x' from there with the forward policy (Zhang et al. 2022, arXiv:2202.01361; Kim et al.
    2023, arXiv:2310.02710). The proposal is accepted if its reward is strictly higher, or with the
    Metropolis-Hastings probability that leaves R(x) / Z invariant. Each row may have its own K.

    Exploration applies to both policies, ``exit_bias`` to the forward policy alone.
    Metropolis-Hastings accounts for all options.

    Attributes:
        estimator: the forward policy.
        backward_sampler: sampler of the backward policy.
        n_reward_calls: number of states whose reward was computed so far: ends of new trajectories
            and proposals. Objects that a search starts from cost none.

    Args:
        pf: forward policy: TensorDict module from "state" (and "condition") to "logits", one for
            each action of the environment, with ``is_backward`` False.
        pb: backward policy: such a module with logits for each action but the exit, and
            ``is_backward`` True. A :class:`~gfn_rb.envs.ContinuousEnv` needs ``get_dist`` of both.

    Raises:
        ArgumentError: a policy has the wrong direction or none.
    """

    def __init__(self, pf: TensorDictModuleBase, pb: TensorDictModuleBase) -> None:
        if require_direction(pf, "pf"):
            raise ArgumentError("pf must be a forward policy, got one with is_backward=True")
        if not require_direction(pb, "pb"):
            raise ArgumentError("pb must be a backward policy, got one with is_backward=False")
        super().__init__(pf)
        self.backward_sampler = Sampler(pb)
        self.n_reward_calls = 0

    @torch.no_grad()
    def local_search(
        self,
        env: GFNEnv,
        trajectories: Trajectories | States,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        back_steps: int | Tensor | None = None,
        back_ratio: float | None = None,
        use_metropolis_hastings: bool = False,
        debug: bool = False,
        **policy_kwargs: Any,
    ) -> tuple[Trajectories, Bool[Tensor, "n"]]:
        """Search once around each object.

        Only the objects x of the input count, with their log-rewards and conditions. The backward
        policy samples the way back to the source, because a buffer may store no path.

        Args:
            env: the environment.
            trajectories: forward or backward trajectories, or terminating states.
            save_estimator_outputs: whether to save the forward policy's logits at each step.
            save_logprobs: whether to save the forward policy's log-probability of each action in
                nats, including the steps before the undone moves.
            back_steps: number K of moves to undo, the exit not counted: one number, or one per row,
                int64 [n]. Give ``back_steps`` or ``back_ratio``.
            back_ratio: share of moves to undo, above 0 and at most 1, rounded up.
            use_metropolis_hastings: whether to accept by Metropolis-Hastings. Otherwise a proposal
                is accepted if its reward is strictly higher.
            debug: whether to compare the proposals with those that a plain loop puts together.
            **policy_kwargs: fields of an :class:`~gfn_rb.rollout.Exploration` by name: ``epsilon``,
                ``temperature``, ``exit_bias`` and ``generator``.

        Returns:
            The proposals as forward trajectories, accepted or not, and which rows were accepted,
            [n]. All proposals are worth storing.

        Raises:
            ArgumentError: not exactly one of ``back_steps`` and ``back_ratio`` is given, one is out
                of range or goes back beyond the source, a state is not terminating, or an option is
                unknown or out of range.
            ShapeError: a shape or dtype does not fit.
            NaNError: a reward or the logits are NaN.
        """
        exploration = exploration_from(policy_kwargs, is_backward=False)
        start = _terminating(trajectories)
        rule = back_steps_rule(back_steps, back_ratio, len(start))
        back = replace(exploration, exit_bias=0.0)
        needs_log_probs = use_metropolis_hastings or save_logprobs
        old = self.backward_sampler.sample_trajectories(
            env,
            states=start.state,
            conditions=start.condition,
            save_logprobs=needs_log_probs,
            log_rewards=start.log_reward,
            **vars(back),
        ).reverse()
        junction = old.length - 1 - moves_back(rule, old.length - 1)
        new = super().sample_trajectories(
            env,
            states=old.state[torch.arange(len(old), device=old.device), junction],
            conditions=start.condition,
            save_estimator_outputs=save_estimator_outputs,
            save_logprobs=needs_log_probs,
            **vars(exploration),
        )
        self.n_reward_calls += len(new)
        pf = Walk(self.policy, env, exploration)
        pb = Walk(self.backward_sampler.policy, env, back)
        proposal = Proposal(old, new, junction, pf, pb)
        if use_metropolis_hastings:
            updated = metropolis_hastings(proposal, rule, exploration.generator)
        else:
            updated = new.log_reward > old.log_reward
        found = proposal.trajectories(save_estimator_outputs, save_logprobs)
        if debug:
            proposal.check(found)
        return found, updated

    @torch.no_grad()
    def sample_trajectories(
        self,
        env: GFNEnv,
        n: int | None = None,
        states: Tensor | None = None,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        n_local_search_loops: int = 0,
        back_steps: int | Tensor | None = None,
        back_ratio: float | None = None,
        use_metropolis_hastings: bool = False,
        **policy_kwargs: Any,
    ) -> Trajectories:
        """Sample trajectories, then search around them several times.

        Each of ``n_local_search_loops`` loops searches around the object that earlier loops
        accepted in each row.

        Args:
            env: the environment.
            n: number of trajectories from the source. Give ``n`` or ``states``.
            states: starting states, [n, *S], any but the sink.
            conditions: one condition per row, [n, *C], if the environment has conditions. Default
                with ``n``: ``env.sample_condition`` samples them.
            save_estimator_outputs: whether to save the forward policy's logits at each step.
            save_logprobs: whether to save the forward policy's log-probability of each action, in
                nats.
            n_local_search_loops: number of searches around each row, at least 0.
            back_steps: number K of moves to undo, the exit not counted: one number, or one per row,
                int64 [n]. With loops, give ``back_steps`` or ``back_ratio``.
            back_ratio: share of moves to undo, above 0 and at most 1, rounded up.
            use_metropolis_hastings: whether to accept by Metropolis-Hastings. Otherwise a proposal
                is accepted if its reward is strictly higher.
            **policy_kwargs: fields of an :class:`~gfn_rb.rollout.Exploration` by name: ``epsilon``,
                ``temperature``, ``exit_bias`` and ``generator``.

        Returns:
            n * (1 + n_local_search_loops) trajectories: the sampled ones, then each loop's
            proposals.

        Raises:
            ArgumentError, ShapeError, NaNError: as by :meth:`local_search`, or a starting state is
                the sink.
        """
        n_local_search_loops = as_count("n_local_search_loops", n_local_search_loops, 0)
        if n_local_search_loops:  # before any reward is paid for
            exploration_from(policy_kwargs, is_backward=False)
            rows = n if states is None else len(states)
            back_steps_rule(back_steps, back_ratio, rows or 0)
        keep = {
            "save_estimator_outputs": save_estimator_outputs,
            "save_logprobs": save_logprobs,
            **policy_kwargs,
        }
        batch = super().sample_trajectories(env, n, states, conditions, **keep)
        self.n_reward_calls += len(batch)
        proposals = self.proposals(
            env,
            batch,
            n_local_search_loops,
            back_steps=back_steps,
            back_ratio=back_ratio,
            use_metropolis_hastings=use_metropolis_hastings,
            **keep,
        )
        return Trajectories.cat([batch, *proposals])

    def proposals(
        self, env: GFNEnv, trajectories: Trajectories | States, n_loops: int, **options: Any
    ) -> Iterator[Trajectories]:
        """Yield the proposals of ``n_loops`` searches, each around what earlier ones accepted.

        The other arguments are those of :meth:`local_search`.
        """
        current = _terminating(trajectories)
        for _ in range(n_loops):
            batch, updated = self.local_search(env, current, **options)
            yield batch
            row = torch.arange(len(current), device=updated.device)
            both = States.cat([current, _terminating(batch)])
            current = both[row + len(current) * updated]


def _terminating(rows: Trajectories | States) -> States:
    """Take terminating states, with their rewards, out of what a search starts from."""
    require_kind("trajectories", rows, Trajectories, lambda value: isinstance(value, States))
    log_reward = rows.log_reward
    if log_reward.isnan().any():
        row = int(log_reward.isnan().nonzero()[0])
        raise NaNError(f"trajectories must have log_reward without NaN, got one in row {row}")
    if isinstance(rows, Trajectories):
        return States(
            state=rows.terminating_states,
            is_terminating=torch.ones_like(log_reward, dtype=torch.bool),
            log_reward=log_reward,
            condition=rows.condition,
        )
    if not rows.is_terminating.all():
        row = int((~rows.is_terminating).nonzero()[0])
        raise ArgumentError(
            f"trajectories must be Trajectories or terminating States, got a state with "
            f"is_terminating False in row {row}"
        )
    return rows
