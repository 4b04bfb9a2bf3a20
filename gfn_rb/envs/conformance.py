"""Conformance suites: a new environment is tested by a class of one method.

    class TestMyEnv(GFNEnvConformance):
        def make_env(self):
            return MyEnv()

Derive from ``EnumerableEnvConformance`` instead if the environment is an ``EnumerableEnv``, from
``ContinuousEnvConformance`` if it is a ``ContinuousEnv``. pytest runs the methods ``test_...``.
"""

from __future__ import annotations

import re
from unittest import TestCase

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from gfn_rb import keys
from gfn_rb.envs.checks import QuickLaws, check_same
from gfn_rb.envs.enumerable import LogPF, uniform_log_pf
from gfn_rb.errors import ArgumentError, ShapeError

__all__ = ["ContinuousEnvConformance", "EnumerableEnvConformance", "GFNEnvConformance"]

refuses = TestCase().assertRaisesRegex


class GFNEnvConformance(QuickLaws):
    """Tests of every ``GFNEnv``; pytest runs it for each ``Test...`` subclass."""

    def conditions(self) -> list[Tensor | None]:
        """Return some conditions; None alone if rewards depend on none."""
        fixed = self.env.fixed_conditions(3)
        return [None] if fixed is None else list(fixed)

    def log_rewards(self, state: Tensor, condition: Tensor | None) -> Tensor:
        """Return log R of states under one condition, [*C]."""
        given = None if condition is None else condition.expand(len(state), *condition.shape)
        log_reward: Tensor = self.env.log_reward(state, given)
        return log_reward

    def test_log_reward_refuses_other_states(self) -> None:
        """A state of a wrong shape, and the sink, have no reward."""
        env, condition = self.env, self.env.sample_condition(1)
        with refuses(ShapeError, r"^state must be .* of shape"):
            env.log_reward(env.source(1)[..., None], condition)
        with refuses(ArgumentError, "state must be terminating"):
            env.log_reward(env.sink_state[None], condition)

    def test_states_are_made_again_from_actions(self) -> None:
        """``states_of`` gives the states of the walks, whatever actions follow their end."""
        env, (state, action) = self.env, self.walks
        length = (env.kind(action) >= 0).sum(1)
        over = torch.arange(action.shape[1]) >= length[:, None]
        over = over.view(*over.shape, *(1 for _ in env.action_shape))
        more = action.new_zeros(len(action), 3, *env.action_shape)
        longer = torch.cat([action.masked_fill(over, 0), more], 1)
        sink = state[:, -1:].expand(-1, 3, *env.state_shape)
        state = torch.cat([state, sink], 1)
        for n_steps in (0, 1, int(length.min()), action.shape[1], longer.shape[1]):
            made = env.states_of(longer[:, :n_steps], length)
            check_same(f"states_of {n_steps} actions", made, state[:, : n_steps + 1])
        check_same("states_of actions", env.states_of(action, length), state[:, :-3])
        check_same("states_of no rows", env.states_of(longer[:0], length[:0]), state[:0])

    def test_only_moves_are_the_only_ones(self) -> None:
        """``only_moves``, if any, lead to their states, and each can be undone in one way alone."""
        env, state = self.env, self.terminating
        if (moves := env.only_moves(state)) is None:
            return
        n, n_moves = moves.shape[:2]
        action = torch.cat([moves, env.exits(n)[:, None]], 1)
        made = env.states_of(action, torch.full((n,), n_moves + 1))
        check_same("states_of only_moves", made[:, -2], state, state)
        between = made[:, 1:-1].flatten(0, 1)
        ways = env.backward_mask(between).sum(1)
        check_same("the number of ways back", ways, torch.ones_like(ways), between)

    def test_results_stay_on_the_input_device(self) -> None:
        """No function makes a tensor on the default device, whose tensors cannot be mixed in."""
        env, terminating = self.env, self.terminating
        state, kind, move = self.moves(self.visited)
        condition = env.sample_condition(len(terminating))
        with torch.device("meta"):
            child = env.forward_step(state, move)
            results = [child, env.backward_step(child, move), env.source(2)]
            results.append(env.states_of(move[:, None], torch.full_like(kind, 2)))
            for function in (env.forward_mask, env.backward_mask, env.encode, env.is_source):
                results.append(function(state))
            results.append(env.log_reward(terminating, condition))
        check_same("the devices", {result.device.type for result in results}, {"cpu"})

    def test_environment_moves_to_a_device(self) -> None:
        """``env.to`` moves all tensors (to a GPU if there is one)."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        state, condition = self.terminating, self.env.sample_condition(len(self.terminating))
        there = self.make_env().to(device)
        td = there.rollout(there.max_length)
        for at in (td.device, there.source(1).device):
            check_same("the device", at.type, device)
        moved = None if condition is None else condition.to(device)
        found = there.log_reward(state.to(device), moved).cpu()
        assert_close(found, self.env.log_reward(state, condition))

    def test_scores_order_states_as_rewards_do(self) -> None:
        """In the order of ``score``, with or without log R, states never fall in reward."""
        env, state = self.env, self.terminating
        log_reward = self.log_rewards(state, self.conditions()[0])
        for score in (env.score(state), env.score(state, log_reward)):
            check_same("score - score", score - score, torch.zeros(len(state)), state)
            ordered = log_reward[score.argsort()]
            falls = ordered.diff() < -1e-4 * ordered[1:].abs()
            check_same("the reward falls", falls, False, state[score.argsort()])

    def test_modes_reached_are_numbered(self) -> None:
        """Modes reached are those of the single states together, below ``n_modes`` if known."""
        env, state = self.env, self.terminating
        modes = env.modes_reached(state).unique()
        alone = torch.cat([env.modes_reached(one[None]) for one in state])
        check_same("modes_reached", modes, alone.unique())
        if env.condition_shape is None:
            known = env.modes_reached(state, env.log_reward(state))
            check_same("modes_reached with log R", known.unique(), modes)
        if env.n_modes is not None:
            check_same("modes_reached in range", (modes >= 0) & (modes < env.n_modes), True, modes)

    # As an environment of TorchRL.

    def test_specs(self) -> None:
        """TorchRL's own check of specs against data passes, whether or not rollouts stop."""
        check_env_specs(self.env, break_when_any_done="both")

    def test_any_batch_size(self) -> None:
        """Without a batch size, the environment resets and steps TensorDicts of any."""
        env = self.env
        for batch in ((), (0,), (5,), (2, 3)):
            td = env.rand_step(env.reset(TensorDict(batch_size=batch)))
            for key, shape in (
                (keys.STATE, env.state_shape),
                (keys.ACTION, env.action_shape),
                ((keys.NEXT, keys.REWARD), (1,)),
                ((keys.NEXT, keys.LOG_REWARD), ()),
            ):
                check_same(f"the shape of {key}", td[key].shape, (*batch, *shape))

    def test_rollout_equals_the_functions(self) -> None:
        """A random rollout contains the results of the functions, and ends in all rows."""
        env, start = self.env, TensorDict(batch_size=[16])
        td = env.rollout(env.max_length, tensordict=start, break_when_all_done=True)
        check_same("done", td[keys.NEXT, keys.DONE][:, -1], True)
        td = td.reshape(-1)
        state, action, after = td[keys.STATE], td[keys.ACTION], td[keys.NEXT]
        check_same("next state", after[keys.STATE], env.forward_step(state, action), state, action)
        for part in (td, after):
            for key in (keys.FORWARD_MASK, keys.BACKWARD_MASK):
                mask = env.forward_mask if key == keys.FORWARD_MASK else env.backward_mask
                check_same(str(key), part[key], mask(part[keys.STATE]), part[keys.STATE])
        kind = env.kind(action)
        check_same("legal", td[keys.FORWARD_MASK].gather(1, kind[:, None]), True, state, action)
        exits = kind == env.exit_action
        expected = torch.full(exits.shape, -torch.inf)
        condition = None if env.condition_shape is None else td[keys.CONDITION][exits]
        expected[exits] = env.log_reward(state[exits], condition)
        for key, value in (
            (keys.DONE, exits[:, None]),
            (keys.TERMINATED, exits[:, None]),
            (keys.LOG_REWARD, expected),
            (keys.REWARD, expected.exp()[:, None]),
        ):
            check_same(str(key), after[key], value, state, action)

    def test_step_refuses_illegal_actions(self) -> None:
        """``step`` raises on an action outside its mask, the dummy action included."""
        env, state = self.env, self.visited
        row, kind = (~env.forward_mask(state)).nonzero(as_tuple=True)
        wrong = [*zip(state[row], env.random_action(state[row], kind), strict=True)][:20]
        outside = self.dummies(1)[0]
        wrong += [(env.source(1)[0], bad) for bad in (outside, outside + 1 + env.n_actions)]
        for one, bad in wrong:
            td = env.reset(TensorDict(batch_size=[1]))
            td.update({keys.STATE: one[None], keys.ACTION: bad[None]})
            with refuses(ArgumentError, re.escape(f"got {bad.tolist()} in row 0")):
                env.step(td)


