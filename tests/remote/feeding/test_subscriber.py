import itertools
import math
import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from remote.remote_runs import objects
from statistics_of_draws import chi_square_p
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.containers.objects import objects_in
from gfn_rb.remote.feeding import ObjectIndex, Subscriber


def terms(quota=2, policy="top", own=False, fresh=True):
    return {"quota": quota, "policy": policy, "own": own, "fresh": fresh}


def fed(index, quota=2):
    rows = index.subscribers[1].next(quota)
    return [] if rows is None else rows["state"][:, 0].tolist()


def subscribed(rb, **options):
    index = ObjectIndex(rb, 4)
    index.subscribe(1, terms(**options))
    return index


values = st.integers(0, 30)
log_rewards = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, 2.0])
changes = st.one_of(
    st.tuples(st.just("extend"), st.dictionaries(values, log_rewards, max_size=8)),
    st.tuples(st.just("relabel"), st.tuples(values, log_rewards)),
    st.tuples(st.just("sent"), values),  # the worker sends what is held
    st.tuples(st.just("subscribe"), st.booleans()),  # again, after a restart or not
    st.tuples(st.just("empty"), st.none()),
)


@pytest.mark.parametrize("policy", ["top", "newest"])
@settings(max_examples=100)
@given(st.lists(st.tuples(changes, st.integers(0, 12)), max_size=12))
def test_orders_agree_with_sorting(policy, changes):
    rb, held, sent, given = fifo_buffer(12), {}, set(), set()  # held: the reward and the arrival
    index = subscribed(rb, policy=policy)
    latest = -1
    for (action, argument), quota in changes:
        if action == "empty":
            rb.empty()
            held = {}
        elif action == "extend":
            rows = {v: r for v, r in argument.items() if v not in held}
            if rows:
                rb.extend(objects(list(rows), list(rows.values())))
            held = dict([*held.items(), *((v, (r, None)) for v, r in rows.items())][-12:])
        elif action == "relabel" and argument[0] in held:
            value, reward = argument
            rb[:]["log_reward"][rb[:]["state"][:, 0] == value] = reward
            held[value] = reward, held[value][1]
        elif action == "sent" and argument in held:
            index.sent.add(index.find(objects_in(objects([argument]))), 1)
            sent.add(argument)
        elif action == "subscribe":
            index.subscribe(1, terms(policy=policy, fresh=argument))
            given = set() if argument else given
        index.refresh()
        sent, given = sent & held.keys(), given & held.keys()
        for value in [v for v, (_, arrival) in held.items() if arrival is None]:
            arrival = int(index.arrival[index.find(objects_in(objects([value])))[0]])
            assert arrival > latest  # those of one batch arrive in some order
            held[value] = held[value][0], arrival
        latest = index.n_arrived - 1
        to_give = [v for v in held.keys() - sent - given if held[v][0] > -math.inf]
        first = 0 if policy == "top" else 1
        expected = sorted(to_give, key=lambda v: held[v][first:], reverse=True)[:quota]
        assert fed(index, quota) == expected
        given.update(expected)


def test_softmax_draws_have_their_law():
    log_reward, counts = [0.0, 1.0, 2.0, -2.0, 1e-3], torch.zeros(5)
    rb = fifo_buffer(5)
    rb.set_rng(torch.Generator().manual_seed(0))
    rb.extend(objects(range(5), log_reward))
    index = ObjectIndex(rb, 4)
    for _ in range(1500):
        index.subscribe(1, terms(policy="softmax"))
        counts[fed(index, 1)] += 1
    assert chi_square_p(counts, torch.tensor(log_reward).softmax(0)) > 1e-3
    index.subscribe(1, terms(policy="softmax"))
    assert sorted(fed(index, 3) + fed(index, 3) + fed(index)) == [*range(5)]  # nothing twice


def sorted_as_before(index, rank, quota):
    """The rows that a worker is fed, each object once, found by sorting all of them."""
    subscriber, rows = index.subscribers[rank], torch.arange(len(index.storage))
    number, reward = index.number[: len(rows)], index.storage[:]["log_reward"].double().numpy()
    to_give = ~index.given.has(number, rank) & (reward > -math.inf)
    if not subscriber.terms["own"]:
        to_give &= ~index.sent.has(number, rank)
    key = {"top": -reward, "newest": -index.arrival[number]}[subscriber.terms["policy"]]
    order = np.lexsort((rows, -index.arrival[number], key))
    order = order[to_give[order]]
    return order[np.sort(np.unique(number[order], return_index=True)[1])][:quota].tolist()


@pytest.mark.parametrize("make", [fifo_buffer, reward_prioritized_buffer])
@pytest.mark.parametrize("most_planned", [2, 8, 1024])
def test_many_workers_are_fed_what_sorting_all_rows_finds(make, most_planned, monkeypatch):
    monkeypatch.setattr("gfn_rb.remote.feeding._MOST_PLANNED", most_planned)
    rb, dice, n_fed = make(300), np.random.default_rng(most_planned), 0
    index = ObjectIndex(rb, 20)
    for rank in range(20):
        policy = "top" if rank % 2 else "newest"
        index.subscribe(rank, terms(policy=policy, own=rank % 3 == 0))
    read = []
    monkeypatch.setattr(index, "read", lambda rows: read.append(rows.tolist()))
    for step in range(400):
        values = dice.integers(0, 2000, dice.integers(0, 60) if step % 100 < 50 else 1)
        slots = np.empty(0, int)
        if len(values := np.unique(values)):  # rewards that are often equal
            slots = rb.extend(objects(values.tolist(), (values % 7).tolist())).numpy()
        index.refresh()
        if step % 5 == 0:
            rb[:]["log_reward"][dice.integers(len(rb))] = float(dice.integers(8))
        if step == 150:
            rb.empty()
            continue
        rank, quota = int(dice.integers(20)), int(dice.choice([1, 3, 16, 100]))
        index.refresh()
        index.sent.add(index.number[slots[slots >= 0]], rank)
        expected = sorted_as_before(index, rank, quota)
        read.clear()
        index.subscribers[rank].next(quota)
        assert [row for rows in read for row in rows] == expected
        n_fed += len(expected)
    assert n_fed > 1000


