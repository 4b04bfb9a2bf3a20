"""What a worker counts. What is sent adds up: every row is in one counter at each end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gfn_rb.errors import RemoteError
from gfn_rb.remote.protocol.messages import Outcomes, Scores
from gfn_rb.transports.deadline import Deadline


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


@dataclass(frozen=True)
class Reply:
    """A manager's answer to a batch.

    Attributes:
        manager: its rank.
        n: how many rows were sent.
        scores: by name: a number for the batch, or a tensor of one entry per row sent.
        outcomes: what became of the rows: how many were ``stored``, ``rejected``,
            ``duplicates``, ``scored`` or ``refused``.
        baseline: the log-reward below which items are not worth sending; None while unknown.
        error: what went wrong over there, None if nothing did.
    """

    manager: int
    n: int
    scores: Scores
    outcomes: dict[str, int]
    baseline: float | None
    error: RemoteError | None = None


@dataclass
class SentBatch:
    """A batch that is not answered yet.

    Attributes:
        manager: where it was sent.
        n: its rows.
        deadline: of the answer.
        reply: the answer, where only the items that come with it are still to come.
    """

    manager: int
    n: int
    deadline: Deadline
    reply: Reply | None = None


class UnansweredBatches:
    """The account of the batches that managers have not answered.

    Args:
        count: what is counted in when a batch is closed.

    Attributes:
        sent: the batches by number, in the order they were sent.
        replies: to those that were answered and not taken yet.
        errors: refusals likewise.
    """

    def __init__(self, count: WorkerStatistics) -> None:
        self.sent: dict[int, SentBatch] = {}
        self.replies: list[Reply] = []
        self.errors: list[RemoteError] = []
        self._count = count

    def __len__(self) -> int:
        return len(self.sent)

    @property
    def deadline(self) -> Deadline:
        """That of the oldest batch."""
        return next(iter(self.sent.values())).deadline

    def of(self, manager: int) -> list[int]:
        """Return the numbers of the batches that a manager has not answered, oldest first."""
        return [number for number, batch in self.sent.items() if batch.manager == manager]

    def overdue(self) -> set[int]:
        """Return the managers that have not answered in time."""
        if not self.sent or not self.deadline.passed:  # which is the first to pass
            return set()
        return {batch.manager for batch in self.sent.values() if batch.deadline.passed}

    def close(self, numbers: Iterable[int]) -> None:
        """Count what became of batches: what their replies say, or that they are lost.

        Batches that were closed before are passed over.
        """
        for batch in [self.sent.pop(each) for each in numbers if each in self.sent]:
            if batch.reply is None:
                self._count.lost += batch.n
                continue
            self._count.count(replies=1, **batch.reply.outcomes)
            self.replies.append(batch.reply)
            if batch.reply.error is not None:
                self._count.errors += 1
                self.errors.append(batch.reply.error)

    def take(self) -> tuple[list[Reply], list[RemoteError]]:
        """Return the replies and refusals that nobody has seen."""
        taken = self.replies, self.errors
        self.replies, self.errors = [], []
        return taken
