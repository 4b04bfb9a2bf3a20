"""No row is drawn more often than it may be: by each sampler, and after a restart."""

import itertools
import os
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from checkpoint.uses_kill import draw_and_kill
from factories import (
    DEVICES,
    assert_equal,
    in_fresh_process,
    journaled,
    objects,
    rows,
    seeded,
    trajectories,
)
from statistics_of_draws import chi_square_p, successive
from torchrl.data import LazyMemmapStorage

import gfn_rb
from gfn_rb import GroupSampler, RaggedStorage, load_checkpoint, save_checkpoint
from gfn_rb.errors import ArgumentError, EmptyBufferError
from gfn_rb.samplers import PrioritySampler, RankRewardSampler, SoftmaxRewardSampler

# The whole check is of 200 kills: GFN_RB_KILLS=200 pytest --all tests/buffers/test_use_limit.py
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
        max_uses, more = pick.randrange(1, 4), {} if device == "cpu" else {"device": device}
        rb = PRESETS[preset](CAPACITY, max_uses=max_uses, **more)
        for _ in range(20):
            while rb.can_sample(5) and pick.random() < 0.8:
                batch, n = rb.sample(5), len(rb)
                assert batch.get("n_uses", None) is None
                drawn.update(batch["x"].tolist())
                # The index says where each row is now, and which left in the call.
                now = rb[:]["x"].tolist() if n else []
                for x, slot in zip(batch["x"].tolist(), batch["index"].tolist(), strict=True):
                    assert (slot == -1) == (drawn[x] == max_uses)
                    assert slot == -1 or now[slot] == x
                assert not n or int(rb[:]["n_uses"].max()) < max_uses
            n_left = {x: max_uses - drawn[x] for x in range(start) if drawn[x] < max_uses}
            assert rb.can_sample(5) == (sum(n_left.values()) >= 5)
            n = min(pick.randrange(6), CAPACITY - len(n_left))
            slots = rb.extend(rows(torch.randn(n, generator=seeded(start)), start).to(device))
            start += n
            # Rows without a draw left have gone, and no others.
            held = [] if not len(rb) else rb[:]["x"].tolist()
            assert sorted(held) == sorted([*n_left, *range(start - n, start)])
            assert [held[slot] for slot in slots.tolist()] == [*range(start - n, start)]
        assert max(drawn.values()) <= max_uses
        assert len(drawn) > 10


def test_a_batch_has_the_law_of_draws_one_after_another():
    """Whatever is drawn again: rows leave as they reach their limit, within a batch too."""
    reward, n = torch.tensor([1.0, 0.5, 0.0, -0.5]), 1500
    p = torch.softmax(reward.double(), 0).numpy()
    law, counts = successive(p, 3), Counter()
    sampler = SoftmaxRewardSampler(replacement=True)
    generator = seeded()
    for _ in range(n):
        rb = gfn_rb.fifo_buffer(4, sampler=sampler, max_uses=1, generator=generator)
        rb.extend(rows(reward))
        counts[tuple(rb.sample(3)["x"].tolist())] += 1
    assert chi_square_p([counts[each] for each in law], [*law.values()]) > 1e-3


def test_draws_of_several_rows_each_are_uniform_over_what_is_left():
    counts = np.zeros(16)
    rb = gfn_rb.fifo_buffer(16, max_uses=2, generator=seeded())
    for _ in range(500):
        rb.empty()
        rb.extend(rows(torch.zeros(16)))
        counts += np.bincount(rb.sample(8)["x"], minlength=16)
    assert chi_square_p(counts, [1 / 16] * 16) > 1e-3


def test_a_row_that_is_added_again_counts_from_zero():
    rb = gfn_rb.fifo_buffer(8, unique="x", max_uses=2)
    rb.extend(rows(torch.zeros(1)))
    for _ in range(5):
        drawn = rb.sample(1)
        rb.extend(drawn)
    assert rb[:]["n_uses"].tolist() == [0]
    rb.sample(2)
    assert len(rb) == 0


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
    rb, again = (gfn_rb.fifo_buffer(12, max_uses=2, generator=seeded()) for _ in range(2))
    rb.extend(rows(torch.zeros(12)))
    rb.sample(9)
    FORMS[form](rb, again, tmp_path)
    if form != "checkpoint":
        again.set_rng(rb._rng.clone_state())
    for _ in range(3):
        assert_equal(again.sample(5), rb.sample(5))
    assert len(again) == len(rb) == 0


def in_turn(p, n, max_uses):
    """The probability of each tuple of n draws one after another, of rows with a use left."""
    law = {}
    for drawn in itertools.product(range(len(p)), repeat=n):
        share = 1.0
        for i, row in enumerate(drawn):
            left = [drawn[:i].count(each) < max_uses for each in range(len(p))]
            share *= left[row] * p[row] / (p @ np.array(left))
        law[drawn] = share
    return law


