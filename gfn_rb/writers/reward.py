"""Writer that keeps the rows of highest reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NestedKey, unravel_key
from torch import Tensor
from torch.autograd.graph import increment_version
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import (
    as_count,
    as_keys,
    name_of,
    require_choice,
    require_flag,
    require_key,
    require_kind,
)
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.kernels.exchange import DUPLICATE, KEEP, REFRESH, compile_exchange
from gfn_rb.keys import LOG_REWARD
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Int64, Rows, Shaped
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.sharing import (
    one_process,
    one_thread,
    record_slots,
    require_access,
    settle,
    share_writes,
    whole_write,
    write_whole,
)
from gfn_rb.storages.state_folder import StateInFolder
from gfn_rb.storages.tensors import require_rows
from gfn_rb.writers.commit import commit_of
from gfn_rb.writers.direct import DirectWrite
from gfn_rb.writers.exchange import NO_MOVES, Moves, PendingExchange, RowExchange, Tie
from gfn_rb.writers.features import Features, ObjectColumns, Unique, read_by_any, require_finite
from gfn_rb.writers.rows import (
    RowLayout,
    check_number,
    check_slots,
    check_stored,
    one_batch,
    scalar_key,
)
from gfn_rb.writers.states import GENERATION, check_size, checked_state, listed

OnDuplicate = Literal["refresh", "keep"]

# Why a row is rejected: its object, a row near it or its group's best rows are stored; or its key.
REASONS = ("duplicate", "near", "group_full", "worst")  # in the order of their numbers
_NO_SLOTS = np.zeros(0, np.int64)


class RewardPrioritizedWriter(StateInFolder, Writer):
    """A writer that keeps the ``capacity`` items of highest key ever offered.

    Each row of a batch that is better than the worst stored row takes its slot. One compiled call
    decides this for the whole batch and writes the rows, so that an interrupt finds the buffer as
    before the call or as after it. The cost hardly depends on the capacity. TorchRL's
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
        super().__init__()
        require_flag("track_generations", track_generations)
        require_key("key", key)
        require_choice("tie", tie, ("newest", "oldest"))
        require_flag("largest", largest)
        require_choice("on_duplicate", on_duplicate, ("refresh", "keep"))
        if (group is None) != (per_group is None):
            raise ArgumentError(
                f"group and per_group must be given together, got {group!r:.80} and {per_group!r}"
            )
        self.key = key
        self.tracks_generations = track_generations
        self.unique, self.on_duplicate = as_keys(unique), on_duplicate
        self.group, self.per_group = as_keys(group), per_group
        self.rejected = dict.fromkeys(REASONS, 0)
        # Returns the slots of rows that leave with the next batch, such as those too old beside it.
        self.leaving: Callable[[], Tensor] | None = None
        self._restored: dict[str, Any] | None = None  # a state, until there is a storage
        self._layout = RowLayout()
        self._exchange = RowExchange(KeyColumn(key), tie, largest)
        self._direct = DirectWrite(self._exchange)
        if unique is not None:
            self.identify(unique)
        if group is not None:
            self.group_by(group)

    def load_loops(self) -> None:
        """Compile the loops of exchanges, or read them from disk, before the first write."""
        compile_exchange()

    def identify(self, unique: Unique) -> None:
        """Identify objects by other entries from now on, such as the rows' compact form."""
        self._exchange.objects = ObjectColumns(unique)
        self._exchange.duplicate = DUPLICATE
        self._exchange.on_duplicate = REFRESH if self.on_duplicate == "refresh" else KEEP
        self._watch()

    def group_by(self, group: Unique) -> None:
        """Group rows by other entries from now on, such as those of the rows' compact form."""
        self._exchange.groups = ObjectColumns(group, "group")
        self._exchange.per_group = as_count("per_group", self.per_group)
        self._watch()

    def _compared(self) -> list[Features]:
        """Return what rows are compared by, beside their keys."""
        each = self._exchange.objects, self._exchange.groups
        return [features for features in each if features is not None]

    def _watch(self) -> None:
        """Watch the entries that rows are compared by, together with the key."""
        compared = self._compared()
        if self._storage is not None:
            for features in compared:
                features.register_storage(self._storage)
        self._exchange.column.watch_also(partial(read_by_any, compared))
        self._exchange.version = None
        self._direct = DirectWrite(self._exchange)

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
            check_size(len(self._restored["rank"]), storage)
        super().register_storage(storage)
        if self.tracks_generations:
            compat.track_slot_generations(storage)
        if self._restored is not None:
            state, self._restored = self._restored, None
            self.load_state_dict(state)
        for features in self._compared():
            features.register_storage(storage)
        if share_writes(storage, self):
            self._exchange.share()

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
        if (index := self._written_directly(data)) is not None:
            return index
        # Before the lock, which others need not wait for while a batch on a device is fetched.
        data, key, columns = self.checked(data)
        if not key.shape[0]:
            return torch.empty(0, dtype=torch.int64)
        storage = self._storage
        with one_thread(storage), whole_write(storage, self):
            if not storage.initialized:
                self._lay_out(data, key)
            if len(removed := self._leaving(data)):
                compat.drop_prefetched(storage)
            moves = self._offer(data, key, columns, removed)
        if len(moves.row) < len(moves.slot):
            for reason, n in zip(REASONS, moves.n_rejected, strict=True):
                self.rejected[reason] += n
        index, device = torch.from_numpy(moves.slot.copy()), data.device
        return index if device is None else index.to(device, non_blocking=device.type != "cpu")

    def _written_directly(self, data: Rows) -> Int64[Tensor, "n"] | None:
        """Write a batch if it can be written as it came; see :class:`DirectWrite`."""
        storage = self._storage
        if storage is None or self.leaving is not None:
            return None
        with one_thread(storage), whole_write(storage, self):
            return self._direct.write(storage, data, self.rejected)

    def _leaving(self, data: Rows) -> Int64[np.ndarray, "m"]:
        """Return the slots of rows that leave with a batch in any case, each once."""
        return _NO_SLOTS if self.leaving is None else on_host(self.leaving())[0].numpy()

    def checked(self, data: Rows) -> tuple[Rows, Tensor, list[Tensor]]:
        """Return a batch as :meth:`extend` writes it, its keys, and what a device has to compare.

        Keys have the sign by which the highest ones are kept.
        """
        if self._storage is None:
            raise ArgumentError("writer must be attached to a buffer before rows are written")
        if isinstance(data, (list, LazyStackedTensorDict)):
            data = one_batch(data, self._storage)
        key = self._exchange.signed(self._keys_of(data))
        columns: list[Tensor] = []
        if not key.is_cpu:
            key, *columns = on_host(key, *(features(data) for features in self._compared()))
            columns = [require_finite(each) for each in columns]
        return self._layout.check(data, self._storage) if key.shape[0] else data, key, columns

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
        if self._exchange.objects is None or self.unique is None:
            raise ArgumentError("unique must be given to find objects by, got unique=None")
        storage, rows = self._storage, on_host(self._exchange.objects(data))[0]
        with one_thread(storage):
            slot = torch.from_numpy(self._exchange.slots_of(storage, rows.numpy()))
        compat.attach_generations(slot, storage)
        return slot

    def generations_of(self, index: int | Tensor) -> Int64[Tensor, "*m"]:
        """Return how often slots were written to since the first time; -1 where that is unknown."""
        index = torch.as_tensor(index, dtype=torch.int64)
        return compat.generations_at(self._storage if self.tracks_generations else None, index)

    @property
    def threshold(self) -> float:
        """The worst key kept; -inf (inf for ``largest=False``) until the storage is full.

        It is read from the storage, so other processes may write at the same time.
        """
        largest = self._exchange.largest
        if self._storage is None or len(self._storage) < self._storage.max_size:
            return -math.inf if largest else math.inf
        values = self._exchange.column.values(self._storage)
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
        storage, column = self._storage, self._exchange.column
        with one_thread(storage), one_process(storage), whole_write(storage, self):
            check_stored(index, len(storage))
            if not len(index):
                return
            # First what is known is brought up to date: keys that other code changed would else be
            # taken for unchanged ones by the new version that ends this call.
            self._exchange.sync(storage)
            slot = index.unique() if len(index) > 1 else index
            write_whole(storage, slot, partial(column.write, storage, index, key))
            # Read back: of a slot given twice one key has won, and the storage may round it.
            value = self._exchange.signed(column.values(storage)[slot])
            # Keys that also identify objects or groups change these: all is read anew at the next
            # call, for which the version is left as it is.
            is_compared = any(each.reads(unravel_key(self.key)) for each in self._compared())
            if not is_compared:
                self._exchange.relabel(storage, slot.numpy(), on_host(value)[0])

    def remove(self, index: Int64[Tensor, "m"]) -> Moves:
        """Remove items from the storage; items from its end take their slots.

        Args:
            index: slots in [0, len(storage)).

        Returns:
            Which items moved from where to where.

        Raises:
            ArgumentError: a slot holds no item.
        """
        require_kind("index", index, Tensor)
        index = index.reshape(-1).cpu().unique()
        storage = self._storage
        with one_thread(storage), one_process(storage), whole_write(storage, self):
            check_stored(index, len(storage))
            if not index.shape[0]:
                return NO_MOVES
            compat.drop_prefetched(storage)
            return self._carry_out(None, self._exchange.remove(storage, index.numpy()))

    @property
    def tie(self) -> Tie:
        """Among equal keys, whether the "newest" or the "oldest" items are kept."""
        return self._exchange.tie

    @property
    def largest(self) -> bool:
        """Whether items of the largest keys are kept, or of the smallest."""
        return self._exchange.largest

    # Writing.

    def _keys_of(self, data: Rows) -> Tensor:
        return scalar_key(data, self.key)

    def _lay_out(self, data: Rows, key: Tensor) -> None:
        """Allocate the storage for rows such as those of the first batch."""
        from gfn_rb.storages.memmaps import lay_out  # which only the first batch needs

        check_number(self._exchange.signed(key), self.key)
        for features in self._compared():  # what it refuses must not decide the layout
            features(data)
        lay_out(self._storage, data[0])

    def _offer(
        self, data: Rows, key: Tensor, columns: list[Tensor], removed: Int64[np.ndarray, "m"]
    ) -> Moves:
        """Write what is to be kept of a batch; all decisions are made on the host."""
        pending = self._exchange.offer(self._storage, data, key, columns, removed)
        return self._carry_out(data, pending)

    def _carry_out(self, data: Rows | None, pending: PendingExchange) -> Moves:
        """Write what an exchange has decided, if it has not, and tell samplers of it."""
        moves, storage = pending.moves(), self._storage
        if not pending.is_written:
            # First the slots are recorded, for a lock or journal that restores them; then the write
            # is made ready, which may run out of memory; only then can it be carried out again.
            record_slots(storage, written := moves.overwritten)
            pending.commit = commit_of(storage, self._exchange, data, moves, written)
        elif len(moves.row) or moves.length != moves.before:
            increment_version(self._exchange.written_tensors)
        pending.finish()
        if moves.length > moves.before and len(moves.row) == len(moves.slot):
            compat.set_last_cursor(storage, int(moves.target[-1]))
        self._exchange.take_over(storage)
        return moves

    # State.

    @property
    def _write_count(self) -> int:
        return self._exchange.counters()[1]

    def _empty(self, empty_write_count: bool = True) -> None:
        require_access(self._storage, self)
        self._exchange.empty(self._storage, empty_write_count)
        if empty_write_count:
            self.rejected = dict.fromkeys(REASONS, 0)
        if self._storage is not None:
            compat.raise_slot_generations(self._storage)

    def state_dict(self) -> dict[str, Any]:
        """Return the age of each item and the counters, which the storage does not hold."""
        if self._restored is not None:
            return {**self._restored}
        if self._storage is not None:
            settle(self._storage)
        state = {**self._options(), **self._exchange.state(self._storage)}
        if self._storage is not None and self.tracks_generations:
            state[GENERATION] = compat.slot_generations(self._storage).clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. Keys are read from the storage when needed.

        Args:
            state_dict: state of a writer with the same options.

        Raises:
            CheckpointMismatchError: the state is of a writer with other options, or of a larger
                storage.
        """
        rank, known = checked_state(state_dict, self._options(), self._exchange.state(None))
        if self._storage is None:
            self._restored = {**state_dict}
            return
        check_size(rank.shape[0], self._storage)
        check_slots(self._storage)
        self._exchange.restore(self._storage, state_dict)
        compat.raise_slot_generations(self._storage)  # without stamps, all rows are new ones
        if self.tracks_generations and known is not None:
            stamps = compat.track_slot_generations(self._storage)
            stamps[: known.shape[0]] = known[: stamps.shape[0]]

    def _options(self) -> dict[str, Any]:
        """Return what a state is recognised by. A callable has no name that means anything."""
        options: dict[str, Any] = {"tie": self.tie, "largest": self.largest, "key": str(self.key)}
        if self.unique is not None:
            options |= {"unique": name_of(self.unique), "on_duplicate": self.on_duplicate}
        if self.group is not None:
            options |= {"group": name_of(self.group), "per_group": self.per_group}
        return options

    # What a lock asks for, where processes share the storage.

    def slot_tensors(self) -> list[Tensor]:
        """Return the age of each slot."""
        return [self._exchange.ages(self._storage)]

    def counters(self) -> list[int]:
        """Return the numbers of rows offered and written."""
        return self._exchange.counters()

    def roll_back(self, counters: list[int]) -> None:
        """Restore what :meth:`counters` returned, and have every process read the keys anew."""
        self._exchange.roll_back(counters, self._storage)

    def __getstate__(self) -> dict[str, Any]:
        """Make sure that a process this is sent to shares the state, rather than starts its own."""
        if self._storage is not None:
            self._exchange.ages(self._storage)
        return {**super().__getstate__(), "leaving": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({listed(self._options())})"
