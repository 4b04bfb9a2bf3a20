"""What the TorchRL interface of an environment promises."""

from __future__ import annotations

import re

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from gfn_rb import keys
from gfn_rb.envs.checks import RandomWalks
from gfn_rb.errors import ArgumentError


class InterfaceConformance(RandomWalks):
    """What every ``GFNEnv`` promises as a TorchRL environment."""

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
