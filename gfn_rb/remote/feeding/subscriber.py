"""Who is to be given which of the rows that a manager holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from gfn_rb.containers.fields import select_rows
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import INDEX
from gfn_rb.remote.feeding.feed_policies import POLICIES, check_policy
from gfn_rb.remote.feeding.ledger import Ledger
from gfn_rb.shapes import Int64
from gfn_rb.torchrl_compat import all_slots


class Subscriber:
    """A worker that a manager feeds.

    Args:
        rank: of the worker.
        terms: what :meth:`Subscription.terms` gave.
        ledger: of the manager's buffer.

    Raises:
        ArgumentError: the terms are none.
    """

    def __init__(self, rank: int, terms: Any, ledger: Ledger) -> None:
        self.rank = rank
        self.quota, self.own = _checked(terms)
        self.terms = dict(terms)
        self._ledger = ledger
        self._shelf = POLICIES[check_policy(terms.get("policy"))](ledger.storage)
        if terms.get("fresh"):
            ledger.forget_receiver(rank)
        ledger.look()
        self._changed = [torch.arange(len(ledger.storage))]
        self._n_changed = len(ledger.storage)

    def offer(self, rows: Int64[Tensor, "m"]) -> None:
        """Take note that rows of the manager's buffer changed, or who knows them.

        Args:
            rows: each once.
        """
        if len(rows) == 0:
            return
        self._changed.append(rows)
        self._n_changed += len(rows)
        if self._n_changed > 2 * self._ledger.storage.max_size:
            self._changed = [torch.cat(self._changed).unique()]
            self._n_changed = len(self._changed[0])

    def _catch_up(self) -> None:
        """Put what changed on the shelf: once for all changes since the last reply."""
        if self._n_changed == 0:
            return
        changed = np.unique(torch.cat(self._changed).numpy())
        self._changed, self._n_changed = [], 0
        rows = torch.from_numpy(changed[: np.searchsorted(changed, len(self._ledger.storage))])
        if len(rows):
            # What is known is put in as worth nothing: one update instead of two.
            log_reward = self._ledger.log_reward(rows).masked_fill(self._known(rows), -math.inf)
            self._shelf.put(rows, log_reward, self._ledger.arrival(rows))

    def _known(self, rows: Tensor) -> Tensor:
        known = self._ledger.given(rows, self.rank)
        return known if self.own else known | self._ledger.sent(rows, self.rank)

    def _pick(self, quota: int, generator: torch.Generator | None) -> Tensor:
        """Take rows off the shelf, and return those that still hold what the worker lacks.

        Rows may have been emptied, or hold what another row held that was given.
        """
        while len(rows := self._shelf.pick(quota, generator)):
            self._shelf.remove(rows)
            rows = rows[rows < len(self._ledger.storage)]
            rows = rows[~self._known(rows)]
            if len(rows):
                break
        return rows

    def next(self, quota: int, generator: torch.Generator | None) -> TensorDictBase | None:
        """Return the rows to give next, and note that they were given.

        Args:
            quota: how many at most, at least 1.
            generator: source of randomness, on the CPU.

        Returns:
            The rows, None if there are none.
        """
        if not self._ledger.storage.initialized:
            return None
        self._catch_up()
        rows = self._pick(quota, generator)
        if len(rows) == 0:
            return None
        self._ledger.give(rows, self.rank)
        return select_rows(all_slots(self._ledger.storage), rows, but=(INDEX,)).cpu()


def _checked(terms: Any) -> tuple[int, bool]:
    if not isinstance(terms, Mapping):
        raise ArgumentError(f"subscription must be terms by name, got {terms!r}")
    quota, own = terms.get("quota"), terms.get("own", False)
    if type(own) is not bool:
        raise ArgumentError(f"own must be true or false, got {own!r}")
    if type(quota) is not int or quota < 1:
        raise ArgumentError(f"quota must be a number of at least 1, got {quota!r}")
    return quota, own
