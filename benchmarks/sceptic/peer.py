"""torchgfn's ``tutorials/examples/train_hypergrid_buffer.py`` on environments of this library.

The loop, networks, learning rates, batches of 16 and buffer of 10,000 trajectories are those of the
script with ``--prioritized_capacity --prioritized_sampling``, and rewards and masks come from our
environment. It stands in for a trainer where runs are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gfn.actions import Actions
from gfn.containers import ReplayBuffer
from gfn.env import DiscreteEnv
from gfn.estimators import DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.preprocessors import Preprocessor
from gfn.samplers import Sampler
from gfn.states import DiscreteStates, States
from gfn.utils.common import set_seed
from gfn.utils.modules import MLP
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gfn_rb import Trajectories
from gfn_rb.envs import EnumerableEnv
from gfn_rb.training import TrainConfig
from gfn_rb.training.metrics import DiscoveryMetrics, ExactFit

BATCH_SIZE, CAPACITY, PREFILL, LR, LR_LOG_Z = 16, 10_000, 10, 1e-3, 1e-1


class Wrapped(DiscreteEnv):
    """An environment of ours as one of torchgfn's."""

    def __init__(self, env: EnumerableEnv) -> None:
        self._env = env
        super().__init__(
            n_actions=env.n_actions,
            s0=env.source_state,
            state_shape=tuple(env.state_shape),
            sf=env.sink_state,
        )

    def step(self, states: DiscreteStates, actions: Actions) -> DiscreteStates:
        """Make moves."""
        return self.states_from_tensor(self._env.move(states.tensor, actions.tensor[:, 0]))

    def backward_step(self, states: DiscreteStates, actions: Actions) -> DiscreteStates:
        """Undo moves."""
        return self.states_from_tensor(self._env.undo(states.tensor, actions.tensor[:, 0]))

    def make_states_class(self) -> type[DiscreteStates]:
        """Return states whose masks are ours."""
        env = self._env

        class WrappedStates(super().make_states_class()):  # type: ignore[misc]
            def _compute_forward_masks(self) -> Tensor:
                return _rowwise(env.forward_mask, self.tensor)

            def _compute_backward_masks(self) -> Tensor:
                return _rowwise(env.backward_mask, self.tensor)

        return WrappedStates

    def log_reward(self, states: States) -> Tensor:
        """Return log R."""
        return self._env.log_reward(states.tensor)


def _rowwise(function: Callable[[Tensor], Tensor], state: Tensor) -> Tensor:
    """Return a function of states of any batch shape, [*, n_places]."""
    return function(state.flatten(0, -2)).unflatten(0, state.shape[:-1])


class Encoded(Preprocessor):
    """What networks see of a state here."""

    def __init__(self, env: EnumerableEnv) -> None:
        super().__init__(env.encoded_size)
        self._env = env

    def preprocess(self, states: States) -> Tensor:
        """Return the codes of states."""
        return _rowwise(self._env.encode, states.tensor)


class _PolicyFit(ExactFit):
    """An exact fit of a policy that is a function of states."""

    def __init__(
        self,
        env: EnumerableEnv,
        network: nn.Module,
        log_pf: Callable[[Tensor], Tensor],
        log_z: Callable[[Tensor | None], Tensor],
    ) -> None:
        super().__init__(env, TensorDictModule(network, ["encoded"], ["logits"]), log_z)
        self._log_pf = log_pf

    def policy_log_prob(self, condition: Tensor | None = None) -> Tensor:
        return self.env.policy_log_prob(self._log_pf)


class TorchGFNScript:
    """Trains as torchgfn's script does.

    Args:
        config: of the task and the seed; all other options are the script's.
        hooks: unused.
    """

    def __init__(self, config: TrainConfig, hooks: object = None) -> None:
        set_seed(config.seed)
        self.config, self.env = config, config.make_env()
        assert isinstance(self.env, EnumerableEnv)
        self._peer, seen = Wrapped(self.env), Encoded(self.env)
        n = self.env.n_actions
        pf = MLP(input_dim=self.env.encoded_size, output_dim=n)
        pb = MLP(input_dim=self.env.encoded_size, output_dim=n - 1, trunk=pf.trunk)
        forward = DiscretePolicyEstimator(pf, n, preprocessor=seen, is_backward=False)
        backward = DiscretePolicyEstimator(pb, n, preprocessor=seen, is_backward=True)
        self._flow = TBGFlowNet(pf=forward, pb=backward, init_logZ=0.0)
        self._sampler = Sampler(estimator=forward)
        self._optimizer = torch.optim.Adam(self._flow.pf_pb_parameters(), lr=LR)
        self._optimizer.add_param_group({"params": self._flow.logz_parameters(), "lr": LR_LOG_Z})
        self._rb = ReplayBuffer(
            self._peer, capacity=CAPACITY, prioritized_capacity=True, prioritized_sampling=True
        )
        self.discovery, self.steps_done, self._pf = DiscoveryMetrics(self.env), 0, pf
        self.fit = _PolicyFit(self.env, pf, self._log_pf, lambda _: self._flow.logZ.detach())

    def step(self) -> None:
        """Sample, store and learn once, and once more from the buffer."""
        fresh = self._sampler.sample_trajectories(
            self._peer, n=BATCH_SIZE, save_logprobs=True, save_estimator_outputs=False
        )
        x, log_reward = fresh.terminating_states.tensor, fresh.log_rewards
        self.discovery.add(_ends(self.env, x, log_reward))
        with torch.no_grad():
            self._rb.add(fresh)
        self.steps_done += 1
        if self.steps_done <= PREFILL or len(self._rb) < BATCH_SIZE:
            return
        self._learn(fresh, False)
        self._learn(self._rb.sample(n_samples=BATCH_SIZE), True)

    def _learn(self, rows: Any, are_old: bool) -> None:
        self._optimizer.zero_grad()
        self._flow.loss(self._peer, rows, recalculate_all_logprobs=are_old).backward()
        self._optimizer.step()

    def _log_pf(self, state: Tensor) -> Tensor:
        logits = self._pf(self.env.encode(state))
        return logits.where(self.env.forward_mask(state), -torch.inf).log_softmax(1)


def _ends(env: EnumerableEnv, x: Tensor, log_reward: Tensor) -> Trajectories:
    """Return trajectories of no moves that end in some objects, which metrics read alone."""
    state = torch.stack([x, env.sink_state.expand_as(x)], 1)
    action, length = x.new_full((len(x), 1), env.exit_action), x.new_ones(len(x))
    return Trajectories(state=state, action=action, length=length, log_reward=log_reward)
