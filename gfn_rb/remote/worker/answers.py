"""Checks of what managers answer to a worker."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import nlargest
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import ArgumentError, RemoteError, ShapeError
from gfn_rb.remote.protocol.channel import ReceivedFrame
from gfn_rb.remote.protocol.messages import (
    OUTCOMES,
    PROTOCOL,
    Kind,
    Scores,
    is_finite,
    is_number,
    one_line,
    remote_error,
    unpack,
)
from gfn_rb.remote.protocol.rows import check_rows
from gfn_rb.remote.worker.accounts import Reply, UnansweredBatches

log = logging.getLogger(__name__)

_ANSWERS = {Kind.HELLO: Kind.WELCOME, Kind.FETCH: Kind.FEED, Kind.GOODBYE: Kind.BYE}


class FeedSplit:
    """Splits a quota of rows over managers so that those are fed which are the best of all.

    Each manager tells with its answers how much the rows that it would feed next are wanted, by the
    worker's policy; see :meth:`~gfn_rb.remote.feeding.feed_policies.FeedPolicy.best`. The
    quota goes where the highest of these numbers are. As far as there are fewer of them, each
    manager is asked for as many more, for they may have come by others since.

    Args:
        quota: rows, of all managers together; 0 for a worker that is not fed.
    """

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self._next: dict[int, Sequence[float]] = {}

    def update(self, manager: int, scores: Sequence[float]) -> None:
        """Record how much the rows are wanted that a manager would feed next."""
        self._next[manager] = scores

    def __call__(
        self, managers: Sequence[int], turn: int, quota: int | None = None
    ) -> Counter[int]:
        """Return how many rows each manager is to feed.

        Args:
            managers: that are asked.
            turn: who gets what cannot be shared equally: a number that grows.
            quota: rows; by default that of the subscription.
        """
        quota = self.quota if quota is None else quota
        known = ((score, rank) for rank in managers for score in self._next.get(rank, ()))
        split = Counter(rank for _, rank in nlargest(quota, known))
        each, more = divmod(quota - split.total(), len(managers))
        for i, rank in enumerate(managers):
            split[rank] += each + ((i + turn) % len(managers) < more)
        return split


class Answers:
    """Goes by what managers answer: keeps the account of batches, and hands on what is fed.

    Args:
        name: of the worker, for the log.
        unanswered: the account.
        feed: called with the rows a manager feeds.

    Attributes:
        baseline: the newest that a manager told.
        split: how many rows each manager is to feed.
        response: to a question, by manager.
    """

    def __init__(
        self, name: str, unanswered: UnansweredBatches, feed: Callable[[TensorDictBase], None]
    ) -> None:
        self.baseline: float | None = None
        self.split = FeedSplit(0)
        self.response: dict[int, ReceivedFrame] = {}
        self._name, self._unanswered, self._feed = name, unanswered, feed

    def take(self, message: ReceivedFrame) -> None:
        """Go by a message of a manager.

        It is sorted by what it is, not by what is waited for: an answer to an earlier batch, or
        what it brings, may come while a question is open.
        """
        if message.error is not None or message.kind == Kind.ERROR:
            self._failed(message)
        elif message.kind == Kind.SCORES:
            self._scored(message)
        else:
            self.response[message.source] = message

    def take_response(self, rank: int, kind: Kind) -> ReceivedFrame:
        """Return what a manager answered to a question of a kind.

        Raises:
            GfnRbError: it refuses, or its answer cannot be read or is another.
        """
        answer = self.response.pop(rank).checked()
        if answer.kind != _ANSWERS[kind]:
            raise RemoteError(rank, f"it answered {kind.name} with a frame of kind {answer.kind}")
        return answer

    def _scored(self, message: ReceivedFrame) -> None:
        """Close the account of a batch that is answered, and hand on what came with that."""
        meta, source, number = message.meta, message.source, _number(message)
        try:
            self._take_fed(message)  # which the manager gives only once
        except RemoteError as unfed:
            self._unanswered.errors.append(unfed)
        sent = self._unanswered.sent.get(number)
        if sent is None or sent.manager != source:
            return  # given up earlier
        # What it has passed over will not be answered: a transport keeps the order of messages
        # between two ranks, and a manager replies to each before it takes the next.
        self._unanswered.lose([each for each in self._unanswered.of(source) if each < number])
        error, n = remote_error(source, meta["error"]) if "error" in meta else None, len(sent.rows)
        try:
            with answer_of(source):
                outcomes, scores = outcomes_of(meta, n), scores_of(meta, message.scores, n)
                self.split.update(source, wanted_of(meta))
                self._update_baseline(meta)
                reply = Reply((source,), n, scores, outcomes, self.baseline, error)
        except RemoteError as nonsense:
            self._unanswered.errors.append(nonsense)
            self._unanswered.lose([number])
        else:
            self._unanswered.answer(number, reply)

    def _failed(self, message: ReceivedFrame) -> None:
        """Close the account of a batch that is refused, or whose answer cannot be read.

        Managers answer in order: what names no batch is about the oldest that this one has not
        answered, and about a question once all batches before it are answered.
        """
        source, number = message.source, _number(message)
        owed = self._unanswered.of(source)
        if number in self._unanswered.sent and number not in owed:
            return  # of another manager, which answers for itself
        if number < 0:
            number = next(iter(owed), -1)
        if message.error is not None:
            log.warning(
                "%s: cannot read what manager %d sent on tag %d: %s",
                *(self._name, source, message.tag, message.error),
            )
        elif number >= 0:
            self._unanswered.errors.append(remote_error(source, message.meta.get("error")))
        if number < 0:
            self.response[source] = message
        else:
            self._unanswered.lose([number])

    def take_feed(self, message: ReceivedFrame) -> None:
        """Hand on what a manager feeds that was asked to.

        Raises:
            RemoteError: it cannot be stored, or makes no sense.
        """
        self._take_fed(message)
        with answer_of(message.source):
            self.split.update(message.source, wanted_of(message.meta))

    def _take_fed(self, message: ReceivedFrame) -> None:
        if message.rows is not None:
            with answer_of(message.source):
                check_rows(message.rows)
                self._feed(message.rows)

    def take_welcome(self, message: ReceivedFrame) -> None:
        """Learn what a manager answers to a greeting.

        Raises:
            RemoteError: it speaks another version, or makes no sense.
        """
        if message.meta.get("protocol") != PROTOCOL:
            said = f"{message.meta!s:.200}"
            raise RemoteError(message.source, f"speaks {said}, expected protocol {PROTOCOL}")
        with answer_of(message.source):
            self._update_baseline(message.meta)

    def _update_baseline(self, meta: Mapping[str, Any]) -> None:
        baseline = baseline_of(meta)
        self.baseline = self.baseline if baseline is None else baseline


def _number(message: ReceivedFrame) -> int:
    """Return the number of the batch that a message answers, -1 if it names none."""
    number = message.meta.get("to")
    return number if is_number(number) else -1


@contextmanager
def answer_of(rank: int) -> Iterator[None]:
    """Raise whatever an answer that makes no sense causes as the error of a rank.

    Raises:
        RemoteError: names the rank, and what is wrong.
    """
    try:
        yield
    except RemoteError:
        raise
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise RemoteError(rank, f"its answer makes no sense: {why}") from error


def baseline_of(meta: Mapping[str, Any]) -> float | None:
    """Return the baseline that an answer tells, None where it tells none.

    Raises:
        ArgumentError: it is no log-reward below which items are not worth sending.
    """
    value = meta.get("baseline")
    if value is None or is_finite(value) or value == -math.inf:
        return None if value is None else float(value)
    raise ArgumentError(f"baseline must be a number below inf, got {value!r:.80}")


def wanted_of(meta: Mapping[str, Any]) -> list[float]:
    """Return how much the rows are wanted that would be fed next.

    Raises:
        ArgumentError: these are no numbers.
    """
    wanted = meta.get("next", [])
    if isinstance(wanted, list) and all(
        is_finite(each) or abs(each) == math.inf for each in wanted
    ):
        return [float(each) for each in wanted]
    raise ArgumentError(f"next must be numbers, got {wanted!r:.80}")


def outcomes_of(meta: Mapping[str, Any], n: int) -> dict[str, int]:
    """Return what became of n rows that were sent.

    Raises:
        ArgumentError: these are no counts, or do not add up.
    """
    said = meta.get("outcomes")
    known = {} if not isinstance(said, dict) else {k: said[k] for k in OUTCOMES if k in said}
    if not all(type(count) is int and count >= 0 for count in known.values()):
        raise ArgumentError(f"outcomes must be counts, got {said!r:.200}")
    if sum(known.values()) != n:
        raise ArgumentError(f"outcomes must add up to the {n} rows sent, got {said!r:.200}")
    return known


def scores_of(meta: Mapping[str, Any], rows: TensorDictBase | None, n: int) -> Scores:
    """Return the scores of n rows that were sent.

    Raises:
        ArgumentError, ShapeError: these are none.
    """
    numbers = meta.get("scores")
    if not isinstance(numbers, dict) or not all(type(v) in (int, float) for v in numbers.values()):
        raise ArgumentError(f"scores must be numbers by name, got {numbers!r:.200}")
    if rows is not None and len(rows) != n:
        raise ShapeError(f"scores must be of the {n} rows sent, got {len(rows)}")
    return unpack(numbers, rows)
