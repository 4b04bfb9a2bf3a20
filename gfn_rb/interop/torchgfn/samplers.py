"""torchgfn's samplers of trajectories, on the rollouts and the local search of this package."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import gfn.samplers
import torch
from gfn.containers import Trajectories
from gfn.env import Env
from gfn.estimators import DiscretePolicyEstimator, Estimator
from gfn.states import States
from gfn.utils.prob_calculations import get_trajectory_pfs
from torch import Tensor

from gfn_rb import containers, keys, rollout
from gfn_rb.arguments import as_count, require_kind, require_optional
from gfn_rb.errors import ArgumentError
from gfn_rb.interop.torchgfn.environment import (
    UNKNOWN_LENGTH,
    TorchGFNEnv,
    adapt_env,
    adapt_estimator,
)
from gfn_rb.interop.torchgfn.rows import container_of
from gfn_rb.interop.torchgfn.searches import EstimatorProposal, after, our_rows, ours
from gfn_rb.rollout.categorical import exploration_from
from gfn_rb.rollout.metropolis_hastings import (
    BackStepsRule,
    back_steps_rule,
    metropolis_hastings,
    moves_back,
)
from gfn_rb.rollout.walk import Walk
from gfn_rb.shapes import Bool

log = logging.getLogger(__name__)

_OPTIONS = {"sf_bias": "exit_bias", "temperature": "temperature", "epsilon": "epsilon"}
_METHODS = "init_context", "compute_dist", "log_probs", "to_probability_distribution"


class Sampler(gfn.samplers.Sampler):
    """torchgfn's ``Sampler``: same constructor, methods, containers, gradients and distribution.

    Trajectories come from :class:`gfn_rb.Sampler` if :func:`adapt_env` accepts the environment,
    the environment is on the CPU and the estimator is a ``DiscretePolicyEstimator``, conditional
    or not. Otherwise torchgfn's code samples: graphs, continuous actions, recurrent estimators.

    Args:
        estimator: torchgfn's policy estimator, forward or backward.

    Raises:
        ArgumentError: it is no estimator of torchgfn.
    """

    def __init__(self, estimator: Estimator) -> None:
        require_kind("estimator", estimator, Estimator)
        gfn.samplers.Sampler.__init__(self, estimator)

    def sample_trajectories(
        self,
        env: Env,
        n: int | None = None,
        states: States | None = None,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        **policy_kwargs: Any,
    ) -> Trajectories:
        """Sample trajectories with torchgfn's arguments.

        Args:
            env: environment of torchgfn.
            n: number of trajectories from the source. Give ``n`` or ``states``.
            states: torchgfn's starting states; terminating states for a backward estimator.
            conditions: one condition per row, [n, *C], if the environment is conditional.
            save_estimator_outputs: whether to save the logits at each step.
            save_logprobs: whether to save the log-probability of each action, in nats, with
                gradient.
            **policy_kwargs: keywords below. Others are for torchgfn's code.

        Keyword Args:
            epsilon: share of uniformly random legal actions, 0 to 1. Default: 0.
            temperature: divisor of the logits, above 0. Default: 1.
            sf_bias: number subtracted from the logit of the exit action. Default: 0.
        """
        require_kind("env", env, Env)
        require_optional("states", states, States)
        if n is not None:
            n = as_count("n", n, 0)
        assert states is None or len(states.batch_shape) == 1, (
            "States should have a batch_shape of length 1, w/ no trajectory dim!"
        )
        is_backward, kept = self.estimator.is_backward, (save_estimator_outputs, save_logprobs)
        if states is None and n is not None and not is_backward:
            states = env.reset(batch_shape=(n,))
        walk = _walk(self.estimator, env, policy_kwargs, *kept)
        if walk is None or states is None or (not is_backward and states.is_sink_state.any()):
            return super().sample_trajectories(env, n, states, conditions, *kept, **policy_kwargs)
        if conditions is not None:
            states.conditions = conditions
        unknown = torch.full(states.batch_shape, torch.nan)  # torchgfn computes rewards when read
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(kept)):
            rows = walk.trajectories(states.tensor, states.conditions, unknown)
        return _container(rows, env)


class LocalSearchSampler(Sampler, gfn.samplers.LocalSearchSampler):
    """torchgfn's ``LocalSearchSampler``: same constructor, methods and containers.

    Searches are those of :class:`gfn_rb.LocalSearchSampler`: Metropolis-Hastings leaves R(x) / Z
    invariant, where torchgfn's acceptance ratio is inverted. Each loop searches around the objects
    that earlier loops accepted. Where :class:`Sampler` uses torchgfn's code, this class does, too,
    and takes the densities of Metropolis-Hastings from it. Only for a recurrent backward policy,
    whose density torchgfn does not compute, is the acceptance torchgfn's.

    Args:
        pf_estimator: torchgfn's forward policy estimator.
        pb_estimator: torchgfn's backward policy estimator.

    Raises:
        ArgumentError: one is no estimator of torchgfn, or of the other direction.
    """

    def __init__(self, pf_estimator: Estimator, pb_estimator: Estimator) -> None:
        super().__init__(pf_estimator)
        self.backward_sampler = Sampler(pb_estimator)
        if pf_estimator.is_backward or not pb_estimator.is_backward:
            raise ArgumentError("pf_estimator must be forward and pb_estimator backward")

    def local_search(
        self,
        env: Env,
        trajectories: Trajectories,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        back_steps: Tensor | None = None,
        back_ratio: float | None = None,
        use_metropolis_hastings: bool = True,
        debug: bool = False,
        **policy_kwargs: Any,
    ) -> tuple[Trajectories, Bool[Tensor, "n"]]:
        """Search once around each object.

        Args:
            env: environment of torchgfn.
            trajectories: torchgfn's trajectories, n of them; only their objects count.
            save_estimator_outputs: whether to save the logits at each step.
            save_logprobs: whether to save the forward log-probabilities of the proposals, in nats:
                as in torchgfn, those of the policy without exploration.
            back_steps: number of moves to undo, int64 [n]; at most the moves of each row. Give
                ``back_steps`` or ``back_ratio``, which has no effect beside it.
            back_ratio: share of moves to undo, above 0 and at most 1.
            use_metropolis_hastings: whether to accept by Metropolis-Hastings. Otherwise a proposal
                is accepted if its reward is strictly higher.
            debug: whether to compare the proposals with those that a plain loop puts together.
            **policy_kwargs: ``epsilon``, ``temperature`` and ``sf_bias``, see
                :meth:`Sampler.sample_trajectories`.

        Returns:
            The proposals, and which rows were accepted, bool [n].

        Raises:
            NotImplementedError: states are graphs.
            ArgumentError: ``save_estimator_outputs``, where torchgfn's code samples.
        """
        given = back_steps
        if back_steps is not None:
            back_ratio = None
            back_steps = torch.as_tensor(back_steps).minimum(trajectories.terminating_idx - 1)
        pf = _walk(self.estimator, env, policy_kwargs)
        pb = _walk(self.backward_sampler.estimator, env, policy_kwargs)
        if pf is None or pb is None:
            if save_estimator_outputs and isinstance(env.s0, Tensor):
                raise ArgumentError(
                    f"save_estimator_outputs must be False for {type(env).__name__} with a "
                    f"{type(self.estimator).__name__}, which torchgfn's code samples, got True"
                )
            if isinstance(env.s0, Tensor) and self.backward_sampler.estimator.is_vectorized:
                rule = back_steps_rule(given, back_ratio, len(trajectories))
                # Ways back differ in length: no row goes back beyond the source.
                return self._search(
                    env, trajectories, lambda moves: rule(moves).minimum(moves),
                    save_logprobs, use_metropolis_hastings, debug, policy_kwargs,
                )  # fmt: skip
            chosen: Any = (
                False, save_logprobs, back_steps, back_ratio, use_metropolis_hastings, debug
            )  # fmt: skip
            found, updated = super().local_search(env, trajectories, *chosen, **policy_kwargs)
            if not use_metropolis_hastings:
                updated = found.log_rewards > trajectories.log_rewards
            return found, updated
        end = trajectories.terminating_states
        start = containers.States(
            state=end.tensor,
            is_terminating=torch.ones(end.batch_shape, dtype=torch.bool),
            log_reward=trajectories.log_rewards,
            condition=end.conditions,
        )
        search = rollout.LocalSearchSampler(pf.policy, pb.policy)
        chosen = (back_steps, back_ratio, use_metropolis_hastings, debug)
        rows, updated = search.local_search(
            pf.env, start, save_estimator_outputs, False, *chosen, **vars(pf.exploration)
        )
        found = _container(rows, env)
        if save_logprobs:
            found.log_probs = get_trajectory_pfs(self.estimator, found)
        return found, updated

    def _search(
        self,
        env: Env,
        trajectories: Trajectories,
        rule: BackStepsRule,
        save_logprobs: bool,
        use_metropolis_hastings: bool,
        debug: bool,
        options: dict[str, Any],
    ) -> tuple[Trajectories, Bool[Tensor, "n"]]:
        """Search once by torchgfn's rollouts and densities, and accept as this package does."""
        ends = trajectories.terminating_states
        walked = self.backward_sampler.sample_trajectories(env, states=ends, **options)
        old = our_rows(walked.reverse_backward_trajectories(), env)
        moves = old.get(keys.LENGTH) - 1
        junction = moves - moves_back(rule, moves)
        undone = after(old, junction, env)
        start = undone.states[0]
        new = Sampler.sample_trajectories(self, env, states=start, **options)
        proposal = EstimatorProposal(
            ours(old), ours(our_rows(new, env)), junction, self.estimator,
            self.backward_sampler.estimator, undone, new, options,
        )  # fmt: skip
        if use_metropolis_hastings:
            updated = metropolis_hastings(proposal, rule, None)
        else:
            updated = new.log_rewards > trajectories.log_rewards
        rows = proposal.trajectories(False, False)
        if debug:
            proposal.check(rows)
        found = _container(rows, env)
        if save_logprobs:
            found.log_probs = get_trajectory_pfs(self.estimator, found)
        return found, updated

    def sample_trajectories(
        self,
        env: Env,
        n: int | None = None,
        states: States | None = None,
        conditions: Tensor | None = None,
        save_estimator_outputs: bool = False,
        save_logprobs: bool = False,
        n_local_search_loops: int = 0,
        back_steps: Tensor | None = None,
        back_ratio: float | None = None,
        use_metropolis_hastings: bool = False,
        **policy_kwargs: Any,
    ) -> Trajectories:
        """Sample trajectories, then search around them several times.

        Each row is searched around ``n_local_search_loops`` times, 0 or more. Other arguments are
        those of :meth:`Sampler.sample_trajectories` and :meth:`local_search`.

        Returns:
            The sampled trajectories, followed by the proposals of each loop.
        """
        kept = save_estimator_outputs, save_logprobs
        chosen: Any = (back_steps, back_ratio, use_metropolis_hastings)
        found = super().sample_trajectories(env, n, states, conditions, *kept, **policy_kwargs)
        n_loops = as_count("n_local_search_loops", n_local_search_loops, 0)
        current = row = torch.arange(len(found), device=found.device)
        for _ in range(n_loops):
            proposals, updated = self.local_search(
                env, found[current], *kept, *chosen, **policy_kwargs
            )
            current = (row + len(found)).where(updated, current)
            found.extend(proposals)
        return found


