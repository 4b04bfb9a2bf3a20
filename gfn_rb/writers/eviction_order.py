"""The order in which stored rows give way to better ones."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import ListStorage, Storage

from gfn_rb.column import KeyColumn, Version
from gfn_rb.numerics.top_k import UNKNOWN_RANK, TopK, worst_first
from gfn_rb.shapes import Float, Float64, Int64, Shaped
from gfn_rb.state_folder import require_count, require_numbers
from gfn_rb.storages import is_laid_out, slots_beside
from gfn_rb.writers.moves import Moves

Tie = Literal["newest", "oldest"]

_OFFERED, _WRITTEN, _REVISION = range(3)
_AGES_BEFORE = 2**62  # what rows of unknown age are older by than the first row offered


class EvictionOrder:
    """Orders the rows of a storage by their key, and by age where keys tie.

    It follows the key column of the storage, which is the truth: rows that others wrote or
    relabelled count with their new keys from the next call on. Keys are compared as float64, on
    the host whatever the storage's device: it has to know which rows come in before they are moved.

    Attributes:
        version: the content of the storage that this is in step with, as this process sees it; None
            for none.
    """

    def __init__(self, column: KeyColumn, tie: Tie, largest: bool = True) -> None:
        self.column = column
        self.tie = tie
        self.largest = largest
        self._extremes: Any = None  # a TopK, once there is a storage
        self.restored: Tensor | None = None  # ranks, until there is a storage
        # Rows offered, rows written, storage revision the extremes are in step with. On the CPU,
        # and a tensor, so that processes sharing the buffer share it.
        self._counters = torch.zeros(3, dtype=torch.int64)
        self.version: Version | None = None
        self._floor: tuple[Version | None, float] | None = None  # the lowest key of a version

    # Following a storage.

    def extremes(self, storage: Storage) -> TopK:
        """Return the keys and ranks of the rows of a storage, not necessarily in step with it."""
        if self._extremes is None:
            self.make_room(storage, len(storage))
        extremes: TopK = self._extremes
        return extremes

    def make_room(self, storage: Storage, n: int) -> None:
        """Lay out as many slots as there are, or for a list of rows, as are needed."""
        known = self._extremes
        if known is not None and (not isinstance(storage, ListStorage) or n <= known.capacity):
            return
        self._extremes = TopK(slots_beside(storage, n))
        if self._counters.is_shared():
            self._extremes.share_memory()
        if known is not None:
            self._extremes.assign(known.key, known.rank)
        elif self.restored is not None:
            self._extremes.rank[: len(self.restored)] = self.restored
            self.restored = None

    def signed(self, key: Shaped[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return keys as floats, of which those to keep are the largest."""
        if not key.is_floating_point():
            key = key.to(torch.float64)
        return key if self.largest else -key

    def in_step(self, storage: Storage) -> TopK:
        """Return the keys and ranks, read anew if the storage changed behind the writer's back."""
        laid_out = is_laid_out(storage)
        if self._extremes is None or isinstance(storage, ListStorage):
            self.make_room(storage, len(storage))
        extremes: TopK = self._extremes
        if not laid_out:
            return extremes
        version = self.column.version(storage)
        if version == self.version:
            return extremes
        # A process that shares the state keeps it in step and writes down for which revision. Its
        # writes do not raise the version that this process sees of the key tensor.
        mine = self.version is not None and version[1:] == self.version[1:]
        if not mine or int(self.count[_REVISION]) != version[0]:
            values = self.signed(self.column.values(storage)).cpu()
            extremes.assign(values, self._ranks(extremes, len(values)))
        else:
            extremes.forget_sorted()
        self.version, self.count[_REVISION] = version, version[0]
        return extremes

    def _ranks(self, extremes: TopK, stored: int) -> Int64[Tensor, "n"]:
        """Return the rank of each stored row; those of others are older than all that came here."""
        rank = extremes.rank[:stored].clone()
        # The rank of a row that was never written is that of padding, and would lose to it.
        age = torch.arange(stored, device=rank.device) - _AGES_BEFORE
        return torch.where(rank == UNKNOWN_RANK, age if self.tie == "newest" else -age, rank)

    def lowest(self, storage: Storage) -> float:
        """Return the lowest key of a full storage, looked up once for each content."""
        if self._floor is None or self._floor[0] is not self.version:
            self._floor = (self.version, float(self._extremes.smallest(1)[0][0]))
        return self._floor[1]

    def wrote(
        self,
        storage: Storage,
        slot: Int64[Tensor, "m"],
        key: Float64[Tensor, "m"],
        rank: Int64[Tensor, "m"],
        n_replaced: int = 0,
    ) -> None:
        """Record rows that were just written to a storage, with which this was in step.

        The first ``n_replaced`` slots are those that :meth:`replacements` returned.
        """
        self._extremes.update(slot, key, rank, n_replaced)
        self.now_in_step(storage)

    def moved(self, storage: Storage, move: Moves, before: int) -> None:
        """Follow rows that were moved, of a storage with which this was in step."""
        extremes = self.extremes(storage)
        if move.source.shape[0]:
            extremes.update(move.hole, extremes.key[move.source], extremes.rank[move.source])
        if move.length < before:
            extremes.remove(move.tail(before))
        self.now_in_step(storage)

    def now_in_step(self, storage: Storage) -> None:
        """Record that the extremes hold what was just written to the storage."""
        self.version = self.column.version_after_write(storage)
        self._counters.numpy()[_REVISION] = self.version[0]

    def forget(self) -> None:
        """Have the keys read anew."""
        self.version = None

    # Comparing.

    def beats(self, key: Any, stored: Any) -> Any:
        """Tell whether a key takes the place of a stored one that is older."""
        return key >= stored if self.tie == "newest" else key > stored

    def rank(self, row: Int64[Tensor, "m"]) -> Int64[Tensor, "m"]:
        """Return what orders rows of the current batch among equal keys, the first to go lowest."""
        age = row + int(self._counters.numpy()[_OFFERED])
        return age if self.tie == "newest" else -age

    def worst_first(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Sort keys of a batch; of equal ones the one to keep comes last."""
        value, row = worst_first(key, self.tie == "newest")
        return torch.from_numpy(value), torch.from_numpy(row)

    def below(self, value: Tensor, floor: float) -> int:
        """Return how many of the sorted keys do not beat the lowest one stored."""
        return int(torch.searchsorted(value, floor, right=self.tie == "oldest"))

    def replacements(
        self, key: Shaped[Tensor, "n"], free: int
    ) -> tuple[Int64[Tensor, "c"], Float64[Tensor, "c"], Int64[Tensor, "m"]]:
        """Return which rows of a batch come in, and what they replace; see :class:`TopK`."""
        extremes: TopK = self._extremes
        return extremes.replacements(key, free, self.tie == "newest")

    def driven_out(
        self,
        storage: Storage,
        contest: Float64[Tensor, "m"],
        rank: Int64[Tensor, "m"] | None = None,
        given_up: Int64[Tensor, "g"] | None = None,
    ) -> Int64[Tensor, "k"]:
        """Return the slots of the worst rows that lose against keys, these from the best down.

        Keys are newer than all stored rows, unless there are ranks to decide among equal ones.
        Slots that were given up already are passed over.
        """
        extremes, m = self.extremes(storage), contest.shape[0]
        n = min(m if given_up is None else m + given_up.shape[0], len(storage))
        value, slot = map(torch.from_numpy, extremes.smallest(n))
        if given_up is not None:
            is_left = ~torch.isin(slot, given_up)
            value, slot = value[is_left][:m], slot[is_left][:m]
        contest = contest[: slot.shape[0]]
        wins = self.beats(contest, value)
        if rank is not None:
            is_later = rank[: slot.shape[0]] > extremes.rank[slot]
            wins = (contest > value) | ((contest == value) & is_later)
        return slot[: int(wins.sum())]

    # State.

    @property
    def count(self) -> Any:
        """The counters as NumPy numbers, far quicker to read and write one by one.

        Made anew each time: sharing a tensor between processes moves its memory.
        """
        return self._counters.numpy()

    def count_offered(self, n: int) -> None:
        """Count rows offered, which makes those to come newer."""
        self._counters.numpy()[_OFFERED] += n

    def count_written(self, n: int) -> None:
        """Count rows written."""
        self._counters.numpy()[_WRITTEN] += n

    def share(self) -> None:
        """Move everything into memory that forked processes share."""
        self._counters.share_memory_()
        if self._extremes is not None:
            self._extremes.share_memory()

    def counters(self) -> list[int]:
        """Return how many rows were offered, and how many written."""
        counters: list[int] = self._counters[:_REVISION].tolist()
        return counters

    def roll_back(self, counters: list[int]) -> None:
        """Return to counters, and have every process read the keys anew."""
        self.count[: len(counters)] = counters
        self.count[_REVISION] = -1
        self.forget()

    def empty(self, storage: Storage | None, empty_write_count: bool = True) -> None:
        """Start anew, for the storage was emptied."""
        self.count[_OFFERED] = 0
        if storage is not None:
            self.extremes(storage).rank.fill_(UNKNOWN_RANK)
        if empty_write_count:
            self.count[_WRITTEN] = 0

    def state(self, storage: Storage | None) -> dict[str, Any]:
        """Return the age of each row, and how many were offered and written."""
        if storage is not None:
            rank = self.extremes(storage).rank[: len(storage)].clone()
        else:
            rank = torch.empty(0, dtype=torch.int64) if self.restored is None else self.restored
        return {
            "rank": rank,
            "offered": int(self.count[_OFFERED]),
            "written": int(self.count[_WRITTEN]),
        }

    def restore(self, storage: Storage | None, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Keys are read from the storage when needed."""
        rank = state["rank"]
        require_numbers("rank", rank, torch.int64)
        for name in ("offered", "written"):
            require_count(name, state[name])
        if storage is None:
            self.restored = rank.clone()
        else:
            self.make_room(storage, len(rank))
            known = self.extremes(storage).rank
            known[: len(rank)] = rank
            known[len(rank) :] = UNKNOWN_RANK
        self.count[_OFFERED], self.count[_WRITTEN] = state["offered"], state["written"]
        self.forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process saw of the storage."""
        return {**self.__dict__, "version": None, "_floor": None}
