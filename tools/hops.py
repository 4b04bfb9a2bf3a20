"""Which files a batch passes through on its way from a worker to a manager's storage.

64 trajectories of TFBind8 are given to ``ReplayBufferWorker.extend``, over a ``LocalTransport``,
and ``ReplayBufferManager.step`` is called until its storage is written. A file of the package
counts once, if meanwhile one of its functions is called with the batch among its arguments,
``self`` left out. The batch is: a TensorDict or a container of this package; a tensor or array
with a dimension of 64 or more, or as many bytes; or a tuple, list, dict or dataclass with one of
these directly in it.

Run as ``python tools/hops.py ROOT``: it prints one file a line, in the order of first calls.
"""

from __future__ import annotations

import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

N_ROWS = 64


class Trace:
    """What ``sys.setprofile`` calls: collects the files of a package that are given the batch."""

    def __init__(self, package: Path) -> None:
        self.files: dict[str, None] = {}  # ordered
        self.is_on = False
        self._prefix = f"{package}/"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Look at the arguments of a call."""
        file = frame.f_code.co_filename
        if not self.is_on or event != "call" or not file.startswith(self._prefix):
            return
        name = file.removeprefix(self._prefix)
        if name not in self.files and _has_batch(frame):
            self.files[name] = None


def _has_batch(frame: FrameType) -> bool:
    code = frame.f_code
    n = (
        code.co_argcount
        + code.co_kwonlyargcount
        + bool(code.co_flags & 4)
        + bool(code.co_flags & 8)
    )
    names = [name for name in code.co_varnames[:n] if name not in ("self", "cls")]
    return any(_is_batch(frame.f_locals.get(name)) for name in names)


def _is_batch(value: Any, depth: int = 1) -> bool:
    import numpy as np
    from tensordict import TensorDictBase
    from torch import Tensor

    if isinstance(value, TensorDictBase) or hasattr(value, "to_tensordict"):
        return True
    if isinstance(value, (Tensor, np.ndarray)):
        return value.ndim > 0 and max(value.shape) >= N_ROWS
    if isinstance(value, (bytes, bytearray, memoryview)):
        return len(value) >= N_ROWS
    if depth == 0:
        return False
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (tuple, list)):
        parts = list(value)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    else:
        return False
    return any(_is_batch(part, depth - 1) for part in parts)


def hops(package: Path) -> list[str]:
    """Return the files a batch passes through; the package must be the one that is imported."""
    import torch
    from torchrl import logger

    logger.setLevel("ERROR")
    from gfn_rb import Sampler, fifo_buffer
    from gfn_rb.envs import TFBind8
    from gfn_rb.policies import ForwardPolicy
    from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker
    from gfn_rb.transports import LocalTransport

    torch.manual_seed(0)
    env, (at_manager, at_worker) = TFBind8(), LocalTransport.group(2)
    buffer = fifo_buffer(1000)
    manager = ReplayBufferManager(at_manager, buffer)
    worker = ReplayBufferWorker(at_worker, 0)
    batch = Sampler(ForwardPolicy(env)).sample_trajectories(env, n=N_ROWS)
    trace, write = Trace(package), buffer.storage.set

    def write_and_stop(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        trace.is_on = False

    buffer.storage.set = write_and_stop

    def work() -> None:
        worker.connect()
        time.sleep(0.1)  # the manager has answered, and has done with it
        trace.is_on = True
        sys.setprofile(trace)  # of this thread
        worker.extend(batch)

    thread = Thread(target=work)
    thread.start()
    sys.setprofile(trace)
    while thread.is_alive() or not len(buffer):
        manager.step(timeout=0.01)
    sys.setprofile(None)
    assert len(buffer) == N_ROWS, f"{len(buffer)} of {N_ROWS} rows arrived"
    return list(trace.files)


if __name__ == "__main__":
    root = Path(sys.argv[1]).resolve()
    sys.path[0] = str(root)
    print(*hops(root / "gfn_rb"), sep="\n")
