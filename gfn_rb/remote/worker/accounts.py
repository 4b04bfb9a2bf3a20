"""Counters of a worker, and its batches that managers have not answered."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gfn_rb.errors import RemoteError
from gfn_rb.remote.protocol.messages import Outcomes, Scores
from gfn_rb.transports.deadline import Deadline


@dataclass
class WorkerStatistics(Outcomes):
    """Counters of a worker.

    ``offered`` is the sum of ``reduced``, ``filtered``, ``skipped``, ``sent`` and pending rows.
    ``sent`` plus ``resent`` is the sum of the outcomes, ``lost`` and unanswered rows.

    Attributes:
        offered: rows given to the worker.
        reduced: rows that identify no object, left out of a reduced payload.
        filtered: rows below the baseline, not sent.
        skipped: rows not sent, because too many batches were unanswered, their manager is lost, or
            the rows cannot be sent.
        sent: rows sent, one frame for each manager that owns any of them.
        resent: rows of the worker's buffer sent again, because their manager returned.
        batches: frames of rows sent.
        replies: replies to them.
        errors: replies with an error.
        lost: rows sent that will not be answered.
        fed: rows received for the manager-fed buffer.
        fed_duplicates: fed rows that were dropped because held or fed before.
        bytes_sent: size of all frames sent.
        bytes_received: size of all frames received.
        seconds_sending: seconds in which frames were made and sent.
        seconds_blocked: seconds in which the worker waited for a manager.
    """

    offered: int = 0
    reduced: int = 0
    filtered: int = 0
    skipped: int = 0
    sent: int = 0
    resent: int = 0
    batches: int = 0
    replies: int = 0
    errors: int = 0
    lost: int = 0
    fed: int = 0
    fed_duplicates: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_sending: float = 0.0
    seconds_blocked: float = 0.0


@dataclass(frozen=True)
class Reply:
    """The managers' reply to a batch.

    Attributes:
        managers: ranks of the managers that owned any of the rows.
        n: number of rows sent.
        scores: scores by name: one number for the batch, the mean over rows of several managers; or
            a tensor with one entry per sent row, NaN without a score.
        outcomes: numbers of rows by outcome: ``stored``, ``rejected``, ``duplicates``, ``scored``
            or ``refused``.
        baseline: log-reward below which items need not be sent; None while unknown.
        error: error of a manager; None without one.
    """

    managers: tuple[int, ...]
    n: int
    scores: Scores
    outcomes: dict[str, int]
    baseline: float | None
    error: RemoteError | None = None


@dataclass(eq=False)
class SentBatch:
    """A batch, of which each manager was sent the rows that it owns.

    Attributes:
        n: number of its rows.
        store: whether they are to be stored, or only scored.
        is_new: whether the caller gets the reply; False for rows that are sent again.
        unanswered: number of managers that have not answered.
        answers: replies of single managers, each with the positions of its rows in the batch; None
            for all positions.
    """

    n: int
    store: bool
    is_new: bool = True
    unanswered: int = 0
    answers: list[tuple[Tensor | None, Reply]] = field(default_factory=list)

    def reply(self) -> Reply:
        """Return the answers joined."""
        at, first = self.answers[0]
        if at is None:
            return first
        replies = [reply for _, reply in self.answers]
        outcomes: Counter[str] = Counter()
        for each in replies:
            outcomes.update(each.outcomes)
        names = dict.fromkeys(name for each in replies for name in each.scores)
        return Reply(
            tuple(sorted({rank for each in replies for rank in each.managers})),
            self.n,
            {name: self._score(name) for name in names},
            dict(outcomes),
            replies[-1].baseline,
            next((each.error for each in replies if each.error is not None), None),
        )

    def _score(self, name: str) -> float | Tensor:
        """Return one score of all rows: entries in their order, or the mean of numbers."""
        parts = [(at, r.n, r.scores[name]) for at, r in self.answers if name in r.scores]
        known = sum(n for _, n, _ in parts)
        values = [value for _, _, value in parts if isinstance(value, Tensor)]
        if len(values) < len(parts):
            return sum(n * float(torch.as_tensor(v).mean()) for _, n, v in parts) / known
        score = torch.full((self.n, *values[0].shape[1:]), torch.nan)
        if known == self.n:
            score = score.to(values[0].dtype)
        for at, _, value in parts:
            score[at] = torch.as_tensor(value).to(score.dtype)
        return score


class SentShare(NamedTuple):
    """The rows of a batch that one manager was sent."""

    batch: SentBatch
    manager: int
    n: int
    at: Tensor | None
    """Positions of the rows in the batch, None for all."""
    deadline: Deadline
    """Of the answer."""
