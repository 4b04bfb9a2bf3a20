"""The suites for environments of real numbers, and for those that can be enumerated."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.testing import assert_close

from gfn_rb.envs.conformance.every import GFNEnvConformance
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.envs.enumerable import EnumerableEnv, LogPF, uniform_log_pf


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
        states, actions = self.states_and_actions(env)
        for step, state in enumerate(states[1:]):
            moved = ~env.is_sink(state)
            is_first, first = env.from_source(state)
            assert not is_first[moved].any() or step == 0
            if step == 0:
                assert is_first[moved].all()
                assert_close(first[moved], actions[0][moved, 1:], rtol=0, atol=self.atol)


class EnumerableEnvConformance(GFNEnvConformance):
    """Tests of every ``EnumerableEnv``; pytest runs it for each ``Test...`` subclass."""

    @abstractmethod
    def make_env(self) -> EnumerableEnv:
        """Return a new environment without a batch size, on the CPU."""

    def conditions(self, env: EnumerableEnv) -> list[Tensor | None]:
        """Return what to ask for: some conditions, or None alone where there are none."""
        fixed = env.fixed_conditions(3)
        return [None] if fixed is None else list(fixed)

    def log_rewards(self, env: EnumerableEnv, condition: Tensor | None) -> Tensor:
        """Return log R of every terminating state under one condition."""
        state = env.terminating_states()
        if condition is None:
            return env.log_reward(state)
        return env.log_reward(state, condition.expand(len(state), *condition.shape))

    def test_layers_hold_each_state_once(self) -> None:
        """Layers begin with the source, are disjoint, and a move leads to the next layer."""
        env = self.make_env()
        layers = list(env.layers())
        assert env.is_source(layers[0]).tolist() == [True]
        assert len(layers) <= env.max_length
        state = torch.cat(layers)
        assert len(env.state_key(state).unique()) == len(state), "two states share one key"
        assert len(state.unique(dim=0)) == len(state), "a state is listed twice"
        keys_of = [set(env.state_key(layer).tolist()) for layer in [*layers, state[:0]]]
        for layer, following in zip(layers, keys_of[1:], strict=True):
            row, move = self.moves(env, layer)
            reached = env.state_key(env.forward_step(layer[row], move))
            assert set(reached.tolist()) == following

    def test_walks_stay_within_the_layers(self) -> None:
        """Every state that random walks meet is listed, under its own key."""
        env = self.make_env()
        listed, visited = torch.cat(list(env.layers())), self.visited(env)
        key, order = env.state_key(listed).sort()
        row = torch.searchsorted(key, env.state_key(visited)).clamp(max=len(key) - 1)
        assert listed[order][row].equal(visited), "a state is missing, or shares its key"

    def test_backward_mask_is_the_set_of_edges(self) -> None:
        """A backward mask holds exactly the moves that lead here from some state."""
        env = self.make_env()
        state = torch.cat(list(env.layers()))
        key, order = env.state_key(state).sort()
        row, move = self.moves(env, state)
        child = torch.searchsorted(key, env.state_key(env.forward_step(state[row], move)))
        edges = torch.zeros_like(env.backward_mask(state))
        edges[child, move] = True
        assert env.backward_mask(state[order]).equal(edges)

    def test_terminating_states_are_indexed_in_order(self) -> None:
        """``terminating_states`` are those where exit is legal, and know their row."""
        env = self.make_env()
        state = env.terminating_states()
        every = torch.cat(list(env.layers()))
        assert len(state) == env.n_terminating == int(env.forward_mask(every)[:, -1].sum())
        assert env.terminating_index(state).equal(torch.arange(len(state)))
        assert env.terminating_index(state.flip(0)).equal(torch.arange(len(state)).flip(0))

    def test_target_is_the_normalised_reward(self) -> None:
        """The target sums to one, and log R(x) - log p(x) is log Z everywhere."""
        env = self.make_env()
        for condition in self.conditions(env):
            log_p = env.target_log_prob(condition)
            assert log_p.dtype == torch.float64
            assert_close(log_p.exp().sum().item(), 1.0, rtol=0, atol=1e-9)
            log_reward = self.log_rewards(env, condition).double()
            at = log_p.isfinite()
            log_z = torch.full_like(log_p[at], env.log_partition(condition))
            assert_close(log_reward[at] - log_p[at], log_z)

    def test_policy_distribution_sums_to_one(self) -> None:
        """The exact distributions of the uniform and of a random policy sum to one."""
        env = self.make_env()
        weight = torch.randn(
            env.encoded_size, env.n_actions, generator=torch.Generator().manual_seed(2)
        )

        def random_log_pf(state: Tensor) -> Tensor:
            logits = env.encode(state) @ weight
            return logits.masked_fill(~env.forward_mask(state), -torch.inf).log_softmax(1)

        def conditional_log_pf(state: Tensor, condition: Tensor) -> Tensor:
            assert condition.shape == (len(state), *(env.condition_shape or ()))
            return random_log_pf(state)

        asked: list[tuple[LogPF, Tensor | None]] = [
            (uniform_log_pf(env), None),
            (random_log_pf, None),
        ]
        if env.condition_shape is not None:
            asked += [(conditional_log_pf, condition) for condition in self.conditions(env)]
        for log_pf, condition in asked:
            log_p = env.policy_log_prob(log_pf, chunk_size=1000, condition=condition)
            assert log_p.shape == (env.n_terminating,)
            assert log_p.dtype == torch.float64
            assert_close(log_p.exp().sum().item(), 1.0, rtol=0, atol=1e-5)
            assert log_p.isfinite().all(), "a terminating state is out of reach"

    def test_modes_are_where_the_reward_is_highest(self) -> None:
        """Every mode exists, and no state outside one has a higher reward than one inside."""
        env = self.make_env()
        state = env.terminating_states()
        mode = env.mode_index(state)
        assert mode[mode >= 0].unique().tolist() == list(range(env.n_modes))
        assert int(mode.min()) >= -1
        assert env.is_mode(state).equal(mode >= 0)
        for condition in self.conditions(env):
            log_reward = self.log_rewards(env, condition)
            rest = log_reward[mode < 0]
            highest = rest.max() if len(rest) else torch.tensor(-torch.inf)
            assert (log_reward[mode >= 0] >= highest).all()

    def test_graph_follows_the_environment_to_a_device(self) -> None:
        """Enumerating, moving and enumerating again gives tensors on the new device."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        env = self.make_env()
        before, log_p = env.terminating_states(), env.policy_log_prob(uniform_log_pf(env))
        env.to(device)
        assert env.terminating_states().device.type == device
        condition = self.conditions(env)[0]
        assert env.target_log_prob(condition).device.type == device
        assert env.terminating_states().cpu().equal(before)
        assert_close(env.policy_log_prob(uniform_log_pf(env)).cpu(), log_p)
