"""Python calls of an exchange, which cost more than its bytes: a bound that holds what was won."""

import gc
import sys
import threading

import pytest
import torch
from remote.remote_runs import group
from tensordict import TensorDict

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription

ROUNDS = 8


def rows(i, n=64, n_steps=60, width=16):
    values = torch.arange(i * n, (i + 1) * n)
    columns = {
        "state": values[:, None, None].repeat(1, n_steps + 1, width),
        "action": torch.zeros(n, n_steps, dtype=torch.int64),
        "length": torch.full((n,), n_steps),
        "log_reward": values.double(),
    }
    return TensorDict(columns, [n])


class Calls:
    """Counts calls of Python functions, without those that ``extend`` of a buffer makes."""

    def __init__(self):
        self.count, self._inside = 0, 0

    def __call__(self, frame, event, arg):
        code = frame.f_code
        is_extend = code.co_name in ("wrapper", "extend") and "replay_buffer" in code.co_filename
        if event == "call":
            self.count += not self._inside
            self._inside += is_extend
        elif event == "return":
            self._inside -= is_extend

    def __enter__(self):
        gc.collect()  # or what other tests left would be finalized meanwhile, by calls of its own
        gc.disable()
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        gc.enable()


@pytest.mark.parametrize(("is_fed", "most"), [(False, 392), (True, 586)])
def test_an_exchange_takes_few_calls_at_worker_and_manager(is_fed, most, request):
    if request.config.option.all:
        pytest.skip("types are checked at each call, by further calls")
    mine, theirs = group(2)
    manager = ReplayBufferManager(mine, reward_prioritized_buffer(10_000))
    fed = Subscription(fifo_buffer(1000), 16, own=True) if is_fed else None
    worker = ReplayBufferWorker(theirs, 0, mode="nonblocking", subscription=fed)
    server = threading.Thread(target=manager.step, args=(5.0,))
    server.start()
    worker.connect()
    server.join()
    calls = Calls()
    for i in range(3 * ROUNDS):
        batch = rows(i)
        if i < 2 * ROUNDS:  # what is looked up, compiled or loaded once
            worker.extend(batch)
            manager.step()
            worker.collect()
            continue
        with calls:
            worker.extend(batch)
            manager.step()
            worker.collect()
    assert worker.statistics.stored == 3 * ROUNDS * 64
    assert worker.statistics.fed == is_fed * 3 * ROUNDS * 16
    assert most / 2 < calls.count / ROUNDS <= most