def plackett_luce(weights, order, changed):
    """The probability of an order of draws where row 0 changes its weight after the first."""
    left, p = dict(enumerate(weights)), 1.0
    for i, row in enumerate(order):
        p *= left.pop(row) / (left_total := sum(left.values()) + weights[row])
        if i == 0 and 0 in left:
            left[0], weights = changed, [changed, *weights[1:]]
        assert left_total > 0
    return p


@pytest.mark.parametrize("changed", [1.0, 6.0])
def test_draws_have_their_law_when_rows_change_and_plans_run_out(changed, monkeypatch):
    monkeypatch.setattr("gfn_rb.remote.feeding._MOST_PLANNED", 2)
    weights, orders = [1.0, 2.0, 3.0, 0.5], [*itertools.permutations(range(4))]
    rb, counts = fifo_buffer(4), torch.zeros(len(orders))
    rb.set_rng(torch.Generator().manual_seed(1))
    rb.extend(objects(range(4)))
    index = ObjectIndex(rb, 4)
    for _ in range(1500):
        rb[:]["log_reward"][:] = torch.tensor(weights).log()
        index.subscribe(1, terms(policy="softmax"))
        drawn = fed(index, 1)
        rb[:]["log_reward"][0] = math.log(changed)
        counts[orders.index((*drawn, *fed(index, 1), *fed(index, 2)))] += 1
    law = [plackett_luce(weights, order, changed) for order in orders]
    assert sum(law) == pytest.approx(1)
    assert chi_square_p(counts, torch.tensor(law)) > 1e-3


def test_only_changed_rows_are_planned_again(monkeypatch):
    rb, planned, update = fifo_buffer(1000), [], Subscriber._update
    rb.extend(objects(range(1000)))
    index = subscribed(rb)
    monkeypatch.setattr(
        Subscriber,
        "_update",
        lambda self, found: planned.append(len(found.slot)) or update(self, found),
    )
    for i in range(3):
        fed(index, 4)
        rb.extend(objects(range(1000 + 5 * i, 1005 + 5 * i)))
    assert planned == [1000, 5, 5]


def test_saved_subscribers_continue_as_restored_ones_do():
    rb, fed_rows = fifo_buffer(100), []
    rb.set_rng(torch.Generator().manual_seed(2))
    rb.extend(objects(range(100)))
    index = subscribed(rb, policy="softmax")
    first = fed(index, 10)
    state, generator = index.state_dict(), rb._rng.get_state()
    restored = ObjectIndex(rb, 4)
    restored.load_state_dict(state)
    for each in (index, restored):
        rb._rng.set_state(generator)
        fed_rows.append(fed(each, 10))
    assert fed_rows[0] == fed_rows[1]
    assert not {*first} & {*fed_rows[0]}


def test_a_byte_per_flag_of_earlier_versions_is_read():
    rb = fifo_buffer(3)
    rb.extend(objects(range(3)))
    index = subscribed(rb)
    state = index.state_dict()
    for name in ("sent", "given"):
        state["index"][name] = torch.zeros(3, 4, dtype=torch.bool)
    state["index"]["given"][2, 1] = state["index"]["sent"][1, 1] = True
    index.load_state_dict(state)
    assert fed(index, 3) == [0]


@pytest.mark.slow
def test_a_thousand_subscribers_take_less_than_a_byte_per_row_each():
    n, n_ranks = 100_000, 1001
    rb = fifo_buffer(n)
    rb.extend(objects(range(n)))
    tracemalloc.start()
    index = ObjectIndex(rb, n_ranks)
    index.refresh()
    for rank in range(1, n_ranks):
        index.subscribe(rank, terms(16, ["top", "newest", "softmax"][rank % 3]))
        assert len(index.subscribers[rank].next()) == 16
    state = index.state_dict()["index"]
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used / (n * n_ranks) < 1  # with the objects themselves and the saved state
    assert (state["sent"].nbytes + state["given"].nbytes) / (n * n_ranks) < 0.26


def test_slots_that_a_buffer_stores_are_not_given():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    index = subscribed(rb)
    rb.extend(objects([3]).set("index", torch.zeros(1, dtype=torch.int64)))
    assert "index" in rb.storage._storage.keys()  # noqa: SIM118
    assert set(index.subscribers[1].next().keys()) == {"state", "log_reward"}


@pytest.mark.slow
def test_loops_are_compiled_before_a_peer_waits(tmp_path):
    code = """if True:
        import numpy as np
        from numba.core.event import RecordingListener, install_listener
        from remote.remote_runs import managed, objects
        from gfn_rb import reward_prioritized_buffer
        from gfn_rb.remote.feeding import POLICIES

        manager, *clients = managed(reward_prioritized_buffer(200), n=4)
        with install_listener("numba:compile", RecordingListener()) as compiled:
            for client, policy in zip(clients, POLICIES):
                client.subscribe(policy=policy)
            for batch in np.split(np.arange(600), [150, 151, 152, 400]):
                for client in clients:
                    assert "error" not in client.send(objects(batch.tolist())).meta
        print(len(compiled.buffer), len(manager.buffer))
    """
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": "tests"}
    found = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    assert found.split() == ["0", "200"]
