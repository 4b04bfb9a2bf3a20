"""Conformance suites: a new environment is tested by a class of one method.

    class TestMyEnv(GFNEnvConformance):
        def make_env(self):
            return MyEnv()

Derive from ``EnumerableEnvConformance`` instead if the environment is an ``EnumerableEnv``, from
``ContinuousEnvConformance`` if it is a ``ContinuousEnv``. This module needs pytest, unlike the rest
of the library.
"""

from __future__ import annotations

import re
from abc import abstractmethod

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from gfn_rb import keys
from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.checks import CoreConformance
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.envs.enumerable import EnumerableEnv, LogPF, uniform_log_pf
from gfn_rb.errors import ArgumentError, ShapeError

__all__ = ["ContinuousEnvConformance", "EnumerableEnvConformance", "GFNEnvConformance"]


class GFNEnvConformance(CoreConformance):
    """Tests of every ``GFNEnv``; pytest runs it for each ``Test...`` subclass."""

    def log_rewards(self, env: GFNEnv, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R of states under one condition, by default a fixed one."""
        if env.condition_shape is None:
            return env.log_reward(state)
        if condition is None:
            fixed = env.fixed_conditions(1)
            assert fixed is not None
            condition = fixed[0]
        return env.log_reward(state, condition.expand(len(state), *env.condition_shape))

    def call_everything(
        self, env: GFNEnv, state: Tensor, kind: Tensor, move: Tensor
    ) -> list[Tensor]:
        """Return the results of all functions of states, for rows where ``move`` is legal."""
        child = env.forward_step(state, move)
        results = [child, env.backward_step(child, move), env.source(2)]
        results.append(env.states_of(move[:, None], torch.full_like(kind, 2)))
        functions = (env.forward_mask, env.backward_mask, env.encode, env.is_source, env.is_sink)
        return results + [function(state) for function in functions]

    def test_log_reward_refuses_other_states(self) -> None:
        """A state of a wrong shape, and the sink, have no reward."""
        env = self.make_env()
        condition = env.sample_condition(1)
        with pytest.raises(ShapeError, match=r"^state must be .* of shape"):
            env.log_reward(env.source(1)[..., None], condition)
        with pytest.raises(ArgumentError, match="state must be terminating"):
            env.log_reward(env.sink_state[None], condition)

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """Every function gives a row the same result alone, in a batch, and in an empty batch."""
        env = self.make_env()
        state = self.visited(env)[:8]
        for function in (env.forward_mask, env.backward_mask, env.encode, env.is_sink):
            batch = function(state)
            assert_close(torch.cat([function(one[None]) for one in state]), batch, rtol=0, atol=0)
            assert function(state[:0]).shape == (0, *batch.shape[1:])
        assert env.log_reward(state[:0], env.sample_condition(0)).shape == (0,)
        for step in (env.forward_step, env.backward_step):
            assert step(state[:0], self.dummies(env, 0)).shape == (0, *env.state_shape)

    def test_states_are_made_again_from_actions(self) -> None:
        """``states_of`` gives the states of the walks, whatever actions follow their end."""
        env = self.make_env()
        state, action = self.walk(env)
        length = (env.kind(action) >= 0).sum(1)
        assert env.states_of(action, length).equal(state)
        over = torch.arange(action.shape[1]) >= length[:, None]
        over = over.view(*over.shape, *(1 for _ in env.action_shape))
        more = action.new_zeros(len(action), 3, *env.action_shape)
        longer = torch.cat([action.masked_fill(over, 0), more], 1)
        sink = state[:, -1:].expand(-1, 3, *env.state_shape)
        assert env.states_of(longer, length).equal(torch.cat([state, sink], 1))
        for n_steps in (0, 1, int(length.min())):
            assert env.states_of(action[:, :n_steps], length).equal(state[:, : n_steps + 1])
        assert env.states_of(action[:0], length[:0]).equal(state[:0])

    def test_states_keep_to_their_range(self) -> None:
        """No state, the sink included, has a number outside ``state_range``."""
        env = self.make_env()
        if env.state_range is not None:
            state, _ = self.walk(env)
            assert env.state_range[0] <= int(state.min())
            assert int(state.max()) <= env.state_range[1]

    def test_inputs_are_left_alone(self) -> None:
        """No function changes its input or returns a view that could change the source."""
        env = self.make_env()
        state, kind, move = self.moves(env, self.visited(env))
        before = state.clone()
        self.call_everything(env, state, kind, move)
        assert state.equal(before)
        env.source(2).fill_(99)
        assert not (env.source(2) == 99).any()

    def test_results_stay_on_the_input_device(self) -> None:
        """No function makes a tensor on the default device, whose tensors cannot be mixed in."""
        env = self.make_env()
        moves, terminating = self.moves(env, self.visited(env)), self.terminating(env)
        condition = env.sample_condition(len(terminating))
        with torch.device("meta"):
            results = self.call_everything(env, *moves)
            results.append(env.log_reward(terminating, condition))
        assert {result.device.type for result in results} == {"cpu"}

    def test_environment_moves_to_a_device(self) -> None:
        """``env.to`` moves all tensors (to a GPU if there is one)."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        here, there = self.make_env(), self.make_env().to(device)
        td = there.rollout(there.max_length)
        assert td.device == there.source(1).device
        assert td.device.type == device
        state = self.terminating(here)
        condition = here.sample_condition(len(state))
        expected = here.log_reward(state, condition)
        moved = None if condition is None else condition.to(device)
        assert_close(there.log_reward(state.to(device), moved).cpu(), expected)

    def test_conditions_have_their_shape(self) -> None:
        """Conditions, drawn and fixed, have ``condition_shape`` and repeat."""
        env = self.make_env()
        generator = torch.Generator().manual_seed(3)
        condition, fixed = env.sample_condition(3, generator), env.fixed_conditions(3)
        for drawn in (condition, fixed):
            assert (None if drawn is None else drawn.shape[1:]) == env.condition_shape
        if condition is not None:
            assert_close(env.fixed_conditions(3), fixed, rtol=0, atol=0)
            again = env.sample_condition(3, generator.manual_seed(3))
            assert_close(again, condition, rtol=0, atol=0)
            code = env.encode_condition(condition)
            assert (len(code), code.ndim, code.dtype) == (3, 2, torch.float32)

    def test_fingerprints_tell_states_apart(self) -> None:
        """Different states have different fingerprints, equal ones the same."""
        env = self.make_env()
        state = self.visited(env)
        key = env.fingerprint(state)
        assert (key.shape, key.dtype) == ((len(state),), torch.int64)
        assert len(key.unique()) == len(state), "two states share one fingerprint"
        assert env.fingerprint(state.flip(0)).equal(key.flip(0))

    def test_scores_order_states_as_rewards_do(self) -> None:
        """In the order of ``score``, with or without log R, states never fall in reward."""
        env = self.make_env()
        state = self.terminating(env)
        log_reward = self.log_rewards(env, state)
        for score in (env.score(state), env.score(state, log_reward)):
            assert (score.shape, score.dtype) == ((len(state),), torch.float32)
            assert score.isfinite().all(), "score is NaN or infinite"
            ordered = log_reward[score.argsort()]
            assert (ordered.diff() >= -1e-4 * ordered[1:].abs()).all()

    def test_modes_reached_are_numbered(self) -> None:
        """Modes reached are those of the single states together, below ``n_modes`` if known."""
        env = self.make_env()
        state = self.terminating(env)
        modes = env.modes_reached(state)
        assert (modes.ndim, modes.dtype) == (1, torch.int64)
        alone = torch.cat([env.modes_reached(one[None]) for one in state])
        assert modes.unique().equal(alone.unique())
        if env.condition_shape is None:
            assert env.modes_reached(state, env.log_reward(state)).unique().equal(modes.unique())
        if env.n_modes is not None:
            assert ((modes >= 0) & (modes < env.n_modes)).all()

    # As an environment of TorchRL.

    def test_specs(self) -> None:
        """TorchRL's own check of specs against data passes, whether or not rollouts stop."""
        check_env_specs(self.make_env(), break_when_any_done="both")

    @pytest.mark.parametrize("batch", [(), (0,), (5,), (2, 3)])
    def test_any_batch_size(self, batch: tuple[int, ...]) -> None:
        """Without a batch size, the environment resets and steps TensorDicts of any."""
        env = self.make_env()
        td = env.reset(TensorDict(batch_size=batch))
        assert td[keys.STATE].shape == (*batch, *env.state_shape)
        td = env.rand_step(td)
        assert td[keys.ACTION].shape == (*batch, *env.action_shape)
        assert td[keys.NEXT, keys.REWARD].shape == (*batch, 1)
        assert td[keys.NEXT, keys.LOG_REWARD].shape == batch

    def test_rollout_equals_the_functions(self) -> None:
        """A random rollout contains the results of the functions, and ends in all rows."""
        env = self.make_env()
        td = env.rollout(
            env.max_length, tensordict=TensorDict(batch_size=[16]), break_when_all_done=True
        )
        assert td[keys.NEXT, keys.DONE][:, -1].all()
        td = td.reshape(-1)
        state, action, after = td[keys.STATE], td[keys.ACTION], td[keys.NEXT]
        assert_close(after[keys.STATE], env.forward_step(state, action), rtol=0, atol=0)
        for part in (td, after):
            assert part[keys.FORWARD_MASK].equal(env.forward_mask(part[keys.STATE]))
            assert part[keys.BACKWARD_MASK].equal(env.backward_mask(part[keys.STATE]))
        kind = env.kind(action)
        assert td[keys.FORWARD_MASK].gather(1, kind[:, None]).all()
        exits = kind == env.exit_action
        for key in (keys.DONE, keys.TERMINATED):
            assert after[key].equal(exits[:, None])
        condition = None if env.condition_shape is None else td[keys.CONDITION][exits]
        expected = torch.full(exits.shape, -torch.inf)
        expected[exits] = env.log_reward(state[exits], condition)
        assert_close(after[keys.LOG_REWARD], expected, rtol=0, atol=0)
        assert_close(after[keys.REWARD], expected.exp()[:, None], rtol=0, atol=0)

    def test_step_refuses_illegal_actions(self) -> None:
        """``step`` raises on an action outside its mask, the dummy action included."""
        env = self.make_env()
        state = self.visited(env)
        row, kind = (~env.forward_mask(state)).nonzero(as_tuple=True)
        wrong = [*zip(state[row], env.random_action(state[row], kind), strict=True)][:20]
        outside = self.dummies(env, 1)[0]
        wrong += [(env.source(1)[0], bad) for bad in (outside, outside + 1 + env.n_actions)]
        for one, bad in wrong:
            td = env.reset(TensorDict(batch_size=[1]))
            td.update({keys.STATE: one[None], keys.ACTION: bad[None]})
            with pytest.raises(ArgumentError, match=re.escape(f"got {bad.tolist()} in row 0")):
                env.step(td)


class ContinuousEnvConformance(GFNEnvConformance):
    """Tests of every ``ContinuousEnv``; pytest runs it for each ``Test...`` subclass."""

    atol = 1e-5

    @abstractmethod
    def make_env(self) -> ContinuousEnv:
        """Return a new environment without a batch size, on the CPU."""

    def test_references_are_densities(self) -> None:
        """The reference has a batch of moves, and a finite density of each that it draws."""
        env = self.make_env()
        state = self.visited(env)
        for is_backward in (False, True):
            density = env.reference(state, is_backward)
            assert density.batch_shape == (len(state),)
            assert density.event_shape == (env.action_shape[0] - 1,)
            kind = torch.zeros(len(state), dtype=torch.int64)
            move = env.random_action(state, kind, is_backward)
            may = (env.backward_mask if is_backward else env.forward_mask)(state)[:, 0]
            if is_backward:
                may &= ~env.from_source(state)[0]
            assert density.log_prob(move[:, 1:])[may].isfinite().all()

    def test_first_moves_are_known_from_where_they_led(self) -> None:
        """``from_source`` holds exactly for the states after a first move, and gives that move."""
        env = self.make_env()
        states, actions = self.walk(env)
        for step, state in enumerate(states[:, 1:].unbind(1)):
            moved = ~env.is_sink(state)
            is_first, first = env.from_source(state)
            assert (is_first == (step == 0))[moved].all()
            if step == 0:
                assert_close(first[moved], actions[moved, 0, 1:], rtol=0, atol=self.atol)


class EnumerableEnvConformance(GFNEnvConformance):
    """Tests of every ``EnumerableEnv``; pytest runs it for each ``Test...`` subclass."""

    @abstractmethod
    def make_env(self) -> EnumerableEnv:
        """Return a new environment without a batch size, on the CPU."""

    def conditions(self, env: EnumerableEnv) -> list[Tensor | None]:
        """Return some conditions; None alone if rewards depend on none."""
        fixed = env.fixed_conditions(3)
        return [None] if fixed is None else list(fixed)

    def test_layers_hold_each_state_once(self) -> None:
        """Layers begin with the source, are disjoint, and a move leads to the next layer."""
        env = self.make_env()
        layers = list(env.layers())
        assert env.is_source(layers[0]).tolist() == [True]
        assert len(layers) <= env.max_length
        state = torch.cat(layers)
        assert len(env.state_key(state).unique()) == len(state), "two states share one key"
        assert len(state.unique(dim=0)) == len(state), "a state is listed twice"
        for layer, following in zip(layers, [*layers[1:], state[:0]], strict=True):
            before, _, move = self.moves(env, layer)
            reached = env.state_key(env.forward_step(before, move))
            assert reached.unique().equal(env.state_key(following).unique())

    def test_walks_stay_within_the_layers(self) -> None:
        """Every state of random walks is listed, under its own key."""
        env = self.make_env()
        listed, visited = torch.cat(list(env.layers())), self.visited(env)
        key, order = env.state_key(listed).sort()
        row = torch.searchsorted(key, env.state_key(visited)).clamp(max=len(key) - 1)
        assert listed[order][row].equal(visited), "a state is missing, or shares its key"

    def test_backward_mask_is_the_set_of_edges(self) -> None:
        """A backward mask contains exactly the moves that lead to its state from some state."""
        env = self.make_env()
        state = torch.cat(list(env.layers()))
        key, order = env.state_key(state).sort()
        before, kind, move = self.moves(env, state)
        child = torch.searchsorted(key, env.state_key(env.forward_step(before, move)))
        edges = torch.zeros_like(env.backward_mask(state))
        edges[child, kind] = True
        assert env.backward_mask(state[order]).equal(edges)

    def test_terminating_states_are_indexed_in_order(self) -> None:
        """``terminating_states`` are those where exit is legal, each with its row as index."""
        env = self.make_env()
        state, every = env.terminating_states(), torch.cat(list(env.layers()))
        assert len(state) == int(env.forward_mask(every)[:, -1].sum())
        assert env.terminating_index(state).equal(torch.arange(len(state)))
        assert env.terminating_index(state.flip(0)).equal(torch.arange(len(state)).flip(0))

    def test_words_tell_all_states_apart(self) -> None:
        """``describe`` gives different words for different terminating states."""
        env = self.make_env()
        words = env.describe(env.terminating_states())
        assert len({*words}) == len(words), "two terminating states have the same words"

    def test_target_is_the_normalised_reward(self) -> None:
        """The target sums to one, and log R(x) - log p(x) is log Z everywhere."""
        env = self.make_env()
        for condition in self.conditions(env):
            log_p = env.target_log_prob(condition)
            assert log_p.dtype == torch.float64
            assert_close(log_p.exp().sum().item(), 1.0, rtol=0, atol=1e-9)
            log_reward = self.log_rewards(env, env.terminating_states(), condition).double()
            at = log_p.isfinite()
            log_z = torch.full_like(log_p[at], env.log_partition(condition))
            assert_close(log_reward[at] - log_p[at], log_z)

    def test_policy_distribution_sums_to_one(self) -> None:
        """The exact distributions of the uniform and of a random policy sum to one."""
        env = self.make_env()
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(env.encoded_size, env.n_actions, generator=generator)

        def random_log_pf(state: Tensor, condition: Tensor | None = None) -> Tensor:
            if condition is not None:
                assert condition.shape == (len(state), *(env.condition_shape or ()))
            logits = env.encode(state) @ weight
            return logits.masked_fill(~env.forward_mask(state), -torch.inf).log_softmax(1)

        cases: list[tuple[LogPF, Tensor | None]] = [(uniform_log_pf(env), None)]
        cases += [(random_log_pf, condition) for condition in (None, *self.conditions(env))]
        for log_pf, condition in cases:
            log_p = env.policy_log_prob(log_pf, chunk_size=1000, condition=condition)
            assert (len(log_p), log_p.dtype) == (len(env.terminating_states()), torch.float64)
            assert_close(log_p.exp().sum().item(), 1.0, rtol=0, atol=1e-5)
            assert log_p.isfinite().all(), "a terminating state is out of reach"

    def test_modes_are_where_the_reward_is_highest(self) -> None:
        """Every mode exists, and no state outside one has a higher reward than one inside."""
        env = self.make_env()
        state = env.terminating_states()
        mode = env.mode_index(state)
        assert mode.unique().tolist() in ([*range(env.n_modes)], [*range(-1, env.n_modes)])
        for condition in self.conditions(env):
            log_reward = self.log_rewards(env, state, condition)
            rest = log_reward[mode < 0]
            highest = rest.max() if len(rest) else torch.tensor(-torch.inf)
            assert (log_reward[mode >= 0] >= highest).all()

    def test_graph_follows_the_environment_to_a_device(self) -> None:
        """After a move to a device, states are listed on it."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        env = self.make_env()
        before, log_p = env.terminating_states(), env.policy_log_prob(uniform_log_pf(env))
        env.to(device)
        assert env.terminating_states().device.type == device
        assert env.target_log_prob(self.conditions(env)[0]).device.type == device
        assert env.terminating_states().cpu().equal(before)
        assert_close(env.policy_log_prob(uniform_log_pf(env)).cpu(), log_p)
