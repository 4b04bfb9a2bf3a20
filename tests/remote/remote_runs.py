"""Items, and threads that run managers and workers, for the tests of remote parts."""

import threading
from contextlib import contextmanager

import numpy as np
from factories import objects, trajectories, transitions  # noqa: F401

from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, PROTOCOL, Kind
from gfn_rb.remote.ranks import shares
from gfn_rb.transports.local import LocalTransport

LIMIT = 20.0  # seconds that no thread of a test ever takes
MODES = ["awaited", "deferred", "nonblocking"]
WELCOME = {"protocol": PROTOCOL, "managers": [0], "baseline": None, "rows": None}


@contextmanager
def threads(*functions):
    """Run functions in threads for the time of the block; raise what they raise."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(each,), daemon=True) for each in functions]
    for each in started:
        each.start()
    yield
    for each in started:
        each.join(LIMIT)
        assert not each.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def serve_until(done, *managers):
    """Serve in a thread, also when all workers have left for the moment."""

    def serve():
        while not done.is_set():
            for manager in managers:
                manager.step(0.01)

    return serve


def group(n, timeout=5.0):
    return LocalTransport.group(n, timeout=timeout)


class Client:
    """A worker reduced to its frames; the manager is driven by hand."""

    def __init__(self, transport, manager):
        self.link, self.manager = FrameChannel(transport), manager

    def post(self, kind, meta=None, rows=None, tag=DATA_TAG):
        self.link.send(0, tag, kind, meta, rows)
        while self.manager.step():
            pass

    def ask(self, *args, **kwargs):
        """Send, and return the one answer, None without any."""
        self.post(*args, **kwargs)
        answer = self.link.receive(0)
        assert self.link.receive(0) is None
        return answer

    def send(self, rows, number=1, **meta):
        return self.ask(Kind.ITEMS, {"id": number, **meta}, rows)

    def subscribe(self, **terms):
        terms = {"quota": 2, "policy": "top", "own": False, "fresh": True, **terms}
        return self.ask(Kind.HELLO, {"protocol": PROTOCOL, "managers": [0], "subscription": terms})


def managed(buffer=None, score=None, n=3, **kwargs):
    """A manager of rank 0, and clients of the other ranks."""
    transports = group(n)
    scored = {} if score is None else {"score": score}
    manager = ReplayBufferManager(transports[0], buffer, **scored, **kwargs)
    return manager, *(Client(transport, manager) for transport in transports[1:])


class Driven:
    """A worker of rank 0, and the links of its managers, which do what a test says."""

    def __init__(self, n_managers=1, local=None, **options):
        mine, *theirs = group(1 + n_managers)
        self.links = {rank: FrameChannel(each) for rank, each in enumerate(theirs, start=1)}
        self.worker = ReplayBufferWorker(
            mine, [*self.links], local, **{"timeout": LIMIT, **options}
        )

    def greet(self):
        """Have the managers say welcome before they are greeted; return the worker."""
        for link in self.links.values():
            link.send(0, DATA_TAG, Kind.HELLO, WELCOME)
        self.worker.connect()
        return self.worker

    def answer(self, to, rows=None, per_row=None, by=1, kind=Kind.SCORES, **meta):
        """Answer the batch of a number, before it is sent or after."""
        given = {"to": to, "outcomes": {}, "scores": {}, "baseline": None, **meta}
        self.links[by].send(0, DATA_TAG, kind, given, rows, per_row)


def owners_of(rows, managers):
    """The manager that owns each row, as an array."""
    owner = np.zeros(len(rows), int)
    for rank, at in shares(rows, managers, managers):
        owner[slice(None) if at is None else at] = rank
    return owner


def values_of(rb):
    """The first coordinates of the states that a buffer of objects holds, in ascending order."""
    return sorted(rb[:]["state"][:, 0].tolist()) if len(rb) else []
