"""What the ranks of a run tell each other: their progress, their results, and that it is over."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from gfn_rb.errors import PeerLostError, WorkerError
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.ownership import RankRoles
from gfn_rb.shapes import Int64
from gfn_rb.training.trainer import Row, Trainer
from gfn_rb.transports import Transport
from gfn_rb.transports.deadline import Deadline, ShutdownBudget

log = logging.getLogger(__name__)

COORDINATION_TAG = 21
_EVERY = 0.5  # seconds between two progress messages of a rank


class _RunKind(IntEnum):
    ALIVE = 101  # the counts of a worker; none to a rank that has sent its result, and waits
    RESULT = 102  # worker: its last row, and the modes it found; manager: that it is done
    END = 103  # the run is over; which ranks are not counted in it


class RankResult(NamedTuple):
    """What a rank did in a run."""

    row: Row
    counters: dict[str, Any]
    modes: Int64[Tensor, "m"]


class RankCoordinator:
    """Tells the rank that reports what the others do, and them when the run is over.

    The lowest rank that trains and is not lost reports: as a rule rank 0. Who is done tells it so,
    and stays until the run is over; meanwhile it hears from the one that reports, or else tells
    the next one. Who was lost and comes back before that is counted again.
    """

    def __init__(
        self,
        transport: Transport,
        roles: RankRoles,
        silence: float,
        shutdown: ShutdownBudget | None = None,
        manager_silence: float | None = None,
    ) -> None:
        self.roles = roles
        rank, first = transport.rank, roles.workers[0]
        self._silence = silence if rank == first else 2 * silence
        self._manager_silence = silence if manager_silence is None else manager_silence
        self._others = [r for r in range(roles.size) if r != rank]
        self.peers = Membership(set(roles.workers) - {rank}, self._silence)
        self.managers = Membership(set(roles.managers) - {rank}, self._manager_silence)
        self.results: dict[int, RankResult] = {}
        self.unwritten: dict[int, list[str]] = {}
        self._rank, self._transport, self._shutdown = rank, transport, shutdown
        self._channel = FrameChannel(transport)
        self._progress: dict[int, dict[str, int]] = {}
        self._waiting: set[int] = set()  # done, and waiting for the end
        self._told: int | None = None  # who reports, as far as this rank has told its result
        self._have_trained = False  # all ranks, as far as they are not lost
        self._has_ended = False  # the run, as this rank was told
        self._given_up: str | None = None  # why it has ended without this rank
        self._next = self._next_alive = 0.0

    @property
    def reporting(self) -> int | None:
        """The rank that reports, None if all that train are lost."""
        lost = self.peers.lost
        return next((rank for rank in self.roles.workers if rank not in lost), None)

    @property
    def lost(self) -> dict[int, str]:
        """Why ranks are lost, by rank, ascending."""
        return dict(sorted({**self.peers.lost, **self.managers.lost}.items()))

    def report_progress(self, trainer: Trainer) -> None:
        """Tell the rank that reports the counts of this one, and hear from others, now and then."""
        # A step may take a millisecond, and ranks listen only between their own.
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        self.poll()
        self._check_counted()
        counts, reporting = trainer.discovery, self.reporting
        if reporting != self._rank:
            meta = {"calls": counts.calls, "modes": counts.modes_found}
            self._send(reporting, _RunKind.ALIVE, meta)

    def poll(self) -> None:
        """Receive all that other ranks have sent, and tell those that are done to wait on."""
        for rank in self._others:
            try:
                while message := self._channel.receive(rank, COORDINATION_TAG):
                    self._handle(message)
                    if self._has_ended:
                        return
            except PeerLostError as error:
                self.lose(rank, error.reason)
        now = time.monotonic()
        if now >= self._next_alive:
            self._next_alive = now + _EVERY
            for rank in self._waiting:
                self._send(rank, _RunKind.ALIVE)

    def lose(self, rank: int, why: str) -> None:
        """Go on without a rank; one that is done, or lost already, is passed over."""
        reporting = self.reporting
        is_new = [each.leave(rank, LOST, why) for each in (self.peers, self.managers)]
        if any(is_new) and reporting in (rank, self._rank):
            log.warning("rank %d: has lost rank %d: %s", self._rank, rank, why)

    def describe(self, trainer: Trainer, loss: float) -> str:
        """Return the progress of all ranks, in a few words; trainer and loss are of this one."""
        counts, n_modes = trainer.discovery, trainer.env.n_modes
        others = [self._progress.get(r, {}) for r in self.roles.workers if r != self._rank]
        modes = "|".join(str(n) for n in (counts.modes_found, *(o.get("modes", 0) for o in others)))
        calls = counts.calls + sum(each.get("calls", 0) for each in others)
        lost = f", lost ranks {[*self.lost]}" if self.lost else ""
        return (
            f"modes {modes}{f' of {n_modes}' if n_modes else ''}, {calls:,} reward calls{lost}, "
            f"loss {loss:.3f}"
        )

    def modes_found(self) -> int:
        """Return how many different modes all ranks found together."""
        return len(torch.cat([each.modes.cpu() for each in self.results.values()]).unique())

    # The end.

    def gather(self, result: RankResult | None = None) -> bool:
        """Wait until all others are done; on other ranks than the one that reports, for the end."""
        if result is not None:
            self.results[self._rank] = result
        # Those that train may be far behind: only silence tells that one is lost, which counts from
        # now on, as this rank had better things to do than listen.
        Deadline(math.inf, self._shutdown).wait(lambda seconds: self._is_over(result, seconds))
        self._check_counted()
        if self.reporting != self._rank or self._has_ended:
            return False
        for rank in (*self.peers.present, *self.managers.present):
            self.lose(rank, f"rank {self._rank} was told to stop waiting for it")
        return True

    def end(self) -> tuple[int, ...]:
        """Tell all others that the run is over, and wait until they have left."""
        lost, transport = self.lost, self._transport
        meta = {"lost": {str(rank): why for rank, why in lost.items()}}
        for rank in self._others:
            # A manager that is not done would take it for something that a worker sent.
            if rank in self.peers or rank in self._waiting:
                self._send(rank, _RunKind.END, meta)

        def have_left(seconds: float) -> bool:
            for rank in self._others:
                with suppress(PeerLostError):
                    self._channel.receive(rank, COORDINATION_TAG)  # too late, whatever it is
            time.sleep(min(seconds, 0.01))
            return all(rank in lost or rank in transport.lost for rank in self._others)

        Deadline(self._silence, self._shutdown).wait(have_left)
        return tuple(rank for rank in self._others if rank not in transport.lost)

    def _is_over(self, result: RankResult | None, seconds: float) -> bool:
        self.poll()
        reporting = self.reporting
        if self._has_ended or reporting is None:
            return True
        if self._told != reporting:
            self._told = reporting
            self.peers.restart_silence()
            self._tell_result(reporting, result)
        reports = reporting == self._rank
        for rank in self.peers.silent():
            if reports or rank == reporting:
                self.lose(rank, f"it has been silent for {self._silence:g} s")
        if reports and not self.peers.present:
            if not self._have_trained:
                self._have_trained = True
                self.managers.restart_silence()
            for rank in self.managers.silent():
                self.lose(rank, f"it is not done {self._manager_silence:g} s after the others")
            if not self.managers.present:
                return True
        time.sleep(min(seconds, 0.01))  # MPI cannot be waited for without a busy processor
        return False

    def _tell_result(self, reporting: int, result: RankResult | None) -> None:
        if reporting == self._rank:
            if self._rank != self.roles.workers[0]:
                log.warning("rank %d: reports, as those before it are lost", self._rank)
            return
        meta: dict[str, Any] = {"unwritten": self.unwritten.get(self._rank, [])}
        rows = None
        if result is not None:
            meta |= {"row": result.row, "counters": result.counters}
            if n := len(result.modes):
                rows = TensorDict({"mode": result.modes.cpu()}, [n])
        self._send(reporting, _RunKind.RESULT, meta, rows)

    def _check_counted(self) -> None:
        if self._given_up is not None:
            raise WorkerError(f"the run has ended without rank {self._rank}: {self._given_up}")

    # Messages.

    def _send(
        self,
        rank: int | None,
        kind: _RunKind,
        meta: dict[str, Any] | None = None,
        rows: TensorDict | None = None,
    ) -> None:
        # What a lost rank sent before is received first, and then that it is lost.
        with suppress(PeerLostError):
            if rank is not None:
                self._channel.send(rank, COORDINATION_TAG, kind, meta, rows)

    def _handle(self, message: ReceivedFrame) -> None:
        rank = message.source
        among = self.peers if rank in self.peers else self.managers
        if among.seen(rank):
            log.warning("rank %d: rank %d is back", self._rank, rank)
        if message.error is not None:
            what = self._rank, rank, message.error
            log.warning("rank %d: cannot read what rank %d sent: %s", *what)
        elif message.kind == _RunKind.ALIVE:
            self._progress[rank] = message.meta or self._progress.get(rank, {})
        elif message.kind == _RunKind.END:
            self._has_ended = True
            for lost, why in message.meta["lost"].items():
                if int(lost) == self._rank:
                    self._given_up = str(why)
                else:
                    for each in (self.peers, self.managers):
                        each.leave(int(lost), LOST, str(why))
        elif message.kind == _RunKind.RESULT:
            self._waiting.add(rank)
            among.leave(rank)
            if unwritten := message.meta["unwritten"]:
                self.unwritten[rank] = unwritten
            if rank in self.peers:
                rows, meta = message.rows, message.meta
                modes = rows.get("mode").clone() if rows is not None else torch.zeros(0).long()
                self.results[rank] = RankResult(meta["row"], meta["counters"], modes)
