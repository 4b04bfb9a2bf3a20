"""The suite for every environment: its functions, and its TorchRL interface."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from gfn_rb import keys
from gfn_rb.envs.checks import CoreConformance
from gfn_rb.errors import ArgumentError, ShapeError


class GFNEnvConformance(CoreConformance):
    """Tests of every ``GFNEnv``; pytest runs it for each ``Test...`` subclass."""

    def test_log_reward_is_a_float32_vector(self) -> None:
        """``log_reward`` is finite or -inf, one float32 per terminating state."""
        env = self.make_env()
        state = self.terminating(env)
        log_reward = env.log_reward(state, env.sample_condition(len(state)))
        assert log_reward.shape == (len(state),)
        assert log_reward.dtype == torch.float32
        assert (log_reward < torch.inf).all(), "log_reward holds NaN or inf"

    def test_log_reward_refuses_what_is_no_terminating_state(self) -> None:
        """A state of the wrong shape, and the sink, have no reward."""
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
            alone = torch.cat([function(one[None]) for one in state])
            assert_close(batch, alone, rtol=0, atol=0)
            assert function(state[:0]).shape == (0, *batch.shape[1:])
        assert env.log_reward(state[:0], env.sample_condition(0)).shape == (0,)
        none = self.dummies(env, 0)
        assert env.forward_step(state[:0], none).shape == (0, *env.state_shape)
        assert env.backward_step(state[:0], none).shape == (0, *env.state_shape)

    def test_states_are_made_again_from_actions(self) -> None:
        """``states_of`` gives what the walks met, whatever follows their end or is cut there."""
        env = self.make_env()
        states, actions = self.states_and_actions(env)
        state, action = torch.stack(states, 1), torch.stack(actions, 1)
        length = (env.kind(action) >= 0).sum(1)
        assert env.states_of(action, length).equal(state)
        over = torch.arange(action.shape[1]) >= length[:, None]
        sink = state[:, -1:].expand(-1, 3, *env.state_shape)
        over = over.view(*over.shape, *(1 for _ in env.action_shape))
        more = action.new_zeros(len(action), 3, *env.action_shape)
        longer = torch.cat([action.masked_fill(over, 0), more], 1)
        assert env.states_of(longer, length).equal(torch.cat([state, sink], 1))
        for n_steps in (0, 1, int(length.min())):
            cut = env.states_of(action[:, :n_steps], length)
            assert cut.equal(state[:, : n_steps + 1])
        assert env.states_of(action[:0], length[:0]).equal(state[:0])

    def test_states_keep_to_their_range(self) -> None:
        """No state, the sink included, holds a number outside ``state_range``."""
        env = self.make_env()
        if env.state_range is not None:
            state = torch.cat(self.walk(env))
            assert env.state_range[0] <= int(state.min())
            assert int(state.max()) <= env.state_range[1]

    def test_inputs_are_left_alone(self) -> None:
        """No function changes its input or hands out a view that could change the source."""
        env = self.make_env()
        state = self.visited(env)
        before = state.clone()
        row, move = self.moves(env, state)
        rows = state[row]
        self.call_everything(env, rows, move)
        assert_close(rows, before[row], rtol=0, atol=0)
        env.source(2).fill_(99)
        assert not (env.source(2) == 99).any()

    def test_results_stay_on_the_input_device(self) -> None:
        """No function makes a tensor on the default device, here one that cannot be mixed in."""
        env = self.make_env()
        state = self.visited(env)
        row, move = self.moves(env, state)
        terminating = self.terminating(env)
        condition = env.sample_condition(len(terminating))
        with torch.device("meta"):
            results = self.call_everything(env, state[row], move)
            results += [env.source(2), env.log_reward(terminating, condition)]
        assert {result.device.type for result in results} == {"cpu"}

    def test_environment_moves_to_a_device(self) -> None:
        """``env.to`` takes everything along (to a GPU where there is one)."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        here, there = self.make_env(), self.make_env()
        td = there.to(device).rollout(there.max_length)
        assert td.device == there.source(1).device
        assert td.device.type == device
        state = self.terminating(here)
        condition = here.sample_condition(len(state))
        expected = here.log_reward(state, condition)
        moved = None if condition is None else condition.to(device)
        assert_close(there.log_reward(state.to(device), moved).cpu(), expected)

    def test_conditions_have_their_shape(self) -> None:
        """Conditions, drawn and fixed, agree with ``condition_shape`` and repeat."""
        env = self.make_env()
        generator = torch.Generator().manual_seed(3)
        condition = env.sample_condition(3, generator)
        shape = None if condition is None else condition.shape[1:]
        assert shape == env.condition_shape
        fixed = env.fixed_conditions(3)
        assert (None if fixed is None else fixed.shape[1:]) == env.condition_shape
        if condition is not None and fixed is not None:
            assert_close(env.fixed_conditions(3), fixed, rtol=0, atol=0)
            again = env.sample_condition(3, generator.manual_seed(3))
            assert_close(again, condition, rtol=0, atol=0)
            code = env.encode_condition(condition)
            assert code.shape[0] == 3
            assert code.ndim == 2
            assert code.dtype == torch.float32

    def test_fingerprints_tell_states_apart(self) -> None:
        """Different states have different fingerprints, equal ones the same."""
        env = self.make_env()
        state = self.visited(env)
        key = env.fingerprint(state)
        assert key.shape == (len(state),)
        assert key.dtype == torch.int64
        assert len(key.unique()) == len(state), "two states share one fingerprint"
        assert env.fingerprint(state.flip(0)).equal(key.flip(0))

    def test_scores_order_states_as_rewards_do(self) -> None:
        """Sorted by ``score``, states under one condition never fall in reward, known or not."""
        env = self.make_env()
        state = self.terminating(env)
        score = env.score(state)
        assert score.shape == (len(state),)
        assert score.dtype == torch.float32
        assert score.isfinite().all(), "score holds NaN or inf"
        condition = env.fixed_conditions(1)
        if condition is not None:
            condition = condition.expand(len(state), *condition.shape[1:])
        log_reward = env.log_reward(state, condition)
        for order in (score.argsort(), env.score(state, log_reward).argsort()):
            ordered = log_reward[order]
            assert (ordered.diff() >= -1e-4 * ordered[1:].abs()).all()

    def test_modes_reached_are_numbered(self) -> None:
        """Modes reached are those of the single states together, below ``n_modes`` if known."""
        env = self.make_env()
        state = self.terminating(env)
        modes = env.modes_reached(state)
        assert modes.ndim == 1
        assert modes.dtype == torch.int64
        alone = torch.cat([env.modes_reached(one[None]) for one in state])
        assert modes.unique().equal(alone.unique())
        if env.condition_shape is None:
            assert env.modes_reached(state, env.log_reward(state)).unique().equal(modes.unique())
        if env.n_modes is not None and len(modes):
            assert 0 <= int(modes.min()) <= int(modes.max()) < env.n_modes

    # As an environment of TorchRL.

    def test_specs(self) -> None:
        """TorchRL's own check of specs against data passes, whether or not rollouts stop."""
        check_env_specs(self.make_env(), break_when_any_done="both")

    @pytest.mark.parametrize("batch", [(), (0,), (5,), (2, 3)])
    def test_any_batch_size(self, batch: tuple[int, ...]) -> None:
        """Without a batch size of its own, the environment resets and steps any."""
        env = self.make_env()
        td = env.reset(TensorDict(batch_size=batch))
        assert td[keys.STATE].shape == (*batch, *env.state_shape)
        td = env.rand_step(td)
        assert td[keys.ACTION].shape == (*batch, *env.action_shape)
        assert td[keys.NEXT, keys.REWARD].shape == (*batch, 1)
        assert td[keys.NEXT, keys.LOG_REWARD].shape == batch

    def test_rollout_equals_the_functions(self) -> None:
        """A random rollout holds what the functions say, and ends everywhere."""
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
        assert td[keys.FORWARD_MASK].gather(1, env.kind(action)[:, None]).all()
        exits = env.kind(action) == env.exit_action
        assert after[keys.DONE].equal(exits[:, None])
        assert after[keys.TERMINATED].equal(exits[:, None])
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
        action = env.random_action(state[row[:20]], kind[:20])
        wrong = [*zip(state[row[:20]], action, strict=True)]
        outside = self.dummies(env, 1)[0]
        wrong += [(env.source(1)[0], bad) for bad in (outside, outside + 1 + env.n_actions)]
        for one, bad in wrong:
            td = env.reset(TensorDict(batch_size=[1]))
            td.update({keys.STATE: one[None], keys.ACTION: bad[None]})
            with pytest.raises(ArgumentError, match=re.escape(f"got {bad.tolist()} in row 0")):
                env.step(td)
