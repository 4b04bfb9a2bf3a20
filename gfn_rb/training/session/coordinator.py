"""What the ranks of a run tell each other: where it is, how they stand, and what they found."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gfn_rb.errors import GfnRbError, PeerLostError, TransportError
from gfn_rb.remote.protocol.channel import FrameChannel, Message
from gfn_rb.remote.protocol.roles import RankRoles
from gfn_rb.shapes import Int64
from gfn_rb.training.trainer import Row, Trainer
from gfn_rb.transports import Transport

log = logging.getLogger(__name__)

TEAM_TAG = 21
_EVERY = 0.5  # seconds between news of one rank
_STRETCH = 0.1  # seconds between looks at whether this rank is to stop
_MODES = "mode"


class _Kind(IntEnum):
    BEGIN = 101  # rank 0: the folder of the run
    REFUSED = 102  # rank 0: there is none
    NEWS = 103  # worker: counts
    FOUND = 104  # worker: its last row, and the modes it found


class Found:
    """What a rank did in a run.

    Attributes:
        row: what it measured last.
        exchange: counters of what it sent and was fed; nothing where there is no manager.
        modes: keys of the modes it found.
    """

    def __init__(self, row: Row, exchange: dict[str, Any], modes: Int64[Tensor, "m"]) -> None:
        self.row, self.exchange, self.modes = row, exchange, modes


class RefusedError(GfnRbError):
    """Rank 0 has already said why there will be no run."""


class Team:
    """The ranks of a run, each with the same view of who does what.

    Args:
        transport: between the ranks.
        layout: the roles of all.
        patience: seconds of silence after which a rank counts as lost.

    Attributes:
        found: what each training rank found, as far as rank 0 was told.
        lost: why ranks count as lost.
    """

    def __init__(self, transport: Transport, layout: RankRoles, patience: float) -> None:
        self.layout = layout
        self.found: dict[int, Found] = {}
        self.lost: dict[int, str] = {}
        self._transport, self._patience = transport, patience
        self._link = FrameChannel(transport)
        self._news: dict[int, dict[str, int]] = {}
        self._heard = dict.fromkeys(layout.workers[1:], time.monotonic())
        self._next = 0.0

    # Beginning together.

    def agree(self, prepare: Callable[[], Path]) -> Path:
        """Return the folder of the run, which rank 0 prepares and tells the others.

        Args:
            prepare: returns the folder, or raises.

        Raises:
            RefusedError: it could not be prepared, on another rank than 0.
        """
        if self._transport.rank:
            return self._told()
        try:
            path = prepare()
        except BaseException as error:
            self._tell_all(_Kind.REFUSED, {"why": str(error)})
            raise
        self._tell_all(_Kind.BEGIN, {"path": str(path.resolve())})
        return path

    def _told(self) -> Path:
        parcel = self._link.receive(0, TEAM_TAG, self._patience)
        if parcel is None:
            raise TransportError(f"rank 0 named no run folder within {self._patience:g} s")
        if parcel.error is not None:
            raise parcel.error
        if parcel.kind != _Kind.BEGIN:
            raise RefusedError(str(parcel.meta.get("why")))
        return Path(parcel.meta["path"])

    def _tell_all(self, kind: _Kind, meta: dict[str, Any]) -> None:
        for rank in range(1, self.layout.size):
            self._link.send(rank, TEAM_TAG, kind, meta)

    # On the way.

    def stepped(self, trainer: Trainer) -> None:
        """Tell rank 0 how this rank stands, or, there, take note of the others, now and then.

        Args:
            trainer: of this rank.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        if self._transport.rank:
            tally = trainer.discovery
            self._post(_Kind.NEWS, {"calls": tally.calls, "modes": tally.modes_found})
        else:
            self.look()

    def look(self) -> None:
        """Take note of what other ranks have told."""
        for rank in self.training_elsewhere():
            try:
                while parcel := self._link.receive(rank, TEAM_TAG):
                    self._hear(parcel)
            except PeerLostError as error:
                if rank not in self.found:
                    self._lose(rank, error.reason)

    def progress(self, trainer: Trainer, loss: float) -> str:
        """Return how the training of all ranks stands, in a few words.

        Args:
            trainer: of this rank.
            loss: its newest.
        """
        tally, n_modes = trainer.discovery, trainer.env.n_modes
        others = [self._news.get(rank, {}) for rank in self.layout.workers[1:]]
        modes = "|".join(str(n) for n in (tally.modes_found, *(o.get("modes", 0) for o in others)))
        calls = tally.calls + sum(each.get("calls", 0) for each in others)
        lost = f", lost ranks {[*self.lost]}" if self.lost else ""
        return (
            f"loss {loss:.3f}, modes {modes}{f' of {n_modes}' if n_modes else ''}, "
            f"{calls:,} reward calls{lost}"
        )

    def training_elsewhere(self) -> list[int]:
        """Return the other ranks that still train, as far as rank 0 knows."""
        gone = {*self.lost, *self.found}
        return [rank for rank in self.layout.workers[1:] if rank not in gone]

    # Ending together.

    def finish(self, found: Found, stopped: Callable[[], bool] = lambda: False) -> None:
        """Tell rank 0 what this rank found; on rank 0, wait for what the others found.

        Args:
            found: on this rank.
            stopped: whether this rank was told to stop. Then it waits for nobody: rank 0 does
                without those that still train.
        """
        self.found[self._transport.rank] = found
        if self._transport.rank:
            meta = {"row": found.row, "exchange": found.exchange}
            modes = TensorDict({_MODES: found.modes.cpu()}, [len(found.modes)])
            self._post(_Kind.FOUND, meta, modes if len(modes) else None)
            end = time.monotonic() + self._patience
            while self._link.flush(_STRETCH) and not stopped() and time.monotonic() < end:
                pass
            return
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        while waiting := self.training_elsewhere():
            self.look()
            for rank in waiting:
                if stopped():
                    self._lose(rank, "rank 0 was told to stop waiting for it")
                elif time.monotonic() - self._heard[rank] > self._patience:
                    self._lose(rank, f"it has been silent for {self._patience:g} s")
            time.sleep(0.01)

    def modes_found(self) -> int:
        """Return how many different modes all ranks found together."""
        return len(torch.cat([found.modes.cpu() for found in self.found.values()]).unique())

    # Messages.

    def _post(self, kind: _Kind, meta: dict[str, Any], rows: TensorDict | None = None) -> None:
        if 0 in self.lost:
            return
        try:
            self._link.send(0, TEAM_TAG, kind, meta, rows)
        except PeerLostError as error:
            self._lose(0, error.reason)

    def _hear(self, parcel: Message) -> None:
        rank = parcel.source
        self._heard[rank] = time.monotonic()
        if parcel.error is not None:
            log.warning("rank 0: cannot read what rank %d sent: %s", rank, parcel.error)
        elif parcel.kind == _Kind.NEWS:
            self._news[rank] = parcel.meta
        elif parcel.kind == _Kind.FOUND:
            rows = parcel.rows
            modes = torch.zeros(0, dtype=torch.int64) if rows is None else rows.get(_MODES).clone()
            self.found[rank] = Found(parcel.meta["row"], parcel.meta["exchange"], modes)

    def _lose(self, rank: int, why: str) -> None:
        if rank in self.lost:
            return
        self.lost[rank] = why
        log.warning("rank %d: goes on without rank %d: %s", self._transport.rank, rank, why)
