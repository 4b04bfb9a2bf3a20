"""Feeding of workers by a manager: the objects that it holds, and the next ones of each worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.storages import Storage, TensorStorage

from gfn_rb.arguments import require_choice
from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.containers.objects import ObjectsInRows, objects_in
from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.kernels.exchange import compile_exchange
from gfn_rb.kernels.objects import Hashed, Objects
from gfn_rb.kernels.weights import gumbel_like
from gfn_rb.keys import INDEX, LOG_REWARD, N_USES
from gfn_rb.remote.records import ChangeLog, RankFlags
from gfn_rb.shapes import Bool, Float64, Int64
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.tensors import EncodedStorage
from gfn_rb.torchrl_compat import all_slots, generator_of, length_of
from gfn_rb.writers.rows import select_rows

_CHUNK = 8192  # compact or ragged rows made whole at a time: all may be larger than memory


@cache
def compile_loops() -> None:
    """Compile the loops of exchanges, or read them from disk, before a peer waits for an answer.

    A machine that has not compiled them needs several seconds, and a timeout may be shorter.
    """
    compile_exchange()
    slot, objects = np.arange(1), Objects(64, 1)
    objects.put(slot, objects.look_up(slot[:, None])[0])


class Candidates(NamedTuple):
    """Rows that may be given, and all slots that changed; None for perhaps all."""

    changed: Int64[np.ndarray, "m"] | None
    slot: Int64[np.ndarray, "n"]
    number: Int64[np.ndarray, "n"]
    log_reward: Float64[np.ndarray, "n"]
    arrival: Int64[np.ndarray, "n"]


class ObjectIndex:
    """The different objects in the rows of a storage, by number; rows of one share its number.

    Rows that were announced as written, moved or restored are read again. What is known of an
    object moves with it from row to row, and ends when it leaves the storage. A row that stands for
    no whole object has a number of its own that nothing finds.
    Objects are compared whole: hashes alone decide nothing.
    """

    def __init__(self, rb: ReplayBuffer, n_ranks: int = 0) -> None:
        is_plain = isinstance(rb.storage, TensorStorage) and rb.storage.ndim == 1
        if not is_plain:
            raise ArgumentError(
                "buffer cannot be followed: its storage must be a TensorStorage with ndim=1, got "
                f"{type(rb.storage).__name__} with ndim={rb.storage.ndim}"
            )
        self.storage: Storage = rb.storage
        self.encoded = rb.storage if isinstance(rb.storage, EncodedStorage) else None
        n = rb.storage.max_size
        self.number = np.full(n, -1)  # of the object in each row, -1 for an empty one
        self.arrival = np.zeros(n, np.int64)  # by number; it grows with each arrival
        self.sent = RankFlags(n, n_ranks)  # by number and rank, whether it came from there
        self.given = RankFlags(n, n_ranks)  # whether it was given to the rank
        self.changes = ChangeLog(max(n // 4, 1))
        self._candidates: tuple[int, int | None, Candidates] | None = None  # found last
        self.subscribers: dict[int, Subscriber] = {}  # by rank
        self._own = (INDEX,) if getattr(rb, "use_limit", None) is None else (INDEX, N_USES)
        self._compact = compact_rows_of(rb)
        self._length = 0
        self._column = KeyColumn(LOG_REWARD)
        self._objects = Objects(n, 1)  # by number
        self._n_rows = np.zeros(n, np.int64)  # by number, how many rows hold it
        self._unused = np.arange(n - 1, -1, -1)  # a stack
        self._n_unused = n
        self.n_arrived = 0
        generator = generator_of(rb)
        on_cpu = generator is not None and generator.device.type == "cpu"  # as are the choices
        self.generator = generator if on_cpu else None
        self.storage.attach(self)

    # Following the storage.

    def mark_update(self, index: int | Tensor) -> None:
        """Record that rows were written: TorchRL's call to what is attached to a storage."""
        if self.storage.initialized:
            self._column.announce(self.storage, torch.as_tensor(index, dtype=torch.int64).cpu())

    def refresh(self) -> Int64[Tensor, "m"]:
        """Bring the objects up to date with the storage, and return the rows read again."""
        length, rows = length_of(self.storage), np.empty(0, np.int64)
        emptied = np.arange(length, self._length)
        if self.storage.initialized:
            if len(emptied):
                self._column.forget()
            changed = self._column.changed(self.storage)
            if changed is None:
                rows = np.arange(length)
            elif len(changed):
                rows = np.unique(changed.numpy())
        if len(rows) or len(emptied):
            try:
                objects = self._read_objects(torch.from_numpy(rows))
            except Exception:
                self._column.forget()
                raise
            left = self.number[np.concatenate([rows, emptied])]
            self.number[emptied] = -1
            self.number[rows] = self._replace(left[left >= 0], objects)
            self._length = length
            self.changes.note(rows)
        return torch.from_numpy(rows)

    def read(self, rows: Int64[Tensor, "m"], max_nbytes: int | None = None) -> TensorDictBase:
        """Return copies of rows on the CPU as they came, whole where they are stored compact."""
        if self.encoded is not None:
            stored = self.encoded.padded_rows(rows).exclude(INDEX)
        else:
            stored = select_rows(all_slots(self.storage), rows, but=self._own)
        if torch.device(self.storage.device).type != "cpu":
            stored = stored.cpu()
        if self._compact is None:
            return stored
        if max_nbytes is not None:
            self._compact.check_size(stored, max_nbytes)
        return self._compact.forward(stored)

    def candidates(self, seen: int | None) -> Candidates:
        """Return what may be given of the rows that changed after so many changes, or of all.

        Workers that are fed one after another share what is found.
        """
        known, total = self._candidates, self.changes.total
        if known is not None and known[:2] == (total, seen):
            return known[2]
        changed = None if seen is None else self.changes.since(seen)
        length = length_of(self.storage)
        if changed is None:
            slot = np.arange(length)
        else:
            changed = np.unique(changed)
            slot = changed[changed < length]  # others were emptied since
        values = self._column.values(self.storage)[torch.from_numpy(slot)]
        log_reward: np.ndarray = values.cpu().to(torch.float64).numpy()
        if not (may_come := log_reward > -math.inf).all():  # no weight is never given
            slot, log_reward = slot[may_come], log_reward[may_come]
        number = self.number[slot]
        found = Candidates(changed, slot, number, log_reward, self.arrival[number])
        self._candidates = total, seen, found
        return found

    def _read_objects(self, rows: Int64[Tensor, "m"]) -> ObjectsInRows:
        if self._compact is None and self.encoded is None:
            return objects_in(all_slots(self.storage), rows)
        parts = rows.split(_CHUNK) if len(rows) else ()
        found = [objects_in(self.read(part)) for part in parts]
        at = [i * _CHUNK + each.at for i, each in enumerate(found)]
        columns = [each.columns for each in found] or [np.zeros((0, 0), np.int64)]
        return ObjectsInRows(len(rows), np.concatenate([rows[:0], *at]), np.concatenate(columns))

    # Finding.

    @property
    def has_twins(self) -> bool:
        """Whether several rows hold one object."""
        return self._n_unused > len(self.number) - self._length

    def find(self, objects: ObjectsInRows) -> Int64[np.ndarray, "n"]:
        """Return the numbers of objects as of the last refresh, -1 for those not known."""
        return look_up(self._objects, objects)[1]

    def look_up(
        self, objects: ObjectsInRows
    ) -> tuple[Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
        """Return the numbers that :meth:`find` does, and where each object comes first in rows."""
        _, number, first = look_up(self._objects, objects)
        return number, first

    # Numbers.

    def _replace(self, left: np.ndarray, objects: ObjectsInRows) -> Int64[np.ndarray, "m"]:
        """Return the numbers of objects that rows hold now; one that moves keeps its number."""
        hashed, number, first = look_up(self._objects, objects)
        is_new = number < 0
        # What enters counts before what left is forgotten: an object that only moves is both.
        np.add.at(self._n_rows, left, -1)
        np.add.at(self._n_rows, number[~is_new], 1)
        if len(left):  # numbers that no row has are used again
            gone = np.unique(left[self._n_rows[left] == 0])
            self._unused[self._n_unused : self._n_unused + len(gone)] = gone
            self._n_unused += len(gone)
            self._objects.remove(gone)
        entering = (is_new & (first == np.arange(objects.n))).nonzero()[0]
        if n_new := len(entering):
            self._n_unused -= n_new
            new = self._unused[self._n_unused : self._n_unused + n_new][::-1].copy()
            self.sent.clear(new)
            self.given.clear(new)
            self.arrival[new] = np.arange(self.n_arrived, self.n_arrived + n_new)
            self.n_arrived += n_new
            number[entering] = new
        if len(objects.at) < objects.n:  # others are no whole objects, and cannot be found
            which = np.isin(objects.at, entering).nonzero()[0]
            self._name(number[objects.at[which]], hashed.select(which))
        elif n_new:
            self._name(new, hashed if n_new == objects.n else hashed.select(entering))
        number = number[first]
        np.add.at(self._n_rows, number[is_new], 1)
        return number

    def _name(self, number: Int64[np.ndarray, "k"], hashed: Hashed) -> None:
        """Let numbers be found by their objects."""
        width = hashed.rows.shape[1]
        if self._objects.width != width:  # of a storage that is laid out, or was laid out anew
            self._objects = Objects(len(self.number), width)
            hashed = self._objects.hashed(hashed.rows)
        self._objects.put(number, hashed)

    # State.

    def subscribe(self, rank: int, terms: Any) -> None:
        """Feed a worker from now on."""
        self.subscribers[rank] = Subscriber(rank, terms, self)

    def state_dict(self) -> dict[str, Any]:
        """Return, row by row, what the storage does not hold, and the subscribers."""
        self.refresh()
        number = self.number[: length_of(self.storage)]
        rows = {
            "sent": torch.from_numpy(self.sent.packed[number]),
            "given": torch.from_numpy(self.given.packed[number]),
            "arrival": torch.from_numpy(self.arrival[number]),
            "n_arrived": self.n_arrived,
        }
        terms = {}
        for rank, each in self.subscribers.items():
            each.forget()  # as one that is restored has no plan either, and draws one
            terms[str(rank)] = each.terms
        return {"index": rows, "subscribers": terms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned, over a storage restored to that moment."""
        state, subscribers = state["index"], state["subscribers"]
        n, came = length_of(self.storage), len(state["arrival"])
        if came != n:
            raise CheckpointMismatchError(f"index of {came} rows, expected {n} as are stored")
        self._column.forget()
        self.refresh()
        number = self.number[:n]
        self.sent.load(number, state["sent"])
        self.given.load(number, state["given"])
        self.arrival[number] = state["arrival"].numpy()
        self.n_arrived = state["n_arrived"]
        self.subscribers = {}
        for rank, terms in subscribers.items():
            self.subscribe(int(rank), {**terms, "fresh": False})


def look_up(
    held: Objects, objects: ObjectsInRows
) -> tuple[Hashed, Int64[np.ndarray, "n"], Int64[np.ndarray, "n"]]:
    """Return the slot of each row's object, -1 for none, and where the object comes first in rows.

    A row that stands for no whole object is like no other. The whole ones come hashed, too.
    """
    columns, at = objects.columns, objects.at
    if held.width != columns.shape[1]:  # objects of another layout are unknown
        held = Objects(1, columns.shape[1])
    hashed, found, twins = held.look_up(columns)
    if len(at) == objects.n:
        return hashed, found, twins
    slot, first = np.full(objects.n, -1), np.arange(objects.n)
    slot[at], first[at] = found, at[twins]
    return hashed, slot, first


MAX_QUOTA = 4096  # rows that are fed at a time
# Highest log-reward first, of equal ones the newest; draws without replacement in proportion to
# exp(log-reward); the last that arrived first.
POLICIES = ("top", "softmax", "newest")


def require_terms(quota: Any, policy: Any, own: Any) -> dict[str, Any]:
    """Return the terms of a subscription by name, or raise unless they can be met."""
    if type(own) is not bool:
        raise ArgumentError(f"own must be true or false, got {own!r:.80}")
    if type(quota) is not int or not 1 <= quota <= MAX_QUOTA:
        raise ArgumentError(f"quota must be an integer from 1 to {MAX_QUOTA}, got {quota!r:.80}")
    require_choice("policy", policy, POLICIES)
    return {"quota": quota, "policy": policy, "own": own}


_MOST_PLANNED = 1024  # rows of a plan: 12 bytes each, for every subscriber


class Subscriber:
    """A worker that a manager feeds, and a short plan of the rows that it may be given next.

    The plan has the first rows, in order, of all that the worker does not know; every other such
    row comes after the last one planned. Rows that changed since the last reply join the plan, or
    leave it. Only a plan that runs out is made anew, from all rows. Memory for a subscriber
    therefore hardly grows with the buffer, and most replies take as long from a large buffer as
    from a small one.

    Under ``"softmax"``, a row of weight w arrives after an exponential time of rate w. The order of
    arrivals has the law of draws without replacement. The time that is left until an arrival has
    the law of a new one (it has no memory), so a row that changes, and a new plan, draw anew.
    """

    def __init__(self, rank: int, terms: Any, index: ObjectIndex) -> None:
        if not isinstance(terms, Mapping):
            raise ArgumentError(f"subscription must be terms by name, got {terms!r:.80}")
        # Only the terms that are understood: they are saved, and others may be of any size.
        self.terms = require_terms(terms.get("quota"), terms.get("policy"), terms.get("own", False))
        self.rank, self._index, n = rank, index, index.storage.max_size
        self._most_planned = min(max(n // 32, 8), _MOST_PLANNED)
        self.forget()
        if terms.get("fresh"):  # it starts anew, without the rows that it was given
            index.given.clear_rank(rank)

    def forget(self) -> None:
        """Make the next reply plan anew."""
        self._seen: int | None = None  # changes of the index that the plan knows of
        self._plan = np.empty(0, np.int32)  # slots in order
        self._key = np.empty(0)  # what they are ordered by; of a draw, the log of the time left
        self._last: tuple[float, int] | None = None  # key and tie of the last; None if all are in

    def next(self, quota: int | None = None) -> TensorDictBase | None:
        """Return the next rows, at most ``quota`` or those of the terms; record them as given."""
        index, most = self._index, self.terms["quota"] if quota is None else min(quota, MAX_QUOTA)
        if not most or not index.storage.initialized:
            return None
        index.refresh()
        seen, self._seen = self._seen, None  # if this fails, the next reply plans anew
        if seen != index.changes.total:
            self._update(index.candidates(seen))
        picked = self._take(most)
        while len(picked) < most and self._last is not None:
            self._update(index.candidates(None))
            picked = np.concatenate([picked, self._take(most - len(picked))])
        self._seen = index.changes.total
        return index.read(torch.from_numpy(picked)) if len(picked) else None

    def _update(self, found: Candidates) -> None:
        """Plan rows that changed, in place of what they were."""
        changed, plan, most = found.changed, self._plan, self._most_planned
        if changed is None:
            self._plan, self._key, self._last = plan[:0], self._key[:0], None
        elif len(changed):
            nearest = changed.searchsorted(plan).clip(max=len(changed) - 1)
            is_same = changed[nearest] != plan
            self._plan, self._key = plan[is_same], self._key[is_same]
        if self.terms["policy"] == "softmax":
            weight = torch.from_numpy(found.log_reward)
            key = -(weight + gumbel_like(weight, self._index.generator)).numpy()
        else:
            key = -(found.log_reward if self.terms["policy"] == "top" else found.arrival)
        tie = found.slot - found.arrival * self._index.storage.max_size
        if self._last is None:
            at = np.arange(len(key))
        else:
            last, last_tie = self._last
            at = ((key < last) | ((key == last) & (tie <= last_tie))).nonzero()[0]
        at = at[~self._is_known(found.number[at])]
        if changed is not None and len(at) > (enough := 8 * self.terms["quota"]):
            most = min(most, enough)  # more of them will have come before all of these are given
        if len(at):
            self._insert(found.slot[at], key[at].astype(np.float64), tie[at], most)

    def _insert(
        self,
        slot: Int64[np.ndarray, "m"],
        key: Float64[np.ndarray, "m"],
        tie: Int64[np.ndarray, "m"],
        most: int,
    ) -> None:
        """Insert rows into the plan, which keeps the first rows, at most so many."""
        index, plan = self._index, self._plan
        plan_tie = plan - index.arrival[index.number[plan]] * index.storage.max_size
        slot, key = np.concatenate([plan, slot]), np.concatenate([self._key, key])
        tie = np.concatenate([plan_tie, tie])
        is_cut = len(slot) > most
        if is_cut:
            first = _first(key, tie, most)
            slot, key, tie = slot[first], key[first], tie[first]
        order = np.lexsort((tie, key))
        if is_cut:
            self._last = float(key[order[-1]]), int(tie[order[-1]])
        self._plan, self._key = slot[order].astype(np.int32), key[order]

    def _take(self, n: int) -> Int64[np.ndarray, "k"]:
        """Take the next n rows out of the plan, or all there are, and record them as given."""
        index, plan = self._index, self._plan
        # Slots may have been emptied, and the worker may have sent objects since.
        at = (plan < length_of(index.storage)).nonzero()[0]
        at = at[~self._is_known(index.number[plan[at]])]
        if index.has_twins:  # each object once
            at = at[np.sort(np.unique(index.number[plan[at]], return_index=True)[1])]
        at = at[:n]
        picked, end = plan[at].astype(np.int64), at[-1] + 1 if len(at) == n else len(plan)
        if self.terms["policy"] == "softmax" and 0 < end < len(plan):
            now, left = self._key[end - 1], self._key[end:]
            self._key[end:] = _time_left(left, now)
            if self._last is not None:
                self._last = float(_time_left(np.array(self._last[0]), now)), self._last[1]
        self._plan, self._key = plan[end:], self._key[end:]
        index.given.add(index.number[picked], self.rank)
        return picked

    def _is_known(self, number: Int64[np.ndarray, "m"]) -> Bool[np.ndarray, "m"]:
        """Return which objects the worker was given or, unless it wants its own, sent."""
        known = self._index.given.has(number, self.rank)
        return known if self.terms["own"] else known | self._index.sent.has(number, self.rank)


def _first(
    key: Float64[np.ndarray, "n"], tie: Int64[np.ndarray, "n"], m: int
) -> Int64[np.ndarray, "m"]:
    """Return where the first m in the order of key and tie are, in any order."""
    last = key[key.argpartition(m - 1)[m - 1]]
    before, equal = (key < last).nonzero()[0], (key == last).nonzero()[0]
    n = m - len(before)
    if n < len(equal):
        equal = equal[tie[equal].argpartition(n - 1)[:n]]
    return np.concatenate([before, equal])


def _time_left(log_time: np.ndarray, now: float) -> np.ndarray:
    """Return the logs of what is left of times at a moment that is not after them."""
    with np.errstate(divide="ignore", invalid="ignore"):  # nothing left, and two times of zero
        left = log_time + np.log1p(-np.exp(now - log_time))
    return np.where(log_time > now, left, -math.inf)
