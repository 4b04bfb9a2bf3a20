"""No row is drawn more often than it may be: by whichever sampler, and after a restart."""

import os
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from checkpoint.draws_kill import draw_and_kill
from checkpoint.journal_kill import forked
from factories import DEVICES, assert_equal, in_fresh_process, journaled, rows, seeded
from statistics_of_draws import chi_square_p, successive
from torchrl.data import LazyMemmapStorage

import gfn_rb
from gfn_rb import load_checkpoint, save_checkpoint
from gfn_rb.errors import ArgumentError, EmptyBufferError
from gfn_rb.samplers import PrioritySampler, RankRewardSampler, SoftmaxRewardSampler

# The whole check is of 200 kills: GFN_RB_KILLS=200 pytest --all tests/buffers/test_draw_limit.py
KILLS = int(os.environ.get("GFN_RB_KILLS", "24"))
CAPACITY = 24
PRESETS = {
    "newest": gfn_rb.fifo_buffer,
    "newest objects": partial(gfn_rb.fifo_buffer, unique="x"),
    "best": gfn_rb.reward_prioritized_buffer,
    "diverse": partial(gfn_rb.diverse_buffer, features="x", cutoff_distance=0.0),
    "groups": partial(gfn_rb.fifo_buffer, group="x", per_group=1),
    "priorities": partial(gfn_rb.fifo_buffer, sampler=PrioritySampler()),
    "with replacement": partial(
        gfn_rb.fifo_buffer, sampler=SoftmaxRewardSampler(temperature=5.0, replacement=True)
    ),
    "ranks": partial(gfn_rb.reward_prioritized_buffer, sampler=RankRewardSampler(k=0.5)),
    "files": lambda n, **more: gfn_rb.fifo_buffer(n, storage=LazyMemmapStorage(n), **more),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_row_is_drawn_as_often_as_it_may_be_and_no_more(preset, device):
    if device != "cpu" and preset == "files":
        pytest.skip("rows of files are on the host")
    for seed in range(4):
        pick, drawn, start = random.Random(seed), Counter(), 0
        max_draws, more = pick.randrange(1, 4), {} if device == "cpu" else {"device": device}
        rb = PRESETS[preset](CAPACITY, max_draws=max_draws, **more)
        for _ in range(20):
            while rb.can_sample(5) and pick.random() < 0.8:
                batch = rb.sample(5)
                assert batch.get("n_draws", None) is None
                drawn.update(batch["x"].tolist())
            n_left = {x: max_draws - drawn[x] for x in range(start) if drawn[x] < max_draws}
            assert rb.can_sample(5) == (sum(n_left.values()) >= 5)
            n = min(pick.randrange(6), CAPACITY - len(n_left))
            slots = rb.extend(rows(torch.randn(n, generator=seeded(start)), start).to(device))
            start += n
            # Only rows without a draw left have gone.
            held = [] if not len(rb) else rb[:]["x"].tolist()
            assert sorted(held) == sorted([*n_left, *range(start - n, start)])
            assert [held[slot] for slot in slots.tolist()] == [*range(start - n, start)]
        assert max(drawn.values()) <= max_draws
        assert len(drawn) > 10


def test_a_batch_has_the_law_of_draws_one_after_another():
    """Whatever is drawn again: rows leave as they reach their limit, within a batch too."""
    reward, n = torch.tensor([1.0, 0.5, 0.0, -0.5]), 1500
    p = torch.softmax(reward.double(), 0).numpy()
    law, counts = successive(p, 3), Counter()
    sampler = SoftmaxRewardSampler(replacement=True)
    generator = seeded()
    for _ in range(n):
        rb = gfn_rb.fifo_buffer(4, sampler=sampler, max_draws=1, generator=generator)
        rb.extend(rows(reward))
        counts[tuple(rb.sample(3)["x"].tolist())] += 1
    assert chi_square_p([counts[each] for each in law], [*law.values()]) > 1e-3


def test_draws_of_several_rows_each_are_uniform_over_what_is_left():
    counts = np.zeros(16)
    rb = gfn_rb.fifo_buffer(16, max_draws=2, generator=seeded())
    for _ in range(500):
        rb.empty()
        rb.extend(rows(torch.zeros(16)))
        counts += np.bincount(rb.sample(8)["x"], minlength=16)
    assert chi_square_p(counts, [1 / 16] * 16) > 1e-3


def test_slots_of_a_batch_are_valid_until_the_next_call():
    rb = gfn_rb.fifo_buffer(8, sampler=PrioritySampler(), max_draws=1, generator=seeded())
    rb.extend(rows(torch.zeros(8)))
    batch = rb.sample(4)
    assert rb[:]["x"][batch["index"]].tolist() == batch["x"].tolist()
    left = sorted({*range(8)} - {*batch["x"].tolist()})
    rb.update_priority(batch["index"], torch.full((4,), 9.0))  # which must not reach other rows
    assert sorted(rb.sample(4)["x"].tolist()) == left
    rb.update_priority(batch["index"], torch.full((4,), 9.0))
    rb.extend(rows(torch.zeros(1), 8))
    assert rb[:]["x"].tolist() == [8]


def test_a_row_that_is_added_again_counts_from_zero():
    rb = gfn_rb.fifo_buffer(8, unique="x", max_draws=2)
    rb.extend(rows(torch.zeros(1)))
    for _ in range(5):
        drawn = rb.sample(1)
        rb.extend(drawn)
    assert rb.storage[:]["n_draws"].tolist() == [0]
    rb.sample(2)
    assert not rb.can_sample(1)


def through_file(rb, again, path):
    save_checkpoint(path / "rb.gfnrb", rb)
    load_checkpoint(path / "rb.gfnrb", again)


FORMS = {
    "checkpoint": through_file,
    "dumps": lambda rb, again, path: (rb.dumps(path), again.loads(path)),
    "state_dict": lambda rb, again, _: again.load_state_dict(rb.state_dict()),
    "set_storage": lambda rb, again, _: again.set_storage(rb.storage),
}


@pytest.mark.parametrize("form", [form for form in FORMS if form != "set_storage"])
def test_counts_are_saved_with_the_rows(form, tmp_path):
    rb, again = (gfn_rb.fifo_buffer(12, max_draws=2, generator=seeded()) for _ in range(2))
    rb.extend(rows(torch.zeros(12)))
    rb.sample(9)
    FORMS[form](rb, again, tmp_path)
    if form != "checkpoint":
        again.set_rng(rb._rng.clone_state())
    for _ in range(3):
        assert_equal(again.sample(5), rb.sample(5))
    for each in (rb, again):
        assert each.draw_limit.n_left(each.storage) == 0


def test_rejected_draws_are_not_counted():
    rb = gfn_rb.fifo_buffer(8, max_draws=1)
    rb.extend(rows(torch.zeros(3)))
    with pytest.raises(EmptyBufferError, match="max_draws=1 leaves 3 draws of the 3 stored"):
        rb.sample(4)
    assert rb.stats()["drawn"] == 0
    assert len(rb.sample(3)) == 3
    rb = gfn_rb.fifo_buffer(8, max_draws=1)
    rb.extend(rows(torch.zeros(3)))
    rb.sample(3)
    with pytest.raises(EmptyBufferError, match="max_draws=1 leaves 0 draws of the 0 stored"):
        rb.sample(1)


def test_draws_of_a_batch_that_fails_are_not_counted():
    def fail(_):
        raise ValueError("no batch")

    rb = gfn_rb.fifo_buffer(4, max_draws=1)
    rb.extend(rows(torch.zeros(4)))
    rb.append_transform(fail)
    for _ in range(3):
        with pytest.raises(ValueError, match="no batch"):
            rb.sample(4)
        assert rb.can_sample(4)
    assert rb.stats()["drawn"] == 0


@pytest.mark.parametrize("replacement", [True, False, "auto"])
@pytest.mark.parametrize("kind", ["softmax", "priorities"])
def test_rows_beside_one_of_nearly_all_mass_are_drawn(kind, replacement):
    priority = torch.tensor([1e30, *[1e-30] * 4, 0.0])  # row 5 is never drawn
    if kind == "softmax":
        sampler = SoftmaxRewardSampler(replacement=replacement)
    else:
        sampler = PrioritySampler("priority", eps=0.0, replacement=replacement)
    rb = gfn_rb.fifo_buffer(6, max_draws=2, sampler=sampler, generator=seeded())
    rb.extend(rows(10 * priority.log(), priority=priority))
    drawn, n = Counter(), 3
    while rb.can_sample(n):
        batch = rb.sample(n)
        if replacement is False:
            assert len(batch["x"].unique()) == n
        log_prob = rb.sampler.log_probs(rb.storage)[batch["index"]]
        assert torch.allclose(batch["draw_log_prob"], log_prob.float())
        if kind == "priorities":
            rb.update_priority(batch["index"], torch.full((n,), 7.0))
            assert sampler.n_late == 0
        drawn.update(batch["x"].tolist())
    assert 5 not in drawn
    assert drawn.total() >= 6
    assert replacement is False or drawn.total() == 9
    with pytest.raises((ArgumentError, EmptyBufferError)):
        rb.sample(n)


def test_counting_makes_no_new_rows():
    sampler = PrioritySampler(replacement=False)
    rb = gfn_rb.fifo_buffer(8, max_draws=9, sampler=sampler, generator=seeded())
    rb.update_priority(rb.extend(rows(torch.zeros(8))), torch.arange(1.0, 9.0))
    before = sampler.log_probs(rb.storage).clone()
    for _ in range(2):
        rb.sample(8)
    assert_equal(sampler.log_probs(rb.storage), before)
    assert rb.stats()["drawn_unique"] == 8


def test_a_process_removes_rows_that_another_one_exhausts():
    rb = gfn_rb.fifo_buffer(8, max_draws=1, shared=True, storage=LazyMemmapStorage(8))
    rb.extend(rows(torch.zeros(4)))
    rb.extend(rows(torch.zeros(2), 4))
    child, pipe = forked(lambda _: rb.sample(4))
    os.close(pipe)
    os.waitpid(child, 0)
    rb.extend(rows(torch.zeros(1), 6))
    assert len(rb) == 3


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_restored_buffer_are_removed(form, tmp_path):
    rb, again = (gfn_rb.fifo_buffer(4, max_draws=1) for _ in range(2))
    for each in (rb, again):
        each.extend(rows(torch.zeros(4)))
    again.extend(rows(torch.zeros(0)))  # which looks for rows without a draw left
    rb.sample(3)
    FORMS[form](rb, again, tmp_path)
    again.extend(rows(torch.zeros(0)))
    assert len(again) == 1


def test_rows_that_are_written_over_count_from_zero():
    rb = gfn_rb.fifo_buffer(4, max_draws=2, generator=seeded())
    rb.extend(rows(torch.zeros(4)))
    rb.sample(8)
    rb[0:2] = rows(torch.zeros(2), 4)
    assert rb.sample(4)["x"].unique().tolist() == [4, 5]


def test_a_users_own_numbers_of_draws_are_kept():
    rb = gfn_rb.fifo_buffer(4, statistics=True)
    rb.extend(rows(torch.zeros(4), n_draws=torch.arange(4)))
    assert rb.sample(4)["n_draws"].shape == (4,)
    assert rb.best(4)["n_draws"].tolist() == [0, 1, 2, 3]


def test_a_journal_has_every_draw(tmp_path):
    def make(path):
        return journaled(gfn_rb.fifo_buffer(8, max_draws=2), path, "always")

    rb, drawn = make(tmp_path / "rb.journal"), Counter()
    rb.extend(rows(torch.zeros(8)))
    for _ in range(5):
        drawn.update(rb.sample(3)["x"].tolist())
        rb.journal.close()
        rb = make(tmp_path / "rb.journal")
    assert not rb.can_sample(3)
    assert max(drawn.values()) == 2
    rb.journal.close()


def assert_nothing_is_served_again(folder, n_kills, seed):
    found = in_fresh_process(draw_and_kill, folder, n_kills, seed)
    assert found["wrong"] == []
    assert found["told"] >= n_kills


def test_kills_serve_no_row_again(tmp_path):
    assert_nothing_is_served_again(tmp_path, 3, 1)


@pytest.mark.slow
def test_many_kills_serve_no_row_again(tmp_path):
    assert_nothing_is_served_again(tmp_path, KILLS, 2)