class ContinuousEnvConformance(GFNEnvConformance):
    """Tests of every ``ContinuousEnv``; pytest runs it for each ``Test...`` subclass."""

    def test_references_are_densities(self) -> None:
        """The reference has a batch of moves, and a finite density of each that it draws."""
        env, state = self.env, self.visited
        for is_backward in (False, True):
            density = env.reference(state, is_backward)
            check_same("batch_shape", density.batch_shape, (len(state),))
            check_same("event_shape", density.event_shape, (env.action_shape[0] - 1,))
            kind = torch.zeros(len(state), dtype=torch.int64)
            move = env.random_action(state, kind, is_backward)
            may = (env.backward_mask if is_backward else env.forward_mask)(state)[:, 0]
            if is_backward:
                may &= ~env.from_source(state)[0]
            is_finite = density.log_prob(move[:, 1:]).isfinite()
            check_same("finite log_prob", is_finite[may], True, state[may], move[may])

    def test_first_moves_are_known_from_where_they_led(self) -> None:
        """``from_source`` holds exactly for the states after a first move, and gives that move."""
        env, (states, actions) = self.env, self.walks
        for step, state in enumerate(states[:, 1:].unbind(1)):
            moved = ~env.is_sink(state)
            is_first, first = env.from_source(state)
            check_same("from_source", is_first[moved], step == 0, state[moved])
            if step == 0:
                made = actions[moved, 0, 1:]
                check_same("from_source", first[moved], made, state[moved], atol=self.atol)


