"""Store of torch by which processes find rank 0, and the key that they share."""

from __future__ import annotations

import json
import secrets
from datetime import timedelta

import torch.distributed as dist

from gfn_rb.errors import ArgumentError
from gfn_rb.transports.addresses import Card

_LOOK = 5.0  # seconds to ask the store again


class MeetingPlace:
    """The store by which processes find rank 0, and the key that they share.

    Args:
        where: as of :class:`TCPTransport`.
        rank: rank of this process; -1 for that of the environment.
        size: number of processes; -1 for that of the environment.
        patience: how long to wait for the store.
    """

    def __init__(self, where: str | dist.Store, rank: int, size: int, patience: timedelta) -> None:
        self._where = where
        if isinstance(where, str):
            where, rank, size = meet(where, rank, size, patience)
        self.rank, self.size = rank, size
        self._whole = where  # which others may still ask where this process serves it
        self._store = dist.PrefixStore("gfn_rb", where)

    def __str__(self) -> str:
        """Return what it is, in words."""
        return repr(self._where) if isinstance(self._where, str) else f"its store at {self.host}"

    @property
    def host(self) -> str:
        """Host of the store; "" if it has none."""
        store = self._whole
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return str(store.host) if isinstance(store, dist.TCPStore) else ""

    def open(self, card: Card) -> tuple[bytes, bool]:
        """Set the key and the card of rank 0; return the key, and whether it was there already."""
        is_there = bool(self._store.check(["key"]))
        self._store.set("at/0", json.dumps(card._asdict()))
        if not is_there:
            self._store.set("key", secrets.token_hex(32))
        return self._store.get("key"), is_there

    def look(self, patience: timedelta) -> tuple[bytes, Card]:
        """Wait for the key and the card of rank 0."""
        self._store.wait(["key", "at/0"], patience)
        return self._store.get("key"), Card.of(json.loads(self._store.get("at/0")))

    def look_again(self) -> tuple[bytes, Card]:
        """Return the key and the card of rank 0, also of a store that rank 0 serves anew."""
        try:
            return self.look(timedelta(seconds=_LOOK))
        except RuntimeError:
            if not isinstance(self._where, str) or not self.host:
                raise
            again = meet(self._where, self.rank, self.size, timedelta(seconds=_LOOK))
            self._whole = again[0]
            self._store = dist.PrefixStore("gfn_rb", self._whole)
            return self.look(timedelta(seconds=_LOOK))


def meet(where: str, rank: int, size: int, patience: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store that all processes share, and rank and size."""
    try:
        return next(dist.rendezvous(where, rank, size, timeout=patience))
    except (ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"where is {where!r}, by which rank {rank} of {size} did not find the others: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
