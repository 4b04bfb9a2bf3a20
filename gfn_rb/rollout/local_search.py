"""Local search: walk back from an object, build it up anew, keep the better one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import States, Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.rollout.categorical import Exploration, exploration_from
from gfn_rb.rollout.metropolis_hastings import (
    BackStepsRule,
    Proposal,
    back_steps_rule,
    metropolis_hastings,
    moves_back,
)
from gfn_rb.rollout.outputs import require_direction
from gfn_rb.rollout.sampler import Sampler
from gfn_rb.rollout.walk import Walk
from gfn_rb.shapes import Bool


class LocalSearchSampler:
    """Improves objects by undoing their last moves and making new ones (back and forth).

    One search takes an object x back by K moves, drawn from the backward policy, to a junction s,
    and from there forward to a proposal x', drawn from the forward policy (Zhang et al. 2022,
    arXiv:2202.01361; Kim et al. 2023, arXiv:2310.02710). The proposal is accepted if its reward is
    strictly higher, or with the probability that leaves R(x) / Z invariant (Metropolis-Hastings).
    Each row may go back by a number of moves of its own.

    ``**policy_kwargs`` are the fields of :class:`gfn_rb.rollout.Exploration`. They hold for both
    policies, but exit_bias for the forward one alone. Metropolis-Hastings accounts for all of them
    except noise, under which proposals have no tractable density and which it therefore refuses.

    Attributes:
        n_reward_calls: number of states whose reward has been asked for so far: those of new
            trajectories and of proposals. The objects that a search starts from cost none.

    Args:
        pf: forward policy, see :class:`gfn_rb.rollout.Sampler`.
        pb: backward policy.

    Raises:
        ArgumentError: a policy does not go the way that is needed.
    """

    def __init__(self, pf: TensorDictModuleBase, pb: TensorDictModuleBase) -> None:
        if require_direction(pf, "pf"):
            raise ArgumentError("pf must be a forward policy, got one with is_backward=True")
        if not require_direction(pb, "pb"):
            raise ArgumentError("pb must be a backward policy, got one with is_backward=False")
        self.forward, self.backward = Sampler(pf), Sampler(pb)
        self.n_reward_calls = 0

    @torch.no_grad()
    def local_search(
        self,
        env: GFNCore,
        trajectories: Trajectories | States,
        back_steps: int | Tensor | None = None,
        back_ratio: float | None = None,
        use_metropolis_hastings: bool = False,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        **policy_kwargs: Any,
    ) -> tuple[Trajectories, Bool[Tensor, "n"]]:
        """Search once around each object.

        Of the input only the objects x, their log-rewards and conditions count: the way back is
        drawn anew from the backward policy, as far as the source, since a buffer may hold no path.

        Args:
            env: the environment.
            trajectories: where to start, forward or backward; or terminating states.
            back_steps: K, the moves to undo (the exit action not counted): one number for all rows,
                or one per row, int64 [n].
            back_ratio: instead, the share in (0, 1] of a way's moves to undo, rounded up.
            use_metropolis_hastings: whether to accept as Metropolis-Hastings does, by
                :func:`gfn_rb.rollout.metropolis_hastings.log_acceptance`; otherwise a proposal is
                accepted if its reward is strictly higher.
            save_estimator_outputs: whether to keep the forward policy's logits at each step.
            save_logprobs: whether to keep the forward policy's log-probability of each action, that
                of the steps before the junction included.
            **policy_kwargs: see the class.

        Returns:
            The proposals as forward trajectories, accepted or not (all of them are worth storing),
            and which rows were accepted, [n].

        Raises:
            ArgumentError: not exactly one of ``back_steps`` and ``back_ratio`` is given, one is out
                of its range or goes back beyond the source, a state is not terminating, or an
                option is unknown, out of range or barred.
            ShapeError: a shape or dtype does not fit.
            NaNError: a reward is NaN, or the logits give no distribution.
        """
        exploration = _exploration_from(policy_kwargs, use_metropolis_hastings)
        start = _terminating(trajectories)
        rule = back_steps_rule(back_steps, back_ratio, len(start))
        proposal = self._propose(env, start, rule, exploration, save_estimator_outputs)
        if use_metropolis_hastings:
            updated = metropolis_hastings(proposal, rule, exploration.generator)
        else:
            updated = proposal.reconstructed.log_reward > proposal.backtracked.log_reward
        return proposal.trajectories(save_estimator_outputs, save_logprobs), updated

    @torch.no_grad()
    def sample_trajectories(
        self,
        env: GFNCore,
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

        Each of ``n_local_search_loops`` loops searches around what the loops before have accepted
        in each row. All other arguments are those of ``Sampler.sample_trajectories`` and of
        ``local_search``. Where lengths vary, ``back_ratio`` fits every row; without loops neither
        it nor ``back_steps`` is needed.

        Returns:
            n * (1 + n_local_search_loops) trajectories: those sampled, then each loop's proposals.

        Raises:
            ArgumentError, ShapeError, NaNError: see ``local_search`` and
                ``Sampler.sample_trajectories``.
        """
        if n_local_search_loops < 0:
            raise ArgumentError(
                f"n_local_search_loops must be at least 0, got {n_local_search_loops}"
            )
        if n_local_search_loops:  # before any reward is paid for
            _exploration_from(policy_kwargs, use_metropolis_hastings)
            rows = n if states is None else len(states)
            back_steps_rule(back_steps, back_ratio, rows or 0)
        keep = {
            "save_estimator_outputs": save_estimator_outputs,
            "save_logprobs": save_logprobs,
            **policy_kwargs,
        }
        batch = self.forward.sample_trajectories(env, n, states, conditions, **keep)
        self.n_reward_calls += len(batch)
        batches, current = [batch], _terminating(batch)
        for _ in range(n_local_search_loops):
            batch, updated = self.local_search(
                env, current, back_steps, back_ratio, use_metropolis_hastings, **keep
            )
            batches.append(batch)
            row = torch.arange(len(current), device=updated.device)
            both = States.cat([current, _terminating(batch)])
            current = both[row + len(current) * updated]
        return Trajectories.cat(batches)

    def _propose(
        self,
        env: GFNCore,
        start: States,
        rule: BackStepsRule,
        exploration: Exploration,
        save_estimator_outputs: bool,
    ) -> Proposal:
        """Walk back, find the junctions, and walk forward from them."""
        back = replace(exploration, exit_bias=0.0)
        old = self.backward.sample_trajectories(
            env,
            states=start.state,
            conditions=start.condition,
            save_logprobs=True,
            log_rewards=start.log_reward,
            **vars(back),
        ).reverse()
        junction = old.length - 1 - moves_back(rule, old.length - 1)
        new = self.forward.sample_trajectories(
            env,
            states=old.state[torch.arange(len(old), device=old.device), junction],
            conditions=start.condition,
            save_estimator_outputs=save_estimator_outputs,
            save_logprobs=True,
            **vars(exploration),
        )
        self.n_reward_calls += len(new)
        pf = Walk(self.forward.policy, env, exploration)
        pb = Walk(self.backward.policy, env, back)
        return Proposal(old, new, junction, pf, pb)


def _exploration_from(policy_kwargs: dict[str, Any], use_metropolis_hastings: bool) -> Exploration:
    exploration = exploration_from(policy_kwargs, is_backward=False)
    if use_metropolis_hastings and exploration.noise:
        raise ArgumentError(
            f"noise must be 0 with use_metropolis_hastings, as the density of what it draws is "
            f"unknown, got {exploration.noise}"
        )
    return exploration


def _terminating(rows: Trajectories | States) -> States:
    """Take terminating states, with their rewards, out of what a search starts from."""
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
