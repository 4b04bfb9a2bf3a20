"""What a worker believes of what managers answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDictBase

from gfn_rb.errors import ArgumentError, RemoteError, ShapeError
from gfn_rb.remote.protocol.messages import OUTCOMES, Scores, is_finite, one_line, unpack


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
