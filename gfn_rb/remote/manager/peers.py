"""Managers among themselves: one baseline of what all of them know."""

from __future__ import annotations

from collections.abc import Sequence

from gfn_rb.errors import PeerLostError
from gfn_rb.remote.manager.baseline import BaselineKeeper, Summary
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.membership import LOST, Membership
from gfn_rb.remote.protocol.messages import PEER_TAG, Kind


class Peers:
    """The other managers, told what this one knows of rewards, and heard likewise.

    Nobody waits for anybody: news goes out when the last of it has been taken.

    Args:
        ranks: of the others.
        channel: to them.
        baseline: of this manager.
    """

    def __init__(
        self, ranks: Sequence[int], channel: FrameChannel, baseline: BaselineKeeper
    ) -> None:
        self._members = Membership(ranks)
        self._channel = channel
        self._baseline = baseline
        self._told: dict[int, Summary] = {}

    def __contains__(self, rank: int) -> bool:
        return self._members.is_present(rank)

    def tell(self) -> list[PeerLostError]:
        """Tell what is new to those who have taken the last news.

        Returns:
            Who turned out to be gone.
        """
        gone: list[PeerLostError] = []
        if not len(self._members):
            return gone
        summary = self._baseline.summary()
        for rank in self._members.present:
            if self._told.get(rank) == summary or self._channel.in_flight(rank):
                continue
            try:
                self._channel.send(rank, PEER_TAG, Kind.SUMMARY, summary.to_json())
            except PeerLostError as error:
                gone.append(error)
            self._told[rank] = summary
        return gone

    def hear(self, message: ReceivedFrame) -> None:
        """Record what another manager knows.

        Args:
            message: from it.

        Raises:
            ArgumentError: it says something else.
        """
        self._baseline.hear(message.source, Summary.from_json(message.meta))

    def drop(self, rank: int, why: str = "") -> None:
        """Continue without another manager.

        Args:
            rank: which.
            why: it is lost.
        """
        self._members.leave(rank, LOST, why)
        self._baseline.drop_peer(rank)
