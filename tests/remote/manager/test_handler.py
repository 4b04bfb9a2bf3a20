import pytest
import torch
from remote.remote_runs import objects, values_of

from gfn_rb import reward_prioritized_buffer
from gfn_rb.remote.manager.baseline import BaselineKeeper, EMABaseline
from gfn_rb.remote.manager.handler import BatchHandler
from gfn_rb.remote.manager.store import Store
from gfn_rb.remote.protocol.scores import no_scores
from gfn_rb.stopwatch import Stopwatch


@pytest.fixture
def rb():
    return reward_prioritized_buffer(4)


@pytest.fixture
def baseline():
    return BaselineKeeper(EMABaseline(1.0))


def intake(rb, baseline, score=no_scores):
    return BatchHandler(Store(rb, 3), score, baseline, Stopwatch(("store", "score")))


def test_a_batch_is_stored_scored_and_observed(rb, baseline):
    def score(rows, sender):
        return {"mean": rows["log_reward"].mean(), "twice": 2 * rows["log_reward"], "from": sender}

    verdict = intake(rb, baseline, score).take(objects([3, 4]), 2, keep=True)
    assert verdict.outcomes == {"stored": 2, "rejected": 0, "duplicates": 0}
    assert verdict.scores == {"mean": 3.5, "from": 2.0}
    assert verdict.per_row["twice"].tolist() == [6.0, 8.0]
    assert verdict.unstored is verdict.unscored is None
    assert values_of(rb) == [3, 4]
    assert baseline.value() == 3.0


def test_a_batch_to_be_scored_alone_is_not_stored(rb, baseline):
    verdict = intake(rb, baseline).take(objects([3, 4]), 2, keep=False)
    assert verdict.outcomes == {"scored": 2}
    assert len(rb) == 0
    assert baseline.value() == 3.0


def test_what_does_not_fit_is_refused_and_does_not_count(rb, baseline):
    taking = intake(rb, baseline)
    verdict = taking.take(objects([1, 2], [0.0, torch.nan]), 2, keep=True)
    assert verdict.outcomes == {"refused": 2}
    assert type(verdict.unstored).__name__ == "NaNError"
    assert baseline.value() is None
    verdict = taking.take(objects([1]).exclude("log_reward"), 2, keep=False)
    assert verdict.outcomes == {"refused": 1}
    assert type(verdict.unstored).__name__ == "KeyMismatchError"
    assert taking.take(objects([1]), 2, keep=True).outcomes["stored"] == 1


def test_the_baseline_is_told_how_many_rows_were_written(rb, baseline, monkeypatch):
    taking, written = intake(rb, baseline), []
    monkeypatch.setattr(baseline, "written", written.append)
    taking.take(objects([3, 4, 4]), 2, keep=True)
    taking.take(objects([5]), 2, keep=False)
    taking.take(objects([6], [torch.nan]), 2, keep=True)
    assert written == [2, 0]


def test_a_scoring_function_that_raises_costs_no_items(rb, baseline):
    def score(rows, sender):
        raise ZeroDivisionError("of mine")

    verdict = intake(rb, baseline, score).take(objects([3]), 2, keep=True)
    assert verdict.outcomes["stored"] == 1
    assert isinstance(verdict.unscored, ZeroDivisionError)
    assert verdict.scores == {}
    assert verdict.per_row is None
