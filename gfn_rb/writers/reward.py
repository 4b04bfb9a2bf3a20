"""Keeping the items of highest reward."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, unravel_key
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import name_of, require_choice, require_flag, require_key, require_kind
from gfn_rb.column import KeyColumn
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, ShapeError
from gfn_rb.kernels.objects import Hashed
from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.flat import on_host
from gfn_rb.numerics.near.index import EqualRows
from gfn_rb.shapes import Bool, Float64, Int64, Rows, Shaped
from gfn_rb.sharing import (
    one_thread,
    one_write,
    record_slots,
    recording,
    require_access,
    share_writes,
    write_whole,
)
from gfn_rb.state_folder import StateInFolder, require_count, require_numbers
from gfn_rb.storages import require_rows
from gfn_rb.writers.eviction_order import Evict, EvictionOrder, Tie, moves_of
from gfn_rb.writers.features import Features, ObjectColumns, SyncedIndex, Unique, require_finite
from gfn_rb.writers.rows import (
    Copy,
    RowLayout,
    carry_out,
    check_number,
    check_slots,
    check_stored,
    copies_from,
    copies_to,
    finish_write,
    one_batch,
    scalar_key,
)

if TYPE_CHECKING:
    from gfn_rb.writers.group_limit import GroupLimit

OnDuplicate = Literal["refresh", "keep"]

# Why a row is rejected: its object, a row near it or its group's best rows are stored; or its key.
_REASONS = ("duplicate", "near", "group_full", "worst")
_GENERATION = "generation"  # of the state: how often each slot was written to

_NONE = np.zeros(0, np.int64)  # slots

Written = tuple[np.ndarray, np.ndarray]  # int64: rows of a batch that were written, their slots


class Found(NamedTuple):
    """Offered rows as an index finds them."""

    synced: SyncedIndex[Any]
    prepared: Any
    at: Int64[np.ndarray, "m"]  # the place of each row there


class RewardPrioritizedWriter(StateInFolder, Writer):
    """A writer that keeps the ``capacity`` items of highest key ever offered.

    A batch is merged as a whole. Its best rows replace the worst stored rows, pair by pair, as long
    as they are better. The cost hardly depends on the capacity. TorchRL's
    ``TensorDictMaxValueWriter`` instead loops over rows in Python.

    With ``group``, first each group keeps its ``per_group`` best rows, of those stored and those
    offered, and then the storage keeps the rows that it has room for. Rows that other code wrote
    to a group beyond ``per_group`` stay until better ones replace them.

    The writer reads keys from the storage. If other code changes a key, the next call uses the new
    one. Keys on a device are compared on the host, so that a batch waits for the device once.

    Args:
        key: entry to rank items by, one number per item. Keys are compared as float64, so integers
            beyond 2^53 are refused.
        tie: which items of equal key are kept, the "newest" or the "oldest".
        unique: what identifies an object, of which one row is kept. "state" is the terminating
            state and condition of trajectories and terminating states. Also allowed: another key, a
            list of keys, or a callable from items [n] to int64 fingerprints [n] or [n, d]. Equality
            is exact; tensors of different lengths, strings and bytes are compared by a BLAKE2b hash
            of 128 bits. None keeps equal rows too.
        on_duplicate: "refresh" updates the stored row of an object, with its key and age, and
            "keep" rejects the new item. In a batch the last row of an object counts. If other code
            stored an object twice, the first row is refreshed.
        group: what rows are grouped by, as one of the kinds that ``unique`` takes. None: no groups.
        per_group: number of rows to keep of each group, at least 1; required with ``group``.
        evict: which rows leave when the storage is full: the "worst" of all, or first those of the
            "oldest_group", which is the group whose newest row is the oldest.
        largest: whether items of the largest keys are the best, or those of the smallest.
        track_generations: whether to count the writes of each slot, which
            ``rb.update_if_present`` needs.
        compilable: no effect; accepted because TorchRL passes it to its own writers.

    Attributes:
        rejected: numbers of rows that this process offered in vain, by reason: "duplicate" (its
            object is stored, or comes later in the batch), "near" (a better row is near),
            "group_full" (its group is full of better rows) and "worst" (the storage is).

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
        *,
        group: Unique = None,
        per_group: int | None = None,
        evict: Evict = "worst",
        largest: bool = True,
        track_generations: bool = False,
        compilable: bool | None = None,
    ) -> None:
        super().__init__()
        require_flag("track_generations", track_generations)
        self.tracks_generations = track_generations
        self._restored: dict[str, Any] | None = None  # a state, until there is a storage
        require_key("key", key)
        require_choice("tie", tie, ("newest", "oldest"))
        require_choice("on_duplicate", on_duplicate, ("refresh", "keep"))
        require_flag("largest", largest)
        self.key = key
        self.unique = unique
        self.on_duplicate = on_duplicate
        self._order = EvictionOrder(KeyColumn(key), tie, largest)
        self._index: SyncedIndex[Any] | None = None  # rows by what tells whether they are the same
        self.group, self.per_group, self.evict = group, per_group, evict
        self._limit: GroupLimit | None = None
        require_choice("evict", evict, ("worst", "oldest_group"))
        if (group is None) != (per_group is None):
            raise ArgumentError(
                f"group and per_group must be given together, got {group!r:.80} and {per_group!r}"
            )
        if evict != "worst" and group is None:
            raise ArgumentError(f"evict={evict!r} needs a group, got group=None")
        if unique is not None:
            self.identify(unique)
        if group is not None:
            self.group_by(group)
        self._layout = RowLayout()
        self.rejected = dict.fromkeys(_REASONS, 0)
        self._rejected_now = dict.fromkeys(_REASONS, 0)  # of a batch that is being offered
        self._stored = 0  # rows in use when a batch was offered

    # What TorchRL calls.

    def register_storage(self, storage: Storage) -> None:
        """Attach the storage to write to.

        Args:
            storage: one-dimensional ``TensorStorage``, one row per item.

        Raises:
            ShapeError: any other storage.
            CheckpointMismatchError: a state was restored that holds more items.
        """
        require_rows(storage)
        if self._restored is not None:
            self._check_size(len(self._restored["rank"]), storage)
        super().register_storage(storage)
        if self.tracks_generations:
            compat.track_slot_generations(storage)
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.load_state_dict(state)
        for index in self._indexes:
            index.features.register_storage(storage)
        if share_writes(storage, self):
            self._order.share()

    def add(self, data: Rows) -> int:
        """Offer one item.

        Args:
            data: batch size [].

        Returns:
            Its slot, or -1 if the item was rejected.

        Raises:
            KeyMismatchError, ShapeError, NaNError: as :meth:`extend` raises them.
        """
        return int(self.extend(data.unsqueeze(0) if hasattr(data, "batch_size") else data)[0])

    @compat.outside_graph
    def extend(self, data: Rows) -> Int64[Tensor, "n"]:
        """Offer a batch; earlier rows count as older.

        Args:
            data: batch size [n], with the key, shape [n] or [n, 1].

        Returns:
            One slot per row, -1 for a rejected row.

        Raises:
            KeyMismatchError: the key is missing, or keys differ from the stored ones.
            ShapeError: the batch size is wrong, or an entry has another shape than the stored one.
            NaNError: a key is NaN.
            ArgumentError: an item identifies no object although ``unique`` is set, or a key is an
                integer beyond 2^53.
        """
        if self._storage is None:
            raise ArgumentError("writer must be attached to a buffer before rows are written")
        if isinstance(data, (list, LazyStackedTensorDict)):
            data = one_batch(data, self._storage)
        key = self._order.signed(self._keys_of(data))
        rows: list[Tensor] = []
        if not key.is_cpu:
            key, *rows = on_host(key, *(index.features(data) for index in self._indexes))
            rows = [require_finite(each) for each in rows]
        n, storage, device = key.shape[0], self._storage, data.device
        if not n:
            return torch.empty(0, dtype=torch.int64)
        data = self._layout.check(data, storage)
        with one_write(storage, self):
            if not storage.initialized:
                from gfn_rb.memmaps import lay_out  # which only the first batch needs

                lay_out(storage, data[0])
            offered, written = self._order.counters()
            self._rejected_now = now = dict.fromkeys(_REASONS, 0)
            self._stored = compat.length_of(storage)
            row, target = self._offer(data, key, rows)
            self._order.count(offered + n, written + len(row))
        if len(row) < n:
            now["worst"] = n - len(row) - sum(now.values())
            for reason in _REASONS:
                self.rejected[reason] += now[reason]
        slot = torch.full((n,), -1)
        if len(row):
            slot.numpy()[row] = target
        return slot if device is None else slot.to(device, non_blocking=device.type != "cpu")

    def identify(self, unique: Unique) -> None:
        """Identify objects by other entries from now on, such as the rows' compact form."""
        self._compare_by(SyncedIndex(ObjectColumns(unique), EqualRows))

    def group_by(self, group: Unique) -> None:
        """Group rows by other entries from now on, such as those of the rows' compact form."""
        from gfn_rb.writers.group_limit import GroupLimit  # few writers need it

        assert self.per_group is not None
        self._limit = GroupLimit(group, self.per_group, self.evict)
        self._watch()

    def _compare_by(self, index: SyncedIndex[Any]) -> None:
        """Compare rows by an index."""
        self._index = index
        self._watch()

    @property
    def _indexes(self) -> list[SyncedIndex[Any]]:
        indexes = [] if self._index is None else [self._index]
        return indexes if self._limit is None else [*indexes, self._limit.synced]

    def _watch(self) -> None:
        """Watch what the indexes read together with the key."""
        features = [index.features for index in self._indexes]
        if self._storage is not None:
            for each in features:
                each.register_storage(self._storage)
        self._order.column.watch_also(partial(_read_by_any, features))
        self._order.forget()

    # What users call.

    def slots_of(self, data: Rows) -> Int64[Tensor, "n"]:
        """Return the current slots of objects, for late relabels and priorities.

        ``rb.update_priority(rb.writer.slots_of(batch), loss)`` assigns a loss to each object at its
        current slot, and ignores objects that were removed.

        Args:
            data: batch size [n], with the entries that identify objects.

        Returns:
            The slot of each row's object, -1 if it is not stored.

        Raises:
            ArgumentError: the writer has ``unique=None``.
        """
        if self._index is None or self.unique is None:
            raise ArgumentError("unique must be given to find objects by, got unique=None")
        storage = self._storage
        self._order.sync(storage)
        rows = self._index.read(data)
        index = self._index.sync(storage, rows, self._order.version)
        slot = torch.from_numpy(index.first_slot(index.prepare(rows)))
        compat.attach_generations(slot, storage)
        return slot

    def generations_of(self, index: int | Tensor) -> Int64[Tensor, "*m"]:
        """Return how often slots were written to since the first time; -1 where that is unknown."""
        index = torch.as_tensor(index, dtype=torch.int64)
        stamps = compat.slot_generations(self._storage) if self.tracks_generations else None
        if stamps is None or not stamps.shape[0]:
            return torch.full_like(index, -1)
        at = index.to(stamps.device)
        is_slot = (at >= 0) & (at < stamps.shape[0])
        return stamps[at.where(is_slot, 0)].where(is_slot, -1).to(index.device)

    @property
    def threshold(self) -> float:
        """The worst key kept; -inf (inf for ``largest=False``) until the storage is full.

        It is read from the storage, so other processes may write at the same time.
        """
        largest = self._order.largest
        if self._storage is None or len(self._storage) < self._storage.max_size:
            return -math.inf if largest else math.inf
        values = self._order.column.values(self._storage)
        return float(values.min() if largest else values.max())

    def update(self, index: Int64[Tensor, "m"], key: Shaped[Tensor, "m"]) -> None:
        """Change the keys of stored items. Their age is unchanged.

        Args:
            index: slots in [0, len(storage)).
            key: new keys, one per slot.

        Raises:
            ArgumentError: a slot holds no item.
            ShapeError: ``index`` and ``key`` differ in length.
            NaNError: a key is NaN.
        """
        index, key = index.reshape(-1).cpu(), key.detach().reshape(-1).cpu()
        if index.shape != key.shape:
            raise ShapeError(f"index and key must have one length, got {len(index)} and {len(key)}")
        check_number(key, self.key)
        storage = self._storage
        with one_thread(storage):  # or other threads could remove the rows meanwhile
            check_stored(index, len(storage))
            order, column = self._order.sync(storage), self._order.column
            index = index.unique() if len(index) > 1 else index
            move, rank = moves_of(len(index), index.numpy(), len(storage)), order.tie[index.numpy()]
            known = self._known()
            with recording(storage), one_write(storage, self):
                record_slots(storage, index)
                column.write(storage, index, key)
                self._announce(index)
                values = self._order.signed(column.values(storage)[index]).cpu().to(torch.float64)
                self._order.follow(storage, move, values.numpy(), rank)
            for compared in known:
                reads_key = compared.features.reads(unravel_key(self.key))
                compared.version = None if reads_key else self._order.version

    def remove(self, index: Int64[Tensor, "m"]) -> None:
        """Remove items from the storage; items from its end take their slots.

        Args:
            index: slots in [0, len(storage)).

        Raises:
            ArgumentError: a slot holds no item.
        """
        require_kind("index", index, Tensor)
        index = index.reshape(-1).cpu().unique()
        storage = self._storage
        with one_thread(storage):
            check_stored(index, len(storage))
            if not index.shape[0]:
                return
            self._order.sync(storage)
            known, move = self._known(), moves_of(0, index.numpy(), len(storage))
            overwritten = torch.from_numpy(move.slots)
            compat.drop_prefetched(storage)
            with recording(storage), one_write(storage, self):
                record_slots(storage, overwritten)
                move.close_holes(storage)
                compat.raise_slot_generations(storage, overwritten)
                self._announce(torch.from_numpy(move.hole))
                self._order.follow(storage, move, np.zeros(0), move.target)
            for compared in known:
                compared.follow(move, None, self._order.version)

    def _known(self) -> list[SyncedIndex[Any]]:
        """Return the indexes that match the storage, as the order does."""
        return [each for each in self._indexes if each.version == self._order.version]

    # Choosing.

    def _keys_of(self, data: Rows) -> Tensor:
        return scalar_key(data, self.key)

    def _offer(self, data: Rows, key: Tensor, columns: list[Tensor]) -> Written:
        """Write what is to be kept of a batch; all decisions are made on the host.

        ``columns`` is what each index compares, if the batch was on a device.
        """
        storage, order, limit = self._storage, self._order, self._limit
        by = None if self.unique is None else self._index
        n_free = storage.max_size - self._stored
        if by is None and limit is None and key.shape[0] <= n_free:
            order.check(key)
            return self._append(data)
        value = order.numbers(key)
        order.sync(storage)
        is_offered = slot = objects = None
        if by is not None:
            objects = self._prepared(by, data, columns)
            is_offered, slot = self._objects(by.index, objects)
        # Rows of stored objects give up their slots, which leaves room for worse rows, too.
        if slot is None and limit is None:
            row = order.contenders(value, not n_free)
        else:
            row = order.sort(value)
        if is_offered is not None:
            row = row[is_offered[row]]
        slot = None if slot is None else slot[row]
        known = [] if by is None else [Found(by, objects, row)]
        if limit is not None:
            known.append(Found(limit.synced, self._prepared(limit.synced, data, columns), row))
        return self._compete(data, value, row, slot, _NONE, known)

    def _prepared(self, synced: SyncedIndex[Any], data: Rows, columns: list[Tensor]) -> Any:
        """Bring an index up to date, and return what it finds the rows of a batch by."""
        rows = columns[self._indexes.index(synced)] if columns else synced.read(data)
        return synced.sync(self._storage, rows, self._order.version).prepare(rows)

    def _objects(
        self, index: EqualRows, prepared: Hashed
    ) -> tuple[Bool[np.ndarray, "n"] | None, Int64[np.ndarray, "n"] | None]:
        """Return which rows are offered, one of each object, and the slot each takes over.

        None stands for all rows, and for no slots.
        """
        n, slot = len(prepared.code), index.first_slot(prepared)
        is_offered = index.last_twins(prepared) == np.arange(n)
        is_new = slot < 0
        if self.on_duplicate == "keep":
            is_offered &= is_new
        n_offered = np.count_nonzero(is_offered)
        self._rejected_now["duplicate"] = n - n_offered
        takes_over = self.on_duplicate == "refresh" and not is_new.all()
        return None if n_offered == n else is_offered, slot if takes_over else None

    def _compete(
        self,
        data: Rows,
        value: Float64[np.ndarray, "n"],
        row: Int64[np.ndarray, "m"],
        slot: Int64[np.ndarray, "m"] | None,
        spare: Int64[np.ndarray, "s"],
        known: list[Found],
    ) -> Written:
        """Write rows of a batch as far as they win a slot.

        Args:
            data: the batch.
            value: its keys.
            row: rows that are offered, in ascending order of their keys; of equal ones the one to
                keep comes last.
            slot: slots that the rows take over, -1 for none; None where no row does.
            spare: slots of other rows that leave in any case.
            known: the indexes, and where the rows are in what each finds them by.
        """
        order, limit, place = self._order, self._limit, np.arange(len(row))
        if limit is not None:
            group = known[-1].prepared.columns[0][known[-1].at]
            slot = np.full(len(row), -1) if slot is None else slot
            place, slot, spare = limit.choose(order, group, value[row], slot, spare)
            self._rejected_now["group_full"] = len(row) - len(place)
        given_up = spare if slot is None else np.concatenate([slot[slot >= 0], spare])
        n_free = self._storage.max_size - self._stored + len(given_up)
        if len(place) > n_free:
            some = row[place]
            lost: Any
            if limit is None or limit.evict == "worst":
                n_lost, out = order.compete(value[some], n_free, given_up)
                lost, stays = slice(n_lost), slice(n_lost, None)
            else:
                lost, out = limit.remove_oldest(
                    order, group[place], value[some], order.rank(some), given_up, len(some) - n_free
                )
                stays = ~lost
            place, spare = place[stays], np.concatenate([spare, out]) if len(spare) else out
            if slot is not None:
                spare = np.concatenate([spare, slot[lost][slot[lost] >= 0]])
                slot = slot[stays]
        if slot is not None:  # those that take over a slot come first
            takes_over = slot >= 0
            spare = np.concatenate([slot[takes_over], spare])
            others = place[~takes_over]
            place = np.concatenate([place[takes_over], others[row[others].argsort()]])
        elif len(place) > len(spare):  # rows are put at the end in the order of the batch
            place = place[row[place].argsort()]
        row = row[place]
        chosen = [(synced, prepared.select(at[place])) for synced, prepared, at in known]
        return row, self._write(data, row, value[row], spare, chosen)

    # Writing.

    def _append(self, data: Rows) -> Written:
        """Write the whole batch into free slots. Nothing is compared before the storage is full."""
        storage, stored, order = self._storage, self._stored, self._order
        row = np.arange(data.shape[0])
        target, rank = row + stored, order.rank(row)
        slot = torch.from_numpy(target)
        copies = copies_from(storage, stored, data)
        self._commit(copies, slot, rank, len(row), stored + len(row), int(target[-1]))
        self._announce(slot)
        return row, target

    def _write(
        self,
        data: Rows,
        row: Int64[np.ndarray, "k"],
        key: Float64[np.ndarray, "k"],
        removed: Int64[np.ndarray, "r"],
        known: list[tuple[SyncedIndex[Any], Any]],
    ) -> Int64[np.ndarray, "k"]:
        """Write rows of a batch over removed ones and then behind all, and return their slots.

        Where fewer rows come in than go out, rows from the end take the slots that are left.
        """
        if not len(row) and not len(removed):
            return row
        storage, order = self._storage, self._order
        move, rank = moves_of(len(row), removed, self._stored), order.rank(row)
        slot, chosen = torch.from_numpy(move.target), torch.from_numpy(row)
        changed = slot
        if move.length < move.before:
            overwritten = torch.from_numpy(move.slots)
            record_slots(storage, overwritten)
            if len(row):
                carry_out(copies_to(storage, slot, data, chosen))
                finish_write(storage, max(move.length, move.before))
                order.ranks(storage)[slot] = torch.from_numpy(rank)
            move.close_holes(storage)
            compat.raise_slot_generations(storage, overwritten)
            changed = overwritten[: len(row) + len(move.hole)]
        else:
            copies = copies_to(storage, slot, data, chosen)
            self._commit(copies, slot, rank, data.shape[0], move.length)
        self._announce(changed)
        order.follow(storage, move, key, rank)
        for synced, prepared in known:
            synced.follow(move, prepared, order.version)
        return move.target

    def _commit(
        self,
        copies: list[Copy],
        slot: Int64[Tensor, "k"],
        rank: Int64[np.ndarray, "k"],
        n_offered: int,
        length: int,
        cursor: int | None = None,
    ) -> None:
        """Carry out copies with the ranks and counters, so that an exception leaves all or none."""
        storage, order = self._storage, self._order
        ranks, (offered, written) = order.ranks(storage).numpy(), order.counters()
        copies = [*copies, *compat.raised_generations(storage, slot)]

        def commit() -> None:
            carry_out(copies)
            ranks[slot.numpy()] = rank
            order.count(offered + n_offered, written + len(rank))
            finish_write(storage, length, cursor)

        write_whole(storage, slot, commit)

    def _announce(self, index: Tensor) -> None:
        """Tell samplers which slots have changed."""
        self._order.column.announce(self._storage, index)
        compat.mark_update(self._storage, index)

    # State.

    @property
    def tie(self) -> Tie:
        """Among equal keys, whether the "newest" or the "oldest" items are kept."""
        return self._order.tie

    @property
    def largest(self) -> bool:
        """Whether items of the largest keys are kept, or of the smallest."""
        return self._order.largest

    @property
    def _write_count(self) -> int:
        return self._order.counters()[1]

    def _empty(self, empty_write_count: bool = True) -> None:
        require_access(self._storage, self)
        self._order.empty(self._storage, empty_write_count)
        if empty_write_count:
            self.rejected = dict.fromkeys(_REASONS, 0)
        if self._storage is not None:
            compat.raise_slot_generations(self._storage)

    def state_dict(self) -> dict[str, Any]:
        """Return the age of each item and the counters, which the storage does not hold."""
        if self._restored is not None:
            return {**self._restored}
        state = {**self._options(), **self._order.state(self._storage)}
        if self._storage is not None and self.tracks_generations:
            state[_GENERATION] = compat.slot_generations(self._storage).clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Keys are read from the storage when needed.

        Args:
            state_dict: state of a writer with the same options.

        Raises:
            CheckpointMismatchError: the state is of a writer with other options, or of a larger
                storage.
        """
        expected, beside = self._options(), {_GENERATION, *self._order.state(None)}
        came = {name: value for name, value in state_dict.items() if name not in beside}
        if came != expected or "rank" not in state_dict:
            came = came if "rank" in state_dict else {}
            raise CheckpointMismatchError(
                f"writer state is of {_listed(came)}, expected {_listed(expected)}"
            )
        require_numbers("rank", rank := state_dict["rank"], torch.int64)
        for name in ("offered", "written"):
            require_count(name, state_dict[name])
        if (known := state_dict.get(_GENERATION)) is not None:
            require_numbers(_GENERATION, known, torch.int64)
        if self._storage is None:
            self._restored = {**state_dict}
            return
        self._check_size(rank.shape[0], self._storage)
        check_slots(self._storage)
        self._order.restore(self._storage, state_dict)
        compat.raise_slot_generations(self._storage)  # without stamps, all rows are new ones
        if self.tracks_generations and known is not None:
            stamps = compat.track_slot_generations(self._storage)
            stamps[: known.shape[0]] = known[: stamps.shape[0]]
        self._forget_indexes()

    def _forget_indexes(self) -> None:
        for index in self._indexes:
            index.forget()

    @staticmethod
    def _check_size(n: int, storage: Storage) -> None:
        if n > storage.max_size:
            raise CheckpointMismatchError(
                f"writer state is of {n} items, expected at most {storage.max_size}"
            )

    def _options(self) -> dict[str, Any]:
        """Return what a state is recognised by. A callable has no name that means anything."""
        options: dict[str, Any] = {"tie": self.tie, "largest": self.largest, "key": str(self.key)}
        if self.unique is not None:
            options |= {"unique": name_of(self.unique), "on_duplicate": self.on_duplicate}
        if self.group is not None:
            group = name_of(self.group)
            options |= {"group": group, "per_group": self.per_group, "evict": self.evict}
        return options

    # What a lock asks for, where processes share the storage.

    def slot_tensors(self) -> list[Tensor]:
        """Return the position of each slot in the order of eviction."""
        return [self._order.ranks(self._storage)]

    def counters(self) -> list[int]:
        """Return the numbers of rows offered and written."""
        return self._order.counters()

    def roll_back(self, counters: list[int]) -> None:
        """Restore what :meth:`counters` returned, and have every process read the keys anew."""
        self._order.roll_back(counters, self._storage)
        self._forget_indexes()

    def __getstate__(self) -> dict[str, Any]:
        """Make sure that a process this is sent to shares the state, rather than starts its own."""
        if self._storage is not None:
            self._order.ranks(self._storage)
        return super().__getstate__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_listed(self._options())})"


def _read_by_any(features: list[Features], name: NestedKey) -> bool:
    return any(each.reads(name) for each in features)


def _listed(options: dict[str, Any]) -> str:
    """Return options as an error names them."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "another kind"
