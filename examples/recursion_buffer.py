"""The replay buffer of recursionpharma/gflownet, with unique objects and any law of draws."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
import xxhash
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from gfn_rb import fifo_buffer


class ReplayBuffer:
    """recursion/gflownet's ``ReplayBuffer``: same constructor, methods, draws and columns.

    Without ``key`` and ``rb``, the buffer keeps and draws the same items as recursion's with the
    same ``rng``. With ``key``, objects are unique, and the newest item of an object replaces the
    stored one. With ``rb``, that buffer decides what is kept and drawn. It uses the log-reward, the
    second argument of ``push`` as in recursion's ``DataSource``. Items are kept in ``buffer``.

    Args:
        cfg: recursion's ``Config``, of which ``replay.capacity`` and ``replay.warmup`` are read.
        rng: draws items without ``rb``. Default: a new generator.
        key: returns what identifies an object from the arguments of ``push``, such as a SMILES
            string or the hash of a graph; equal keys must have equal ``repr``. Default: each item
            is another object.
        rb: an empty buffer of gfn_rb with the same capacity, such as
            ``reward_prioritized_buffer(capacity, unique="state")``. Its rows have the entries
            "state" (the hashed key, int64 [2]), "is_terminating" and "log_reward". Default: the
            newest items.
    """

    def __init__(
        self,
        cfg: Any,
        rng: np.random.Generator | None = None,
        *,
        key: Callable[..., Hashable] | None = None,
        rb: TensorDictReplayBuffer | None = None,
    ) -> None:
        self.capacity, self.warmup = int(cfg.replay.capacity), int(cfg.replay.warmup)
        if self.warmup > self.capacity:
            raise ValueError(f"replay.warmup must be at most {self.capacity}, got {self.warmup}")
        if rb is not None and (len(rb) or rb.storage.max_size != self.capacity):
            raise ValueError(f"rb must be empty and have the capacity {self.capacity}, got {rb}")
        self.rng = np.random.default_rng() if rng is None else rng
        self.buffer: list[tuple[Any, ...]] = []
        self._key, self._has_law, self._n_pushed = key, rb is not None, 0
        self._rb = fifo_buffer(self.capacity, unique=key and "state") if rb is None else rb

    def push(self, *args: Any) -> None:
        """Add one item, all arguments together; their number is the same in each call."""
        if self.buffer and len(args) != len(self.buffer[0]):
            raise ValueError(f"push takes {len(self.buffer[0])} arguments, got {len(args)}")
        self._n_pushed += 1
        name = self._n_pushed if self._key is None else self._key(*args)
        digest = xxhash.xxh3_128(repr(name).encode()).digest()
        row = {
            "state": torch.frombuffer(bytearray(digest), dtype=torch.int64)[None],
            "is_terminating": torch.ones(1, dtype=torch.bool),
            "log_reward": torch.tensor([float(args[1])] if self._has_law else [0.0]),
        }
        slot = int(self._rb.extend(TensorDict(row, [1])))
        if slot == len(self.buffer):
            self.buffer.append(args)
        elif slot >= 0:
            self.buffer[slot] = args

    def sample(self, batch_size: int) -> list[Any]:
        """Draw items; return the columns of their arguments, arrays and tensors stacked."""
        if self._has_law:
            slots = self._rb.sample(batch_size)["index"].tolist()
        else:
            slots = self.rng.choice(len(self.buffer), batch_size).tolist()
        columns = zip(*(self.buffer[slot] for slot in slots), strict=True)
        return [stacked(list(column)) for column in columns]

    def __len__(self) -> int:
        return len(self.buffer)


def stacked(column: list[Any]) -> Any:
    """Return arrays and tensors as one, anything else as it is."""
    if all(isinstance(each, np.ndarray) for each in column):
        return np.stack(column)
    return torch.stack(column) if all(isinstance(x, torch.Tensor) for x in column) else column
