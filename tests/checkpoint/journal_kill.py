"""Kill a process that extends a journaled buffer, again and again, and look at what is left.

A child opens the journal, and so recovers; extends the buffer and compacts it in between; and
acknowledges each batch, by its number, through a pipe. It is killed at a random instant, of its
start too. What the next one finds must be what a plain rule keeps of all batches up to the last one
acknowledged, or to the one after it, whose acknowledgement the kill may have cut off.

    python journal_kill.py FOLDER N_KILLS SEED
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from gfn_rb.buffers import fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import journal

CAPACITY, N = 40, 7
KINDS = ("best", "newest")


def batch(k: int) -> list[tuple[int, float]]:
    """The rows of batch k: their number, and a reward."""
    pick = random.Random(k)
    return [(k * N + i, float(pick.randint(0, 1000) + min(k, 1000))) for i in range(N)]


def rows_of(k: int) -> TensorDict:
    numbers, rewards = zip(*batch(k), strict=True)
    columns = {"x": torch.tensor(numbers), "log_reward": torch.tensor(rewards)}
    return TensorDict(columns, [N])


def kept(kind: str, n_batches: int) -> list[int]:
    """What is kept of so many batches: plain Python."""
    rows = [row for k in range(n_batches) for row in batch(k)]
    if kind == "newest":
        return sorted(number for number, _ in rows[-CAPACITY:])
    best = sorted(rows, key=lambda row: (row[1], row[0]), reverse=True)[:CAPACITY]
    return sorted(number for number, _ in best)


def make(kind: str, path: Path, sync: str) -> Any:
    preset = reward_prioritized_buffer if kind == "best" else fifo_buffer
    return preset(CAPACITY, journal=path, sync=sync)


def n_offered(rb: Any) -> int:
    """As the writer counts, whose rows are there; a buffer counts before it hands them over."""
    state = rb.writer.state_dict()
    return int(state["_write_count"] if "_write_count" in state else state["offered"])


def extend_for_ever(kind: str, path: Path, sync: str, pipe: int) -> None:
    rb = make(kind, path, sync)
    while True:
        k = n_offered(rb) // N
        rb.extend(rows_of(k))
        os.write(pipe, (k + 1).to_bytes(8, "little"))


def forked(kind: str, path: Path, sync: str) -> tuple[int, int]:
    """Start a child; give its process id, and where its acknowledgements are read."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            extend_for_ever(kind, path, sync, write)
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def acknowledged(pipe: int, before: int) -> int:
    with open(pipe, "rb") as stream:
        text = stream.read()
    whole = text[: len(text) // 8 * 8]
    return int.from_bytes(whole[-8:], "little") if whole else before


def kill_loop(folder: Path, n_kills: int, seed: int) -> dict[str, Any]:
    """Return how many batches were found after each kill, and what was found wrong."""
    pick = random.Random(seed)
    rb = fifo_buffer(N)  # once here, for what is loaded late
    rb.extend(rows_of(0))
    n_found = {kind: [0] for kind in KINDS}
    wrong: list[str] = []
    for i in range(n_kills):
        kind = KINDS[i % 2]
        sync = ("never", "always", "interval")[i // 2 % 3]
        path, before = folder / kind, n_found[kind][-1]
        child, pipe = forked(kind, path, sync)
        if i % 4:  # others while it starts, and recovers
            select.select([pipe], [], [], 60.0)
        time.sleep(0.25 * pick.random())
        status = os.waitpid(child, os.WNOHANG)
        if status != (0, 0):
            wrong.append(f"{kind} after {before}: it ended with {status}")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = max(before, acknowledged(pipe, before))
        found = forked_look(kind, path)
        n_found[kind].append(found["batches"])
        at_least = before if sync == "interval" else told
        if not at_least <= found["batches"] <= told + 1:
            wrong.append(f"{kind}, {sync}: {told} were acknowledged, {found['batches']} found")
        if found["rows"] != kept(kind, found["batches"]):
            wrong.append(f"{kind}, {sync}: other rows than of {found['batches']} batches")
    return {"batches": n_found, "wrong": wrong}


def forked_look(kind: str, path: Path) -> dict[str, Any]:
    """What a process finds that opens the journal."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rb = make(kind, path, "never")
            rows = rb.storage[:]["x"].tolist() if len(rb) else []
            offered = n_offered(rb)
            answer = {"batches": offered // N, "rows": sorted(rows)}
            assert offered % N == 0
            os.write(write, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return dict(json.loads(answer or b'{"batches": -1, "rows": []}'))


if __name__ == "__main__":
    torch.set_num_threads(1)
    journal._LEAST, journal._INTERVAL = 20_000, 0.05
    print(json.dumps(kill_loop(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
