"""A schedule goes on where its checkpoint left it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint.checkpoint_runs import buffer, rows
from factories import assert_equal
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler, StepScheduler

from gfn_rb.checkpoint import load_checkpoint, save_checkpoint, schedule_state
from gfn_rb.errors import CheckpointError
from gfn_rb.samplers import SoftmaxRewardSampler

SCHEDULERS = {
    "linear": lambda rb: LinearScheduler(rb, "temperature", final_value=0.5, num_steps=7),
    "lambda": lambda rb: LambdaScheduler(rb, "temperature", lambda i: 1 / (1 + i), min_value=0.3),
    "multiplied": lambda rb: StepScheduler(rb, "temperature", gamma=0.8, n_steps=2),
    "added": lambda rb: StepScheduler(rb, "temperature", 0.25, mode="additive", max_value=4.0),
}


def run(make: Any) -> Any:
    rb = buffer(sampler=SoftmaxRewardSampler(temperature=2.0, replacement=True))
    return rb, make(rb)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_restored_schedule_goes_on_like_one_never_interrupted(make: Any, tmp_path: Path) -> None:
    (rb, anneal), (other, its) = run(make), run(make)
    rb.extend(rows(20))
    for _ in range(3):
        anneal.step()
    save_checkpoint(tmp_path / "rb", rb, anneal=schedule_state(anneal))
    its.step()  # it was in use
    its.load_state_dict(load_checkpoint(tmp_path / "rb", other)["anneal"])
    for _ in range(6):
        assert other.sampler.temperature == rb.sampler.temperature
        assert_equal(other.sample(), rb.sample())
        anneal.step()
        its.step()
    assert rb.sampler.temperature != 2.0


def test_functions_are_left_out_and_nothing_else() -> None:
    for make, left_out in [("linear", set()), ("lambda", {"lambda_fn"}), ("added", {"operator"})]:
        _, anneal = run(SCHEDULERS[make])
        assert set(anneal.state_dict()) - set(schedule_state(anneal)) == left_out


def test_a_state_with_functions_is_refused_by_name(tmp_path: Path) -> None:
    rb, anneal = run(SCHEDULERS["lambda"])
    with pytest.raises(CheckpointError, match=r"\['anneal'\]\['lambda_fn'\]"):
        save_checkpoint(tmp_path / "rb", rb, anneal=anneal.state_dict())
    assert not (tmp_path / "rb").exists()
