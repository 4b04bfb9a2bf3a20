"""Processes that answer requests for trajectories: starting them, talking to them, ending them."""

from __future__ import annotations

import contextlib
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from gfn_rb.containers import Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError, WorkerError
from gfn_rb.rollout import Sampler

PATIENCE = 5.0
"""Seconds that workers told to stop have for what they are doing."""

_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


class Worker(NamedTuple):
    """The main process's end of a worker.

    Attributes:
        number: which of the workers it is.
        process: the process.
        connection: to the process.
    """

    number: int
    process: BaseProcess
    connection: Connection

    def send(self, request: tuple[int, int] | None) -> None:
        """Ask for a number of trajectories, drawn from a seed; None has the worker end."""
        with contextlib.suppress(OSError):  # where it died, receive() tells
            self.connection.send(request)

    def receive(self) -> Trajectories | None:
        """Return what the worker answers: at first that it is ready, None.

        Raises:
            WorkerError: it failed or died.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            raise WorkerError(f"worker {self.number} died, exit code {code}") from None
        if isinstance(answer, _Failure):
            raise WorkerError(f"worker {self.number}: {answer.summary}") from _Remote(answer.trace)
        return None if answer is None else _unpacked(answer)


def start(
    n_workers: int,
    make_env: Callable[[], GFNCore],
    policy: TensorDictModuleBase,
    policy_kwargs: dict[str, Any],
) -> list[Worker]:
    """Start worker processes; if that fails, stop those that run.

    Args:
        n_workers: how many.
        make_env: returns the environment. Anything callable, lambdas included, as for TorchRL's
            collectors.
        policy: a forward policy in shared memory.
        policy_kwargs: see :class:`gfn_rb.Sampler`.

    Raises:
        ArgumentError: something cannot be pickled.
    """
    context = torch.multiprocessing.get_context("spawn")
    job = (_pickled(make_env), policy, policy_kwargs)
    workers: list[Worker] = []
    try:
        for i in range(n_workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there, *job), daemon=True)
            workers.append(Worker(i, process, here))
            process.start()
            there.close()
    except BaseException as error:
        stop(workers)
        if isinstance(error, _UNPICKLABLE):
            raise ArgumentError(f"policy must be picklable: {error}") from error
        raise
    return workers


def stop(workers: list[Worker]) -> None:
    """End all workers, by force those that take longer than ``PATIENCE``."""
    deadline = time.monotonic() + PATIENCE
    for worker in workers:
        worker.send(None)
        worker.connection.close()
    for process in [worker.process for worker in workers if worker.process.pid is not None]:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join()


def _pickled(make_env: Callable[[], GFNCore]) -> bytes:
    try:
        return cloudpickle.dumps(make_env)
    except _UNPICKLABLE as error:
        raise ArgumentError(f"make_env must be picklable: {error}") from error


class _Failure(NamedTuple):
    """How a worker tells that something was raised."""

    summary: str
    trace: str


class _Remote(Exception):
    """Shows the traceback of another process as the cause of an error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


# In a worker.


def _work(
    connection: Connection,
    make_env: bytes,
    policy: TensorDictModuleBase,
    policy_kwargs: dict[str, Any],
) -> None:
    """Answer requests until there are no more, or the main process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the main process that is interrupted
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        try:
            env, sampler = pickle.loads(make_env)(), Sampler(policy)
        except Exception as error:
            connection.send(_failure(error))
            return
        connection.send(None)
        while (request := connection.recv()) is not None:
            connection.send(_answer(sampler, env, policy_kwargs, *request))


def _answer(
    sampler: Sampler, env: GFNCore, policy_kwargs: dict[str, Any], n: int, seed: int
) -> dict[str, np.ndarray] | _Failure:
    torch.manual_seed(seed)  # conditions too are drawn from torch's own generator
    try:
        return _packed(sampler.sample_trajectories(env, n, **policy_kwargs))
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> _Failure:
    first_line = str(error).partition("\n")[0]
    return _Failure(f"{type(error).__name__}: {first_line}", traceback.format_exc())


def _packed(trajectories: Trajectories) -> dict[str, np.ndarray]:
    """Turn trajectories into arrays, which are pickled whole and leave nothing open behind."""
    td = trajectories.to_tensordict()
    return {name: value.numpy(force=True) for name, value in td.items()}


def _unpacked(arrays: dict[str, np.ndarray]) -> Trajectories:
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return Trajectories.from_tensordict(TensorDict(tensors, [len(arrays["length"])]))
