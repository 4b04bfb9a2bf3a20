"""What the ranks of a run tell each other: their progress and their results."""

from __future__ import annotations

import logging
import math
import time
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from gfn_rb.errors import PeerLostError
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.roles import RankRoles
from gfn_rb.shapes import Int64
from gfn_rb.training.trainer import Row, Trainer
from gfn_rb.transports import Transport
from gfn_rb.transports.deadline import Deadline, Grace

log = logging.getLogger(__name__)

COORDINATION_TAG = 21
_EVERY = 0.5  # seconds between two progress messages of a rank


class _RunKind(IntEnum):
    PROGRESS = 101  # worker: counts
    RESULT = 102  # worker: its last row, and the modes it found


class RankResult(NamedTuple):
    """What a rank did in a run.

    Attributes:
        row: what it measured last.
        counters: of what it sent and was fed; nothing where there is no manager.
        modes: keys of the modes it found.
    """

    row: Row
    counters: dict[str, Any]
    modes: Int64[Tensor, "m"]


class RankCoordinator:
    """Tells rank 0 of a run what the others do.

    Args:
        transport: between the ranks.
        roles: of all ranks.
        silence: seconds without a message after which a rank counts as lost.
        grace: tells whether this rank is to stop. Then it waits for nobody: rank 0 does without
            those that still train.

    Attributes:
        peers: on rank 0 the other ranks that train, which are present until their results are
            there; on these, rank 0.
        results: of each training rank, as far as rank 0 was told.
    """

    def __init__(
        self,
        transport: Transport,
        roles: RankRoles,
        silence: float,
        grace: Grace | None = None,
    ) -> None:
        self.roles = roles
        self.peers = Membership((0,) if transport.rank else roles.workers[1:], silence)
        self.results: dict[int, RankResult] = {}
        self._rank, self._silence, self._grace = transport.rank, silence, grace
        self._channel = FrameChannel(transport)
        self._progress: dict[int, dict[str, int]] = {}
        self._next = 0.0

    def report_progress(self, trainer: Trainer) -> None:
        """Tell rank 0 the counts of this rank, or, there, receive those of others, now and then."""
        # A step may take a millisecond, and rank 0 reads only between its own.
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY
        if self._rank:
            counts = trainer.discovery
            self._send(_RunKind.PROGRESS, {"calls": counts.calls, "modes": counts.modes_found})
        else:
            self.poll()

    def poll(self) -> None:
        """Receive all that other ranks have sent, on rank 0."""
        for rank in self.peers.present:
            try:
                while message := self._channel.receive(rank, COORDINATION_TAG):
                    self._handle(message)
            except PeerLostError as error:
                self._lose(rank, error.reason)

    def describe(self, trainer: Trainer, loss: float) -> str:
        """Return the progress of all ranks, in a few words; trainer and loss are of this one."""
        counts, n_modes = trainer.discovery, trainer.env.n_modes
        others = [self._progress.get(rank, {}) for rank in self.roles.workers[1:]]
        modes = "|".join(str(n) for n in (counts.modes_found, *(o.get("modes", 0) for o in others)))
        calls = counts.calls + sum(each.get("calls", 0) for each in others)
        lost = f", lost ranks {[*self.peers.lost]}" if self.peers.lost else ""
        return (
            f"loss {loss:.3f}, modes {modes}{f' of {n_modes}' if n_modes else ''}, "
            f"{calls:,} reward calls{lost}"
        )

    def gather(self, result: RankResult) -> None:
        """Send rank 0 the result of this rank; there, wait for those of the others."""
        self.results[self._rank] = result
        if self._rank:
            modes = TensorDict({"mode": result.modes.cpu()}, [len(result.modes)])
            meta = {"row": result.row, "counters": result.counters}
            self._send(_RunKind.RESULT, meta, modes if len(modes) else None)
            Deadline(self._silence, self._grace).wait(lambda s: not self._channel.flush(s))
            return
        # Those that train may be far behind: only silence tells that one is lost.
        self.peers.restart_silence()  # until now this rank had better things to do than listen
        Deadline(math.inf, self._grace).wait(self._all_have_ended)
        for rank in self.peers.present:
            self._lose(rank, "rank 0 was told to stop waiting for it")

    def modes_found(self) -> int:
        """Return how many different modes all ranks found together."""
        return len(torch.cat([each.modes.cpu() for each in self.results.values()]).unique())

    def _all_have_ended(self, seconds: float) -> bool:
        self.poll()
        for rank in self.peers.silent():
            self._lose(rank, f"it has been silent for {self._silence:g} s")
        if self.peers.present:
            time.sleep(min(seconds, 0.01))  # MPI cannot be waited for without a busy processor
        return not self.peers.present

    # Messages.

    def _send(self, kind: _RunKind, meta: dict[str, Any], rows: TensorDict | None = None) -> None:
        if self.peers.is_present(0):
            try:
                self._channel.send(0, COORDINATION_TAG, kind, meta, rows)
            except PeerLostError as error:
                self._lose(0, error.reason)

    def _handle(self, message: ReceivedFrame) -> None:
        rank = message.source
        self.peers.seen(rank)
        if message.error is not None:
            log.warning("rank 0: cannot read what rank %d sent: %s", rank, message.error)
        elif message.kind == _RunKind.PROGRESS:
            self._progress[rank] = message.meta
        elif message.kind == _RunKind.RESULT:
            rows = message.rows
            modes = torch.zeros(0, dtype=torch.int64) if rows is None else rows.get("mode").clone()
            self.results[rank] = RankResult(message.meta["row"], message.meta["counters"], modes)
            self.peers.leave(rank)

    def _lose(self, rank: int, why: str) -> None:
        if self.peers.leave(rank, LOST, why):
            log.warning("rank %d: goes on without rank %d: %s", self._rank, rank, why)
