"""What a manager does with a batch: observe, store, score."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorDict, TensorDictBase

from gfn_rb.keys import LOG_REWARD
from gfn_rb.remote.manager.baseline import BaselineKeeper
from gfn_rb.remote.manager.store import Store
from gfn_rb.remote.protocol.scores import ScoreFunction, pack
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.writers.rows import scalar_key


class IngestResult(NamedTuple):
    """What became of a batch."""

    outcomes: dict[str, int]
    """How many rows were stored, rejected, duplicates, only scored, or refused."""
    scores: dict[str, float]
    """Of the batch."""
    per_row: TensorDict | None
    """Scores of its rows."""
    unstored: Exception | None
    """Why it could not be stored."""
    unscored: Exception | None
    """Why it could not be scored."""


class BatchHandler:
    """Takes batches in.

    What does not fit the buffer, and whatever the scoring function raises, is caught here and
    reported: one worker's mistake is not to end the others' manager.

    Args:
        store: where items are kept.
        score: the scoring function.
        baseline: follows the batches.
        watch: measures phases "store" and "score".
    """

    def __init__(
        self, store: Store, score: ScoreFunction, baseline: BaselineKeeper, watch: Stopwatch
    ) -> None:
        self._store = store
        self._score = score
        self._baseline = baseline
        self._watch = watch

    def take(self, rows: TensorDictBase, sender: int, keep: bool) -> IngestResult:
        """Store and score a batch.

        Args:
            rows: batch size [n].
            sender: the rank they came from.
            keep: whether they are to be stored.
        """
        with self._watch("store"):
            outcomes, unstored = self._stored(rows, sender, keep)
        with self._watch("score"):
            scores, per_row, unscored = self._scored(rows, sender)
        return IngestResult(outcomes, scores, per_row, unstored, unscored)

    def _stored(
        self, rows: TensorDictBase, sender: int, keep: bool
    ) -> tuple[dict[str, int], Exception | None]:
        try:
            log_reward = scalar_key(rows, LOG_REWARD)
            outcomes = self._store.put(rows, sender) if keep else {"scored": len(rows)}
        except Exception as error:
            return {"refused": len(rows)}, error
        self._baseline.written(outcomes.get("stored", 0))
        self._baseline.observe(log_reward)
        return outcomes, None

    def _scored(
        self, rows: TensorDictBase, sender: int
    ) -> tuple[dict[str, float], TensorDict | None, Exception | None]:
        try:
            return *pack(self._score(rows, sender), len(rows)), None
        except Exception as error:
            return {}, None, error
