"""The paths in docs/architecture.md are those that calls take."""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from remote.remote_runs import group

import gfn_rb
from gfn_rb import fifo_buffer, reward_prioritized_buffer, save_checkpoint, terminating_state_buffer
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription
from gfn_rb.training import Trainer
from gfn_rb.training.config import TFBind8Config

ROOT = Path(gfn_rb.__file__).parent
PAGE = (ROOT.parent / "docs" / "architecture.md").read_text()
PATHS = {
    title: re.findall(r"^\d+\. `(\w+)`, (\S+\.py): ", text, re.MULTILINE)
    for title, text in re.findall(r"^### (.*)\n((?:(?!#).*\n)*)", PAGE, re.MULTILINE)
}


def traced(work):
    """The file and the name of each function of the package that is called, in all threads."""
    calls = []

    def see(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{ROOT}/"):
            calls.append((frame.f_code.co_name, file.removeprefix(f"{ROOT}/")))

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def rows(i, n=20):
    state = torch.arange(i * n * 3, (i + 1) * n * 3).reshape(n, 3)
    return {"state": state, "log_reward": torch.randn(n)}


def filled():
    rb = terminating_state_buffer(100, batch_size=8)
    rb.extend(rows(0))
    return rb


def extend(_):
    rb = filled()
    return lambda: rb.extend(rows(1))


def sample(_):
    rb = filled()
    rb.sample()
    rb.extend(rows(50, n=2))  # few, so that weights are changed and not all read anew
    return rb.sample


def training_step(_):
    trainer = Trainer(TFBind8Config(steps=10))
    trainer.step()
    return trainer.step


def exchange(_):
    first, second = group(2)
    manager = ReplayBufferManager(first, reward_prioritized_buffer(100))
    feed = Subscription(fifo_buffer(100), 16, own=True)
    worker = ReplayBufferWorker(second, 0, mode="awaited", subscription=feed)

    def work(i=1):
        is_done = threading.Event()

        def serve():
            while not is_done.is_set():
                manager.step(0.1)

        server = threading.Thread(target=serve)
        server.start()
        worker.extend(filled()[:].update(rows(i)))
        is_done.set()
        server.join()

    work(0)  # says hello
    return work


def checkpoint(folder):
    rb = filled()
    return lambda: save_checkpoint(folder / "rb.ckpt", rb)


WORK = {
    "Extend": extend,
    "Sample": sample,
    "Training step": training_step,
    "Exchange of a worker with a manager": exchange,
    "Checkpoint": checkpoint,
}


@pytest.mark.parametrize("title", PATHS)
def test_calls_take_the_path_that_is_described(title, tmp_path):
    calls = iter(traced(WORK[title](tmp_path)))
    missed = next((step for step in PATHS[title] if step not in calls), None)  # in this order
    assert missed is None, f"{missed} is not called, or before the step above it"


def test_paths_have_at_most_ten_steps():
    assert PATHS.keys() == WORK.keys()
    assert all(5 <= len(steps) <= 10 for steps in PATHS.values())
