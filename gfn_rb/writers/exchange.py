"""Keys, ages, objects and groups of stored rows, and the exchange of rows with a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.errors import ShapeError
from gfn_rb.kernels import as_array
from gfn_rb.kernels.exchange import (
    ALIASED,
    BEST,
    N_CALLS,
    N_RESULTS,
    N_TWINS,
    NO_SLOT,
    NOT_A_NUMBER,
    NOT_COMPARED,
    SLOT_OF,
    UNKNOWN,
    KnownRows,
    Rules,
    Slots,
    empty_slots,
    hold,
    relabel,
    worst_of,
)
from gfn_rb.kernels.objects import Objects
from gfn_rb.keys import EPISODE_LOG_REWARD, LOG_REWARD
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Float, Float64, Int64, Rows, Shaped
from gfn_rb.storages.column import KeyColumn, Version
from gfn_rb.storages.sharing import PendingWrite, begin, done
from gfn_rb.storages.tensors import is_laid_out
from gfn_rb.writers.addresses import NO_SLOTS, RowAddresses
from gfn_rb.writers.features import Features, read_stored
from gfn_rb.writers.rows import check_number

Tie = Literal["newest", "oldest"]

_OFFERED, _WRITTEN = range(2)
_AGES_BEFORE = 2**62  # what rows of unknown age are older by than the first row offered
_NOTHING = np.zeros(0, np.int64)
NO_ROWS = torch.zeros(0, 1, dtype=torch.int64)


class Moves(NamedTuple):
    """What an exchange changed in a storage, or is about to change."""

    slot: Int64[np.ndarray, "n"]  # of each row of the batch, -1 if it is rejected
    row: Int64[np.ndarray, "k"]  # rows of the batch that come in
    target: Int64[np.ndarray, "k"]  # their slots
    source: Int64[np.ndarray, "m"]  # slots of rows that move, all of them from ``length`` on
    hole: Int64[np.ndarray, "m"]  # where these move to
    before: int  # length of the storage
    length: int  # of the storage afterwards
    n_rejected: list[int]  # rows of the batch, for each reason

    @property
    def changed(self) -> Int64[np.ndarray, "c"]:
        """The slots that hold another row."""
        return np.concatenate([self.target, self.hole]) if len(self.hole) else self.target

    @property
    def overwritten(self) -> Int64[Tensor, "o"]:
        """The slots whose content is replaced or given up."""
        return torch.from_numpy(np.concatenate([self.target, self.hole, self.tail]))

    @property
    def tail(self) -> Int64[np.ndarray, "t"]:
        """The slots that hold no row any more."""
        return np.arange(min(self.length, self.before), self.before)


NO_MOVES = Moves(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, 0, 0, [])


class RowExchange:
    """Knows key and age of each row of a storage, its object and its group, and exchanges rows.

    It follows the storage: rows that other code wrote or relabelled count with their new keys from
    the next call on. Keys are compared as float64, on the host whatever the storage's device: it
    has to know which rows come in before they are moved.

    What it knows can be read from the rows again at any time, but for ages and counters. Processes
    that share a buffer share these two.

    Args:
        column: the key of each row.
        tie: which rows of equal key are kept, the "newest" or the "oldest".
        largest: whether rows of the largest keys are kept, or those of the smallest.
    """

    def __init__(self, column: KeyColumn, tie: Tie, largest: bool = True) -> None:
        self.column = column
        self.tie = tie
        self.largest = largest
        self.objects: Features | None = None  # what identifies objects, of which one row is kept
        self.groups: Features | None = None
        self.per_group = 0
        self.on_duplicate = BEST
        is_reward = column.key in (LOG_REWARD, EPISODE_LOG_REWARD)  # which is never infinite
        self._refused = (math.inf if largest else -math.inf) if is_reward else math.nan
        self.duplicate = NO_SLOT  # what the result of a row is whose object stays
        self._ages: Tensor | None = None  # of each slot, once there is a storage
        # Rows offered, rows written. On the CPU, and a tensor, so that processes sharing the buffer
        # share it. Its NumPy view is made anew each time: sharing a tensor moves its memory.
        self._counters = torch.zeros(2, dtype=torch.int64)
        self._memory = RowAddresses()
        self._forget()

    def _forget(self) -> None:
        """Forget all that can be read from the storage again."""
        self.version: Version | None = None  # of the storage's content that is known
        self._known: KnownRows | None = None
        self._width = (-1, -1)  # integers of an object and of a group

    # What each slot holds.

    def ages(self, storage: Storage) -> Int64[Tensor, "N"]:
        """Return what decides between equal keys, of every slot."""
        if self._ages is None:
            self._ages = torch.full((storage.max_size,), UNKNOWN)
            if self._counters.is_shared():
                self._ages.share_memory_()
        return self._ages

    def signed(self, key: Shaped[Tensor, "m"]) -> Float[Tensor, "m"]:
        """Return keys as floats, of which those to keep are the largest."""
        if not key.is_floating_point():
            key = key.to(torch.float64)
        return key if self.largest else -key

    def check(self, key: Float[Tensor, "n"]) -> None:
        """Raise NaNError if a :meth:`signed` key is NaN or an infinite reward."""
        check_number(self.signed(key), self.column.key)

    @property
    def keys(self) -> Float64[np.ndarray, "N"]:
        """The signed key of each slot, of a storage that is followed; not to be written to."""
        assert self._known is not None
        keys: np.ndarray = self._known.slots.held["key"]
        return keys

    def lowest(self, storage: Storage) -> float:
        """Return the lowest signed key of a storage that is followed and holds rows."""
        assert self._known is not None
        return float(self.keys[worst_of(compat.length_of(storage), self._known.slots)])

    def sync(self, storage: Storage, width: tuple[int, int] | None = None) -> KnownRows:
        """Read keys, objects and groups anew if the storage changed since they were known.

        Args:
            storage: the storage.
            width: how many integers identify an object and a group, 0 for those that are not
                compared. None where no rows are offered.
        """
        # The version is read before the rows. Code that writes meanwhile leaves a newer one, so
        # that the next call reads again; read afterwards, it would pass old keys for the present
        # ones.
        version = self.column.version(storage) if is_laid_out(storage) else None
        known = self._known
        if known is not None and version == self.version and width in (None, self._width):
            return known
        n = compat.length_of(storage)
        key, features = np.empty(0), (self.objects, self.groups)
        rows, tables = [NO_ROWS.numpy(), NO_ROWS.numpy()], [_NO_TABLE, _NO_TABLE]
        if n:
            key = self.signed(self.column.values(storage)).cpu().to(torch.float64).numpy()
        for i, each in enumerate(features):
            if each is None:
                continue
            asked = 0 if width is None else width[i]
            rows[i] = read_stored(each, storage) if n else np.zeros((0, asked), np.int64)
            stored = rows[i].shape[1]
            if stored != asked and width is not None:
                raise ShapeError(
                    f"features must stay alike: got rows of width {asked}, expected width "
                    f"{stored} as before"
                )
            tables[i] = Objects(storage.max_size, stored)
        self.version = None  # an interrupt from here on must not leave a version without its rows
        known = KnownRows(empty_slots(storage.max_size), *tables)
        objects, groups = known.objects.table, known.groups.table
        hold(key, self._known_ages(storage, n), *rows, known.slots, objects, groups)
        self._known = known
        self._width = (0 if self.objects is None else rows[0].shape[1],
                       0 if self.groups is None else rows[1].shape[1])  # fmt: skip
        self.version = version
        return known

    def _known_ages(self, storage: Storage, stored: int) -> Int64[np.ndarray, "n"]:
        """Return the age of each stored row; those of others are older than all that came here."""
        # Among themselves, rows of others count in the order of their slots: with tie="newest"
        # their ages are -2^62 + slot, so that the lowest slot leaves first and all leave before any
        # other.
        age: np.ndarray = self.ages(storage).numpy()[:stored]
        unknown = (age == UNKNOWN).nonzero()[0]
        if len(unknown):
            known = unknown - _AGES_BEFORE
            age[unknown] = known if self.tie == "newest" else -known
        return age

    # Exchanging rows.

    def known(self, storage: Storage) -> KnownRows | None:
        """Return what is known of the rows, None if it has to be read anew."""
        if self.version is None or not is_laid_out(storage):
            return None
        return self._known if self.column.version(storage) == self.version else None

    def addresses(self, storage: Storage, data: Rows | None) -> Int64[Tensor, "p"]:
        """Return where a compiled loop writes rows, ``NO_SLOTS`` where it cannot."""
        return self._memory.addresses(storage, data, self.ages(storage), self._counters)

    def rules(self, is_signed: bool = True) -> Rules:
        """Return the rules of an exchange, of :meth:`signed` keys or of those that rows have."""
        return Rules(
            int(self._counters.numpy()[_OFFERED]),
            self.tie == "newest",
            NOT_COMPARED if self.objects is None else self.on_duplicate,
            self.per_group,
            self.duplicate,
            self._refused,
            1 if is_signed or self.largest else -1,
        )

    def offer(
        self,
        storage: Storage,
        data: Rows,
        key: Float[Tensor, "n"],
        columns: Sequence[Tensor] = (),
        removed: Int64[np.ndarray, "m"] = _NOTHING,
        slot: Int64[np.ndarray, "n"] | None = None,
    ) -> PendingExchange:
        """Let rows of a batch in, and write them where memory allows for it.

        Args:
            storage: the storage, laid out.
            data: the batch, checked by its ``RowLayout``.
            key: its keys, as :meth:`signed` returns them.
            columns: what identifies objects and groups, if it was read already.
            removed: slots of rows that leave in any case, each once.
            slot: a reason for each row that is rejected already, ``NO_SLOT`` for the others.

        Returns:
            What changed, or is to be changed.

        Raises:
            NaNError: a key is NaN or an infinite reward. Nothing was changed.
        """
        objects = groups = NO_ROWS
        if self.objects is not None:
            # A callable of the user's may raise here: nothing has been changed yet.
            objects, *columns = columns or [self.objects(data)]
            objects = on_host(objects)[0].contiguous()
        if self.groups is not None:
            groups = on_host(columns[0] if columns else self.groups(data))[0].contiguous()
        value = key.to(torch.float64).contiguous()
        known = self.sync(storage, (
            0 if self.objects is None else objects.shape[1],
            0 if self.groups is None else groups.shape[1],
        ))  # fmt: skip
        put = self.addresses(storage, data)
        return self._exchange(storage, known, value, objects, groups, removed, slot, put)

    def remove(self, storage: Storage, removed: Int64[np.ndarray, "m"]) -> PendingExchange:
        """Let rows leave, each slot given once."""
        known = self.sync(storage)
        put = self.addresses(storage, None)
        no_key = torch.empty(0, dtype=torch.float64)
        objects, groups = (
            torch.zeros((0, max(width, 1)), dtype=torch.int64) for width in self._width
        )
        return self._exchange(storage, known, no_key, objects, groups, removed, None, put)

    def _exchange(
        self, storage: Storage, known: KnownRows, key: Tensor, objects: Tensor, groups: Tensor,
        removed: np.ndarray, slot: np.ndarray | None, put: Tensor,
    ) -> PendingExchange:  # fmt: skip
        # ``len`` of a tensor takes a microsecond, its shape a tenth of one.
        n, n_put, leaving = key.shape[0], put.shape[0], torch.from_numpy(removed)
        size = 2 * n + len(removed) + int(known.slots.state[N_TWINS])
        results = torch.empty(N_RESULTS, size, dtype=torch.int64)
        results.numpy()[SLOT_OF, :n] = NO_SLOT if slot is None else slot
        offer = key, objects, groups, self.rules(), leaving, results
        pending = PendingExchange(storage, known.slots, results.numpy(), n, n_put > 0)
        if not n_put:
            self.version = None  # until the rows are written
        # Before the call, since none of these lines is executed if an interrupt follows it: the
        # next use of the storage finds ``pending``, which tells by the number of calls what
        # happened.
        begin(pending)
        n_in = known.exchange(*offer, put)
        if n_in == ALIASED:  # rows of this storage: PyTorch copies them before it writes
            self.version, pending.is_written = None, False
            n_in = known.exchange(*offer, NO_SLOTS)
        if n_in == NOT_A_NUMBER:
            done(storage)
            self.check(key)
        return pending

    def slots_of(self, storage: Storage, rows: np.ndarray) -> Int64[np.ndarray, "n"]:
        """Return the slot of each object, -1 where it is not stored."""
        objects = self.sync(storage, (rows.shape[1], self._width[1])).objects
        return objects.first(objects.hashed(rows))

    def take_over(self, storage: Storage) -> None:
        """Note that the storage holds what is known, after a write."""
        self.version = self.column.version_after_write(storage)

    @property
    def written_tensors(self) -> list[Tensor]:
        """The columns that the last exchange wrote to."""
        return self._memory.tensors

    def counters_after(self, moves: Moves) -> tuple[int, int]:
        """Return the counters after an exchange whose rows are not written yet."""
        offered, written = self.counters()
        return offered + len(moves.slot), written + len(moves.row)

    def write_ages(self, storage: Storage, moves: Moves) -> None:
        """Write the ages of rows that came in or moved, and forget those that left."""
        assert self._known is not None
        ages = self.ages(storage).numpy()
        ages[moves.changed] = self._known.slots.held["age"][moves.changed]
        ages[moves.length : moves.before] = UNKNOWN

    def relabel(
        self, storage: Storage, slot: Int64[np.ndarray, "m"], key: Float[Tensor, "m"]
    ) -> None:
        """Take up other :meth:`signed` keys of stored rows, which are in the storage already."""
        assert self._known is not None
        value = np.ascontiguousarray(as_array(key), np.float64)
        slots, groups = self._known.slots, self._known.groups.table
        relabel(slot, value, slots, groups, self.groups is not None)
        self.version = self.column.version_after_write(storage)

    # State.

    def share(self) -> None:
        """Move the ages and counters into memory that forked processes share."""
        self._counters.share_memory_()
        if self._ages is not None:
            self._ages.share_memory_()

    def counters(self) -> list[int]:
        """Return how many rows were offered, and how many written."""
        return self._counters.tolist()

    def count(self, offered: int, written: int) -> None:
        """Set how many rows were offered, which makes those to come newer, and how many written."""
        self._counters.numpy()[:] = offered, written

    def roll_back(self, counters: list[int], storage: Storage) -> None:
        """Return to counters, and read the keys anew."""
        # The rows themselves were put back before, by the lock that calls this.
        self._counters.numpy()[: len(counters)] = counters
        self.ages(storage)[len(storage) :] = UNKNOWN
        self._forget()  # it may have been left in the middle of a change

    def empty(self, storage: Storage | None, empty_write_count: bool = True) -> None:
        """Start anew, for the storage was emptied."""
        self._counters.numpy()[_OFFERED] = 0
        if storage is not None:
            self.ages(storage).fill_(UNKNOWN)
        if empty_write_count:
            self._counters.numpy()[_WRITTEN] = 0
        self._forget()

    def state(self, storage: Storage | None) -> dict[str, Any]:
        """Return the age of each row, and how many were offered and written."""
        age = torch.empty(0, dtype=torch.int64)
        if storage is not None:
            age = self.ages(storage)[: len(storage)].clone()
        offered, written = self.counters()
        return {"rank": age, "offered": offered, "written": written}

    def restore(self, storage: Storage, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned. Keys are read from the storage when needed."""
        age, known = state["rank"], self.ages(storage)
        known[: len(age)] = age
        known[len(age) :] = UNKNOWN
        self._counters.numpy()[:] = state["offered"], state["written"]
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what this process saw of the storage."""
        state = {**self.__dict__, "_memory": RowAddresses()}
        for name in ("version", "_known", "_width"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the rest, with nothing known of the storage."""
        self.__dict__.update(state)
        self._forget()