class EnumerableEnvConformance(GFNEnvConformance):
    """Tests of every ``EnumerableEnv``; pytest runs it for each ``Test...`` subclass."""

    def test_layers_hold_each_state_once(self) -> None:
        """Layers begin with the source, have each state once, and a move leads to the next."""
        env, layers = self.env, list(self.env.layers())
        check_same("is_source(layers[0])", env.is_source(layers[0]), torch.tensor([True]))
        assert len(layers) <= env.max_length
        state = torch.cat(layers)
        key = env.state_key(state)
        for different in (key.unique(), state.unique(dim=0)):
            check_same("the number of different states and keys", len(different), len(state))
        for layer, following in zip(layers, [*layers[1:], state[:0]], strict=True):
            before, _, move = self.moves(layer)
            reached = env.state_key(env.forward_step(before, move)).unique()
            check_same("states reached", reached, env.state_key(following).unique())
        key, order = key.sort()
        row = torch.searchsorted(key, env.state_key(self.visited)).clamp(max=len(key) - 1)
        check_same("the state listed under a key", state[order][row], self.visited, self.visited)

    def test_backward_mask_is_the_set_of_edges(self) -> None:
        """A backward mask contains exactly the moves that lead to its state from some state."""
        env = self.env
        state = torch.cat(list(env.layers()))
        key, order = env.state_key(state).sort()
        before, kind, move = self.moves(state)
        child = torch.searchsorted(key, env.state_key(env.forward_step(before, move)))
        edges = torch.zeros_like(env.backward_mask(state))
        edges[child, kind] = True
        check_same("backward_mask", env.backward_mask(state[order]), edges, state[order])

    def test_terminating_states_are_indexed_in_order(self) -> None:
        """``terminating_states`` are those where exit is legal, in words, each row its index."""
        env, state = self.env, self.env.terminating_states()
        n = int(env.forward_mask(torch.cat(list(env.layers())))[:, -1].sum())
        for at, row in ((state, torch.arange(n)), (state.flip(0), torch.arange(n).flip(0))):
            check_same("terminating_index", env.terminating_index(at), row)
        check_same("the number of different words", len({*env.describe(state)}), n)

    def test_target_is_the_normalised_reward(self) -> None:
        """The target sums to one, and log R(x) - log p(x) is log Z everywhere."""
        env, state = self.env, self.env.terminating_states()
        for condition in self.conditions():
            log_p = env.target_log_prob(condition)
            assert_close(log_p.exp().sum(), torch.ones((), dtype=torch.float64))
            at = log_p.isfinite()
            log_z = self.log_rewards(state, condition).double()[at] - log_p[at]
            assert_close(log_z, torch.full_like(log_z, env.log_partition(condition)))

    def test_policy_distribution_sums_to_one(self) -> None:
        """The exact distributions of the uniform and of a random policy sum to one."""
        env = self.env
        generator = torch.Generator().manual_seed(2)
        weight = torch.randn(env.encoded_size, env.n_actions, generator=generator)

        def random_log_pf(state: Tensor, condition: Tensor | None = None) -> Tensor:
            if condition is not None:
                assert condition.shape == (len(state), *(env.condition_shape or ()))
            logits = env.encode(state) @ weight
            return logits.masked_fill(~env.forward_mask(state), -torch.inf).log_softmax(1)

        cases: list[tuple[LogPF, Tensor | None]] = [(uniform_log_pf(env), None)]
        cases += [(random_log_pf, condition) for condition in (None, *self.conditions())]
        for log_pf, condition in cases:
            log_p = env.policy_log_prob(log_pf, chunk_size=1000, condition=condition)
            check_same("reach of a state", log_p.isfinite(), True, env.terminating_states())
            one = torch.ones((), dtype=torch.float64)
            assert_close(log_p.exp().sum(), one, rtol=0, atol=1e-5)

    def test_modes_are_where_the_reward_is_highest(self) -> None:
        """Every mode exists, and no state outside one has a higher reward than one inside."""
        env, state = self.env, self.env.terminating_states()
        mode = env.mode_index(state)
        assert mode.unique().tolist() in ([*range(env.n_modes)], [*range(-1, env.n_modes)])
        for condition in self.conditions():
            log_reward = self.log_rewards(state, condition)
            highest = log_reward.masked_fill(mode >= 0, -torch.inf).max()
            check_same("reward of a mode", log_reward[mode >= 0] >= highest, True, state[mode >= 0])

    def test_graph_follows_the_environment_to_a_device(self) -> None:
        """After a move to a device, states are listed on it."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        env, before = self.env, self.env.terminating_states()
        env.to(device)
        check_same("terminating_states", env.terminating_states().cpu(), before)
        for tensor in (env.terminating_states(), env.target_log_prob(self.conditions()[0])):
            check_same("the device", tensor.device.type, device)
