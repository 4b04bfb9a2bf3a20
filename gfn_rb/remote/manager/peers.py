"""Managers among themselves: one baseline of what all of them know."""

from __future__ import annotations

from collections.abc import Sequence

from gfn_rb.errors import PeerLostError
from gfn_rb.remote.manager.baseline import BaselineKeeper, Summary
from gfn_rb.remote.protocol.channel import FrameChannel, Message
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
        self._ranks = list(ranks)
        self._channel = channel
        self._baseline = baseline
        self._told: dict[int, Summary] = {}

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    def tell(self) -> list[PeerLostError]:
        """Tell what is new to those who have taken the last news.

        Returns:
            Who turned out to be gone.
        """
        gone = []
        summary = self._baseline.summary() if self._ranks else None
        for rank in self._ranks:
            if summary is None or self._told.get(rank) == summary or self._channel.in_flight(rank):
                continue
            try:
                self._channel.send(rank, PEER_TAG, Kind.SUMMARY, summary.to_json())
            except PeerLostError as error:
                gone.append(error)
            self._told[rank] = summary
        return gone

    def hear(self, message: Message) -> None:
        """Take note of what another manager knows.

        Args:
            message: from it.

        Raises:
            ArgumentError: it says something else.
        """
        self._baseline.hear(message.source, Summary.from_json(message.meta))

    def drop(self, rank: int) -> None:
        """Go on without another manager.

        Args:
            rank: which.
        """
        self._ranks.remove(rank)
        self._baseline.drop_peer(rank)
