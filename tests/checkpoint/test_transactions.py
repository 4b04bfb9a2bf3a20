"""A call of a buffer is one transaction of its journal, whatever the call does."""

from __future__ import annotations

import os

import pytest
import torch
from checkpoint.priority_kill import write_and_kill
from factories import in_fresh_process
from tensordict import TensorDict

from gfn_rb import PrioritySampler, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal

# The whole check: GFN_RB_KILLS=1000 pytest --all tests/checkpoint/test_transactions.py
KILLS = int(os.environ.get("GFN_RB_KILLS", "24"))


def rows(seed, version, n=4):
    generator = torch.Generator().manual_seed(seed)
    return TensorDict(
        {
            "state": torch.randint(0, 99, (n, 2), generator=generator),
            "log_reward": torch.rand(n, generator=generator),
            "policy_version": torch.full((n,), version),
            "td_error": torch.arange(1.0, n + 1) * 10**version,
        },
        [n],
    )


@pytest.mark.parametrize("max_age", [None, 1])
def test_rows_priorities_and_what_is_too_old_change_in_one_transaction(tmp_path, max_age):
    rb = reward_prioritized_buffer(12, max_age=max_age, sampler=PrioritySampler(), batch_size=4)
    journal = Journal(rb, tmp_path / "journal", sync="always")
    rb.extend(rows(0, 0))
    number = journal.position["number"]
    rb.extend(rows(1, 3))
    assert journal.position["number"] == number + 1
    journal.close()
    restored = reward_prioritized_buffer(
        12, max_age=max_age, sampler=PrioritySampler(), batch_size=4
    )
    Journal(restored, tmp_path / "journal").close()
    assert len(restored) == (8 if max_age is None else 4)
    priority = restored.sampler.state_dict()["priority"]
    expected = torch.arange(1.0, 5) * 1000
    assert sorted(priority[: len(restored)].tolist())[-4:] == expected.tolist()
    assert torch.equal(priority, rb.sampler.state_dict()["priority"])


@pytest.mark.slow
def test_a_kill_leaves_rows_and_priorities_of_one_step(tmp_path):
    found = in_fresh_process(write_and_kill, tmp_path, KILLS, 1)
    assert found["wrong"] == []
    assert found["steps"] > KILLS
