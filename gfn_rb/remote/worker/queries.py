"""Questions that any rank may put to managers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from gfn_rb.containers.objects import object_keys
from gfn_rb.errors import RemoteError, TransportTimeoutError
from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.protocol.channel import FrameChannel, ReceivedFrame
from gfn_rb.remote.protocol.messages import METADATA_TAG, Kind
from gfn_rb.remote.protocol.roles import check_ranks
from gfn_rb.remote.protocol.rows import check_rows
from gfn_rb.remote.worker.client import answer_of
from gfn_rb.remote.worker.options import join_batches
from gfn_rb.transports.base import Transport


class ManagerQueries:
    """Questions to managers, on a tag of their own: answers mix with nothing else.

    Args:
        transport: to the managers; make one such object for each.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._channel = FrameChannel(transport)

    def metadata(self, manager: int | Sequence[int], timeout: float = 30.0) -> dict[str, Any]:
        """Return what managers know: their size, baseline, timings and statistics of senders.

        Args:
            manager: the rank of one; or those of several, whose answers come as one: ``stored``,
                ``capacity``, ``threshold``, ``batches`` and ``senders`` are those of all together,
                and each one's own answer stands under ``managers`` by its rank.
            timeout: how long to wait for an answer, in seconds.

        Raises:
            ArgumentError: there is no such rank.
            TransportTimeoutError: one does not answer.
            PeerLostError: one is gone.
            RemoteError: one could not answer.
        """
        answers = self._ask(manager, Kind.METADATA, timeout)
        if isinstance(manager, int):
            return answers[0].meta
        for i, each in enumerate(answers):
            with answer_of(each.source):
                merged = _merged([before.meta for before in answers[: i + 1]])
        return merged

    def items(self, managers: int | Sequence[int], timeout: float = 300.0) -> TensorDictBase | None:
        """Return what managers keep together: where they keep the best, the K best of all.

        Each object once, those of highest log-reward first; rows that stand for no object as they
        are.

        Args:
            managers: the ranks of all that are present.
            timeout: how long to wait for each answer, in seconds.

        Returns:
            Batch size [n], trajectories padded to the longest; None if there are none.

        Raises:
            ArgumentError, TransportTimeoutError, PeerLostError, RemoteError: see :meth:`metadata`.
        """
        answers = self._ask(managers, Kind.HELD, timeout)
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
        first: dict[bytes, int] = {}
        with answer_of(answers[0].source):
            keep = [
                i
                for i, key in enumerate(object_keys(rows))
                if key is None or first.setdefault(key, i) == i
            ]
            return rows[torch.tensor(keep[: answers[0].meta["capacity"]])]

    def checkpoint(self, manager: int | Sequence[int], timeout: float = 300.0) -> str | list[str]:
        """Have managers save their checkpoints now.

        Args:
            manager: the rank of one, or those of several.
            timeout: how long to wait for each, in seconds.

        Returns:
            The file, as that manager calls it; of several, a list.

        Raises:
            ArgumentError, TransportTimeoutError, PeerLostError: see :meth:`metadata`.
            RemoteError: one has no file to save to, or could not.
        """
        answers = self._ask(manager, Kind.CHECKPOINT, timeout)
        paths = [str(each.meta.get("path")) for each in answers]
        return paths[0] if isinstance(manager, int) else paths

    def _ask(self, manager: int | Sequence[int], kind: Kind, timeout: float) -> list[ReceivedFrame]:
        ranks = [manager] if isinstance(manager, int) else manager
        for rank in check_ranks("manager", ranks, self.transport):
            while self._channel.receive(rank, METADATA_TAG) is not None:
                pass  # answers that came too late for whoever asked
            self._channel.send(rank, METADATA_TAG, kind)
        return [self._answer(rank, kind, timeout) for rank in ranks]

    def _answer(self, rank: int, kind: Kind, timeout: float) -> ReceivedFrame:
        answer = self._channel.receive(rank, METADATA_TAG, timeout)
        if answer is None:
            raise TransportTimeoutError(
                f"rank {rank} did not answer within {timeout:g} s: expected a running "
                "ReplayBufferManager there"
            )
        if answer.checked().kind != kind:
            raise RemoteError(rank, f"it answered {kind.name} with a frame of kind {answer.kind}")
        return answer


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what several managers know as one."""
    capacity = max(each["kept_together"] for each in answers)
    known = {
        name: [each[name] for each in answers if each[name] is not None]
        for name in ("baseline", "threshold")
    }
    senders: dict[str, dict[str, Any]] = {}
    for each in answers:
        for rank, sender in each["senders"].items():
            earlier = senders.get(rank, {})
            numbers = {k: n + earlier.get(k, 0) for k, n in sender.items() if type(n) is int}
            senders[rank] = {**sender, **numbers}
    return {
        "managers": {str(each["rank"]): each for each in answers},
        "stored": min(capacity, sum(each["counted"] for each in answers)),
        "capacity": capacity,
        "threshold": max(known["threshold"], default=None),
        "baseline": max(known["baseline"], default=None),
        "batches": sum(each["batches"] for each in answers),
        "subscribers": sorted({rank for each in answers for rank in each["subscribers"]}),
        "senders": senders,
    }
