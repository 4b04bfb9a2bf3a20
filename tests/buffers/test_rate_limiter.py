"""Draws and offers held to a pace: by one thread after another, several threads, and processes."""

import os
import random
import threading
import time
from itertools import product

import pytest
import torch
import torch.multiprocessing as mp
from factories import assert_equal, objects, rows, seeded

from gfn_rb import load_checkpoint, reward_prioritized_buffer, save_checkpoint
from gfn_rb.buffers import RateLimiter
from gfn_rb.errors import RateLimitError, ShapeError
from gfn_rb.torchrl_compat import write_lock

SCHEDULES = int(os.environ.get("GFN_RB_SCHEDULES", "20"))  # 1000 are the whole check


def limited(*args, capacity=64, generator=None, **options):
    limiter = RateLimiter(*args, **options)
    return reward_prioritized_buffer(capacity, rate_limiter=limiter, generator=generator)


def offer(rb, n, start=0):
    return rb.extend(rows(torch.arange(start, start + n).float(), start))


# The rule.


def test_rows_are_drawn_while_too_few_were_and_offered_while_too_many_were():
    limiter = RateLimiter(2.0, min_size=3, tolerance=1.0)
    offers = {(i, s): limiter.may_insert(i, s) for i, s in product(range(5), range(10))}
    draws = {(i, s): limiter.may_sample(i, s) for i, s in product(range(5), range(10))}
    assert offers == {(i, s): i < 3 or 2 * i - s <= 1 for i, s in offers}
    assert draws == {(i, s): i >= 3 and 2 * i - s > -1 for i, s in draws}


# One thread: who is ahead skips, or gives up at its deadline.


def test_who_is_ahead_skips():
    rb = limited(2.0, min_size=4, timeout=0.0)
    with pytest.raises(RateLimitError, match=r"cannot draw 1 rows within 0 s: too few were off"):
        rb.sample(1)
    assert (offer(rb, 3) >= 0).all()
    assert not rb.can_sample(1)
    assert (offer(rb, 3, 3) >= 0).all()  # fewer than 4 were offered before
    assert offer(rb, 3, 6).tolist() == [-1, -1, -1]  # 12 samples are missing
    assert rb.can_sample(5)
    rb.sample(5)
    rb.sample(7)
    assert not rb.can_sample(1)
    assert (offer(rb, 1, 6) >= 0).all()
    stats = rb.stats()
    assert stats["offered"] == 7
    assert stats["drawn"] == 12
    assert stats["samples_per_insert"] == 12 / 7
    assert stats["target_samples_per_insert"] == 2.0


def test_who_waits_in_vain_says_for_what():
    rb = limited(1.0, timeout=0.02)
    offer(rb, 2)
    with pytest.raises(RateLimitError, match=r"cannot offer 2 rows within 0.02 s: too few were dr"):
        offer(rb, 2)
    rb.sample(2)
    with pytest.raises(RateLimitError, match=r"got 2 offered and 2 drawn, expected RateLimiter"):
        rb.sample(2)


def test_rejected_rows_and_duplicates_are_offers_and_what_fails_is_not():
    rb = reward_prioritized_buffer(2, unique="state", rate_limiter=RateLimiter(9.0, 100))
    rb.extend(objects([5, 5, 6]))
    rb.extend(objects([1, 2]))
    rb.add(objects([7])[0])
    with pytest.raises(ShapeError):
        rb.extend(objects([1]).to(torch.float64))
    rb.rate_limiter.timeout = 0.0
    with pytest.raises(RateLimitError):
        rb.sample(1)
    stats = rb.stats()
    assert (stats["offered"], stats["drawn"]) == (6, 0)
    assert (stats["accepted"], stats["evicted"], stats["size"]) == (3, 1, 2)


def test_draws_that_fail_do_not_count():
    rb = limited(1.0)
    rb.extend(rows([-torch.inf]))
    with pytest.raises(RuntimeError, match="weight zero"):
        rb.sample(1)
    assert rb.stats()["drawn"] == 0


# Many: none waits for ever, and the ratio holds.


class Actor:
    """Who offers, or draws, batches of one size, until enough of them are."""

    def __init__(self, rb, random_numbers):
        self.rb = rb
        self.n = random_numbers.choice([1, 2, 5, 16, 40])
        self.inserts = random_numbers.random() < 0.5

    def attempt(self):
        """Do what is done between two waits; return whether it could."""
        if self.inserts:
            return bool((offer(self.rb, self.n) >= 0).any())
        try:
            self.rb.sample(self.n)
        except RateLimitError:
            return False
        return True


