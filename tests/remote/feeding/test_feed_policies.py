import math

import pytest
import torch
from hypothesis import given, strategies as st
from remote.remote_runs import objects, transitions
from statistics_of_draws import chi_square_p

from gfn_rb import fifo_buffer
from gfn_rb.containers.objects import objects_in
from gfn_rb.remote.feeding import Feeder, Subscriber


def subscriber(policy, rb):
    return Subscriber(1, {"quota": 1, "policy": policy, "fresh": True}, Feeder(rb, 2))


def chosen(policy, k, log_reward, items=None):
    """The positions of the rows that are given first."""
    n = len(log_reward)
    rb = fifo_buffer(n)
    rb.extend(
        (objects(range(n), log_reward) if items is None else items).set("at", torch.arange(n))
    )
    return subscriber(policy, rb).next(k)["at"].tolist()


changes = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 30), st.integers(-3, 3).map(float)), max_size=30),
        st.integers(1, 20),  # a reply of so many
        st.just(math.inf),  # the buffer is emptied
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy", ["top", "newest"])
@given(changes)
def test_orders_agree_with_sorting(policy, changes):
    rb, held, arrival = fifo_buffer(200), {}, 0
    feeder = Feeder(rb, 2)
    feeder.subscribe(1, {"quota": 1, "policy": policy})
    for change in changes:
        if change == math.inf:
            rb.empty()
            feeder.index.refresh()
            held = {}
        elif isinstance(change, list):
            rows = {v: r for v, r in change if v not in held}
            if rows:
                rb.extend(objects(list(rows), list(rows.values())))
            for value, log_reward in rows.items():
                held[value] = (log_reward if policy == "top" else 0, arrival := arrival + 1)
        else:
            to_give = [v for v, key in held.items() if key is not None]
            expected = sorted(to_give, key=held.__getitem__, reverse=True)[:change]
            rows = feeder.next_for(1, change)
            assert ([] if rows is None else rows["state"][:, 0].tolist()) == expected
            held.update(dict.fromkeys(expected))


def test_softmax_draws_have_their_law():
    log_reward, counts = [0.0, 1.0, 2.0, -2.0, 1e-3], torch.zeros(5)
    rb = fifo_buffer(5)
    rb.set_rng(torch.Generator().manual_seed(0))
    rb.extend(objects(range(5), log_reward))
    feeder = Feeder(rb, 2)
    for _ in range(1500):
        feeder.subscribe(1, {"quota": 1, "policy": "softmax", "fresh": True})
        counts[feeder.next_for(1)["state"][:, 0]] += 1
    assert chi_square_p(counts, torch.tensor(log_reward).softmax(0)) > 1e-3


def test_only_changed_rows_are_ranked_again(monkeypatch):
    rb = fifo_buffer(1000)
    rb.extend(objects(range(1000)))
    feeder, ranked = Feeder(rb, 2), []
    feeder.subscribe(1, {"quota": 4, "policy": "top"})
    rank = Subscriber._rank
    monkeypatch.setattr(
        Subscriber, "_rank", lambda self, row: ranked.append(len(row)) or rank(self, row)
    )
    for i in range(3):
        feeder.next_for(1)
        rb.extend(objects(range(1000 + 5 * i, 1005 + 5 * i)))
    assert ranked == [1000, 5, 5]


def test_what_a_worker_sends_after_it_was_ranked_is_not_given_to_it():
    rb = fifo_buffer(8)
    rb.extend(objects(range(4), [3.0, 2.0, 1.0, 0.0]))
    feeder = Feeder(rb, 2)
    feeder.subscribe(1, {"quota": 1, "policy": "top"})
    assert feeder.next_for(1)["state"][:, 0].tolist() == [0]
    index = feeder.index
    index.sent[index.find(objects_in(objects([1]))), 1] = True
    assert feeder.next_for(1, 4)["state"][:, 0].tolist() == [2, 3]


def test_diverse_choices_are_far_apart():
    # The states are [v, 0] for v = row: the best of 64 is 50, furthest from it 0, then 63 or 25.
    log_reward = [0.0] * 50 + [1.0] + [0.0] * 13
    assert chosen("diverse", 8, log_reward)[:3] == [50, 0, 25]


def test_diverse_distances_are_sums_over_the_state():
    log_reward = [2.0, 1.0, 0.0]
    items = objects(range(3), log_reward).set("state", torch.tensor([[0, 0], [5, 0], [3, 3]]))
    assert chosen("diverse", 2, log_reward, items) == [0, 2]


def test_diverse_choices_come_from_the_best():
    found = chosen("diverse", 2, [float(i) for i in range(64)])
    assert (found[0], min(found)) == (63, 64 - 16)  # a pool of 8 times as many


def test_diverse_transitions_are_the_best_ones():
    log_reward = [float(i) for i in range(20)]
    items = transitions(range(20)).set("log_reward", torch.tensor(log_reward))
    assert chosen("diverse", 2, log_reward, items) == [19, 18]
