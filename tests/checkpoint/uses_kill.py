"""Kill processes that draw each row at most twice, and count how often each row was served.

A child opens the journal of a buffer, adds rows as long as there is room, draws batches, and tells
the rows of each batch after ``sample`` has returned. It is killed at a random instant. The rows of
a batch that was counted but not told are those in flight: at most one batch for each kill.
"""

import random
import time
from collections import Counter

import torch
from checkpoint.journal_kill import answer_of, killed
from factories import rows, seeded

from gfn_rb import PrioritySampler
from gfn_rb.buffers import fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal

CAPACITY, N, BATCH, MAX_USES = 40, 7, 5, 2
KINDS = {
    "newest": fifo_buffer,
    "best": reward_prioritized_buffer,
    "priorities": lambda n, **more: fifo_buffer(n, sampler=PrioritySampler(), **more),
}


def make(kind, path, sync):
    rb = KINDS[kind](CAPACITY, max_uses=MAX_USES, generator=seeded(time.monotonic_ns() % 2**31))
    Journal(rb, path, sync)
    return rb


def serve(kind, path, sync, tell):
    rb = make(kind, path, sync)
    n_offered = rb.stats()["offered"]
    while True:
        if len(rb) + N <= CAPACITY:
            rb.extend(rows(torch.zeros(N), n_offered))
            n_offered += N
            tell("had", n_offered)
        tell("drew", "-".join(map(str, rb.sample(BATCH)["x"].tolist())))


def look(kind, path):
    rb = make(kind, path, "never")
    held = rb[:] if len(rb) else {"x": torch.empty(0), "n_uses": torch.empty(0)}
    pairs = dict(zip(held["x"].tolist(), held["n_uses"].tolist(), strict=True))
    return {"offered": rb.stats()["offered"], "rows": pairs}


def draw_and_kill(folder, n_kills, seed):
    """Return how many rows were served, and what was wrong."""
    torch.set_num_threads(1)
    pick, wrong, total = random.Random(seed), [], 0
    for kind in KINDS:  # once here, for what is loaded late
        make(kind, folder / f"{kind}.first", "never").extend(rows(torch.zeros(N)))
    served, in_flight = {kind: Counter() for kind in KINDS}, Counter()
    for i in range(n_kills):
        kind, sync = [*KINDS][i % len(KINDS)], pick.choice(["always", "never"])
        path = folder / f"{kind}.journal"
        seconds = pick.uniform(0.0, 0.1)
        told = killed(lambda tell, args=(kind, path, sync): serve(*args, tell), seconds)
        for what, value in told:
            if what == "drew":
                served[kind].update(map(int, value.split("-")))
            elif what != "had":
                wrong.append(f"{i}: {kind}: {what} {value}")
        found = answer_of(lambda args=(kind, path): look(*args))
        had = [int(value) for what, value in told if what == "had"]
        counted = {x: found["rows"].get(str(x), MAX_USES) for x in range(found["offered"])}
        missing = Counter(counted)
        missing.subtract(served[kind])
        in_flight[kind] += BATCH
        if had and found["offered"] < had[-1]:
            wrong.append(f"{i}: {kind}: {had[-1]} rows were added, {found['offered']} found")
        if most := max(served[kind].values(), default=0) > MAX_USES:
            wrong.append(f"{i}: {kind}: a row was served {most} times")
        if min(missing.values(), default=0) < 0:
            wrong.append(f"{i}: {kind}: rows were served that may be drawn again")
        if sum(missing.values()) > in_flight[kind]:
            wrong.append(f"{i}: {kind}: {sum(missing.values())} draws were counted and not served")
        total += len(told)
    return {"wrong": wrong, "told": total}