def random_schedule(seed):
    """Let several take turns at random; fail where each has tried in vain since the last success.

    A buffer looks at its counts under its locks, so whatever threads or processes do is one such
    order of looks.
    """
    numbers = random.Random(seed)
    target, min_size = numbers.choice([0.3, 1.0, 4.0, 17.5]), numbers.choice([1, 7, 50])
    tolerance = numbers.choice([0.0, 1.0, 30.0])
    rb = limited(target, min_size, tolerance, capacity=1000, timeout=0.0)
    actors = [Actor(rb, numbers) for _ in range(numbers.randint(2, 6))]
    actors[0].inserts, actors[1].inserts = True, False
    in_vain = set()
    for _ in range(150):
        actor = numbers.choice(actors)
        in_vain = set() if actor.attempt() else in_vain | {id(actor)}
        assert len(in_vain) < len(actors), f"deadlock in schedule {seed}"
        inserts, samples = rb.statistics.rows.tolist()
        batch = max(actor.n * (target if actor.inserts else 1) for actor in actors)
        behind = max(tolerance, target * min_size) + batch
        assert -tolerance - batch <= rb.rate_limiter.deficit(inserts, samples) <= behind, seed


def test_no_random_schedule_ends_in_a_deadlock():
    for seed in range(SCHEDULES):
        random_schedule(seed)


def test_threads_wait_for_each_other():
    rb = limited(3.0, min_size=10, tolerance=5.0, timeout=60.0)
    drawing = [threading.Thread(target=lambda: [rb.sample(10) for _ in range(30)], daemon=True)]
    drawing += [threading.Thread(target=lambda: [rb.sample(3) for _ in range(100)], daemon=True)]
    for thread in drawing:
        thread.start()
    for i in range(40):
        offer(rb, 5, 5 * i)
    for thread in drawing:
        thread.join(60)
        assert not thread.is_alive()
    assert rb.statistics.rows.tolist() == [200, 600]


def test_counts_of_processes_that_share_a_buffer_change_one_at_a_time():
    rb = limited(1.0, timeout=60.0)
    rb.share()
    offer(rb, 8)
    drawing = threading.Thread(target=rb.sample, args=(4,), daemon=True)
    with write_lock(rb):  # as another process has it
        drawing.start()
        drawing.join(0.3)
        assert drawing.is_alive()
        assert rb.statistics.rows.tolist() == [8, 0]
    drawing.join(60)
    assert rb.statistics.rows.tolist() == [8, 4]


def offer_unevenly(rb, n, size, pause):
    for _ in range(n // size):
        offer(rb, size)
        time.sleep(pause)


def draw_unevenly(rb, n, size, pause):
    for _ in range(n // size):
        rb.sample(size)
        time.sleep(pause)


@pytest.mark.slow
def test_four_processes_at_uneven_speed_hold_the_ratio():
    rb = limited(4.0, min_size=200, tolerance=64.0, capacity=256, timeout=60.0)
    rb.share()
    offer(rb, 200)
    context = mp.get_context("forkserver")
    work = [
        (offer_unevenly, (rb, 2900, 10, 0.0)),
        (draw_unevenly, (rb, 10_000, 100, 0.001)),
        (draw_unevenly, (rb, 30_000, 50, 0.0)),
    ]
    children = [context.Process(target=f, args=arguments, daemon=True) for f, arguments in work]
    for child in children:
        child.start()
    ratios = []
    for i in range(69):
        offer(rb, 100, 100 * i)
        inserts, samples = rb.statistics.rows.tolist()
        if inserts > 1000:
            ratios.append(samples / inserts)
        time.sleep(0.002 * (i % 3))
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert rb.statistics.rows.tolist() == [10_000, 40_000]
    # In between too: at 1,000 inserts, 64 samples and batches of 100 and 400 make no 15 %.
    assert all(4.0 * 0.85 < ratio < 4.0 * 1.15 for ratio in ratios)
    assert all(4.0 * 0.95 < ratio < 4.0 * 1.05 for ratio in ratios[len(ratios) // 2 :])


# State.


def test_the_counts_are_restored_with_the_buffer(tmp_path):
    rb, other = (limited(2.0, min_size=4, timeout=0.0, generator=seeded()) for _ in range(2))
    offer(rb, 10)
    rb.sample(15)
    save_checkpoint(tmp_path / "rb", rb)
    load_checkpoint(tmp_path / "rb", other)
    assert other.stats() == rb.stats()
    assert_equal(other.sample(7).to_dict(), rb.sample(7).to_dict())
    assert not other.can_sample(1)
    other.empty()
    assert other.statistics.rows.tolist() == [0, 0]
