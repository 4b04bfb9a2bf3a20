"""Generations of slots: how often each was written to, by which a row is known again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.arguments import require_flag
from gfn_rb.shapes import Int64
from gfn_rb.state_folder import require_numbers
from gfn_rb.torchrl_compat import raise_slot_generations, slot_generations, track_slot_generations

_GENERATION = "generation"


class GenerationWriter(Writer):
    """A writer that can tell how often each slot was written to, as TorchRL's can."""

    def __init__(self, track_generations: bool = False) -> None:
        super().__init__()
        require_flag("track_generations", track_generations)
        self.tracks_generations = track_generations
        self._restored: Tensor | None = None  # generations, until there is a storage

    def register_storage(self, storage: Storage) -> None:
        """Attach the storage to write to."""
        super().register_storage(storage)
        if self.tracks_generations:
            track_slot_generations(storage)
        if self._restored is not None:
            self._restore_generations({_GENERATION: self._restored})
            self._restored = None

    def generations_of(self, index: int | Tensor) -> Int64[Tensor, "*m"]:
        """Return how often slots were written to since the first time."""
        index = torch.as_tensor(index, dtype=torch.int64)
        stamps = slot_generations(self._storage) if self.tracks_generations else None
        if stamps is None or not stamps.shape[0]:
            return torch.full_like(index, -1)
        at = index.to(stamps.device)
        is_slot = (at >= 0) & (at < stamps.shape[0])
        found: Tensor = stamps[at.where(is_slot, 0)].where(is_slot, -1)
        return found.to(index.device)

    def _count_generations(self, index: Tensor | None = None) -> None:
        """Record that slots were written to, all of them if none are given."""
        if self._storage is not None:
            raise_slot_generations(self._storage, index)

    def _generation_state(self) -> dict[str, Any]:
        stamps = self._restored
        if self._storage is not None and self.tracks_generations:
            stamps = slot_generations(self._storage)
        return {} if stamps is None else {_GENERATION: stamps.clone()}

    def _restore_generations(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`_generation_state` returned; without it, all rows are new ones."""
        if _GENERATION in state:
            require_numbers(_GENERATION, state[_GENERATION], torch.int64)
        self._count_generations()
        if self._storage is None:
            self._restored = state.get(_GENERATION)
        elif self.tracks_generations and _GENERATION in state:
            stamps, known = track_slot_generations(self._storage), state[_GENERATION]
            stamps[: known.shape[0]] = known[: stamps.shape[0]]
