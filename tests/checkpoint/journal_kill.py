"""Kill processes that use a journaled buffer, again and again, and look at what is left.

A child opens the journal, and so recovers; extends the buffer; and acknowledges each batch, by its
number, through a pipe. What else it does says the place. It is killed at a random instant. What the
next one finds must be what a plain rule keeps of all batches up to the last one acknowledged, or to
the one after it, whose acknowledgement the kill may have cut off; with ``sync="interval"`` it may
be fewer, but none that an earlier one found. Rows are compared whole. At last
each buffer goes on like one that was not killed.

extend     nothing else
load       likewise, but it is killed while it opens the journal
sync       a thread syncs it all the time
save       it saves a checkpoint after each batch, which must be whole as well
refused    the disk is full at times, and the folder not its to write to
orphan     it has forked, and what it forked lives on when the next one opens the journal
threads    three threads extend, one of which dies of an error
rank       a manager extends, and a worker sends; what its manager answered is acknowledged
"""

import json
import logging
import os
import random
import resource
import select
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from checkpoint.test_ragged_rows import listed
from tensordict import TensorDict, lazy_stack

from gfn_rb import RaggedStorage
from gfn_rb.buffers import fifo_buffer, reward_prioritized_buffer
from gfn_rb.checkpoint import journal, load_checkpoint, save_checkpoint
from gfn_rb.errors import CheckpointError
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, Kind
from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.transports import LocalTransport

CAPACITY, N = 40, 7
KINDS = {
    "best": (reward_prioritized_buffer, RowTensorStorage, []),
    "newest": (fifo_buffer, RowTensorStorage, []),
    "ragged": (
        reward_prioritized_buffer,
        lambda n: RaggedStorage(n, {"tokens": N}),
        ["tokens"],
    ),
    "text": (
        fifo_buffer,
        lambda n: RaggedStorage(n, {"tokens": N, "text": 64}, text=["text"]),
        ["tokens", "text"],
    ),
    "threads": (fifo_buffer, RowTensorStorage, []),
}
SYNCS = ("never", "always", "interval")
THREADS, PER_THREAD = 3, 200
NOBODY = 65534


