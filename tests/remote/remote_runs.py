"""Items, and threads that run managers and workers, for the tests of remote parts."""

import threading
from contextlib import contextmanager

import numpy as np
from factories import objects, trajectories, transitions  # noqa: F401

from gfn_rb.remote.ranks import shares
from gfn_rb.transports.local import LocalTransport

LIMIT = 20.0  # seconds that no thread of a test ever takes


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
