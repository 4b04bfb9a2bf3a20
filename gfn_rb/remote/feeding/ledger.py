"""Who sent what a manager's buffer holds, and who was given it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.remote.feeding.holdings import Holdings
from gfn_rb.shapes import Bool, Int64


class Ledger(Holdings):
    """The objects a manager holds, with their origin.

    An object may come from several ranks; all of them are its origin. What is known of an object
    is known of every row that holds it, moves with it from row to row, and ends when it leaves
    the buffer.

    Args:
        rb: the manager's buffer.
        n_ranks: how many ranks there are.
    """

    def __init__(self, rb: ReplayBuffer, n_ranks: int) -> None:
        super().__init__(rb)
        capacity = self.storage.max_size
        self._origin = np.zeros((capacity, n_ranks), bool)
        self._given = np.zeros((capacity, n_ranks), bool)
        self._arrival = np.zeros(capacity, np.int64)
        self._arrived = 0
        self._row = np.zeros(capacity, np.int64)  # of each object, the last written

    def credit(self, rows: Int64[Tensor, "m"], sender: int) -> None:
        """Note that a rank sent what some rows hold.

        Args:
            rows: in [0, capacity).
            sender: the rank.
        """
        self._origin[self._number[rows.numpy()], sender] = True

    def recognise(self, number: Int64[np.ndarray, "m"], sender: int) -> Int64[Tensor, "m"]:
        """Note that a rank sent objects that are held.

        Args:
            number: of the objects, from :meth:`new`.
            sender: the rank.

        Returns:
            The row that each was last written to.
        """
        self._origin[number, sender] = True
        return torch.from_numpy(self._row[number])

    def give(self, rows: Int64[Tensor, "m"], receiver: int) -> None:
        """Note that a rank was given what some rows hold.

        Args:
            rows: in [0, capacity).
            receiver: the rank.
        """
        self._given[self._number[rows.numpy()], receiver] = True

    def sent(self, rows: Int64[Tensor, "m"], rank: int) -> Bool[Tensor, "m"]:
        """Return whether what rows hold came from a rank.

        Args:
            rows: in [0, capacity).
            rank: which.
        """
        return torch.from_numpy(self._origin[self._number[rows.numpy()], rank])

    def given(self, rows: Int64[Tensor, "m"], rank: int) -> Bool[Tensor, "m"]:
        """Return whether what rows hold was given to a rank.

        Args:
            rows: in [0, capacity).
            rank: which.
        """
        return torch.from_numpy(self._given[self._number[rows.numpy()], rank])

    def arrival(self, rows: Int64[Tensor, "m"]) -> Int64[Tensor, "m"]:
        """Return a number that is the larger, the later what a row holds arrived.

        Args:
            rows: in [0, capacity).
        """
        return torch.from_numpy(self._arrival[self._number[rows.numpy()]])

    def forget_receiver(self, rank: int) -> None:
        """Forget what a rank was given, as when it starts anew.

        Args:
            rank: which.
        """
        self._given[:, rank] = False

    def _placed(self, rows: np.ndarray, number: np.ndarray, new: np.ndarray) -> None:
        self._row[number] = rows
        self._origin[new] = False
        self._given[new] = False
        self._arrival[new] = np.arange(self._arrived, self._arrived + len(new))
        self._arrived += len(new)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Return what the storage does not hold."""
        self.look()
        number = self._number[: len(self.storage)]
        return {
            "origin": torch.from_numpy(self._origin[number]),
            "given": torch.from_numpy(self._given[number]),
            "arrival": torch.from_numpy(self._arrival[number]),
            "arrived": self._arrived,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what :meth:`state_dict` returned, over a storage restored to that moment.

        Args:
            state: from another ledger; where that had fewer ranks, or more, the others are unknown.

        Raises:
            CheckpointMismatchError: it is of another number of rows.
        """
        n, came = len(self.storage), len(state["arrival"])
        if came != n:
            raise CheckpointMismatchError(f"ledger of {came} rows, expected {n} as are stored")
        self._column.forget()
        self.look()
        number, ranks = self._number[:n], min(state["origin"].shape[1], self._origin.shape[1])
        for mine, theirs in ((self._origin, state["origin"]), (self._given, state["given"])):
            mine[number] = False
            mine[number, :ranks] = theirs.numpy()[:, :ranks]
        self._arrival[number] = state["arrival"].numpy()
        self._arrived = state["arrived"]
