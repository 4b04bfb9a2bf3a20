"""Items, and threads that run managers and workers, for the tests of remote parts."""

import threading
from contextlib import contextmanager

import torch
from tensordict import TensorDict

from gfn_rb.transports.local import LocalTransport

LIMIT = 20.0  # seconds that no thread of a test ever takes


def objects(values, log_reward=None):
    """Terminating states [v, 0], one for each value, as terminating_state_buffer stores them."""
    values = torch.as_tensor(values, dtype=torch.int64)
    state = torch.stack([values, torch.zeros_like(values)], 1)
    log_reward = values.float() if log_reward is None else torch.as_tensor(log_reward)
    return TensorDict({"state": state, "log_reward": log_reward}, [len(values)])


def trajectories(values, log_reward=None, length=2, n_steps=None):
    """Trajectories 0 -> v -> sink, padded to n_steps; the terminating state is [v]."""
    values = torch.as_tensor(values, dtype=torch.int64)
    n, n_steps = len(values), n_steps or length
    state = torch.full((n, n_steps + 1, 1), -1)
    state[:, : length - 1] = 0
    state[:, length - 1, 0] = values
    action = torch.full((n, n_steps), -1)
    action[:, :length] = 1
    log_reward = values.float() if log_reward is None else torch.as_tensor(log_reward)
    return TensorDict(
        {
            "state": state,
            "action": action,
            "length": torch.full((n,), length),
            "log_reward": log_reward,
        },
        [n],
    )


def transitions(values):
    """Transitions 0 -> v, none of them terminating but the last."""
    values = torch.as_tensor(values, dtype=torch.int64)
    done = torch.zeros(len(values), 1, dtype=torch.bool)
    done[-1] = True
    return TensorDict(
        {
            "state": values[:, None],
            "action": torch.ones_like(values),
            "next": TensorDict({"state": values[:, None] + 1, "done": done}, [len(values)]),
            "log_reward": torch.where(done[:, 0], 1.0, -torch.inf),
        },
        [len(values)],
    )


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


def values_of(rb):
    """The first coordinates of the states that a buffer of objects holds, in ascending order."""
    return sorted(rb[:]["state"][:, 0].tolist()) if len(rb) else []
