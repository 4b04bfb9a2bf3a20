"""Batches that are written as they come: one look at their entries, then one compiled call."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor
from torch.autograd.graph import increment_version
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb import torchrl_compat as compat
from gfn_rb.kernels.exchange import (
    LENGTH,
    N_CALLS,
    N_IN,
    N_MOVED,
    N_REJECTED,
    N_RESULTS,
    N_TWINS,
    NO_SLOT,
    SLOT_OF,
    TARGET,
)
from gfn_rb.numerics.flat import on_host
from gfn_rb.shapes import Int64, Rows
from gfn_rb.storages.sharing import PendingWrite, begin
from gfn_rb.writers.addresses import NO_SLOTS
from gfn_rb.writers.exchange import NO_ROWS, RowExchange
from gfn_rb.writers.features import Features


class DirectWrite(PendingWrite):
    """Writes batches for which nothing has to be converted, looked up or recorded first.

    These are TensorDicts with the entries, dtypes and shapes of the storage, on the host as it is,
    whose keys are floats, where no other code has written since the last call. All other batches,
    and those with something wrong, go by :meth:`RowExchange.offer`. It has the same effect, in
    three times as many steps.

    Args:
        exchange: what is known of the rows.
    """

    def __init__(self, exchange: RowExchange) -> None:
        self.commit = None
        self._exchange = exchange
        self._state = memoryview(b"")
        self._columns: Any = None  # of the storage, when its entries were looked up
        self._rules = exchange.rules(is_signed=False)
        self._runs_user_code = False  # to read what is compared
        self._objects: NestedKey | None = None  # an entry that is compared as it is
        self._groups: NestedKey | None = None
        self._make_room(64)

    def _make_room(self, n: int) -> None:
        """Have memory for the results of a call, which the next one overwrites."""
        self._results = torch.empty(N_RESULTS, n, dtype=torch.int64)
        self._slots, self._target = self._results[SLOT_OF].numpy(), self._results[TARGET].numpy()

    def _look_up(self, storage: Storage) -> None:
        """Look up what is compared in the entries of a storage."""
        exchange, columns = self._exchange, compat.all_slots(storage)
        stored = compat.plain_entries(columns) or {}
        self._objects, self._groups = (
            None if each is None else each.same_entry(stored)
            for each in (exchange.objects, exchange.groups)
        )
        self._runs_user_code = any(
            each is not None and callable(each.source)
            for each in (exchange.objects, exchange.groups)
        )
        self._rules = exchange.rules(is_signed=False)
        self._columns = columns

    def write(
        self, storage: Storage, data: Rows, rejected: dict[str, int]
    ) -> Int64[Tensor, "n"] | None:
        """Offer a batch.

        Args:
            storage: the storage, in a block of :class:`whole_write`.
            data: the batch, as it came.
            rejected: numbers of rejected rows by reason, to which those of the batch are added.

        Returns:
            One slot per row, -1 for a rejected row; None, with nothing changed, if the batch has to
            go the other way.
        """
        exchange = self._exchange
        known = exchange.known(storage)
        if known is None or type(data) is not TensorDict or len(data.batch_size) != 1:
            return None
        if compat.all_slots(storage) is not self._columns:
            self._look_up(storage)
        n, key, put = len(data), exchange.column.floats_of(data), exchange.addresses(storage, data)
        if key is None or put is NO_SLOTS or n == 0:
            return None
        objects = _columns(exchange.objects, self._objects, data)
        groups = _columns(exchange.groups, self._groups, data)
        if objects.shape[1] != known.objects.width or groups.shape[1] != known.groups.width:
            return None
        if self._runs_user_code:  # which may have changed the batch, or the storage
            put = exchange.addresses(storage, data)
            if exchange.known(storage) is not known or put is NO_SLOTS or len(data) != n:
                return None
        self.storage, self._state = storage, (state := known.state)
        before, self._n_calls = state[LENGTH], state[N_CALLS]
        if len(self._slots) < (size := 2 * n + state[N_TWINS]):
            self._make_room(2 * size)
        self._slots[:n] = NO_SLOT
        # Before the call: by the number of calls, the next use of the storage finds out whether an
        # interrupt came before or after it.
        begin(self)
        results = self._results
        n_in = known.exchange(key, objects, groups, self._rules, NO_SLOTS, results, put)
        if n_in < 0:  # nothing was changed: the other way says why
            return None
        increment_version(exchange.written_tensors)
        self.finish()
        exchange.take_over(storage)
        if n_in < n:
            for reason, count in zip(rejected, state[N_REJECTED:], strict=True):
                rejected[reason] += count
        elif state[LENGTH] > before:
            compat.set_last_cursor(storage, int(self._target[n - 1]))
        return torch.from_numpy(self._slots[:n].copy())

    def changed(self) -> Int64[Tensor, "k"] | None:
        """Return the slots that hold other rows, if the exchange took place."""
        if self._state[N_CALLS] == self._n_calls:
            return None
        n = self._state[N_IN] + self._state[N_MOVED]
        return torch.from_numpy(self._target[:n].copy())

    def __reduce__(self) -> tuple[Any, ...]:
        """Start anew in a copy, and in another process."""
        return DirectWrite, (self._exchange,)


def _columns(
    features: Features | None, entry: NestedKey | None, data: Rows
) -> Int64[Tensor, "n d"]:
    """Return what rows are compared by; ``entry`` names one that is taken as it is."""
    if features is None:
        return NO_ROWS
    columns = on_host(features(data))[0] if entry is None else compat.entry_of(data, entry)
    return cast(Tensor, columns).resolve_neg().contiguous()