class PendingExchange(PendingWrite):
    """What has to follow an exchange, whenever an interrupt ends the call.

    Attributes:
        is_written: whether the exchange itself writes the rows.
    """

    def __init__(
        self, storage: Storage, slots: Slots, results: np.ndarray, n: int, is_written: bool
    ) -> None:
        self.storage, self.commit = storage, None
        self._slots, self._results, self._n = slots, results, n
        # Rows that others wrote were taken up before: both know the length.
        self._before, *_, self._n_calls = slots.state[: N_CALLS + 1].tolist()
        self.is_written = is_written
        self._moves: Moves | None = None

    def moves(self) -> Moves:
        """Return what the exchange changed."""
        if self._moves is not None:
            return self._moves
        length, _, n_in, n_moved, _, _, _, *n_rejected = self._slots.state.tolist()
        slot, row, target, source = self._results
        self._moves = Moves(
            slot[: self._n], row[:n_in], target[:n_in], source[:n_moved],
            target[n_in : n_in + n_moved], self._before, length, n_rejected,
        )  # fmt: skip
        return self._moves

    def changed(self) -> Int64[Tensor, "k"] | None:
        """Return the slots that hold other rows, if the exchange took place and is written."""
        # The compiled loop counts its calls at its end. An interrupt before the call leaves the
        # number as it was, and one after it does not: there is no state in between.
        if not self.is_written or int(self._slots.state[N_CALLS]) == self._n_calls:
            return None
        return torch.from_numpy(self.moves().changed)

    def _is_written(self) -> None:
        self.is_written = True


_NO_TABLE = Objects(1, 1)