@pytest.mark.parametrize(
    "kind",
    [
        "softmax",
        "uniform",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ranks", "priorities")),
    ],
)
def test_a_batch_with_repeated_rows_has_the_law_of_draws_in_turn(kind):
    reward, n = torch.tensor([1.0, 0.0, -1.0]), 1500
    samplers = {
        "softmax": SoftmaxRewardSampler(replacement=True),
        "ranks": RankRewardSampler(k=0.5, replacement=True),
        "priorities": PrioritySampler("priority", alpha=1.0, eps=0.0, replacement=True),
        "uniform": None,
    }
    rb = gfn_rb.fifo_buffer(3, sampler=samplers[kind], max_uses=2, generator=seeded(1))
    counts, p = Counter(), np.full(3, 1 / 3)
    for i in range(n):
        rb.empty()
        rb.extend(rows(reward, priority=reward.exp()))
        if i == 0 and samplers[kind] is not None:
            p = rb.sampler.log_probs(rb.storage).exp().numpy()
        counts[tuple(rb.sample(4)["x"].tolist())] += 1
    law = in_turn(p, 4, 2)
    assert set(counts) <= {each for each, share in law.items() if share > 0}
    assert chi_square_p([counts[each] for each in law], [*law.values()]) > 1e-3


def test_whole_groups_are_drawn_at_random_and_used_up():
    sampler = GroupSampler("x", samples_per_group=2, replacement=False)
    first = np.zeros(5)
    for seed in range(200):
        rb = gfn_rb.fifo_buffer(10, sampler=sampler, max_uses=1, generator=seeded(seed))
        data = rows(torch.zeros(10)).set("x", torch.arange(5).repeat(2))
        rb.extend(data)
        drawn = [rb.sample(2)["x"].tolist() for _ in range(5)]
        assert sorted(each[0] for each in drawn) == [0, 1, 2, 3, 4]
        assert all(one == two for one, two in drawn)
        assert not rb.can_sample(2)
        first[drawn[0][0]] += 1
    assert chi_square_p(first, [0.2] * 5) > 1e-3


def test_groups_that_would_repeat_rows_are_refused():
    sampler = GroupSampler("x", samples_per_group=2, small="fill")
    rb = gfn_rb.fifo_buffer(10, sampler=sampler, max_uses=1)
    rb.extend(rows(torch.zeros(3)))
    assert not rb.can_sample(2)
    with pytest.raises(EmptyBufferError, match="max_uses=1 leaves too few uses of the 3 stored"):
        rb.sample(2)
    assert len(rb) == 3


def test_ages_and_uses_are_limited_together():
    rb = gfn_rb.fifo_buffer(20, max_age=1, max_uses=2, generator=seeded())
    drawn = Counter()
    for version in range(8):
        rb.extend(rows(torch.zeros(6), 6 * version, policy_version=torch.full((6,), version)))
        for _ in range(2):
            batch = rb.sample(5)
            assert int(batch["policy_version"].min()) >= version - 1
            drawn.update(batch["x"].tolist())
    assert max(drawn.values()) == 2
    assert int(rb[:]["policy_version"].min()) >= 6


def test_priorities_reach_the_rows_that_were_drawn():
    sampler = PrioritySampler(alpha=1.0, eps=0.0, replacement=False)
    rb = gfn_rb.fifo_buffer(12, sampler=sampler, max_uses=2, generator=seeded())
    rb.extend(rows(torch.zeros(12)))
    for step in range(8):
        batch = rb.sample(3)
        rb.update_priority(batch["index"], batch["x"] + 1.0 + step)
        held = rb[:]["x"].tolist()
        law = rb.sampler.log_probs(rb.storage).exp()
        share = {x: float(law[held.index(x)]) for x in batch["x"].tolist() if x in held}
        for (x, p), (y, q) in itertools.combinations(share.items(), 2):
            assert p / q == pytest.approx((x + 1 + step) / (y + 1 + step))
    assert sampler.n_late == 0


