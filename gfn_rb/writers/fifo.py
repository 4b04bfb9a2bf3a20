"""Writer that keeps the newest rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import expand_right
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import (
    KeepsArguments,
    kind_of,
    require_choice,
    require_flag,
    require_kind,
    shown,
)
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, ShapeError
from gfn_rb.keys import INDEX, POLICY_VERSION
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Int64, Rows
from gfn_rb.storages.column import EqualKeys, KeyColumn
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
from gfn_rb.storages.state_folder import require_count, require_numbers
from gfn_rb.storages.tensors import is_laid_out, require_rows, storage_device
from gfn_rb.writers.exchange import NO_MOVES, Moves
from gfn_rb.writers.features import ObjectColumns, Unique, read_stored
from gfn_rb.writers.reward import OnDuplicate, RewardPrioritizedWriter
from gfn_rb.writers.rows import (
    DRAWN,
    RowLayout,
    check_slots,
    check_stored,
    copies_from,
    copies_to,
    finish_write,
    moved_rows,
    one_batch,
    put_rows,
)

WholeGroups = Literal["oldest", "stalest"]
_NONE = np.zeros(0, np.int64)


class FIFOWriter(KeepsArguments, TensorDictRoundRobinWriter):
    """A round-robin writer that keeps the newest items and checks rows before it writes.

    TorchRL's round-robin writer counts rows and writes some entries before it detects rows that
    do not fit.

    With ``unique`` or ``group``, the constructor returns a :class:`UniqueFIFOWriter`, which keeps
    the newest objects and overwrites the oldest rows in any slot. First each group keeps its
    ``per_group`` newest rows, and then the storage those that it has room for.

    Args:
        unique: what identifies an object, of which one row is kept: "state" (terminating state and
            condition), another key, a list of keys, or a callable from items [n] to int64
            fingerprints [n] or [n, d]. None keeps equal rows too.
        on_duplicate: "refresh" replaces the stored row of an object by the new one, and "keep"
            rejects the new one.
        group: what rows are grouped by, as one of the kinds that ``unique`` takes. None: no groups.
        per_group: number of rows to keep of each group, at least 1; required with ``group``.
        whole_groups: "oldest" or "stalest" removes whole groups when the storage is full, those
            first whose newest row came first or has the lowest ``policy_version``. It replaces
            ``per_group``. Groups of the batch that is added stay. Default: None, rows leave.
        track_generations: whether to count the writes of each slot, which ``rb.update_if_present``
            needs.
        compilable: no effect; accepted because TorchRL passes it to its own writers.
    """

    _cursor: int
    _write_count: int

    # One name for both, as users read it: what is kept depends on options, as in other writers. The
    # other class cannot derive from this one, whose base writes in turn and has no other order.
    if not TYPE_CHECKING:  # which reads the arguments of the constructor below

        def __new__(
            cls,
            unique: Unique = None,
            on_duplicate: OnDuplicate = "refresh",
            *,
            group: Unique = None,
            per_group: int | None = None,
            whole_groups: WholeGroups | None = None,
            **options: Any,
        ) -> Any:
            """Make a writer, of another class where objects are unique or groups limited."""
            if unique is group is per_group is whole_groups is None:
                return super().__new__(cls, on_duplicate=on_duplicate, **options)
            groups = {"group": group, "per_group": per_group, "whole_groups": whole_groups}
            return UniqueFIFOWriter(unique, on_duplicate, **groups, **options)

    def __init__(
        self,
        unique: Unique = None,
        on_duplicate: OnDuplicate = "refresh",
        *,
        group: Unique = None,
        per_group: int | None = None,
        whole_groups: WholeGroups | None = None,
        track_generations: bool = False,
        compilable: bool | None = None,
    ) -> None:
        require_choice("on_duplicate", on_duplicate, ("refresh", "keep"))
        require_flag("track_generations", track_generations)
        super().__init__(track_generations=track_generations)
        self._layout = RowLayout(DRAWN - {INDEX})  # which is stored, as by the one it extends

    def register_storage(self, storage: Storage) -> None:
        """Attach the storage to write to, a one-dimensional ``TensorStorage``."""
        require_rows(storage)
        super().register_storage(storage)
        if self.tracks_generations:
            compat.track_slot_generations(storage)  # in shared memory, which TorchRL's is not
        share_writes(storage, self)

    def add(self, data: Rows) -> int:
        """Write one item, batch size [], and return its slot; raises as :meth:`extend` does."""
        return int(self.extend(data.unsqueeze(0) if hasattr(data, "batch_size") else data)[0])

    @compat.outside_graph
    def extend(self, data: Rows) -> Tensor:
        """Write a batch over the oldest items.

        Args:
            data: batch size [n].

        Returns:
            One slot per row; none for an empty batch.

        Raises:
            KeyMismatchError: keys are missing or unknown to the storage.
            ShapeError: an entry has another shape or dtype than the stored one.
        """
        storage = self._storage
        if isinstance(data, (list, LazyStackedTensorDict)):
            data = one_batch(data, storage)
        if not getattr(data, "batch_size", ()):
            came = [] if hasattr(data, "batch_size") else kind_of(data)
            raise ShapeError(f"data must have batch size [n], one entry per item, got {came}")
        if not (n := data.shape[0]):
            return torch.empty(0, dtype=torch.int64)
        # The cursor is read under the lock, or two threads would write to the same slots.
        with one_thread(storage), whole_write(storage, self):
            self._line_up()
            data = self._layout.check(data, storage)
            if not is_laid_out(storage):
                self._lay_out(data[0])
            slot = torch.arange(self._cursor, self._cursor + n) % storage.max_size
            # Of several rows for one slot, a device might keep any: those that go are left out.
            if n_over := max(n - storage.max_size, 0):
                data, self._cursor = data[n_over:], int(slot[n_over])
                self._write_count += n_over
            index = self._write(data, slot[n_over:] if n_over else slot)
        return slot.to(index.device) if n_over else index

    def _write(self, data: Rows, slot: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Write rows into the next slots, and return these on the device of the rows."""
        storage, size, written = self._storage, self._storage.max_size, self._write_count
        start, n, on_device = self._cursor, slot.shape[0], slot
        if data.device is not None:
            on_device = slot.to(data.device, non_blocking=data.device.type != "cpu")
        if compat.entry_of(compat.all_slots(storage), INDEX) is None:  # others laid it out
            # The base class counts on from where it is: counters go back first, or a second run
            # would write behind the rows of the first.
            def commit() -> None:
                self._cursor, self._write_count = start, written
                super(FIFOWriter, self).extend(self._on_storage_device(data))

        else:
            data.set(INDEX, on_device if data.ndim == 1 else expand_right(on_device, data.shape))
            copies = [*compat.raised_generations(storage, slot), *copies_from(storage, start, data)]

            # Rows first, then the length that shows them to others, then the counters. All come
            # from the numbers above, none from the present ones, so that a second run writes the
            # same.
            def commit() -> None:
                put_rows(copies)
                finish_write(storage, min(start + n, size), (start + n - 1) % size)
                self._cursor, self._write_count = (start + n) % size, written + n

        write_whole(storage, slot, commit)
        return on_device

    def _lay_out(self, row: Rows) -> None:
        from gfn_rb.storages.memmaps import lay_out  # which few programs need

        if isinstance(row, TensorDictBase):
            row = row.copy().set(INDEX, torch.zeros(row.batch_size, dtype=torch.int64))
        lay_out(self._storage, row)

    def _on_storage_device(self, data: Rows) -> Rows:
        """Return rows on the storage's device, which TorchRL's writer does not move."""
        device = storage_device(self._storage)
        return data if device is None or data.device in (None, device) else data.to(device)

    def write_at(self, index: int | Tensor, data: Rows) -> int | Tensor:
        """Write rows into given slots, as buffers do that consume their rows.

        Args:
            index: one slot, or one for each row.
            data: one item, or a batch of items [n].

        Raises:
            KeyMismatchError, ShapeError: as :meth:`extend` raises them.
        """
        storage, slot = self._storage, torch.as_tensor(index)
        with one_thread(storage), whole_write(storage, self):
            rows = self._layout.check(data if slot.ndim else data.unsqueeze(0), storage)
            at, written = slot.reshape(-1), self._write_count
            copies = copies_to(storage, at, rows, torch.arange(len(at)))
            copies += compat.raised_generations(storage, at)

            def commit() -> None:
                put_rows(copies)
                finish_write(storage, int(at.max()) + 1 if len(at) else 0)
                self._write_count = written + len(at)

            write_whole(storage, at, commit)
        return index

    def remove(self, index: Int64[Tensor, "m"]) -> Moves:
        """Remove items; the others keep their order, in time proportional to their number.

        Args:
            index: slots in [0, len(storage)).

        Returns:
            Which items moved from where to where.

        Raises:
            ArgumentError: a slot holds no item.
        """
        require_kind("index", index, Tensor)
        storage, index = self._storage, index.reshape(-1).cpu().unique()
        with one_thread(storage), one_process(storage), whole_write(storage, self):
            check_stored(index, n := len(storage))
            if not len(index):
                return NO_MOVES
            compat.drop_prefetched(storage)
            oldest = self._cursor if n == storage.max_size else 0
            # Rows are laid out from slot 0 on, the oldest first, so that the cursor can go on
            # behind the last: of a full storage whose oldest row is in slot 2, without slot 0::
            #
            #     slot 0 1 2 3      before c d a b     after a b d -     cursor 3
            order = (torch.arange(n) + oldest) % n
            source = order[~torch.isin(order, index)]
            hole = torch.arange(left := len(source))
            hole, source = hole[source != hole], source[source != hole]
            # Slots that fall empty are recorded here, and ``write_whole`` records those written to.
            moves = Moves(_NONE, _NONE, _NONE, source.numpy(), hole.numpy(), n, left, [])
            record_slots(storage, torch.arange(left, n))
            copies = [*moved_rows(storage, moves.source, moves.hole)]
            copies += compat.raised_generations(storage, moves.overwritten)

            def commit() -> None:
                put_rows(copies)
                compat.set_length(storage, left)
                compat.set_last_cursor(storage, left - 1 if left else None)
                self._cursor = left
                for _ in range(2):  # or samplers would take it for a write to some rows
                    compat.bump_mutation_revision(storage)

            write_whole(storage, hole, commit)
        return moves

    def slot_tensors(self) -> list[Tensor]:
        """Return nothing: the counters determine the next slot."""
        return []

    def counters(self) -> list[int]:
        """Return the next slot and the number of rows written."""
        return [self._cursor, self._write_count]

    def roll_back(self, counters: list[int]) -> None:
        """Restore what :meth:`counters` returned; empty if nothing was written."""
        if counters:
            self._cursor = counters[0]
            self._write_count = counters[1]

    def _empty(self, empty_write_count: bool = True) -> None:
        require_access(self._storage, self)
        super()._empty(empty_write_count)

    def _line_up(self) -> None:
        """Go on behind the rows that others stored, as long as there is room."""
        stored = compat.length_of(self._storage)
        if stored < self._storage.max_size and self._cursor != stored:
            self._cursor = stored

    def state_dict(self) -> dict[str, Any]:
        """Return the next slot and the number of rows written, with an interrupted write done."""
        if self._storage is not None:
            settle(self._storage)
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            CheckpointMismatchError: the state is of another kind of writer or of a larger storage.
        """
        if "_cursor" not in state_dict:
            raise CheckpointMismatchError(
                f"writer state holds {sorted(state_dict)}, expected that of a FIFOWriter "
                "without unique"
            )
        for name in ("_cursor", "_write_count"):
            require_count(name, state_dict.get(name, 0))
        if self._storage is not None and state_dict["_cursor"] >= self._storage.max_size:
            raise CheckpointMismatchError(
                f"writer state is of slot {state_dict['_cursor']}, expected one below "
                f"{self._storage.max_size}"
            )
        check_slots(self._storage)
        if (generation := state_dict.get("_generation")) is not None:
            require_numbers("_generation", generation, torch.int64)
            if self._storage is not None and len(generation) != self._storage.max_size:
                raise CheckpointMismatchError(
                    f"writer state has generations of {len(generation)} slots, expected "
                    f"{self._storage.max_size}"
                )
        super().load_state_dict(state_dict)


class UniqueFIFOWriter(RewardPrioritizedWriter):
    """A writer that keeps the newest objects: as all rank alike, the oldest give way.

    Arguments are those of :class:`FIFOWriter`.
    """

    def __init__(
        self,
        unique: Unique = "state",
        on_duplicate: OnDuplicate = "refresh",
        *,
        group: Unique = None,
        per_group: int | None = None,
        whole_groups: WholeGroups | None = None,
        **options: Any,
    ) -> None:
        self.whole_groups = whole_groups
        self._whole: ObjectColumns | None = None
        self._versions = KeyColumn(POLICY_VERSION)
        limits: dict[str, Any] = {"group": group, "per_group": per_group}
        if whole_groups is not None:
            require_choice("whole_groups", whole_groups, ("oldest", "stalest"))
            if group is None or per_group is not None:
                raise ArgumentError(
                    "whole_groups needs group, and no per_group, which would cut groups: got "
                    f"{shown(group)} and {per_group}"
                )
            self._whole, limits = ObjectColumns(group, "group"), {}
        super().__init__(INDEX, "newest", unique, on_duplicate, **limits, **options)
        self._exchange.column = EqualKeys(INDEX)
        self._watch()  # the column is another one now

    def register_storage(self, storage: Storage) -> None:
        """Attach the storage to write to; see the base class."""
        super().register_storage(storage)
        if self._whole is not None:
            self._whole.register_storage(storage)

    def _keys_of(self, data: Rows) -> Tensor:
        return torch.zeros(data.shape[0])

    def _options(self) -> dict[str, Any]:
        whole = {} if self.whole_groups is None else {"whole_groups": self.whole_groups}
        return {**super()._options(), **whole}

    def _written_directly(self, data: Rows) -> Int64[Tensor, "n"] | None:
        return super()._written_directly(data) if self._whole is None else None

    def _leaving(self, data: Rows) -> Int64[np.ndarray, "m"]:
        """Return the slots of rows that leave with a batch: too old ones, and whole groups."""
        removed, storage = super()._leaving(data), self._storage
        n_stored = compat.length_of(storage)
        n_over = n_stored - len(removed) + data.shape[0] - storage.max_size
        if self._whole is None or n_over <= 0:
            return removed
        came = np.ascontiguousarray(on_host(self._whole(data))[0].numpy())
        held = read_stored(self._whole, storage) if n_stored else came[:0]
        number = np.unique(np.concatenate([held, came]), axis=0, return_inverse=True)[1].reshape(-1)
        of_held, of_came = number[:n_stored], number[n_stored:]
        stays = np.ones(n_stored, np.bool_)
        stays[removed] = False
        # A group is as recent as its newest row. Those of the batch stay, or they would be cut.
        # Others leave in turn until the batch fits, which may give up more slots than it needs.
        size = np.bincount(of_held[stays], minlength=len(number))
        size[of_came] = 0
        order = self._in_turn(of_held, len(number))
        order = order[size[order] > 0]
        room = size[order].cumsum()
        if not len(room) or room[-1] < n_over:
            raise ArgumentError(
                f"data must fit into the storage of {storage.max_size} rows with its groups whole, "
                f"got {data.shape[0]} rows, of whose groups others are stored"
            )
        leaving = order[: int(room.searchsorted(n_over)) + 1]
        return np.flatnonzero(np.isin(of_held, leaving) | ~stays)

    def _in_turn(self, number: Int64[np.ndarray, "n"], n: int) -> Int64[np.ndarray, "g"]:
        """Return the groups of stored rows in the order in which they leave, out of n numbers."""
        newest = [np.full(n, np.iinfo(np.int64).min) for _ in range(2)]
        np.maximum.at(newest[0], number, self.slot_tensors()[0][: len(number)].numpy())
        if self.whole_groups == "stalest":
            version = on_host(self._versions.values(self._storage))[0].numpy()
            np.maximum.at(newest[1], number, version)
        return np.lexsort(newest)  # the last counts first
