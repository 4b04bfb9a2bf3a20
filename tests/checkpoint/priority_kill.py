"""Kill processes that write rows with priorities, of which old ones leave, and look at the journal.

A child opens the journal and goes on with steps: it extends the buffer by rows with priorities and
a newer version, then changes two priorities, and tells the number of each step when it is done. It
is killed at a random instant. What is found must be what a buffer without a journal holds after the
last step that was told, or after the next one.
"""

import random

import torch
from checkpoint.journal_kill import answer_of, killed
from tensordict import TensorDict

from gfn_rb import PrioritySampler
from gfn_rb.buffers import fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import Journal

CAPACITY, N = 24, 7
KINDS = {
    "best": (reward_prioritized_buffer, {}),
    "best, priorities": (reward_prioritized_buffer, {"sampler": PrioritySampler}),
    "best, age": (reward_prioritized_buffer, {"max_age": 2}),
    "best, both": (reward_prioritized_buffer, {"sampler": PrioritySampler, "max_age": 2}),
    "newest, priorities": (fifo_buffer, {"sampler": PrioritySampler}),
    "newest, both": (fifo_buffer, {"sampler": PrioritySampler, "max_age": 2}),
}


def make(kind, path=None, sync="never"):
    preset, options = KINDS[kind]
    made = {name: value() if callable(value) else value for name, value in options.items()}
    rb = preset(CAPACITY, statistics=True, batch_size=4, **made)
    if path is not None:
        Journal(rb, path, sync)
    return rb


def batch(k):
    """Rows of step 2 k, whose keys rise and fall from one row to the next."""
    x = torch.arange(k * N, (k + 1) * N)
    return TensorDict(
        {
            "x": x,
            "state": x[:, None],
            "log_reward": (x * 9 % 101).float(),
            "policy_version": torch.full_like(x, k),
            "td_error": 1.0 + x,
        },
        [N],
    )


def take(rb, step):
    """Take a step."""
    if step % 2 == 0:
        rb.extend(batch(step // 2))
    elif isinstance(rb.sampler, PrioritySampler):
        rb.update_priority(torch.tensor([0, 1]), torch.tensor([0.25, 0.5]) * step)


def held(rb):
    """Return the rows by number, and the priority of each, 0 without priorities."""
    n = len(rb)
    priority = torch.zeros(n)
    if isinstance(rb.sampler, PrioritySampler):
        priority = rb.sampler.state_dict()["priority"][:n]
    return sorted(zip(rb[:]["x"].tolist(), priority.tolist(), strict=True)) if n else []


def serve(kind, path, sync, tell):
    rb = make(kind, path, sync)
    step = max(2 * (rb.stats()["offered"] // N) - 1, 0)  # the last change of priorities again
    while True:
        take(rb, step)
        tell("took", step)
        step += 1


def write_and_kill(folder, n_kills, seed):
    """Return how many steps were told, and what was wrong."""
    torch.set_num_threads(1)
    pick, wrong = random.Random(seed), []
    models, states = {}, {}
    for kind in KINDS:
        # Once here, for what is loaded late.
        make(kind, folder / f"{kind}.first").extend(batch(0))
        models[kind], states[kind] = make(kind), [[]]  # states[m]: after m steps
    reached = dict.fromkeys(KINDS, 0)  # steps that are certain
    for i in range(n_kills):
        kind, sync = [*KINDS][i % len(KINDS)], pick.choice(["always", "never"])
        path = folder / f"{kind}.journal"
        seconds = pick.uniform(0.0, 0.05)
        told = killed(lambda tell, args=(kind, path, sync): serve(*args, tell), seconds)
        wrong += [f"{i}: {kind}: {' '.join(words)}" for words in told if words[0] != "took"]
        reached[kind] = max([reached[kind], *(int(words[1]) + 1 for words in told)])
        while len(states[kind]) < reached[kind] + 2:
            take(models[kind], len(states[kind]) - 1)
            states[kind].append(held(models[kind]))
        found = answer_of(lambda args=(kind, path): {"rows": held(make(*args))})
        if "error" in found:
            wrong.append(f"{i}: {kind}: {found['error']}")
            continue
        rows, last = [tuple(row) for row in found["rows"]], reached[kind]
        if rows not in states[kind][last : last + 2]:
            wrong.append(f"{i}: {kind}: after step {last} found {rows}")
        elif rows != states[kind][last]:
            reached[kind] = last + 1
    return {"wrong": wrong, "steps": sum(reached.values())}
