"""Statistics of a buffer: why rows are rejected, how many different ones are drawn, quantiles."""

import threading
import time
from functools import partial

import pytest
import torch
from factories import DEVICES, rows, seeded

import gfn_rb
from gfn_rb.buffers import RateLimiter
from gfn_rb.errors import RateLimitError

REASONS = ("duplicate", "near", "group_full", "worst", "old")
PRESETS = {
    "best": gfn_rb.reward_prioritized_buffer,
    "best objects": partial(gfn_rb.reward_prioritized_buffer, unique="x"),
    "first objects": partial(gfn_rb.reward_prioritized_buffer, unique="x", on_duplicate="keep"),
    "diverse": partial(gfn_rb.diverse_buffer, features="x", cutoff_distance=1.0),
    "diverse, rejecting": partial(
        gfn_rb.diverse_buffer, features="x", cutoff_distance=1.0, near="reject"
    ),
    "groups": partial(gfn_rb.reward_prioritized_buffer, group="group", per_group=2),
    "groups of objects": partial(
        gfn_rb.reward_prioritized_buffer, group="group", per_group=2, unique="x"
    ),
    "diverse groups": partial(
        gfn_rb.diverse_buffer, features="x", cutoff_distance=1.0, group="group", per_group=2
    ),
    "newest": gfn_rb.fifo_buffer,
    "newest objects": partial(gfn_rb.fifo_buffer, unique="x", on_duplicate="keep"),
    "young": partial(gfn_rb.fifo_buffer, max_age=1),
}


def rejected(rb):
    stats = rb.stats()
    return {reason: stats.get(f"rejected_{reason}", 0) for reason in REASONS}


def some(n, seed):
    generator = seeded(seed)
    x = torch.randint(30, (n,), generator=generator)
    version = torch.randint(seed // 4, seed // 4 + 3, (n,), generator=generator)
    reward = torch.randint(-9, 9, (n,), generator=generator).float()
    return rows(reward, group=x % 4, policy_version=version).set("x", x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_that_is_not_kept_has_one_reason(preset, device):
    rb, n_kept, n_offered = PRESETS[preset](10, statistics=True, device=device), 0, 0
    for seed in range(40):
        slots = rb.extend(some(seed % 7, seed).to(device))
        n_kept, n_offered = n_kept + int((slots >= 0).sum()), n_offered + seed % 7
        found = rejected(rb)
        assert min(found.values()) >= 0
        assert sum(found.values()) == n_offered - n_kept
    expected = {
        "best": {"worst"},
        "best objects": {"worst", "duplicate"},
        "first objects": {"worst", "duplicate"},
        "diverse": {"worst", "near"},
        "diverse, rejecting": {"worst", "near"},
        "groups": {"group_full"},  # four groups of two are fewer than ten rows
        "groups of objects": {"group_full", "duplicate"},
        "diverse groups": {"group_full", "near"},
        "newest": set(),
        "newest objects": {"duplicate"},
        "young": {"old"},
    }
    assert {reason for reason, n in found.items() if n} == expected[preset]
    rb.empty()
    assert sum(rejected(rb).values()) == 0


def test_reasons_of_single_batches():
    rb = gfn_rb.reward_prioritized_buffer(3, unique="x", on_duplicate="keep", statistics=True)
    rb.extend(rows([1.0, 2.0, 3.0]))
    rb.extend(rows([9.0, 9.0, 0.0, 5.0, 6.0]).set("x", torch.tensor([0, 1, 7, 8, 8])))
    assert rejected(rb) == {"duplicate": 3, "worst": 1, "near": 0, "group_full": 0, "old": 0}
    rb = gfn_rb.diverse_buffer(3, features="x", cutoff_distance=1.0, statistics=True)
    rb.extend(rows([5.0, 1.0, 2.0]).set("x", torch.tensor([0, 1, 5])))
    assert rejected(rb)["near"] == 1
    rb.extend(rows([4.0, 0.0]).set("x", torch.tensor([1, 9])))
    assert (rejected(rb)["near"], rejected(rb)["worst"], len(rb)) == (2, 0, 3)
    rb = gfn_rb.reward_prioritized_buffer(9, group="group", per_group=1, statistics=True)
    rb.extend(rows([5.0, 1.0, 2.0], group=torch.tensor([0, 0, 1])))
    rb.add(rows([0.0], group=torch.tensor([1]))[0])
    assert rejected(rb)["group_full"] == 2


def test_quantiles_are_those_of_the_present_rows():
    rb = gfn_rb.reward_prioritized_buffer(9, statistics=True)
    assert "key_median" not in rb.stats()
    rb.extend(rows(torch.arange(20.0), policy_version=torch.arange(20)))
    stats = rb.stats()
    names = ("min", "q25", "median", "q75", "max")
    assert [stats[f"key_{name}"] for name in names] == [11.0, 13.0, 15.0, 17.0, 19.0]
    assert [stats[f"age_{name}"] for name in names] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert "key_median" not in gfn_rb.reward_prioritized_buffer(9).stats()


def test_waits_are_counted_by_side():
    limiter = RateLimiter(1.0, min_size=4, timeout=0.5)
    rb = gfn_rb.fifo_buffer(32, rate_limiter=limiter)
    rb.extend(rows(torch.zeros(4)))
    threading.Timer(0.1, rb.sample, (4,)).start()
    begin = time.monotonic()
    rb.extend(rows(torch.zeros(8), 4))
    waited = time.monotonic() - begin
    assert 0.05 < rb.stats()["seconds_waited_to_offer"] <= waited
    assert rb.stats()["seconds_waited_to_draw"] == 0.0
    rb.sample(12)
    with pytest.raises(RateLimitError):
        rb.sample(2)
    assert 0.5 <= rb.stats()["seconds_waited_to_draw"] < 2.0


def test_a_write_counts_if_an_interrupt_follows_it(monkeypatch):
    rb = gfn_rb.fifo_buffer(8, statistics=True)
    rb.extend(rows(torch.zeros(1)))

    def interrupt(index):
        raise KeyboardInterrupt

    monkeypatch.setattr(rb.sampler, "extend", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rb.extend(rows(torch.zeros(2)))
    assert rb.stats()["offered"] == rb.stats()["accepted"] == len(rb) == 3