class Pipe:
    """Tells a number of a kind to the parent, in one write."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __call__(self, what, k):
        os.write(self.pipe, f"{what} {k}\n".encode())


class Place(NamedTuple):
    """Where a child works: what it does, to which buffer, its journal, and random numbers."""

    name: str
    kind: str
    path: Path
    sync: str
    pick: random.Random

    @property
    def saved(self):
        return self.path.with_suffix(".saved")

    @property
    def buffer(self):
        return make(self.kind, self.path, self.sync)


def numbers(kind, rb):
    """The rows that a buffer holds, by slot; each must be whole."""
    if not len(rb):
        return []
    held = rb.storage[:]
    each = held["state"][:, 0].tolist()
    for i, row in enumerate(rows_of(kind, each).unbind(0)):
        for name in ("state", "log_reward", *KINDS[kind][2]):
            value, expected = held[name][i], row[name]
            if name == "tokens":  # which are padded
                value = value[held["tokens_mask"][i]]
            assert (value == expected) if name == "text" else value.equal(expected), (kind, name, i)
    return each


# The rule.


def reward(number):
    """Rewards rise, out of order, and no two are equal."""
    return float(number // 256 * 256 + number * 101 % 256)


def rows_of(kind, each):
    rewards = torch.tensor([reward(number) for number in each])
    rows = TensorDict({"state": torch.tensor(each)[:, None], "log_reward": rewards}, [len(each)])
    if not (names := KINDS[kind][2]):
        return rows
    more = [{"tokens": torch.arange(k % N) * k, "text": f"é{k}" * (k % N)} for k in each]
    pairs = zip(rows.unbind(0), more, strict=True)
    return lazy_stack([row.update({name: some[name] for name in names}) for row, some in pairs])


def batch(kind, k):
    return rows_of(kind, range(k * N, (k + 1) * N))


def kept(kind, n_batches):
    """What is kept of so many batches: plain Python."""
    offered = range(n_batches * N)
    best = sorted(offered, key=reward) if kind in ("best", "ragged") else list(offered)
    return sorted(best[-CAPACITY:])


# The children.


def make(kind, path=None, sync="interval"):
    preset, storage, _ = KINDS[kind]
    n = THREADS * PER_THREAD * N if kind == "threads" else CAPACITY
    rb = preset(n, storage=storage(n), generator=torch.Generator().manual_seed(0))
    if path is not None:
        journal.Journal(rb, path, sync)
    return rb


def n_offered(rb):
    """As the writer counts, whose rows are there; a buffer counts before it hands them over."""
    state = rb.writer.state_dict()
    return int(state["_write_count"] if "_write_count" in state else state["offered"])


def extend(place, tell, each=lambda rb, k: None):
    rb = place.buffer
    while True:
        k = n_offered(rb) // N
        rb.extend(batch(place.kind, k))
        tell("had", k + 1)
        each(rb, k + 1)


def sync(place, tell):
    def begin(rb, _):
        if threading.active_count() < 3:
            threading.Thread(target=rb.journal.sync).start()

    extend(place, tell, begin)


def save(place, tell):
    def save_and_tell(rb, k):
        save_checkpoint(place.saved, rb, k=k)
        tell("saved", k)

    extend(place, tell, save_and_tell)


def refused(place, tell):
    rb = place.buffer
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_root = os.geteuid() == 0
    while True:
        if place.pick.random() < 0.3:
            if is_root:
                os.seteuid(0)
            room = Path(f"{place.path}-wal").stat().st_size + place.pick.randrange(3000)
            limit = place.pick.choice((room, most))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
            if is_root:
                os.seteuid(place.pick.choice((0, NOBODY)))
        k = n_offered(rb) // N
        try:
            rb.extend(batch(place.kind, k))
            tell("had", k + 1)
        except CheckpointError:  # the buffer has them, and perhaps the next record
            tell("tried", k + 1)


def orphan(place, tell):
    def fork_once(rb, _):
        nonlocal forked
        if not forked and os.fork() == 0:
            os.close(tell.pipe)
            time.sleep(1.0)
            os._exit(0)
        forked = True

    forked = False
    extend(place, tell, fork_once)


def threads(place, tell):
    rb, dies_at = place.buffer, place.pick.randrange(1, 20)

    def extend_from(thread):
        for i in range(PER_THREAD):
            if thread == 0 and i == dies_at:
                rb.extend(TensorDict({"other": torch.zeros(N)}, [N]))  # which raises
            rb.extend(batch(place.kind, i * THREADS + thread))
            tell(str(thread), i + 1)

    threading.excepthook = lambda _: None
    for thread in range(THREADS):
        threading.Thread(target=extend_from, args=(thread,)).start()
    signal.pause()


def rank(place, tell):
    mine, theirs = LocalTransport.group(2)
    manager = ReplayBufferManager(mine, place.buffer, checkpoint=place.saved)
    if place.saved.exists():
        manager.load()
    channel = FrameChannel(theirs)
    while True:
        k = n_offered(manager.buffer) // N
        channel.send(0, DATA_TAG, Kind.ITEMS, {"id": k}, batch(place.kind, k))
        manager.step()
        answer = channel.receive(0, timeout=60.0)
        assert answer is not None
        assert answer.error is None
        assert answer.kind == Kind.SCORES
        tell("had", k + 1)
        if place.pick.random() < 0.2:
            manager.save()


PLACES = {
    "extend": extend,
    "load": extend,
    "sync": sync,
    "save": save,
    "refused": refused,
    "orphan": orphan,
    "threads": threads,
    "rank": rank,
}


def forked(work):
    """Start a child; give its process id, and where what it tells is read."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            logging.disable()
            work(Pipe(write))
        except Exception as error:
            os.write(write, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(1)
    os.close(write)
    return child, read


def killed(work, seconds):
    """Kill a child so many seconds after the first it told; return the words of what it told."""
    child, pipe = forked(work)
    select.select([pipe], [], [], 60.0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(pipe) as stream:
        return [line.split() for line in stream if line.endswith("\n")]


def told_by(pipe):
    """Return the last number of each kind that a child told."""
    with open(pipe) as stream:
        pairs = [line.rsplit(maxsplit=1) for line in stream]
    return {what: int(k) if k.isdigit() else -1 for what, k in pairs}


def answer_of(work):
    """Return the dict that a child returns, or its error."""
    child, pipe = forked(lambda tell: os.write(tell.pipe, json.dumps(work()).encode()))
    with open(pipe) as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer.startswith("{") else {"error": answer}


def look(place):
    """Return what a process finds that opens the journal."""
    rb = make(place.kind, place.path, "never")
    found = {"offered": n_offered(rb), "rows": numbers(place.kind, rb)}
    if place.saved.exists() and place.name != "rank":
        again = make(place.kind)
        found["saved"] = load_checkpoint(place.saved, again)["k"]
        found["saved_rows"] = numbers(place.kind, again)
    elif place.saved.exists():
        ReplayBufferManager(LocalTransport.group(2)[0], rb, checkpoint=place.saved).load()
        found["rows"] = numbers(place.kind, rb)
    return found


# What is right.


def faults(place, told, before, found):
    """Return what is wrong with what was found."""
    if "error" in found:
        return [f"it cannot be opened: {found['error']}"]
    if place.kind == "threads":
        return faults_of_threads(told, found["rows"], place.sync)
    had = max(before, told.get("had", 0))
    most = max(had, told.get("tried", 0)) + 1
    least = before if place.sync == "interval" else had
    n, wrong = found["offered"] // N, []
    if found["offered"] % N or not least <= n <= most:
        wrong.append(f"{least} to {most} batches were acknowledged, {found['offered'] / N} found")
    if sorted(found["rows"]) != kept(place.kind, n):
        wrong.append(f"other rows than of {n} batches")
    if "saved" in found:
        if found["saved"] < told.get("saved", 0):
            wrong.append(f"{told['saved']} were saved, {found['saved']} found")
        if sorted(found["saved_rows"]) != kept(place.kind, found["saved"]):
            wrong.append(f"other rows saved than of {found['saved']} batches")
    return wrong


def goes_on(kind, path):
    """Return whether a killed buffer goes on like another one."""
    killed, other = make(kind, path), make(kind)
    n = n_offered(killed) // N
    for k in range(n):
        other.extend(batch(kind, k))
    for k in range(n, n + 20):
        found, expected = (
            (rb.extend(batch(kind, k)).tolist(), listed(rb.sample(5)), numbers(kind, rb))
            for rb in (killed, other)
        )
        if found != expected:
            return False
    return True


def faults_of_threads(told, rows, sync):
    """Each batch is there as a whole, and those of each thread from the first one on."""
    batches = [number // N for number in rows[::N]]
    if rows != [number for k in batches for number in range(k * N, (k + 1) * N)]:
        return ["batches of threads are torn"]
    wrong = []
    for thread in range(THREADS):
        mine = [k // THREADS for k in batches if k % THREADS == thread]
        n = told.get(str(thread), 0)
        if mine != list(range(len(mine))) or len(mine) > n + 1:
            wrong.append(f"thread {thread} told {n}, {mine} found")
        elif sync != "interval" and len(mine) < n:
            wrong.append(f"thread {thread} told {n}, {len(mine)} found")
    return wrong


def kill_loop(folder, n_kills, seed):
    """Return how often each place was killed, how often that was right, and what was wrong."""
    torch.set_num_threads(1)
    journal._INTERVAL = 0.05
    pick = random.Random(seed)
    for kind in KINDS:  # once here, for what is loaded late
        make(kind).extend(batch(kind, 0))
    n_found = {}
    killed = {name: [0, 0] for name in PLACES}
    wrong = []
    for i in range(n_kills):
        name = [*PLACES][i % len(PLACES)]
        kind = {"threads": "threads", "rank": "best"}.get(name, pick.choice([*KINDS][:-1]))
        group = name if name in ("threads", "rank") else kind
        path = folder / f"{group}.journal"
        if name == "threads":
            for each in folder.glob("threads.*"):
                each.unlink()
        sync = "always" if name == "rank" else pick.choice(SYNCS)
        place = Place(name, kind, path, sync, random.Random(pick.random()))
        child, pipe = forked(lambda tell, name=name, place=place: PLACES[name](place, tell))
        if name == "load":
            time.sleep(pick.uniform(0.0, 0.05))
        else:
            select.select([pipe], [], [], 60.0)
            time.sleep(pick.uniform(0.0, 0.1))
        has_ended = os.waitpid(child, os.WNOHANG) != (0, 0)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        told, found = told_by(pipe), answer_of(lambda place=place: look(place))
        found_wrong = [f"it ended by itself: {told}"] if has_ended else []
        found_wrong += faults(place, told, n_found.get(path, 0), found)
        n_found[path] = found.get("offered", 0) // N
        killed[name][0] += 1
        killed[name][1] += not found_wrong
        wrong += [f"{i}: {name}, {kind}, {sync}: {each}" for each in found_wrong]
    for kind in [*KINDS][:-1]:
        if (path := folder / f"{kind}.journal").exists() and not goes_on(kind, path):
            wrong.append(f"{kind}: it goes on unlike one that was not killed")
    batches = {path.stem: n for path, n in n_found.items()}
    return {"killed": killed, "wrong": wrong, "batches": batches}
