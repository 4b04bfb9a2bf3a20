"""Questions that any rank may ask managers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gfn_rb.arguments import require_kind
from gfn_rb.containers.objects import objects_in
from gfn_rb.errors import TransportTimeoutError
from gfn_rb.kernels.objects import Objects
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.feeding.object_index import look_up
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame, check_rows
from gfn_rb.remote.protocol.messages import METADATA_TAG, Kind
from gfn_rb.remote.protocol.ownership import check_ranks
from gfn_rb.remote.worker.client import answer_of, checked_answer
from gfn_rb.remote.worker.options import join_batches
from gfn_rb.transports.base import Transport


class ManagerQueries:
    """Queries to managers, on a message tag of their own.

    Every query raises :class:`~gfn_rb.errors.ArgumentError` for a rank that does not exist,
    :class:`~gfn_rb.errors.TransportTimeoutError` if a manager does not answer,
    :class:`~gfn_rb.errors.PeerLostError` if a manager is lost, and
    :class:`~gfn_rb.errors.RemoteError` if a manager reports an error.

    Args:
        transport: transport to the managers. Create one such object for each transport.
    """

    def __init__(self, transport: Transport) -> None:
        require_kind("transport", transport, Transport)
        self.transport = transport
        self._channel = FrameChannel(transport)

    def metadata(self, manager: int, timeout: float = 30.0) -> dict[str, Any]:
        """Return what a manager reports: size, baseline, timings and statistics of senders.

        Args:
            manager: rank of the manager.
            timeout: seconds to wait for the reply.
        """
        return self._ask([manager], Kind.METADATA, timeout)[0].meta

    def checkpoint(self, manager: int, timeout: float = 300.0) -> str:
        """Ask a manager to save its checkpoint now, and return the path on its machine.

        Args:
            manager: rank of the manager.
            timeout: seconds to wait for the reply.
        """
        return str(self._ask([manager], Kind.CHECKPOINT, timeout)[0].meta.get("path"))

    def items(self, managers: int | Sequence[int], timeout: float = 300.0) -> TensorDictBase | None:
        """Return the rows that managers keep together; of managers that keep the best, the K best.

        Each object occurs once, in descending order of log-reward. Rows that identify no object are
        returned as they are.

        Args:
            managers: ranks of all managers that are not lost.
            timeout: seconds to wait for each reply.

        Returns:
            Rows of batch size [n], trajectories padded to the longest; None without rows.
        """
        ranks = [managers] if isinstance(managers, int) else managers
        answers = self._ask(ranks, Kind.HELD, timeout)
        batches: list[TensorDictBase] = []
        for each in answers:
            if each.rows is not None and len(each.rows):
                with answer_of(each.source):
                    check_rows(each.rows, below=None)
                    batches = [join_batches([*batches, each.rows])]
        if not batches:
            return None
        rows = batches[0]
        rows = rows[rows.get(LOG_REWARD).reshape(-1).argsort(descending=True, stable=True)]
        with answer_of(answers[0].source):
            *_, first = look_up(Objects(1, 0), objects_in(rows))
            at = (first == np.arange(len(first))).nonzero()[0][: answers[0].meta["capacity"]]
            return rows[torch.from_numpy(at)]

    def _ask(self, ranks: Sequence[int], kind: Kind, timeout: float) -> list[ReceivedFrame]:
        for rank in check_ranks("manager", ranks, self.transport):
            while self._channel.receive(rank, METADATA_TAG) is not None:
                pass  # late answers to earlier queries
            self._channel.send(rank, METADATA_TAG, kind)
        answers = []
        for rank in ranks:
            answer = self._channel.receive(rank, METADATA_TAG, timeout)
            if answer is None:
                raise TransportTimeoutError(
                    f"rank {rank} did not answer within {timeout:g} s: expected a running "
                    "ReplayBufferManager there"
                )
            answers.append(checked_answer(answer, kind))
        return answers
