"""Counters of both ends. What is sent adds up: every row is in one of them at each end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

OUTCOMES = ("stored", "rejected", "duplicates", "scored", "refused")


@dataclass
class Outcomes:
    """What became of rows at a manager.

    Attributes:
        stored: they are in its buffer, or were for a while.
        rejected: its writer did not keep them.
        duplicates: it held the same object, or the batch did.
        scored: they were scored alone, because that was asked for or there is no buffer.
        refused: they do not fit its buffer.
    """

    stored: int = 0
    rejected: int = 0
    duplicates: int = 0
    scored: int = 0
    refused: int = 0

    @property
    def outcomes(self) -> int:
        """How many rows these are."""
        return sum(getattr(self, name) for name in OUTCOMES)

    def count(self, **rows: int) -> None:
        """Add to counters by name."""
        for name, n in rows.items():
            setattr(self, name, getattr(self, name) + n)

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    def restore(self, values: dict[str, Any]) -> None:
        """Go on from earlier counters.

        Args:
            values: what :meth:`to_json` gave.
        """
        for field in fields(self):
            setattr(self, field.name, values[field.name])


@dataclass
class SenderStatistics(Outcomes):
    """What a manager knows of one worker. ``items`` is the sum of the outcomes.

    Attributes:
        batches: frames of items that came.
        items: their rows.
        bytes: the size of all frames that came.
        fed: rows it was given.
        unreadable: frames that could not be read.
        errors: batches that could not be stored or scored.
    """

    batches: int = 0
    items: int = 0
    bytes: int = 0
    fed: int = 0
    unreadable: int = 0
    errors: int = 0


@dataclass
class WorkerStatistics(Outcomes):
    """What a worker counts.

    ``offered`` is the sum of ``reduced``, ``filtered``, ``skipped``, ``sent`` and what is still
    pending; ``sent`` that of the outcomes, ``lost`` and what is still unanswered.

    Attributes:
        offered: rows given to the worker.
        reduced: rows that stand for no object of their own, left out of a reduced payload.
        filtered: rows below the baseline, not sent.
        skipped: rows not sent, because too many batches were unanswered, no manager was left, or
            they cannot be sent.
        sent: rows sent.
        batches: batches sent.
        replies: batches answered.
        errors: of these, with an error.
        lost: rows sent that will not be answered.
        refreshes: batches sent whole to learn the baseline anew.
        fed: rows received for the manager-fed buffer.
        fed_duplicates: of these, dropped because held or fed before.
        bytes_sent: the size of all frames sent.
        bytes_received: the size of all frames received.
        seconds_sending: time in which frames were made and handed over.
        seconds_blocked: time in which the worker waited for a manager.
    """

    offered: int = 0
    reduced: int = 0
    filtered: int = 0
    skipped: int = 0
    sent: int = 0
    batches: int = 0
    replies: int = 0
    errors: int = 0
    lost: int = 0
    refreshes: int = 0
    fed: int = 0
    fed_duplicates: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_sending: float = 0.0
    seconds_blocked: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes sent per second of sending or waiting."""
        seconds = self.seconds_sending + self.seconds_blocked
        return self.bytes_sent / seconds if seconds else 0.0
