"""Items, and threads that run managers and workers, for the tests of remote parts."""

import threading
from contextlib import contextmanager

import numpy as np
from factories import objects, trajectories, transitions  # noqa: F401

from gfn_rb.remote.ranks import shares
from gfn_rb.transports.local import LocalTransport

LIMIT = 20.0  # seconds that no thread of a test ever takes


class Threads:
    """Runs functions in threads; errors come out at the end."""

    def __init__(self):
        self.errors = []
        self._threads = []

    def start(self, function, *args, **kwargs):
        def run():
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def join(self):
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a thread hangs"


@contextmanager
def threads(*functions):
    """Run functions in threads for the time of the block; raise what they raise."""
    running = Threads()
    for function in functions:
        running.start(function)
    yield running
    running.join()
    if running.errors:
        raise running.errors[0]


def group(n, timeout=5.0):
    return LocalTransport.group(n, timeout=timeout)


def owners_of(rows, managers):
    """The manager that owns each row, as an array."""
    owner = np.zeros(len(rows), int)
    for rank, at in shares(rows, managers, managers):
        owner[slice(None) if at is None else at] = rank
    return owner


def values_of(rb):
    """The first coordinates of the states that a buffer of objects holds, in ascending order."""
    return sorted(rb[:]["state"][:, 0].tolist()) if len(rb) else []
