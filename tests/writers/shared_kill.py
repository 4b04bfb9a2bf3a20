"""Kill processes that write to a shared buffer, at any line of code or instant, and look at it.

To be run in a fresh process without other threads, which does the forking. It tells, for each
writer, how many kills there were and how many batches in the middle of being written came out
whole; anything that differs from the model is an error.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from gfn_rb.samplers import PrioritySampler, SoftmaxRewardSampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

CAPACITY, N = 12, 5
WRITERS: dict[str, Callable[[], Any]] = {
    "best": RewardPrioritizedWriter,
    "unique": lambda: RewardPrioritizedWriter(unique="state"),
    "diverse": lambda: DiversityWriter(features="state"),
    "newest": FIFOWriter,
    "newest unique": lambda: FIFOWriter("state"),
}
Row = tuple[int, int, int]  # key, serial, object


def batch(serial: int) -> list[Row]:
    pick = random.Random(serial)
    return [(pick.randrange(8), serial * N + i, pick.randrange(20)) for i in range(N)]


def tensors(rows: list[Row]) -> TensorDict:
    key, serial, state = torch.tensor(rows).unbind(1)
    wide = serial[:, None].expand(-1, 50).clone()  # a row half-written would show
    data = {"state": state[:, None], "log_reward": key.float(), "serial": serial, "wide": wide}
    return TensorDict(data, [len(rows)])


def held(rb: TensorDictReplayBuffer) -> set[Row]:
    data = rb[:]
    assert bool((data["wide"] == data["serial"][:, None]).all())
    columns = (data["log_reward"].long(), data["serial"], data["state"][:, 0])
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    assert len(set(rows)) == len(rows)
    return set(rows)


def after(kind: str, rows: set[Row], new: list[Row]) -> set[Row]:
    """What a writer keeps, in plain Python."""
    if kind == "newest":
        return set(sorted([*rows, *new], key=lambda row: row[1])[-CAPACITY:])
    if "unique" in kind:
        last = {state: (key, serial, state) for key, serial, state in new}
        new = list(last.values())
        rows = {row for row in rows if row[2] not in last}
    ranked = sorted([*rows, *new], key=lambda row: row[0 if "newest" not in kind else 1 :])
    ranked.reverse()
    if kind == "diverse":
        ranked = list({row[2]: row for row in reversed(ranked)}.values())
        ranked.sort(reverse=True)
    return set(ranked[:CAPACITY])


def make(kind: str, sampler: Any = None) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyMemmapStorage(CAPACITY),
        writer=WRITERS[kind](),
        sampler=SoftmaxRewardSampler() if sampler is None else sampler,
        batch_size=4,
        shared=True,
    )


def forked(work: Callable[[], None]) -> int:
    """Run in a child, which never returns; give its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return child


def killed_at_line(n: int, work: Callable[[], None]) -> None:
    """Run until the n-th line of ours or TorchRL's."""
    lines = count()

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "/gfn_rb/" not in frame.f_code.co_filename and "torchrl" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()


def kill_loop(kind: str, n_kills: int, seed: int) -> dict[str, int]:
    """Every other kill comes at a line of code, the others at any instant."""
    pick, rb, done = random.Random(seed), make(kind), mmap.mmap(-1, 8)
    acknowledged = memoryview(done).cast("q")
    rb.extend(tensors(batch(0)))
    model, serial, found = after(kind, set(), batch(0)), 1, {"kills": 0, "whole": 0, "undone": 0}
    while found["kills"] < n_kills:
        first, acknowledged[0] = serial, 0

        def write(first: int = first) -> None:
            for each in count(first):
                rb.extend(tensors(batch(each)))
                acknowledged[0] += 1
                rb.sample()

        by_line = found["kills"] % 2 == 0
        n = pick.randrange(3000)
        child = forked((lambda n=n, write=write: killed_at_line(n, write)) if by_line else write)
        if not by_line:
            while not acknowledged[0]:
                time.sleep(0.0005)
            time.sleep(pick.uniform(0.0, 0.004))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        signal.alarm(30)  # should the buffer hang
        rb.sample()
        for each in range(first, first + acknowledged[0]):
            model = after(kind, model, batch(each))
        serial, rows = first + acknowledged[0], held(rb)
        if rows != model:
            model = after(kind, model, batch(serial))
            assert rows == model, (kind, found, rows ^ model)
            found["whole"] += 1
            serial += 1
        rb.extend(tensors(batch(serial)))  # and it goes on as if nothing had been
        model = after(kind, model, batch(serial))
        assert held(rb) == model, (kind, found, held(rb) ^ model)
        signal.alarm(0)
        serial += 1
        found["kills"] += 1
    found["undone"] = UNDONE[0]
    UNDONE[0] = 0
    return found


