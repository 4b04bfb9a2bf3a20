import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from remote.remote_runs import objects
from statistics_of_draws import chi_square_p
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import fifo_buffer
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
            index.sent[index.find(objects_in(objects([argument]))), 1] = True
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


def test_only_changed_rows_are_ranked_again(monkeypatch):
    rb, ranked, rank = fifo_buffer(1000), [], Subscriber._rank
    rb.extend(objects(range(1000)))
    index = subscribed(rb)
    monkeypatch.setattr(
        Subscriber, "_rank", lambda self, row: ranked.append(len(row)) or rank(self, row)
    )
    for i in range(3):
        fed(index, 4)
        rb.extend(objects(range(1000 + 5 * i, 1005 + 5 * i)))
    assert ranked == [1000, 5, 5]


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
