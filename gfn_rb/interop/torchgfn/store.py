"""Where the rows of torchgfn's containers are kept: a buffer of ours, and what is quick about it.

The buffer is nobody else's, so that rows go to its writer and leave its storage directly.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from gfn.env import Env
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.buffers.presets import build
from gfn_rb.errors import NaNError
from gfn_rb.interop.torchgfn.rows import GraphTable, container_of, padded
from gfn_rb.keys import ACTION, LENGTH, LOG_REWARD, NEXT_STATE, STATE
from gfn_rb.shapes import Float, Int64
from gfn_rb.torchrl_compat import all_slots, write_cursor
from gfn_rb.writers import RewardPrioritizedWriter


class RowStore:
    """Items of one kind, as rows.

    Args:
        env: the environment of torchgfn's that they are of.
        capacity: how many are kept.
        writer: makes what decides which are.
        sampler: makes what draws them.
        graphs: what stands for states that are graphs; None where they are tensors.

    Attributes:
        rb: the buffer of ours that holds them.
    """

    def __init__(
        self,
        env: Env,
        capacity: int,
        writer: Callable[[], Writer],
        sampler: Callable[[], Any],
        graphs: GraphTable | None,
    ) -> None:
        self._env, self._graphs = env, graphs
        self._make = lambda: build(capacity, writer(), sampler(), device=env.device)
        self.rb: TensorDictReplayBuffer = self._make()

    def __len__(self) -> int:
        return len(self.rb.storage)

    def extend(self, rows: TensorDict) -> None:
        """Offer rows, as of :func:`rows_of`."""
        if LENGTH in rows:
            rows = self._of_one_width(rows)
        self.rb.writer.extend(rows)
        if self._graphs is not None:
            self._forget_graphs(self._graphs)

    def at(self, slot: Int64[Tensor, "n"]) -> Any:
        """Return the items in some slots as a container of torchgfn's."""
        return container_of(self._rows_at(slot), self._env, self._graphs)

    def log_rewards(self) -> Float[Tensor, "n"]:
        """Return those of all items, by their slots."""
        stored: Tensor = self._stored(LOG_REWARD)
        return stored[: len(self)]

    def in_order(self, by_age: bool = False) -> Int64[Tensor, "n"]:
        """Return all slots in torchgfn's order: by reward where the best are kept, else by age.

        Args:
            by_age: whether the oldest comes first in either case.
        """
        writer, n = self.rb.writer, len(self)
        if not isinstance(writer, RewardPrioritizedWriter):
            return (torch.arange(n, device=self._env.device) + write_cursor(writer)) % n
        slot: Tensor = writer.state_dict()["rank"].argsort()
        return slot if by_age else slot[self.log_rewards()[slot].argsort(stable=True)]

    def draw_by_reward(self, n: int) -> Int64[Tensor, "n"]:
        """Draw slots in proportion to the reward, with replacement if there are fewer than n.

        Args:
            n: how many.

        Raises:
            ValueError: items have no log-rewards.
        """
        try:
            return self.rb.sampler.sample(self.rb.storage, n)[0]
        except NaNError as error:
            raise ValueError("log_rewards must be defined for prioritized sampling.") from error

    def draw_distinct(self, n: int) -> Int64[Tensor, "k"]:
        """Draw n different slots, or all, from torch's random numbers."""
        generator = random.Random(int(torch.randint(2**62, ())))
        return torch.tensor(generator.sample(range(len(self)), min(n, len(self))))

    def _rows_at(self, slot: Int64[Tensor, "n"]) -> dict[Any, Tensor]:
        """Return what ``rb[slot]`` does, in a fraction of the time."""
        stored, slot = all_slots(self.rb.storage), slot.to(self.rb.storage.device)
        return {name: leaf.index_select(0, slot) for name, leaf in stored.items(True, True)}

    def _stored(self, name: Any) -> Any:
        return all_slots(self.rb.storage).get(name, None)

    def _of_one_width(self, rows: TensorDict) -> TensorDict:
        """Pad rows to the width of what is stored, or that to a new width, half as much again."""
        if not len(self):
            return rows
        width, n_steps = self._stored(ACTION).shape[1], rows.get(ACTION).shape[1]
        if n_steps > width:
            width = max(n_steps, width + width // 2)
            stored = TensorDict(self._rows_at(self.in_order(by_age=True)), [len(self)])
            self.rb = self._make()
            self.rb.writer.extend(padded(stored, width, self._env))
        return rows if n_steps == width else padded(rows, width, self._env)

    def _forget_graphs(self, graphs: GraphTable) -> None:
        """Let go of the graphs that no row holds, once they are as many as those held."""
        entries = (self._stored(STATE), self._stored(NEXT_STATE))
        held = torch.cat([n[: len(self)].flatten() for n in entries if n is not None])
        if len(graphs) > 2 * len(held):
            graphs.keep(held)
