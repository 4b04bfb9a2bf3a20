"""Every row sent is accounted for at both ends, whatever happens in between."""

import os
import random

import pytest
import torch
from remote.remote_runs import LIMIT, MODES, group, objects, threads

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import (
    Baseline,
    BaselineFilter,
    ReplayBufferManager,
    ReplayBufferWorker,
    Subscription,
)
from gfn_rb.remote.messages import OUTCOMES

MESSAGES = int(os.environ.get("GFN_RB_MESSAGES", "30"))


def refusing(items, sender):
    if len(items) % 7 == 0:
        raise ValueError("seven")
    return {"sum": items["log_reward"].sum()}


def act(worker, seed):
    """Add batches of random sizes, some of them unfit."""
    dice = random.Random(seed)
    with worker:
        for _ in range(MESSAGES):
            n = dice.choice([0, 1, 2, 3, 7, 16, 40])
            rows = objects([dice.randrange(400) for _ in range(n)])
            if worker.frequency == 1 and dice.random() < 0.1:
                rows = rows.set("unknown", torch.zeros(n))
            worker.extend(rows)
            if dice.random() < 0.05:
                worker.drain(LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_managers", [1, 2])
def test_counters_add_up_at_both_ends(mode, n_managers):
    transports = group(4)
    ranks = list(range(n_managers))
    managers = [
        ReplayBufferManager(
            transports[rank],
            reward_prioritized_buffer(120),
            refusing,
            Baseline(0.1),
            managers=ranks,
            rows=objects([0]),  # else the first message decides, which may be an unfit one
        )
        for rank in ranks
    ]
    workers = [
        ReplayBufferWorker(
            transports[rank],
            ranks,
            mode=mode,
            in_flight=2,
            on_error="log",
            timeout=LIMIT,
            frequency=2 if rank == 1 else 1,
            filter=BaselineFilter(3) if (rank, n_managers) == (2, 1) else None,
            subscription=Subscription(fifo_buffer(60), 4, "softmax"),
        )
        for rank in range(n_managers, 4)
    ]
    runs = [lambda w=w, i=i: act(w, i) for i, w in enumerate(workers)]
    with threads(*(manager.run for manager in managers), *runs):
        pass
    check(managers, workers, range(n_managers, 4))
    if mode == "awaited":  # in other modes chance decides what is skipped
        met = ["refused", "duplicates", "rejected", "errors", "fed"]
        for name in [*met, *(["filtered"] if n_managers == 1 else [])]:
            assert sum(getattr(w.statistics, name) for w in workers) > 0, name


def check(managers, workers, ranks):
    known = [manager.metadata()["senders"] for manager in managers]
    for rank, worker in zip(ranks, workers, strict=True):
        mine, theirs = worker.statistics, [senders[str(rank)] for senders in known]
        assert mine.sent == sum(getattr(mine, name) for name in OUTCOMES) > 0
        assert mine.lost == worker.pending == worker.unanswered == 0
        assert mine.offered == mine.filtered + mine.skipped + mine.sent
        assert mine.batches == mine.replies
        names = {"items": "sent", "batches": "batches", "fed": "fed", "bytes": "bytes_sent"}
        names |= {name: name for name in (*OUTCOMES, "errors")}
        for name, own in names.items():
            assert sum(their[name] for their in theirs) == getattr(mine, own), name
        for their in theirs:
            assert their["items"] == sum(their[name] for name in OUTCOMES)
            assert their["state"] == "gone"
    assert all(len(m.buffer) == m.metadata()["stored"] for m in managers)
