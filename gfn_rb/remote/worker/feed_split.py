"""How many of the rows that a worker is fed at a time each manager gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import nlargest


class FeedSplit:
    """Splits a quota of rows over managers so that those are fed which are the best of all.

    Each manager tells with its answers how much the rows that it would feed next are wanted, by the
    worker's policy; see :meth:`~gfn_rb.remote.feeding.feed_policies.FeedPolicy.next_scores`. The
    quota goes where the highest of these numbers are. As far as there are fewer of them, each
    manager is asked for as many more, for they may have come by others since.

    Args:
        quota: rows, of all managers together; 0 for a worker that is not fed.
    """

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._next: dict[int, Sequence[float]] = {}

    def heard(self, manager: int, scores: Sequence[float]) -> None:
        """Record how much the rows are wanted that a manager would feed next."""
        self._next[manager] = scores

    def __call__(
        self, managers: Sequence[int], turn: int, quota: int | None = None
    ) -> Counter[int]:
        """Return how many rows each manager is to feed.

        Args:
            managers: that are asked.
            turn: who gets what cannot be shared equally: a number that grows.
            quota: rows; by default that of the subscription.
        """
        quota = self.quota if quota is None else quota
        known = ((score, rank) for rank in managers for score in self._next.get(rank, ()))
        split = Counter(rank for _, rank in nlargest(quota, known))
        each, more = divmod(quota - split.total(), len(managers))
        for i, rank in enumerate(managers):
            split[rank] += each + ((i + turn) % len(managers) < more)
        return split