def _walk(estimator: Estimator, env: Env, options: dict[str, Any], *kept: bool) -> Walk | None:
    """Return the walks of an estimator; None if torchgfn's code is to sample."""
    theirs, plain = type(estimator), DiscretePolicyEstimator
    is_plain = all(getattr(theirs, name, None) is getattr(plain, name) for name in _METHODS)
    adapted = _adapted(env) if is_plain and options.keys() <= _OPTIONS.keys() else None
    if adapted is None:
        return None
    ours = {_OPTIONS[name]: value for name, value in options.items()}
    if estimator.is_backward:  # draws no exit
        ours.pop("exit_bias", None)
    exploration = exploration_from(ours, estimator.is_backward)
    return Walk(adapt_estimator(estimator, adapted), adapted, exploration, *reversed(kept))


@lru_cache(maxsize=8)
def _adapted(env: Env) -> TorchGFNEnv | None:
    try:
        if torch.device(env.device).type != "cpu":
            raise ArgumentError(f"env must be on the CPU, got {env.device}")
        return adapt_env(env, max_length=UNKNOWN_LENGTH)
    except ArgumentError as error:
        log.info("torchgfn's own code samples %s: %s", type(env).__name__, error)
        return None


def _container(rows: containers.Trajectories, env: Env) -> Trajectories:
    """Return trajectories as torchgfn's, whose backward ones begin at the object."""
    first, entries = 0, dict[Any, Any](rows.to_tensordict().items())
    if rows.is_backward is not None:
        first, length = 1, rows.length - 1
        state, column = rows.state[:, 1:], torch.arange(rows.state.shape[1] - 1)
        is_done = (column >= length[:, None]).view(*state.shape[:2], *[1] * (state.ndim - 2))
        entries[keys.STATE] = state.where(~is_done, env.s0)
        entries[keys.ACTION], entries[keys.LENGTH] = rows.action[:, 1:], length
    out = container_of(entries, env)
    if rows.log_prob is not None:
        out.log_probs = rows.log_prob[:, first:].T
    if rows.estimator_output is not None:  # torchgfn pads by -inf
        saved = rows.estimator_output[:, first:].transpose(0, 1)
        out.estimator_outputs = saved.masked_fill(out.actions.is_dummy[..., None], -torch.inf)
    return out
