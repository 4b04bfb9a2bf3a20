"""The objects that were seen last."""

from __future__ import annotations

import torch
from torch import Tensor

from gfn_rb.numerics.duplicates import Duplicates
from gfn_rb.remote.identity import Identities
from gfn_rb.shapes import Bool


class Memory:
    """A set of objects that forgets the oldest.

    Args:
        capacity: how many it remembers.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._index: Duplicates | None = None
        self._n_added = 0

    def holds(self, names: Identities) -> Bool[Tensor, "n"]:
        """Return which objects are remembered.

        Args:
            names: of the objects.
        """
        held = torch.zeros_like(names.whole)
        if self._index is not None and names.content.shape[1] == self._index.rows.shape[1]:
            held[self._index.near(self._index.look(names.content))[0]] = True
        return held & names.whole

    def add(self, names: Identities) -> None:
        """Remember objects.

        Args:
            names: of objects that are different and not remembered; what is no whole object is
                passed over.
        """
        content = names.content[names.whole][-self.capacity :]
        if len(content) == 0:
            return
        if self._index is None or self._index.rows.shape[1] != content.shape[1]:
            self._index = Duplicates(self.capacity, content)
        slot = (self._n_added + torch.arange(len(content))) % self.capacity
        self._n_added += len(content)
        self._index.write(slot, self._index.look(content), self.capacity)
