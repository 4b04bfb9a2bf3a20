"""The same items in torchgfn's prioritised ``ReplayBuffer``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from gfn.containers import ReplayBuffer, StatesContainer
from gfn.gym import HyperGrid
from tensordict import TensorDict

from benchmarks.workloads import HEIGHT, WIDTH, challenge, items, random_items

# A way to put off its sorting, absent from the releases up to 2.4.1.
LAZY = {"lazy_sort": True} if "lazy_sort" in inspect.signature(ReplayBuffer).parameters else {}


class TorchGFNBuffer:
    """A full torchgfn buffer of terminating states that keeps the best and draws by reward.

    Args:
        capacity: rows.
        options: further keywords of torchgfn's ``ReplayBuffer``.
    """

    def __init__(self, capacity: int, **options: Any) -> None:
        self._env = HyperGrid(ndim=WIDTH, height=HEIGHT, validate_modes=False)
        self.rb = ReplayBuffer(
            self._env, capacity, prioritized_capacity=True, prioritized_sampling=True, **options
        )
        self.rb.add(self.container(random_items(capacity)))

    def container(self, rows: TensorDict) -> StatesContainer:
        """Return items as torchgfn holds them.

        Args:
            rows: states and log-rewards, see :mod:`benchmarks.workloads`.
        """
        return StatesContainer(
            self._env,
            states=self._env.states_from_tensor(rows["state"]),
            is_terminating=torch.ones(len(rows), dtype=torch.bool),
            log_rewards=rows["log_reward"],
        )

    def challenge(self, accepted: int) -> StatesContainer:
        """Return a batch of which the buffer keeps exactly so many rows.

        Args:
            accepted: see :func:`benchmarks.workloads.challenge`.
        """
        return self.container(items(challenge(self.rb.training_container.log_rewards, accepted)))
