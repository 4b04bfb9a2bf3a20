"""Keeping the items of highest reward."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.column import KeyColumn, StorageVersion, open_shared, require_rows
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, ShapeError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics import Extremes
from gfn_rb.numerics.extremes import UNKNOWN_RANK
from gfn_rb.numerics.near.index import Pairs
from gfn_rb.shapes import Bool, Float, Int64
from gfn_rb.state_folder import StateInFolder
from gfn_rb.torchrl_compat import (
    attached_entities,
    bump_mutation_revision,
    set_length,
    slot_generations,
)
from gfn_rb.writers.features import ObjectColumns, Unique
from gfn_rb.writers.followed_index import FollowedIndex
from gfn_rb.writers.rows import RowLayout, check_number, no_slots, overwrite, scalar_key

Tie = Literal["newest", "oldest"]
OnDuplicate = Literal["refresh", "keep"]

_OFFERED, _WRITTEN, _REVISION = range(3)
_OPTIONS = ("tie", "unique", "on_duplicate")
_AGES_BEFORE = 2**62  # what rows of unknown age are older by than the first row offered


class RewardPrioritizedWriter(StateInFolder, Writer):
    """A writer that keeps the ``capacity`` items of highest key ever offered.

    Where TorchRL's ``TensorDictMaxValueWriter`` walks a heap row by row in Python, a batch is
    merged whole: its rows from the best down meet the stored ones from the worst up, and replace
    them pair by pair as long as they win. The worst stored rows come from
    :class:`~gfn_rb.numerics.Extremes`, whose cost hardly depends on the capacity.

    The key column of the storage is the truth: rows relabelled behind the writer's back count
    with their new keys from the next call on. On CUDA, ``extend`` waits for the device: how many
    rows win decides the shape of what is written (and TorchRL's storage looks at the slots).

    Args:
        key: the key to rank items by, one float per item.
        tie: among equal keys, whether the "newest" or the "oldest" items are kept.
        unique: what tells objects apart, of which there is then one row each: "state" for what
            trajectories and terminating states stand for, the terminating state and the
            condition; another key; a list of keys; or a callable from items, batch size [n], to
            int64 fingerprints, [n] or [n, d]. Equal hashes are confirmed on these columns. None
            keeps equal rows side by side.
        on_duplicate: whether an item whose object is stored shall "refresh" that row, its key and
            its age, or be rejected, to "keep" what is stored. In a batch the last row of an object
            counts. Of an object that others stored twice, the first row is refreshed.

    Raises:
        ArgumentError: an option breaks its rule.

    Examples:
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(2), writer=RewardPrioritizedWriter(), batch_size=2
        ... )
        >>> rb.extend(TensorDict({"log_reward": torch.tensor([1.0, 3.0, 2.0])}, [3]))
        tensor([-1,  0,  1])
    """

    def __init__(
        self,
        key: NestedKey = LOG_REWARD,
        tie: Tie = "newest",
        unique: Unique = None,
        on_duplicate: OnDuplicate = "refresh",
    ) -> None:
        super().__init__()
        if tie not in ("newest", "oldest"):
            raise ArgumentError(f"tie must be 'newest' or 'oldest', got {tie!r}")
        if on_duplicate not in ("refresh", "keep"):
            raise ArgumentError(f"on_duplicate must be 'refresh' or 'keep', got {on_duplicate!r}")
        self.key = key
        self.tie = tie
        self.unique = unique
        self.on_duplicate = on_duplicate
        self._compared: FollowedIndex | None = None  # rows by what tells whether they are the same
        if unique is not None:
            self.identify(unique)
        self._column = KeyColumn(key)
        self._layout = RowLayout()
        self._extremes: Extremes | None = None
        # Rows offered, rows written, storage revision the extremes are in step with. On the CPU,
        # and a tensor, so that processes sharing the buffer share it.
        self._counters = torch.zeros(3, dtype=torch.int64)
        # The content that the extremes are in step with, and its lowest key, as seen from here.
        self._version: StorageVersion | None = None
        self._floor: tuple[StorageVersion | None, float] | None = None

    # What TorchRL calls.

    def register_storage(self, storage: Storage) -> None:
        """Attach the storage to write to.

        Args:
            storage: a one-dimensional tensor storage: one row per item.

        Raises:
            ShapeError: any other storage.
        """
        require_rows(storage)
        super().register_storage(storage)

    def add(self, data: TensorDictBase) -> int:
        """Offer one item.

        Args:
            data: batch size [].

        Returns:
            Its slot, or -1 if it was not kept.

        Raises:
            KeyMismatchError, ShapeError, NaNError: see :meth:`extend`.
        """
        return int(self.extend(data.unsqueeze(0))[0])

    def extend(self, data: TensorDictBase) -> Int64[Tensor, "n"]:
        """Offer a batch; earlier rows count as older.

        Args:
            data: batch size [n], with the key, shape [n] or [n, 1].

        Returns:
            One slot per row, -1 for a row that was not kept.

        Raises:
            KeyMismatchError: the key is missing, or keys differ from the stored ones.
            ShapeError: wrong batch size, or an entry unlike the stored one.
            NaNError: a key is NaN.
            ArgumentError: an item stands for no object, where they have to be ``unique``.
        """
        key = self._keys_of(data)
        highest = check_number(key, self.key)
        if not key.shape[0]:
            return torch.empty(0, dtype=torch.int64)
        data = self._layout.check(data, self._storage)
        slot = self._offer(data, key, highest)
        self._count[_OFFERED] += key.shape[0]
        return slot

    def identify(self, unique: Unique) -> None:
        """Tell objects apart by something else from now on, such as the rows' compact form.

        Args:
            unique: see the class; not None.
        """
        self._compared = FollowedIndex(ObjectColumns(unique))

    # What users call.

    @property
    def threshold(self) -> float:
        """The lowest key kept, ``-inf`` until the storage is full.

        Read from the storage, so it may be asked for while other processes write.
        """
        if len(self._storage) < self._storage.max_size:
            return -math.inf
        return float(self._column.values(self._storage).min())

    def update(self, index: Int64[Tensor, "m"], key: Float[Tensor, "m"]) -> None:
        """Relabel stored items, in the storage and here. Their age is unchanged.

        Args:
            index: slots in [0, len(storage)).
            key: their new keys.

        Raises:
            ArgumentError: a slot that holds no item.
            ShapeError: index and key differ in length.
            NaNError: a key is NaN.
        """
        index, key = index.reshape(-1), key.detach().reshape(-1)
        self._check_update(index, key)
        extremes, compared = self._in_step(), self._compared
        before = None if compared is None else compared.content(self._storage)
        values = self._column.values(self._storage)
        values[index] = key.to(values)
        bump_mutation_revision(self._storage)
        extremes.update(index, values[index].to(torch.float64), extremes.rank[index])
        self._now_in_step(self._column.version(self._storage))
        if compared is not None:
            compared.relabelled(self._storage, before)
        self._announce(index)

    # Keeping the extremes in step with the storage.

    def _in_step(self) -> Extremes:
        """Return the extremes, read anew if the storage changed behind the writer's back."""
        extremes, storage = self._allocated(), self._storage
        open_shared(storage)
        if not storage.initialized:
            return extremes
        version = self._column.version(storage)
        if version == self._version:
            return extremes
        # A process that shares the state keeps it in step and writes down for which revision. Its
        # writes do not raise the version that this process sees of the key tensor.
        mine = self._version is not None and version[1:] == self._version[1:]
        if not mine or int(self._count[_REVISION]) != version.revision:
            values = self._column.values(storage)
            extremes.assign(values, self._ranks(len(values)))
        else:
            extremes.doubt_ranks()
        self._now_in_step(version)
        return extremes

    def _ranks(self, stored: int) -> Int64[Tensor, "n"]:
        """Return the rank of each stored row; those of others are older than all that came here."""
        rank = self._allocated().rank[:stored].clone()
        # The rank of a row that was never written is that of padding, and would lose to it.
        age = torch.arange(stored, device=rank.device) - _AGES_BEFORE
        return torch.where(rank == UNKNOWN_RANK, age if self.tie == "newest" else -age, rank)

    def _lowest(self) -> float:
        """Return the lowest key of a full storage, looked up once for each content."""
        extremes = self._in_step()
        if self._floor is None or self._floor[0] is not self._version:
            self._floor = (self._version, float(extremes.minimum))
        return self._floor[1]

    def _allocated(self) -> Extremes:
        if self._extremes is None:
            device = None if self._storage.device == "auto" else self._storage.device
            self._extremes = Extremes(self._storage.max_size, device)
        return self._extremes

    def _now_in_step(self, version: StorageVersion) -> None:
        self._count[_REVISION] = version.revision
        self._version = version

    # Choosing and writing.

    def _keys_of(self, data: TensorDictBase) -> Tensor:
        return scalar_key(data, self.key)

    def _offer(self, data: TensorDictBase, key: Tensor, highest: float) -> Tensor:
        """Write what is to be kept of a sound batch, and return one slot per row."""
        if self._compared is not None:
            return self._offer_objects(data, key, highest, self._compared)
        return self._offer_any(data, key, highest)

    def _offer_any(self, data: TensorDictBase, key: Tensor, highest: float) -> Tensor:
        free = self._storage.max_size - len(self._storage)
        if key.shape[0] <= free:
            return self._append(data)
        if free == 0 and not self._beats(highest, floor := self._lowest()):
            return no_slots(key)
        return self._merge(data, key, free, floor if free == 0 else -math.inf)

    def _append(self, data: TensorDictBase) -> Tensor:
        """Write the whole batch into free slots. Nothing is compared before the storage is full."""
        stored, extremes = len(self._storage), self._allocated()
        slot = torch.arange(stored, stored + len(data), device=extremes.key.device)
        extremes.rank[stored : stored + len(data)] = self._rank(slot - stored)
        self._write(slot, data)
        return slot

    def _merge(self, data: TensorDictBase, key: Tensor, free: int, floor: float) -> Tensor:
        """Write the rows that win a slot: a free one, or that of one of the worst items."""
        extremes = self._in_step()
        key = key.to(extremes.device, torch.float64)
        order, contest = self._contestants(key, free, floor)
        target = self._driven_out(contest.flip(0))
        chosen = order[order.shape[0] - free - target.shape[0] :]
        if free:
            fresh = torch.arange(len(self._storage), self._storage.max_size, device=key.device)
            target = torch.cat([target, fresh])
        slot = no_slots(key)
        slot[chosen] = target
        self._write(target, data, chosen, self._storage.max_size)
        extremes.update(target, key[chosen], self._rank(chosen))
        self._now_in_step(self._column.version(self._storage))
        return slot

    def _offer_objects(
        self, data: TensorDictBase, key: Tensor, highest: float, compared: FollowedIndex
    ) -> Tensor:
        """Write what is to be kept, one row per object."""
        rows = compared.features(data).to(self._allocated().device)
        index = compared.follow(self._storage, rows)
        prepared = index.prepare(rows)
        stored, twins = index.near(prepared), index.near_each_other(prepared)
        if index.length < index.capacity or stored[0].shape[0] or twins[0].shape[0]:
            same = _slot_of_equal(stored, key.shape[0])
            slot = self._merge_objects(data, key.to(rows.device), same, _is_last(twins, same))
        else:
            slot = self._offer_any(data, key, highest)
        chosen = (slot >= 0).nonzero()[:, 0]
        if chosen.shape[0]:
            index.write(slot[chosen], prepared.select(chosen), len(self._storage))
            compared.wrote(self._storage)
        return slot

    def _merge_objects(
        self, data: TensorDictBase, key: Tensor, same: Tensor, is_last: Tensor
    ) -> Tensor:
        """Write rows over those of the same objects; let the other ones win slots as usual.

        Args:
            data: the batch.
            key: of each row.
            same: the slot that holds the row's object, -1 for none.
            is_last: whether no later row of the batch is of the row's object.
        """
        extremes, stored = self._in_step(), len(self._storage)
        free, key = self._storage.max_size - stored, key.to(torch.float64)
        slot = torch.where(is_last, same, -1) if self.on_duplicate == "refresh" else no_slots(key)
        again, is_new = (slot >= 0).nonzero()[:, 0], is_last & (same < 0)
        if free == 0:
            # Where a row that is refreshed sinks to the bottom, less is needed to beat it.
            lowest = key[again].min() if again.shape[0] else math.inf
            is_new &= self._beats(key, self._lowest()) | (key >= lowest)
        if again.shape[0]:
            self._version = None  # should writing fail, the extremes are read anew
            extremes.update(slot[again], key[again], self._rank(again))
        new = is_new.nonzero()[:, 0]
        out = new[:0]
        if new.shape[0] > free:
            new = new[self._worst_first(key[new])[1]][-self._storage.max_size :]
            contest = new[: new.shape[0] - free].flip(0)
            # Stored rows are older than the batch, all but the refreshed: there ages decide ties.
            tied = again.shape[0] and bool((key[contest, None] == key[again]).any())
            out = self._driven_out(key[contest], self._rank(contest) if tied else None)
            new = new[contest.shape[0] - out.shape[0] :]
            if again.shape[0]:
                slot[torch.isin(slot, out)] = -1  # refreshed, and then driven out
        length = stored + new.shape[0] - out.shape[0]
        slot[new] = torch.cat([out, torch.arange(stored, length, device=out.device)])
        chosen = (slot >= 0).nonzero()[:, 0]
        if chosen.shape[0]:
            self._write(slot[chosen], data, chosen, length)
            extremes.update(slot[chosen], key[chosen], self._rank(chosen))
            self._now_in_step(self._column.version(self._storage))
        return slot

    def _driven_out(self, contest: Tensor, rank: Tensor | None = None) -> Tensor:
        """Return the slots of the worst items, each of which loses against one of the keys.

        Args:
            contest: keys from the best down; the first meets the worst item, and so on.
            rank: what orders them among equal keys; None if all of them are newer than all stored.
        """
        extremes = self._allocated()
        worst = extremes.smallest(contest.shape[0])
        if rank is None:
            return worst.rows(int(self._beats(contest, worst.key).sum()))
        slot = worst.rows(contest.shape[0])
        slot = slot[extremes.rank[slot].argsort()]
        value, place = extremes.key[slot].sort(stable=True)
        slot = slot[place]
        wins = (contest > value) | ((contest == value) & (rank > extremes.rank[slot]))
        return slot[: int(wins.sum())]

    def _contestants(self, key: Tensor, free: int, floor: float) -> tuple[Tensor, Tensor]:
        """Return the rows that may enter, worst first, and the keys of those without a free slot.

        Among equal keys the one to keep comes last. There are more rows than free slots.
        """
        value, order = self._worst_first(key)
        lost = max(key.shape[0] - self._storage.max_size, 0)
        if free == 0:
            lost = max(lost, self._below(value, floor))
        return order[lost:], value[lost : value.shape[0] - free]

    def _worst_first(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Sort keys; return them and their positions. Of equal ones the one to keep comes last."""
        if self.tie == "newest":
            return key.sort(stable=True)
        value, order = key.flip(0).sort(stable=True)
        return value, key.shape[0] - 1 - order

    def _below(self, value: Tensor, floor: float) -> int:
        """Return how many of the sorted keys do not beat the lowest one stored."""
        return int(torch.searchsorted(value, floor, right=self.tie == "oldest"))

    def _beats(self, key: Any, stored: Any) -> Any:
        return key >= stored if self.tie == "newest" else key > stored

    def _rank(self, row: Tensor) -> Tensor:
        """Return what orders rows of the current batch among equal keys, the first to go lowest."""
        age = row + int(self._count[_OFFERED])
        return age if self.tie == "newest" else -age

    def _write(
        self,
        target: Tensor,
        data: TensorDictBase,
        chosen: Tensor | None = None,
        length: int | None = None,
    ) -> None:
        """Write a batch, or the chosen rows of it, into slots.

        Args:
            target: slots, each once.
            data: the batch.
            chosen: positions in it; None for all, which go into free slots.
            length: of the storage afterwards, where some are chosen.
        """
        before = len(self._storage)
        try:
            if chosen is None or not self._storage.initialized:
                self._storage.set(target, data if chosen is None else data[chosen])
            else:
                overwrite(self._storage, target, data, chosen)
                if length is not None and length > before:
                    set_length(self._storage, length)
        except BaseException:
            set_length(self._storage, before)  # set() counts rows before it writes them
            raise
        self._announce(target, target.shape[0])

    def _announce(self, index: Tensor, n_written: int = 0) -> None:
        """Count rows written, and tell samplers which slots have changed."""
        self._count[_WRITTEN] += n_written
        stamps = slot_generations(self._storage) if n_written else None
        if stamps is not None:
            stamps[index] += 1  # the slots are of other rows now; relabelled ones are not
        for entity in attached_entities(self._storage):
            entity.mark_update(index)

    def _check_update(self, index: Tensor, key: Tensor) -> None:
        if index.shape != key.shape:
            raise ShapeError(f"index and key must have one length, got {len(index)} and {len(key)}")
        check_number(key, self.key)
        stored = len(self._storage)
        if index.numel() and not bool(((index >= 0) & (index < stored)).all()):
            raise ArgumentError(
                f"index must name stored items, 0 to {stored - 1}, got {int(index.min())} to "
                f"{int(index.max())}"
            )

    # State.

    @property
    def _count(self) -> Any:
        """The counters as NumPy numbers, far quicker to read and write one by one.

        Made anew each time: sharing a tensor between processes moves its memory.
        """
        return self._counters.numpy()

    @property
    def _write_count(self) -> int:
        return int(self._count[_WRITTEN])

    def _empty(self, empty_write_count: bool = True) -> None:
        self._count[_OFFERED] = 0
        if self._storage is not None:
            self._allocated().rank.fill_(UNKNOWN_RANK)
            stamps = slot_generations(self._storage)
            if stamps is not None:
                stamps[stamps >= 0] += 1
        if empty_write_count:
            self._count[_WRITTEN] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what the storage does not hold: the age of each item, and counters."""
        return {
            **self._options(),
            "rank": self._allocated().rank[: len(self._storage)].clone(),
            "offered": int(self._count[_OFFERED]),
            "written": int(self._count[_WRITTEN]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Keys are read from the storage when needed.

        Args:
            state_dict: from a writer of the same ``tie``, ``unique`` and ``on_duplicate``.

        Raises:
            CheckpointMismatchError: it comes from another, or from a larger storage.
        """
        expected, rank = self._options(), state_dict.get("rank", torch.empty(0))
        came = {name: state_dict[name] for name in _OPTIONS if name in state_dict}
        if came != expected or rank.shape[0] > self._storage.max_size:
            raise CheckpointMismatchError(
                f"writer state is of {_worded(came)} with {rank.shape[0]} items, expected "
                f"{_worded(expected)} and at most {self._storage.max_size}"
            )
        known = self._allocated().rank
        known[: len(rank)] = rank
        known[len(rank) :] = UNKNOWN_RANK
        self._count[_OFFERED] = state_dict["offered"]
        self._count[_WRITTEN] = state_dict["written"]
        self._version = None
        if self._compared is not None:
            self._compared.forget()

    def _options(self) -> dict[str, str]:
        """Return what a state is recognised by. A callable has no name that means anything."""
        if self.unique is None:
            return {"tie": self.tie}
        unique = "a callable" if callable(self.unique) else str(self.unique)
        return dict(zip(_OPTIONS, (self.tie, unique, self.on_duplicate), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        """Make sure that a process this is sent to shares the state, rather than starts its own."""
        if self._storage is not None:
            self._allocated()
        return {**super().__getstate__(), "_version": None, "_floor": None}

    def __repr__(self) -> str:
        unique = f", unique={self.unique!r}, on_duplicate={self.on_duplicate!r}"
        return (
            f"{type(self).__name__}(key={self.key!r}, tie={self.tie!r}"
            f"{unique if self._compared else ''})"
        )


def _worded(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "another kind"


def _slot_of_equal(pairs: Pairs, n: int) -> Int64[Tensor, "n"]:
    """Return the first slot that each of n rows is paired with, -1 for none."""
    row, slot = pairs
    first = torch.full((n,), UNKNOWN_RANK, dtype=torch.int64, device=slot.device)
    first.scatter_reduce_(0, row, slot, "amin")
    return first.masked_fill_(first == UNKNOWN_RANK, -1)


def _is_last(twins: Pairs, like: Tensor) -> Bool[Tensor, "n"]:
    """Tell of each row whether none after it is equal, given all pairs with the first equal one."""
    first, other = twins
    is_last = torch.ones_like(like, dtype=torch.bool)
    if first.shape[0]:
        last = torch.zeros_like(like).scatter_reduce_(0, first, other, "amax")
        is_last[first] = False
        is_last[other] = False
        is_last[last[first]] = True
    return is_last
