"""A recurrent policy with the keys of TorchRL's GRUModule, trained by trajectory balance."""

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import GRUModule

from gfn_rb import Sampler
from gfn_rb.envs import BitSequence
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import LogZ, UniformBackwardPolicy

torch.manual_seed(0)
env = BitSequence(16, 4, n_modes=4)
policy = TensorDictSequential(
    TensorDictModule(lambda state: state.float(), ["state"], ["words"]),
    GRUModule(4, 32, in_keys=["words", "rs"], out_keys=["out", ("next", "rs")]),
    TensorDictModule(nn.Linear(32, env.n_actions), ["out"], ["logits"]),
)
policy.is_backward = False
loss = TrajectoryBalance(policy, UniformBackwardPolicy(env), env, LogZ())
loss(Sampler(policy).sample_trajectories(env, 32)).backward()
