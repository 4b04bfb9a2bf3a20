"""Kill a process that saves over one path in a loop, again and again, and look at what is left.

To be run in a fresh process without other threads, which does the forking.
"""

import os
import random
import resource
import signal
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from writers.shared_kill import forked

from gfn_rb.checkpoint import load_checkpoint, save_checkpoint

ROWS = 64
WIDTH = 8192  # float32: 2 MB in all, so that most of a save's time is spent writing


def make_buffer(storage=None):
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(ROWS) if storage is None else storage,
        writer=TensorDictRoundRobinWriter(),
        batch_size=8,
    )


def generation(k):
    return TensorDict({"k": torch.full((ROWS, WIDTH), float(k))}, [ROWS])


def save_for_ever(path, k):
    rb = make_buffer()
    while True:
        rb.extend(generation(k))
        save_checkpoint(path, rb, k=k)
        k += 1


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def stopped_while_writing(child, folder):
    """Stop a child at an instant when its file lies beside the last good one."""
    while True:
        while len(os.listdir(folder)) < 2:
            time.sleep(0.0002)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        if len(os.listdir(folder)) >= 2:
            return
        os.kill(child, signal.SIGCONT)


def loaded_generation(path):
    """The generation in the file, which all its rows and the extra must agree on."""
    rb = make_buffer()
    k = load_checkpoint(path, rb)["k"]
    assert len(rb) == ROWS
    assert bool((rb[:].get("k") == k).all())
    return int(k)


def kill_loop(path, n_kills, seed):
    """After each kill: the generation that loads, and how many files lie about.

    Every other kill comes while a file is being written, the others at any instant after a save.
    """
    pick = random.Random(seed)
    rb = make_buffer()
    rb.extend(generation(0))
    a_save = max(timed(lambda: save_checkpoint(path, rb, k=0)) for _ in range(3))
    found = {"generations": [0], "files": []}
    for i in range(n_kills):
        before = path.stat().st_mtime_ns
        child = forked(lambda: save_for_ever(path, found["generations"][-1] + 1))
        if i % 2:
            stopped_while_writing(child, path.parent)
        else:
            while path.stat().st_mtime_ns == before:
                time.sleep(0.0002)
            time.sleep(pick.uniform(0.0, 4.0) * a_save)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found["files"].append(len(os.listdir(path.parent)))
        found["generations"].append(loaded_generation(path))
    save_checkpoint(path, rb, k=0)
    found["files"].append(len(os.listdir(path.parent)))
    return found


def data_segment():
    """Bytes of private memory that the process has been given, the quantity RLIMIT_DATA bounds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if "VmData" in line)


def within(nbytes, work):
    """Whether work succeeds in a child that may not allocate more than so many bytes."""

    def limited():
        limit = data_segment() + nbytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        work()

    _, status = os.waitpid(forked(limited), 0)
    return os.waitstatus_to_exitcode(status) == 0


def memory(folder):
    """Save and load 64 MB between storages on disk, with 32 MB of memory to spend."""
    n, width = 256, 65536

    def on_disk(name):
        storage = LazyMemmapStorage(n, scratch_dir=folder / name, auto_cleanup=False)
        rb = TensorDictReplayBuffer(storage=storage, batch_size=8)
        rb.extend(TensorDict({"x": torch.zeros(1, width)}, [1]))
        return rb

    source, target, path = on_disk("a"), on_disk("b"), folder / "checkpoint"
    for i in range(1, n):
        source.extend(TensorDict({"x": torch.full((1, width), float(i))}, [1]))
    return {
        "copy": within(1 << 25, lambda: source[:].get("x").clone()),
        "save": within(1 << 25, lambda: save_checkpoint(path, source)),
        "load": within(1 << 25, lambda: load_checkpoint(path, target)),
        "rows": bool((target.storage._storage["x"][:, 0] == torch.arange(n)).all()),
    }