ROWS = {
    "terminating states": (gfn_rb.terminating_state_buffer, lambda n: objects(range(n))),
    "trajectories": (gfn_rb.reward_prioritized_buffer, lambda n: trajectories(range(n))),
    "states": (gfn_rb.state_buffer, lambda n: trajectories(range(n))),
    "transitions": (gfn_rb.transition_buffer, lambda n: trajectories(range(n))),
    "ragged": (
        lambda n, **more: gfn_rb.fifo_buffer(n, storage=RaggedStorage(n, {"a": 4}), **more),
        lambda n: [{"a": torch.arange(i % 4 + 1), "log_reward": float(i)} for i in range(n)],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_kind_leave_with_their_last_draw(kind):
    make, data = ROWS[kind]
    rb = make(40, max_uses=2, generator=seeded(), shared=kind == "transitions")
    rb.extend(data(8))
    n, n_drawn = len(rb), 0
    while rb.can_sample(1):
        batch = rb.sample(1)
        assert "n_uses" not in batch.keys()  # noqa: SIM118
        n_drawn += 1
    assert "n_uses" not in (rb.best(1).keys() if len(rb) else [])
    assert n_drawn == 2 * n or kind in ("states", "transitions")  # some have weight zero
    assert n_drawn <= 2 * n


def test_an_interrupt_between_count_and_removal_loses_no_row(monkeypatch):
    rb = gfn_rb.fifo_buffer(8, max_uses=2, generator=seeded())
    rb.extend(rows(torch.zeros(8)))
    rb.sample(6)
    before = rb[:]

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rb.writer, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rb.sample(6)
    assert rb[:]["x"].tolist() == before["x"].tolist()
    assert int(rb[:]["n_uses"].max()) < 2


@pytest.mark.parametrize("merged", ["MergedReplayBuffer", "StackedReplayBuffer"])
def test_members_with_a_limit_are_refused(merged):
    members = [gfn_rb.fifo_buffer(4, max_uses=1), gfn_rb.fifo_buffer(4)]
    with pytest.raises(ArgumentError, match="members must not limit uses, got one with max_uses=1"):
        getattr(gfn_rb.buffers, merged)(*members)


def test_a_described_buffer_has_its_limit(tmp_path):
    rb = gfn_rb.fifo_buffer(8, max_uses=3)
    rb.extend(rows(torch.zeros(4)))
    save_checkpoint(tmp_path / "rb.ckpt", rb)
    assert gfn_rb.open_buffer(tmp_path / "rb.ckpt").use_limit.max_uses == 3


def test_rejected_draws_are_not_counted():
    rb = gfn_rb.fifo_buffer(8, max_uses=1)
    rb.extend(rows(torch.zeros(3)))
    with pytest.raises(EmptyBufferError, match="max_uses=1 leaves too few uses of the 3 stored"):
        rb.sample(4)
    assert rb.stats()["drawn"] == 0
    assert len(rb.sample(3)) == 3
    rb = gfn_rb.fifo_buffer(8, max_uses=1)
    rb.extend(rows(torch.zeros(3)))
    rb.sample(3)
    with pytest.raises(EmptyBufferError, match="the buffer is empty"):
        rb.sample(1)


def test_draws_of_a_batch_that_fails_are_not_counted():
    def fail(_):
        raise ValueError("no batch")

    rb = gfn_rb.fifo_buffer(4, max_uses=1)
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
    rb = gfn_rb.fifo_buffer(6, max_uses=2, sampler=sampler, generator=seeded())
    rb.extend(rows(10 * priority.log(), priority=priority))
    drawn, n = Counter(), 3
    while rb.can_sample(n):
        before = rb.sampler.log_probs(rb.storage).float()
        of = dict(zip(rb[:]["x"].tolist(), before.tolist(), strict=True))
        batch = rb.sample(n)
        if replacement is False:
            assert len(batch["x"].unique()) == n
        expected = torch.tensor([of[x] for x in batch["x"].tolist()])
        assert torch.allclose(batch["draw_log_prob"], expected)
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
    rb = gfn_rb.fifo_buffer(8, max_uses=9, sampler=sampler, generator=seeded())
    rb.update_priority(rb.extend(rows(torch.zeros(8))), torch.arange(1.0, 9.0))
    before = sampler.log_probs(rb.storage).clone()
    for _ in range(2):
        rb.sample(8)
    assert_equal(sampler.log_probs(rb.storage), before)


def test_rows_that_are_written_over_count_from_zero():
    rb = gfn_rb.fifo_buffer(4, max_uses=9, generator=seeded())
    rb.extend(rows(torch.zeros(4)))
    rb.sample(8)
    assert int(rb[:]["n_uses"].sum()) == 8
    rb[0:4] = rows(torch.zeros(4), 4)
    assert rb[:]["n_uses"].tolist() == [0] * 4


def test_a_users_own_numbers_of_draws_are_kept():
    rb = gfn_rb.fifo_buffer(4, statistics=True)
    rb.extend(rows(torch.zeros(4), n_uses=torch.arange(4)))
    assert rb.sample(4)["n_uses"].shape == (4,)
    assert rb.best(4)["n_uses"].tolist() == [0, 1, 2, 3]


def test_a_journal_has_every_draw(tmp_path):
    def make(path):
        return journaled(gfn_rb.fifo_buffer(8, max_uses=2), path, "always")

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


def test_a_question_leaves_the_draws_as_they_are():
    batches = []
    for asks in (False, True):
        sampler = GroupSampler("x", num_groups=2)
        rb = gfn_rb.fifo_buffer(12, sampler=sampler, max_uses=2, generator=seeded())
        rb.extend(rows(torch.zeros(12)).set("x", torch.arange(12) % 6))
        for _ in range(3):
            assert not asks or (rb.can_sample(4) and not rb.can_sample(40))
            batches.append(rb.sample(4)["x"].tolist())
    assert batches[:3] == batches[3:]
