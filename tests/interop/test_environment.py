"""torchgfn's environments keep the promises of ours."""

import math

import pytest
import torch

from gfn_rb.envs.conformance import EnumerableEnvConformance, GFNEnvConformance
from gfn_rb.envs.enumerable import uniform_log_pf

gym = pytest.importorskip("gfn.gym")
preprocessors = pytest.importorskip("gfn.preprocessors")

from gfn_rb.interop.torchgfn import TorchGFNEnv, adapt_env  # noqa: E402


def suite(kind, env, max_length=None):
    """Of what ``adapt_env`` returns; its checks are a small part of the suite."""
    return type("Suite", (kind,), {"make_env": lambda _: TorchGFNEnv(env, None, max_length)})


ENUMERABLE = {
    "HyperGrid": gym.HyperGrid(2, 5, validate_modes=False),
    "ConditionalHyperGrid": gym.ConditionalHyperGrid(2, 4, validate_modes=False),
    "BitSequence": gym.BitSequence(2, 8, 4),
    "PerfectBinaryTree": gym.PerfectBinaryTree(lambda x: 1.0 + x.sum(-1).float(), depth=3),
}
for name, env in ENUMERABLE.items():
    globals()[f"Test{name}"] = suite(EnumerableEnvConformance, env)
LARGE = gym.HyperGrid(4, 4, validate_modes=False)
TestNotListed = suite(GFNEnvConformance, LARGE, 13)


@pytest.mark.parametrize("env", [*ENUMERABLE.values(), LARGE])
def test_each_of_them_is_adapted(env) -> None:
    max_length = 13 if env is LARGE else None
    assert adapt_env(env, max_length=max_length).n_actions == env.n_actions


def test_exact_answers_are_of_torchgfns_rewards() -> None:
    grid = gym.HyperGrid(2, 8, validate_modes=False)
    warm = gym.ConditionalHyperGrid(2, 8, validate_modes=False)
    env, state = adapt_env(grid), torch.cartesian_prod(torch.arange(8), torch.arange(8))
    assert (env.max_length, env.n_states) == (15, 64)
    reward = grid.reward(grid.states_from_tensor(state)).double()
    assert env.log_partition() == pytest.approx(float(reward.sum().log()), abs=1e-5)
    ours = env.target_log_prob().exp()[env.terminating_index(state)]
    torch.testing.assert_close(ours, reward / reward.sum(), rtol=1e-5, atol=0)
    assert float(env.policy_log_prob(uniform_log_pf(env)).exp().sum()) == pytest.approx(1.0)
    condition = torch.tensor([0.3])
    reward = warm.reward(warm.states_from_tensor(state, conditions=condition.expand(64, 1)))
    assert adapt_env(warm).log_partition(condition) == pytest.approx(float(reward.sum().log()))


def test_networks_see_what_the_preprocessor_gives() -> None:
    grid = gym.HyperGrid(2, 5, validate_modes=False)
    env = adapt_env(grid, preprocessors.KHotPreprocessor(5, 2))
    code = env.encode(torch.tensor([[0, 3], [4, 1]]))
    assert code.tolist() == [[1, 0, 0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0, 1, 0, 0, 0]]


def test_what_is_not_listed_says_so() -> None:
    env = adapt_env(gym.HyperGrid(8, 8, validate_modes=False), max_length=57)
    assert not env.is_enumerable
    assert env.n_states == math.inf
    assert env.true_log_z is None


def test_paths_of_several_lengths_are_no_layers() -> None:
    env = adapt_env(Strides())
    assert (env.max_length, env.is_enumerable) == (3, False)


class Strides(gym.HyperGrid):
    """A line 0, 1, 2 walked by one (move 0) or by two (move 1) at once."""

    def __init__(self) -> None:
        super().__init__(2, 3, validate_modes=False)

    def make_states_class(self):
        class StridesStates(super().make_states_class()):
            def _compute_forward_masks(self):
                first, n = self.tensor[..., 0], torch.tensor([1, 2])
                moves = first[..., None] + n < 3
                return torch.cat([moves, torch.ones_like(moves[..., :1])], -1)

            def _compute_backward_masks(self):
                return self.tensor[..., :1] >= torch.tensor([1, 2])

        return StridesStates

    def step(self, states, actions):
        return self.states_from_tensor(states.tensor + (actions.tensor + 1) * torch.tensor([1, 0]))

    def backward_step(self, states, actions):
        return self.states_from_tensor(states.tensor - (actions.tensor + 1) * torch.tensor([1, 0]))
