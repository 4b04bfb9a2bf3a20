"""Questions that any rank may put to a manager."""

from __future__ import annotations

from typing import Any

from gfn_rb.errors import TransportTimeoutError
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.messages import METADATA_TAG, Kind
from gfn_rb.remote.protocol.roles import check_ranks
from gfn_rb.transports.base import Transport


class ManagerQueries:
    """Questions to managers, on a tag of their own: answers mix with nothing else.

    Args:
        transport: to the managers; make one such object for each.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._channel = FrameChannel(transport)

    def metadata(self, manager: int, timeout: float = 30.0) -> dict[str, Any]:
        """Return what a manager knows: its size, baseline, timings and statistics of its senders.

        Args:
            manager: its rank.
            timeout: how long to wait for the answer, in seconds.

        Raises:
            ArgumentError: there is no such rank.
            TransportTimeoutError: it does not answer.
            PeerLostError: it is gone.
            RemoteError: it could not answer.
        """
        return self._ask(manager, Kind.METADATA, timeout).meta

    def checkpoint(self, manager: int, timeout: float = 300.0) -> str:
        """Have a manager save its checkpoint now.

        Args:
            manager: its rank.
            timeout: how long to wait, in seconds.

        Returns:
            The file, as that manager calls it.

        Raises:
            ArgumentError, TransportTimeoutError, PeerLostError: see :meth:`metadata`.
            RemoteError: it has no file to save to, or could not.
        """
        return str(self._ask(manager, Kind.CHECKPOINT, timeout).meta["path"])

    def _ask(self, manager: int, kind: Kind, timeout: float) -> ReceivedFrame:
        check_ranks("manager", [manager], self.transport)
        while self._channel.receive(manager, METADATA_TAG) is not None:
            pass  # answers that came too late for whoever asked
        self._channel.send(manager, METADATA_TAG, kind)
        answer = self._channel.receive(manager, METADATA_TAG, timeout)
        if answer is None:
            raise TransportTimeoutError(
                f"rank {manager} did not answer within {timeout:g} s: expected a running "
                "ReplayBufferManager there"
            )
        return answer.checked()
