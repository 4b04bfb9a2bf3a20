"""What a manager does with items: keep the new ones, and find some for others."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.containers.fields import select_rows, shallow_copy
from gfn_rb.containers.objects import object_keys
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding.ledger import Ledger
from gfn_rb.remote.feeding.subscriber import Subscriber
from gfn_rb.shapes import Int64

Duplicates = Literal["drop", "keep"]


class Store:
    """A manager's buffer, with the origin of what it holds, and those who are fed from it.

    Args:
        rb: the buffer; None to keep nothing.
        n_ranks: how many ranks there are.
        duplicates: whether an object that the buffer holds already is dropped or stored again.
        generator: source of randomness of softmax draws, on the CPU.

    Raises:
        ArgumentError: another ``duplicates``.
    """

    def __init__(
        self,
        rb: ReplayBuffer | None,
        n_ranks: int,
        duplicates: Duplicates = "drop",
        generator: torch.Generator | None = None,
    ) -> None:
        if duplicates not in ("drop", "keep"):
            raise ArgumentError(f"duplicates must be 'drop' or 'keep', got {duplicates!r}")
        self.rb = rb
        self.subscribers: dict[int, Subscriber] = {}
        self._ledger = None if rb is None else Ledger(rb, n_ranks)
        self._drop = duplicates == "drop"
        self._generator = generator

    def put(self, rows: TensorDictBase, sender: int) -> dict[str, int]:
        """Offer rows to the buffer.

        Args:
            rows: batch size [n]; what is stored is copied.
            sender: the rank they came from.

        Returns:
            How many were ``stored``, ``rejected`` or ``duplicates``; or ``scored``, without a
            buffer.

        Raises:
            GfnRbError: they do not fit the buffer. Nothing was stored.
        """
        if self.rb is None or self._ledger is None:
            return {"scored": len(rows)}
        new = self._new(rows, sender, self._ledger)
        n_new, n_stored = len(new), 0
        if n_new:
            # A buffer writes their slots into what it is given.
            chosen = (
                shallow_copy(rows)
                if n_new == len(rows)
                else select_rows(rows, torch.from_numpy(new))
            )
            slots = torch.as_tensor(self.rb.extend(chosen)).reshape(-1).cpu()
            changed = self._ledger.look()
            slots = slots[slots >= 0]
            n_stored = len(slots)
            self._ledger.credit(slots, sender)
            self._offer(changed)
        duplicates = len(rows) - n_new
        return {"stored": n_stored, "rejected": n_new - n_stored, "duplicates": duplicates}

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on.

        Args:
            rank: of the worker.
            terms: what it asks for.

        Raises:
            ArgumentError: they cannot be met.
        """
        if self._ledger is None:
            raise ArgumentError("this manager keeps no items, so that nobody can be fed from it")
        self.subscribers[rank] = Subscriber(rank, terms, self._ledger)

    def next_for(self, rank: int, quota: int | None = None) -> TensorDictBase | None:
        """Return the rows that a worker is given next, None if there are none or it is not fed.

        Args:
            rank: of the worker.
            quota: how many at most; by default what it subscribed to.
        """
        subscriber = self.subscribers.get(rank)
        if subscriber is None:
            return None
        return subscriber.next(quota or subscriber.quota, self._generator)

    def _new(self, rows: TensorDictBase, sender: int, ledger: Ledger) -> Int64[np.ndarray, "k"]:
        """Return which rows are to be stored; of the others, note that the sender has them too."""
        if not self._drop:
            return np.arange(len(rows))
        self._offer(ledger.look())
        new, held = ledger.new(object_keys(rows))
        if len(held):
            known = ledger.recognise(held, sender)
            if sender in self.subscribers:
                self.subscribers[sender].offer(known)
        return new

    def _offer(self, changed: Int64[Tensor, "m"]) -> None:
        for subscriber in self.subscribers.values():
            subscriber.offer(changed)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return all but the buffer."""
        return {
            "ledger": None if self._ledger is None else self._ledger.state_dict(),
            "subscribers": {str(rank): each.terms for rank, each in self.subscribers.items()},
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, over a buffer restored to that moment.

        Args:
            state: from another manager.

        Raises:
            CheckpointMismatchError: it is of another buffer.
        """
        if self._ledger is not None and state["ledger"] is not None:
            self._ledger.load_state_dict(state["ledger"])
            self.subscribers = {
                int(rank): Subscriber(int(rank), {**terms, "fresh": False}, self._ledger)
                for rank, terms in state["subscribers"].items()
            }
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(state["generator"])
