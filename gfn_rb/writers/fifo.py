"""Keeping the newest items."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from gfn_rb.column import KeyColumn, StorageVersion
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.keys import INDEX
from gfn_rb.shapes import Float
from gfn_rb.torchrl_compat import mutation_revision
from gfn_rb.writers.features import Unique
from gfn_rb.writers.reward import OnDuplicate, RewardPrioritizedWriter
from gfn_rb.writers.rows import RowLayout


class FIFOWriter(TensorDictRoundRobinWriter):
    """TorchRL's round-robin writer, which compares rows with what is stored before it writes.

    The one it extends counts rows, and writes some of their entries, before it notices that
    others do not fit.

    With ``unique``, the newest objects are kept: it then returns a :class:`UniqueFIFOWriter`, which
    writes over the oldest rows, wherever they lie.

    Args:
        unique: what tells objects apart, of which there is then one row each, see
            :class:`~gfn_rb.RewardPrioritizedWriter`. None keeps equal rows side by side.
        on_duplicate: likewise.
    """

    def __new__(cls, unique: Unique = None, on_duplicate: OnDuplicate = "refresh") -> Any:
        """Make a writer, of another class where objects are unique."""
        return super().__new__(cls) if unique is None else UniqueFIFOWriter(unique, on_duplicate)

    def __init__(self, unique: Unique = None, on_duplicate: OnDuplicate = "refresh") -> None:
        super().__init__()
        self._layout = RowLayout()

    def add(self, data: TensorDictBase) -> int | Tensor:
        """Write one item.

        Args:
            data: batch size [].

        Raises:
            KeyMismatchError, ShapeError: see :meth:`extend`.
        """
        self._layout.check(data.unsqueeze(0), self._storage)
        return super().add(data)

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write a batch over the oldest items.

        Args:
            data: batch size [n].

        Returns:
            One slot per row; none for an empty batch.

        Raises:
            KeyMismatchError: keys are missing or unknown to the storage.
            ShapeError: an entry has another shape or dtype than the stored one.
        """
        if not data.shape[0]:
            return torch.empty(0, dtype=torch.int64)
        self._layout.check(data, self._storage)
        return super().extend(data)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned.

        Raises:
            CheckpointMismatchError: it comes from a writer that keeps objects unique.
        """
        if "_cursor" not in state_dict:
            raise CheckpointMismatchError(
                f"writer state is of unique={state_dict.get('unique')!r}, expected unique=None"
            )
        super().load_state_dict(state_dict)


class UniqueFIFOWriter(RewardPrioritizedWriter):
    """A writer that keeps the ``capacity`` newest objects, one row each.

    Where all items rank alike, the oldest give way to the newest.

    Args:
        unique: what tells objects apart, see :class:`~gfn_rb.RewardPrioritizedWriter`.
        on_duplicate: likewise.
    """

    def __init__(self, unique: Unique = "state", on_duplicate: OnDuplicate = "refresh") -> None:
        super().__init__(INDEX, unique=unique, on_duplicate=on_duplicate)
        self._column = _EqualKeys(INDEX)

    def _keys_of(self, data: TensorDictBase) -> Tensor:
        return torch.zeros(data.shape[0])

    def __repr__(self) -> str:
        return f"FIFOWriter(unique={self.unique!r}, on_duplicate={self.on_duplicate!r})"


class _EqualKeys(KeyColumn):
    """A column that storages need not have, as each row has the same key."""

    def values(self, storage: Storage) -> Float[Tensor, "len"]:
        return torch.zeros(len(storage))

    def version(self, storage: Storage) -> StorageVersion:
        return StorageVersion(mutation_revision(storage), 0, 0)
