"""Trace the five paths of docs/architecture.md: ``python tools/paths.py [--write | TITLE]``.

Prints a table of how many calls of functions of the package each path has, in how many files, and
how deep they are nested. ``--write`` puts the table into the page. TITLE, such as "Sample", prints
each call of one path with its file.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))
os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # it logs a line for every storage

import gfn_rb  # noqa: E402
from gfn_rb import fifo_buffer, save_checkpoint, terminating_state_buffer  # noqa: E402
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription  # noqa: E402
from gfn_rb.training import Trainer  # noqa: E402
from gfn_rb.training.config import TFBind8Config  # noqa: E402
from gfn_rb.transports import LocalTransport  # noqa: E402

PACKAGE = Path(gfn_rb.__file__).parent
PAGE = HERE / "docs" / "architecture.md"
N_ROWS = 64
_TABLE = re.compile(r"(?<=<!-- paths -->\n)(.*?)(?=<!-- end of paths -->)", re.DOTALL)


class Call(NamedTuple):
    """A call of a function of the package, and how many others it is nested in."""

    name: str
    file: str
    depth: int


def traced(work: Callable[[], object]) -> list[Call]:
    """Return the calls of the package that some work makes, in all its threads."""
    calls: list[Call] = []
    depths = threading.local()

    def see(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(f"{PACKAGE}/"):
            return
        depth = getattr(depths, "value", 0)
        if event == "call":
            calls.append(Call(frame.f_code.co_name, file.removeprefix(f"{PACKAGE}/"), depth))
        depths.value = depth + 1 if event == "call" else max(depth - 1, 0)

    gc.collect()  # or what was left before would be finalized meanwhile, by calls of its own
    gc.disable()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None is documented
        gc.enable()
    return calls


def _rows(n: int = N_ROWS) -> TensorDict:
    return TensorDict({"state": torch.randint(2**31, (n, 8)), "log_reward": torch.randn(n)}, [n])


def _full() -> gfn_rb.GFNReplayBuffer:
    """Return a full buffer of one row per object that has written and drawn before."""
    rb = terminating_state_buffer(10_000, batch_size=N_ROWS)
    for _ in range(3):
        rb.extend(_rows(8_192))
    for _ in range(3):
        rb.extend(_rows())
        rb.sample()
    return rb


@contextmanager
def extend() -> Iterator[Callable[[], object]]:
    """Store a batch in a full buffer."""
    rb, rows = _full(), _rows()
    yield lambda: rb.extend(rows)


@contextmanager
def sample() -> Iterator[Callable[[], object]]:
    """Draw a batch after a write, of which the sampler hears."""
    rb = _full()
    rb.extend(_rows())
    yield rb.sample


@contextmanager
def training_step() -> Iterator[Callable[[], object]]:
    """Train one step on TFBind8."""
    trainer = Trainer(TFBind8Config(steps=10))
    for _ in range(3):
        trainer.step()
    yield trainer.step


@contextmanager
def exchange() -> Iterator[Callable[[], object]]:
    """Send rows to a manager, and receive others."""
    first, second = LocalTransport.group(2, timeout=20.0)
    manager = ReplayBufferManager(first, terminating_state_buffer(1_000))
    feed = Subscription(fifo_buffer(100), 16, own=True)
    worker = ReplayBufferWorker(second, 0, mode="awaited", subscription=feed)
    rows = [terminating_state_buffer(N_ROWS) for _ in range(3)]
    for rb in rows:
        rb.extend(_rows())

    def work(batch: Any) -> None:
        server = threading.Thread(target=manager.step, args=(20.0,))
        server.start()
        worker.extend(batch)
        server.join()

    server = threading.Thread(target=manager.step, args=(20.0,))  # for the worker's hello
    server.start()
    work(rows[0][:])
    server.join()
    work(rows[1][:])
    yield lambda: work(rows[2][:])


@contextmanager
def checkpoint() -> Iterator[Callable[[], object]]:
    """Save a buffer."""
    rb = _full()
    with tempfile.TemporaryDirectory() as folder:
        yield lambda: save_checkpoint(Path(folder) / "rb.ckpt", rb)


WORK = {
    "Extend": extend,
    "Sample": sample,
    "Training step": training_step,
    "Exchange of a worker with a manager": exchange,
    "Checkpoint": checkpoint,
}
"""What each path is traced in, by its title in docs/architecture.md."""


def calls_of(title: str) -> list[Call]:
    """Return the calls of one path."""
    torch.manual_seed(0)
    with WORK[title]() as work:
        return traced(work)


def lengths(calls: list[Call]) -> tuple[int, int, int]:
    """Return the number of calls, the number of their files, and the depth of the deepest."""
    return len(calls), len({each.file for each in calls}), 1 + max(each.depth for each in calls)


def table() -> str:
    """Return the lengths of all paths as a table in Markdown."""
    lines = ["| path | calls | files | depth |", "| --- | --- | --- | --- |"]
    for title in WORK:
        lines.append(f"| {title} | {' | '.join(map(str, lengths(calls_of(title))))} |")
    return "\n".join(lines) + "\n"


def stated(page: str) -> dict[str, tuple[int, ...]]:
    """Return the lengths that a page states, by path."""
    found = _TABLE.search(page)
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| (\d+) \|$", found[0] if found else "", re.M)
    return {title: tuple(map(int, each)) for title, *each in rows}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("title", nargs="?", choices=WORK)
    parser.add_argument("--write", action="store_true", help="write the table into the page")
    arguments = parser.parse_args()
    if arguments.title:
        for name, file, depth in calls_of(arguments.title):
            print(f"{'  ' * depth}{name}  {file}")
        return
    print(text := table(), end="")
    if arguments.write:
        PAGE.write_text(_TABLE.sub(lambda _: text, PAGE.read_text()))


if __name__ == "__main__":
    main()
