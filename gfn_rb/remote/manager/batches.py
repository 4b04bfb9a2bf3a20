"""Batches at a manager: stored, observed and scored."""

from __future__ import annotations

import logging
import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from gfn_rb.containers.objects import object_keys
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding.subscriber import Feeder
from gfn_rb.remote.manager.baseline_keeper import BaselineKeeper
from gfn_rb.remote.protocol.messages import ScoreFunction, one_line, pack
from gfn_rb.remote.protocol.rows import check_rows
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.writers.rows import select_rows, shallow_copy

log = logging.getLogger(__name__)

Duplicates = Literal["drop", "keep"]


class IngestResult(NamedTuple):
    """Result of a batch."""

    outcomes: dict[str, int]
    """Numbers of rows stored, rejected, duplicates, only scored, or refused."""
    scores: dict[str, float] = {}
    """Of the batch."""
    per_row: TensorDict | None = None
    """Scores of its rows."""
    unstored: Exception | None = None
    """Why it could not be stored, and was not scored either."""
    unscored: Exception | None = None
    """Why it could not be scored."""


class BatchHandler:
    """Stores and scores batches.

    What does not fit the buffer, and whatever the scoring function raises, is caught here and
    reported: one worker's mistake is not to end the others' manager.
    """

    def __init__(
        self,
        rb: ReplayBuffer | None,
        feeder: Feeder,
        score: ScoreFunction,
        baseline: BaselineKeeper,
        watch: Stopwatch,
        duplicates: Duplicates = "drop",
        below: float | None = math.inf,
    ) -> None:
        if duplicates not in ("drop", "keep"):
            raise ArgumentError(f"duplicates must be 'drop' or 'keep', got {duplicates!r}")
        self._rb = rb
        self.feeder, self.baseline, self.watch = feeder, baseline, watch
        self._score = score
        self._drops, self._below = duplicates == "drop", below

    def handle(self, rows: TensorDictBase, sender: int, store: bool = True) -> IngestResult:
        """Store and score a batch."""
        try:
            self.watch.switch("store")
            log_reward = check_rows(rows, self._below)
            outcomes = self._store(rows, sender) if store else {"scored": len(rows)}
        except Exception as error:  # of a writer, transform or storage that is not known here
            return IngestResult({"refused": len(rows)}, unstored=error)
        self.baseline.written(outcomes.get("stored", 0))
        if store:  # rows to be scored alone are no claim on anybody's room
            self.baseline.observe(log_reward)
        try:
            self.watch.switch("score")
            return IngestResult(outcomes, *pack(self._score(rows, sender), rows.batch_size[0]))
        except Exception as error:
            return IngestResult(outcomes, unscored=error)

    def _store(self, rows: TensorDictBase, sender: int) -> dict[str, int]:
        """Offer rows to the buffer, and return what became of them."""
        index, n = self.feeder.index, rows.batch_size[0]
        if self._rb is None or index is None:
            return {"scored": n}
        self.baseline.notice_writes()
        keys = object_keys(rows)  # refuses what the index could not follow once it is stored
        new = np.arange(n)
        if self._drops:
            # The buffer may have been written behind the manager's back, by a checkpoint or its
            # owner: the index is refreshed before it is asked, and again once rows are in.
            self.feeder.offer(index.refresh())
            new, known = index.new(keys)
            index.sent[known, sender] = True
        n_new, n_stored = len(new), 0
        if n_new:
            # A buffer writes their slots into what it is given.
            chosen = shallow_copy(rows) if n_new == n else select_rows(rows, torch.from_numpy(new))
            slots = torch.as_tensor(self._rb.extend(chosen)).reshape(-1).cpu()
            slots = slots[slots >= 0]
            n_stored = len(slots)
            try:
                changed = index.refresh()
                index.sent[index.number[slots.numpy()], sender] = True
                self.feeder.offer(changed)
            except Exception as error:  # rows that are stored are not refused
                log.warning("rows were stored, and cannot be fed yet: %s", one_line(repr(error)))
        return {"stored": n_stored, "rejected": n_new - n_stored, "duplicates": n - n_new}
