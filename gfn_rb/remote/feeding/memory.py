"""The objects that were seen last."""

from __future__ import annotations

from collections import deque

import numpy as np

from gfn_rb.containers.objects import ObjectKeys
from gfn_rb.shapes import Bool


class Memory:
    """A set of objects that forgets the oldest.

    Args:
        capacity: how many it remembers.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: set[bytes] = set()
        self._oldest_first: deque[bytes] = deque()

    def holds(self, names: ObjectKeys) -> Bool[np.ndarray, "n"]:
        """Return which objects are remembered.

        Args:
            names: of the objects; what is no whole object is not remembered.
        """
        return np.fromiter(map(self._held.__contains__, names), bool, len(names))

    def add(self, names: ObjectKeys) -> None:
        """Remember objects.

        Args:
            names: of objects that are different and not remembered; what is no whole object is
                passed over.
        """
        whole = [name for name in names if name is not None]
        self._held.update(whole)
        self._oldest_first.extend(whole)
        excess = max(0, len(self._oldest_first) - self.capacity)
        self._held.difference_update([self._oldest_first.popleft() for _ in range(excess)])
