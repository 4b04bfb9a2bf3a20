"""Keeping the items of highest reward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, unravel_key
from torch import Tensor

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import as_keys, name_of, require_choice, require_kind
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.kernels.objects import Hashed
from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Bool, Float64, Int64, Rows, Shaped
from gfn_rb.sharing import (
    one_thread,
    one_write,
    record_slots,
    recording,
)
from gfn_rb.writers.eviction_order import Tie, moves_of
from gfn_rb.writers.features import (
    EqualRows,
    ObjectColumns,
    SyncedIndex,
    Unique,
    require_finite,
)
from gfn_rb.writers.ordered import REASONS, OrderedWriter, Written
from gfn_rb.writers.rows import check_number, check_stored, one_batch, scalar_key

if TYPE_CHECKING:
    from gfn_rb.writers.group_limit import GroupLimit

OnDuplicate = Literal["refresh", "keep"]

_NONE = np.zeros(0, np.int64)  # slots


class Found(NamedTuple):
    """Offered rows as an index finds them."""

    synced: SyncedIndex
    prepared: Any
    at: Int64[np.ndarray, "m"]  # the place of each row there


class RewardPrioritizedWriter(OrderedWriter):
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
        largest: bool = True,
        track_generations: bool = False,
        compilable: bool | None = None,
    ) -> None:
        super().__init__(key, tie, largest, track_generations)
        require_choice("on_duplicate", on_duplicate, ("refresh", "keep"))
        if (group is None) != (per_group is None):
            raise ArgumentError(
                f"group and per_group must be given together, got {group!r:.80} and {per_group!r}"
            )
        self.unique, self.on_duplicate = as_keys(unique), on_duplicate
        self.group, self.per_group = as_keys(group), per_group
        self._index: SyncedIndex | None = None  # rows by what tells whether they are the same
        self._limit: GroupLimit | None = None
        if unique is not None:
            self.identify(unique)
        if group is not None:
            self.group_by(group)
        self._rejected_now = dict.fromkeys(REASONS, 0)  # of a batch that is being offered

    # What TorchRL calls.

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
        data, key, rows = self.checked(data)
        n, storage, device = key.shape[0], self._storage, data.device
        if not n:
            return torch.empty(0, dtype=torch.int64)
        with one_write(storage, self):
            if not storage.initialized:
                from gfn_rb.memmaps import lay_out  # which only the first batch needs

                lay_out(storage, data[0])
            offered, written = self._order.counters()
            self._rejected_now = now = dict.fromkeys(REASONS, 0)
            self._stored = compat.length_of(storage)
            row, target = self._offer(data, key, rows)
            self._order.count(offered + n, written + len(row))
        if len(row) < n:
            now["worst"] = n - len(row) - sum(now.values())
            for reason in REASONS:
                self.rejected[reason] += now[reason]
        slot = torch.full((n,), -1)
        if len(row):
            slot.numpy()[row] = target
        return slot if device is None else slot.to(device, non_blocking=device.type != "cpu")

    def checked(self, data: Rows) -> tuple[Rows, Tensor, list[Tensor]]:
        """Return a batch as :meth:`extend` writes it, its keys, and rows of indexes on a device."""
        if self._storage is None:
            raise ArgumentError("writer must be attached to a buffer before rows are written")
        if isinstance(data, (list, LazyStackedTensorDict)):
            data = one_batch(data, self._storage)
        key = self._order.signed(self._keys_of(data))
        rows: list[Tensor] = []
        if not key.is_cpu:
            key, *rows = on_host(key, *(index.features(data) for index in self._indexes))
            rows = [require_finite(each) for each in rows]
        return self._layout.check(data, self._storage) if key.shape[0] else data, key, rows

    def identify(self, unique: Unique) -> None:
        """Identify objects by other entries from now on, such as the rows' compact form."""
        self._compare_by(SyncedIndex(ObjectColumns(unique), EqualRows))

    def group_by(self, group: Unique) -> None:
        """Group rows by other entries from now on, such as those of the rows' compact form."""
        from gfn_rb.writers.group_limit import GroupLimit  # few writers need it

        assert self.per_group is not None
        self._limit = GroupLimit(group, self.per_group)
        self._compare_by(self._index)

    def _compare_by(self, index: SyncedIndex | None) -> None:
        """Compare rows by an index, and by that of groups."""
        self._index = index
        indexes = [index, None if self._limit is None else self._limit.synced]
        self._watch([each for each in indexes if each is not None])

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
        slot = torch.from_numpy(index.first(index.prepare(rows)))
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

    def _known(self) -> list[SyncedIndex]:
        """Return the indexes that match the storage, as the order does."""
        return [each for each in self._indexes if each.version == self._order.version]

    @property
    def tie(self) -> Tie:
        """Among equal keys, whether the "newest" or the "oldest" items are kept."""
        return self._order.tie

    @property
    def largest(self) -> bool:
        """Whether items of the largest keys are kept, or of the smallest."""
        return self._order.largest

    def _options(self) -> dict[str, Any]:
        options = super()._options()
        if self.unique is not None:
            options |= {"unique": name_of(self.unique), "on_duplicate": self.on_duplicate}
        if self.group is not None:
            options |= {"group": name_of(self.group), "per_group": self.per_group}
        return options

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
        value = order.numbers(key)
        if by is None and limit is None and len(value) <= n_free:
            return self._append(data)
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

    def _prepared(self, synced: SyncedIndex, data: Rows, columns: list[Tensor]) -> Any:
        """Bring an index up to date, and return what it finds the rows of a batch by."""
        rows = columns[self._indexes.index(synced)] if columns else synced.read(data)
        return synced.sync(self._storage, rows, self._order.version).prepare(rows)

    def _objects(
        self, index: EqualRows, prepared: Hashed
    ) -> tuple[Bool[np.ndarray, "n"] | None, Int64[np.ndarray, "n"] | None]:
        """Return which rows are offered, one of each object, and the slot each takes over.

        None stands for all rows, and for no slots.
        """
        n, slot = len(prepared.code), index.first(prepared)
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
            group = known[-1].prepared.select(known[-1].at)
            slot = np.full(len(row), -1) if slot is None else slot
            place, slot, spare = limit.choose(order, group, value[row], slot, spare)
            self._rejected_now["group_full"] = len(row) - len(place)
        given_up = spare if slot is None else np.concatenate([slot[slot >= 0], spare])
        n_free = self._storage.max_size - self._stored + len(given_up)
        if len(place) > n_free:
            n_lost, out = order.compete(value[row[place]], n_free, given_up)
            place, spare = place[n_lost:], np.concatenate([spare, out]) if len(spare) else out
            if slot is not None:
                lost, slot = slot[:n_lost], slot[n_lost:]
                spare = np.concatenate([spare, lost[lost >= 0]])
        if slot is not None:  # those that take over a slot come first
            takes_over = slot >= 0
            spare = np.concatenate([slot[takes_over], spare])
            others = place[~takes_over]
            place = np.concatenate([place[takes_over], others[row[others].argsort()]])
        elif len(place) > len(spare):  # rows are put at the end in the order of the batch
            place = place[row[place].argsort()]
        row = row[place]
        chosen = [
            (synced, tuple([column[at[place]] for column in prepared]))
            for synced, prepared, at in known
        ]
        return row, self._write(data, row, value[row], spare, chosen)
