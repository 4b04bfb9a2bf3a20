"""The buffer that a sceptic writes in fifty lines, as a peer of the library's.

Rows lie in preallocated tensors. A dictionary finds duplicates, and ``torch.topk`` keeps the best
rows. ``torch.multinomial`` draws by weights, ``torch.randint`` uniformly. It checks no argument,
saves nothing, and is not safe in threads.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rows = dict[str, Tensor]


class FiftyLines:
    """A buffer of tensors that keeps the newest or the best rows.

    Args:
        capacity: number of rows kept.
        keep: "newest", or "best" by ``log_reward``.
        draw: "uniform", "softmax" of the log-rewards, or "rank", 1 / (k n + rank).
        unique: whether rows whose ``state`` is stored already are dropped.
        k: flatness of the rank draw.
    """

    def __init__(
        self,
        capacity: int,
        keep: Literal["newest", "best"] = "best",
        draw: Literal["uniform", "softmax", "rank"] = "softmax",
        unique: bool = True,
        k: float = 0.01,
    ) -> None:
        self.capacity, self.keep, self.draw, self.unique, self.k = capacity, keep, draw, unique, k
        self.rows: Rows = {}
        self.n, self.cursor = 0, 0
        self.slot_of: dict[bytes, int] = {}
        self.name_of: list[bytes | None] = [None] * capacity

    def __len__(self) -> int:
        """Return the number of stored rows."""
        return self.n

    def extend(self, batch: Rows) -> None:
        """Offer rows: ``state`` [n, *S], ``log_reward`` [n], and others."""
        names = [row.tobytes() for row in batch["state"].numpy()]
        if self.unique:
            first = {name: i for i, name in enumerate(names) if name not in self.slot_of}
            batch = {key: value[[*first.values()]] for key, value in batch.items()}
            names = [*first]
        if not self.rows:
            self.rows = {key: value.new_empty(self.capacity, *value.shape[1:])
                         for key, value in batch.items()}  # fmt: skip
        slot, row = self._choose(batch["log_reward"])
        for key, value in batch.items():
            self.rows[key][slot] = value[row]
        if self.unique:
            for at, i in zip(slot.tolist(), row.tolist(), strict=True):
                if (before := self.name_of[at]) is not None:
                    del self.slot_of[before]
                self.slot_of[names[i]], self.name_of[at] = at, names[i]

    def _choose(self, log_reward: Tensor) -> tuple[Tensor, Tensor]:
        n, stored = len(log_reward), self.n
        self.n = min(stored + n, self.capacity)
        if self.keep == "newest":
            slot = (self.cursor + torch.arange(n)) % self.capacity
            self.cursor = (self.cursor + n) % self.capacity
            return slot, torch.arange(n)
        offered = torch.cat([self.rows["log_reward"][:stored], log_reward])
        best = offered.topk(self.n).indices
        is_left = torch.ones(self.n, dtype=torch.bool)
        is_left[best[best < stored]] = False
        return is_left.nonzero()[:, 0], best[best >= stored] - stored

    def sample(self, n: int) -> Rows:
        """Draw n rows: different ones by reward, any ones uniformly."""
        if self.draw == "uniform":
            index = torch.randint(self.n, (n,))
            return {key: value[index] for key, value in self.rows.items()}
        log_reward = self.rows["log_reward"][: self.n]
        if self.draw == "softmax":
            weight = (log_reward - log_reward.max()).exp()
        else:
            rank = torch.empty(self.n)
            rank[log_reward.argsort(descending=True)] = torch.arange(self.n, dtype=torch.float32)
            weight = 1 / (self.k * self.n + rank)
        index = weight.multinomial(n)
        return {key: value[index] for key, value in self.rows.items()}
