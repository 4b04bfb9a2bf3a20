"""The same items in torchgfn's prioritised buffers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from gfn.containers import (
    NormBasedDiversePrioritizedReplayBuffer,
    ReplayBuffer,
    StatesContainer,
    Trajectories,
)
from gfn.containers.message import Message, MessageType
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
        self._env = _env(WIDTH)
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

    def rows(self) -> TensorDict:
        """Return what is stored, states and log-rewards."""
        stored = self.rb.training_container
        entries = {"state": stored.states.tensor, "log_reward": stored.log_rewards}
        return TensorDict(entries, [len(stored)])

    def challenge(self, accepted: int) -> StatesContainer:
        """Return a batch of which the buffer keeps exactly so many rows.

        Args:
            accepted: see :func:`benchmarks.workloads.challenge`.
        """
        return self.container(items(challenge(self.rb.training_container.log_rewards, accepted)))


class TorchGFNDiverseBuffer(TorchGFNBuffer):
    """A full torchgfn buffer that drops a state near one of higher reward, or near a stored one.

    Args:
        rows: what it holds, states and log-rewards.
        cutoff_distance: how near.
        p: of the norm.
    """

    def __init__(self, rows: TensorDict, cutoff_distance: float, p: float) -> None:
        self._env = _env(rows["state"].shape[1])
        self.rb = NormBasedDiversePrioritizedReplayBuffer(
            self._env, len(rows), cutoff_distance=cutoff_distance, p_norm_distance=p
        )
        self.rb.add(self.container(rows))


def message_of(rows: TensorDict) -> Message:
    """Return what torchgfn sends to a manager: its own trajectories, their environment included.

    Args:
        rows: trajectories with ``state``, ``action``, ``length``, ``log_reward`` and ``log_prob``.
    """
    env = _env(rows["state"].shape[2])
    trajectories = Trajectories(
        env,
        states=env.states_from_tensor(rows["state"].transpose(0, 1).contiguous()),
        actions=env.actions_from_tensor(rows["action"].t().contiguous()[..., None]),
        terminating_idx=rows["length"],
        log_rewards=rows["log_reward"],
        log_probs=rows["log_prob"].t().contiguous(),
    )
    return Message(MessageType.DATA, trajectories)


def answer() -> Message:
    """Return what torchgfn's manager answers."""
    return Message(MessageType.DATA, {"score": 1.0, "baseline_log_reward": 0.0})


def _env(width: int) -> HyperGrid:
    return HyperGrid(ndim=width, height=HEIGHT, validate_modes=False)
