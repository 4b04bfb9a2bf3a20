"""The same rollouts by torchgfn's ``Sampler``: same environment, same network, same weights."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from benchmarks.records import NO_TORCHGFN

if find_spec("gfn") is None:
    sys.exit(NO_TORCHGFN)

import torch
from gfn.containers import Trajectories
from gfn.env import DiscreteEnv
from gfn.estimators import DiscretePolicyEstimator
from gfn.gym import BitSequence, HyperGrid
from gfn.preprocessors import KHotPreprocessor, Preprocessor
from gfn.samplers import Sampler
from gfn.states import States
from gfn.utils.modules import MLP
from torch import Tensor, nn
from torch.nn.functional import embedding

import gfn_rb.envs as ours
from gfn_rb.policies.networks import Policy


class BitPreprocessor(Preprocessor):
    """Each bit as -1 or 1 and empty words as 0, by a look-up: torchgfn has none for BitSequence.

    Args:
        words: words in a sequence.
        word_bits: bits in a word.
    """

    def __init__(self, words: int, word_bits: int) -> None:
        super().__init__(words * word_bits)
        shifts = torch.arange(word_bits - 1, -1, -1)
        bits = torch.arange(2**word_bits)[:, None] >> shifts & 1
        self._code = torch.cat([torch.zeros(1, word_bits), bits * 2.0 - 1])

    def preprocess(self, states: States) -> Tensor:
        """Return [n, words * word_bits]."""
        return embedding(states.tensor + 1, self._code).flatten(-2)


def environment(env: ours.GFNEnv) -> tuple[DiscreteEnv, Preprocessor]:
    """Return torchgfn's counterpart of an environment, and the same encoding of its states."""
    if isinstance(env, ours.HyperGrid):
        grid = HyperGrid(ndim=env.n_dims, height=env.height, validate_modes=False)
        return grid, KHotPreprocessor(env.height, env.n_dims)
    assert isinstance(env, ours.BitSequence)
    bits = BitSequence(env.word_bits, env.n_bits, env.n_modes, temperature=env.n_bits / env.beta)
    return bits, BitPreprocessor(env.length, env.word_bits)


class TorchGFNSampler:
    """A torchgfn sampler with the weights of one of our policies.

    Args:
        env: our environment.
        policy: our policy, of two hidden layers of one width.
    """

    def __init__(self, env: ours.GFNEnv, policy: Policy) -> None:
        self.env, preprocessor = environment(env)
        module = MLP(policy.trunk.in_features, policy.head.out_features, policy.trunk.out_features)
        linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        for layer, same in zip(linear, [*policy.trunk.layers, policy.head], strict=True):
            layer.load_state_dict(same.state_dict())
        self._sampler = Sampler(
            DiscretePolicyEstimator(
                module, env.n_actions, preprocessor=preprocessor, is_backward=policy.is_backward
            )
        )

    @torch.no_grad()
    def forward(self, n: int, save_logprobs: bool = False) -> Trajectories:
        """Sample ``n`` trajectories from the source, with their log-rewards."""
        trajectories = self._sampler.sample_trajectories(self.env, n=n, save_logprobs=save_logprobs)
        assert trajectories.log_rewards is not None  # computed when asked for
        return trajectories

    @torch.no_grad()
    def backward(self, state: Tensor) -> Trajectories:
        """Sample a trajectory back from each terminating state."""
        return self._sampler.sample_trajectories(
            self.env, states=self.env.states_from_tensor(state.clone())
        )