UNDONE = [0]


def several(n_kills: int, seed: int) -> dict[str, int]:
    """Three write at once, of whom one is killed: the others go on."""
    pick, rb = random.Random(seed), make("best")
    done = memoryview(mmap.mmap(-1, 24)).cast("q")
    rb.extend(tensors(batch(0)))
    model, start, kills = after("best", set(), batch(0)), 1, 0

    def offered(writer: int, i: int, start: int) -> list[Row]:
        """Keys of their own: in whatever order batches come, the same rows are kept."""
        serial = start + 3 * i + writer
        return [(serial * N + j, serial * N + j, j) for j in range(N)]

    while kills < n_kills:
        done[0] = done[1] = done[2] = 0

        def write(writer: int, start: int) -> None:
            for i in range(40) if writer else count():
                rb.extend(tensors(offered(writer, i, start)))
                done[writer] += 1

        children = [forked(lambda w=w, s=start: write(w, s)) for w in range(3)]
        signal.alarm(60)
        while min(done) < 1:
            time.sleep(0.0005)
        time.sleep(pick.uniform(0.0, 0.01))
        os.kill(children[0], signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        assert done[1] == done[2] == 40
        rows = held(rb)
        every = [row for w in range(3) for i in range(done[w]) for row in offered(w, i, start)]
        expected = after("best", model, every)
        if rows != expected:
            expected = after("best", expected, offered(0, done[0], start))
        assert rows == expected
        signal.alarm(0)
        model, start = expected, start + 3 * (done[0] + 50)
        kills += 1
    return {"kills": kills}


def priorities(n_kills: int, seed: int) -> dict[str, int]:
    """Relabels that are half-done are undone as well."""
    pick, rb = random.Random(seed), make("newest", PrioritySampler("log_reward"))
    rb.extend(tensors([(0, i, i) for i in range(CAPACITY)]))
    known, slots = 0, torch.arange(CAPACITY)
    for _ in range(n_kills):

        def write(known: int = known) -> None:
            for value in count(known + 1):
                rb.update_priority(slots, torch.full((CAPACITY,), float(value)))

        n = pick.randrange(1500)
        child = forked(lambda n=n, write=write: killed_at_line(n, write))
        os.waitpid(child, 0)
        signal.alarm(30)
        rb.sample()
        (known,) = {int(value) for value in rb[:]["log_reward"].tolist()}
        signal.alarm(0)
    return {"kills": n_kills, "last": known}


def kill_all(n_kills: int, seed: int) -> dict[str, dict[str, int]]:
    from gfn_rb.storages.sharing import WriteLock

    torch.set_num_threads(1)
    recover = WriteLock._recover

    def counted(self: WriteLock) -> None:
        UNDONE[0] += self._words[1] > 0
        recover(self)

    WriteLock._recover = counted
    result = {kind: kill_loop(kind, n_kills, seed + i) for i, kind in enumerate(WRITERS)}
    result["several"] = several(max(n_kills // 10, 2), seed)
    result["priorities"] = priorities(n_kills, seed)
    return result
