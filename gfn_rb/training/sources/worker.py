"""Fresh trajectories from several processes, side by side and under the current weights."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from gfn_rb.arguments import as_device
from gfn_rb.containers import Trajectories
from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, WorkerError
from gfn_rb.rollout import Sampler
from gfn_rb.rollout.categorical import exploration_from
from gfn_rb.rollout.outputs import require_direction
from gfn_rb.storages import staged
from gfn_rb.training.sources.base import Source

GRACE = 5.0
"""Seconds that workers told to stop have for what they are doing."""

_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


class WorkerSource(Source):
    """Samples batches of trajectories in several processes, each with a share of every batch.

    A batch is sampled when it is requested, with the policy's current weights, and is returned
    complete. The share of worker w in batch b depends on (seed, b, w) and the weights alone. A run
    with the same seed and number of workers therefore repeats exactly, and a resumed run only needs
    the number of batches. It pays where rewards take long to compute; one process samples a cheap
    environment faster.

    TorchRL's collectors instead fill buffers in the background, cut batches by frames, and continue
    episodes under newer weights. Here each trajectory is of one policy.

    Processes start by "spawn", so a script needs ``if __name__ == "__main__":``. Each uses one
    thread. They ignore Ctrl-C, and end with the source, the main process, or the first error, which
    the main process raises.

    Args:
        make_env: callable that returns the environment; called once in each worker.
        policy: forward policy. Workers use a copy of it in shared memory.
        n_workers: number of processes, at least 1.
        seed: seed of all random numbers, at least 0.
        device: device of the returned batches.
        **policy_kwargs: fields of :class:`gfn_rb.rollout.Exploration` (epsilon, temperature, noise,
            exit_bias) without the generator.

    Raises:
        ArgumentError: an option has a value that is not allowed, or something cannot be pickled.
        WorkerError: a worker could not create its environment, or died.

    Examples:
        >>> with WorkerSource(TFBind8, ForwardPolicy(TFBind8()), n_workers=4) as source:
        ...     batch = source.sample(256)
    """

    def __init__(
        self,
        make_env: Callable[[], GFNEnv],
        policy: TensorDictModuleBase,
        n_workers: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **policy_kwargs: Any,
    ) -> None:
        device = as_device("device", device)
        if n_workers < 1:
            raise ArgumentError(f"n_workers must be at least 1, got {n_workers}")
        if seed < 0:
            raise ArgumentError(f"seed must be at least 0, got {seed}")
        if require_direction(policy):
            raise ArgumentError("policy must be a forward one, got one with is_backward=True")
        if policy_kwargs.get("generator") is not None:
            raise ArgumentError("generator must not be given: seed, batch, worker seed each draw")
        exploration_from(policy_kwargs, is_backward=False)
        try:  # by cloudpickle, which takes lambdas, as TorchRL's collectors do
            pickled = cloudpickle.dumps(make_env)
        except _UNPICKLABLE as error:
            raise ArgumentError(f"make_env must be picklable: {error}") from error
        self.n_workers, self.batches_drawn = n_workers, 0
        self._policy, self._seed, self._device = policy, seed, device
        # Storages in shared memory are pickled as handles: writing to them here changes the
        # weights that every worker samples by.
        self._shared_policy = copy.deepcopy(policy).requires_grad_(False).share_memory()
        # Not forked: a copy of a process in which torch has begun threads may hang.
        context = _SpawnContext()
        self._processes = context.processes
        self._executor = ProcessPoolExecutor(
            n_workers,
            context,
            initializer=_initialize,
            initargs=(pickled, self._shared_policy, policy_kwargs),
        )
        self._stop = weakref.finalize(self, _stop, self._executor, self._processes)
        try:
            self._run([(i, 0, 0) for i in range(n_workers)])  # makes all environments
        except _UNPICKLABLE as error:
            raise ArgumentError(f"policy must be picklable: {error}") from error

    def sample(self, n: int) -> Trajectories:
        """Sample ``n`` trajectories from the source state, in the order of the workers.

        Raises:
            ArgumentError: ``n`` is negative, or the workers are stopped.
            WorkerError: a worker failed or died. All workers are then stopped.
        """
        if n < 0:
            raise ArgumentError(f"n must be at least 0, got {n}")
        if not self._stop.alive:
            raise ArgumentError("the workers are stopped: make a new WorkerSource")
        shares = [n // self.n_workers + (i < n % self.n_workers) for i in range(self.n_workers)]
        tasks = [
            (i, share, _seed_of(self._seed, self.batches_drawn, i))
            for i, share in enumerate(shares)
            if share or i == 0  # even an empty batch has its fields from a worker
        ]
        self._shared_policy.load_state_dict(self._policy.state_dict())  # copies in place
        batch = Trajectories.cat(self._run(tasks))
        self.batches_drawn += 1
        return batch.wrap(staged(batch.to_tensordict(), self._device))

    def close(self) -> None:
        """Stop the workers. The end of the program does so too."""
        self._stop()

    def state_dict(self) -> dict[str, int]:
        """Return what the next batch depends on, besides the weights."""
        return {
            "seed": self._seed,
            "n_workers": self.n_workers,
            "batches_drawn": self.batches_drawn,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue after the batches of another source.

        Args:
            state_dict: state of a source with the same seed and number of workers.

        Raises:
            CheckpointMismatchError: the state is of another source.
        """
        own = self.state_dict()
        for name in ("seed", "n_workers"):
            if state_dict[name] != own[name]:
                raise CheckpointMismatchError(
                    f"state is of {name}={state_dict[name]}, expected {own[name]}"
                )
        self.batches_drawn = state_dict["batches_drawn"]

    def __enter__(self) -> WorkerSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, tasks: Sequence[tuple[int, int, int]]) -> list[Trajectories]:
        """Return what ``_sample`` does for each task; stop all workers if one fails."""
        try:
            futures = [self._executor.submit(_sample, *task) for task in tasks]
            return [_unpacked(future.result()) for future in futures]
        except BrokenProcessPool:
            self._executor.shutdown()  # which waits until how each process ended is known
            self.close()
            raise WorkerError(_describe_death(self._processes)) from None
        except BaseException:  # an interrupt loses what is under way from its batch
            self.close()
            raise


class _SpawnContext(SpawnContext):
    """Starts processes afresh, and lists them: the executor does not tell how one ended."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[BaseProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:  # type: ignore[override]
        process = SpawnContext.Process(*args, **kwargs)
        self.processes.append(process)
        return process


def _stop(executor: ProcessPoolExecutor, processes: Sequence[BaseProcess]) -> None:
    """End all workers, by force those that take longer than ``GRACE``."""
    executor.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + GRACE
    for process in [process for process in processes if process.pid is not None]:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join()


def _describe_death(processes: Sequence[BaseProcess]) -> str:
    """Return which worker died first, and how: the executor has terminated the others."""
    codes = [process.exitcode for process in processes]
    others = (0, -signal.SIGTERM)
    first = next((i for i, code in enumerate(codes) if code not in others), 0)
    return f"worker {first} died, exit code {codes[first]}"


def _seed_of(seed: int, batch: int, worker: int) -> int:
    # Mixed, not added: batch 1 of worker 0 must not repeat batch 0 of worker 1.
    words = np.random.SeedSequence((seed, batch, worker)).generate_state(1, np.uint64)
    return int(words[0])


def _unpacked(arrays: dict[str, np.ndarray]) -> Trajectories:
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return Trajectories.from_tensordict(TensorDict(tensors, [len(arrays["length"])]))


# In a worker.

_job: tuple[bytes, TensorDictModuleBase, dict[str, Any]]


def _initialize(make_env: bytes, policy: TensorDictModuleBase, options: dict[str, Any]) -> None:
    """Prepare this process. The environment is made by the first task, which can raise."""
    global _job
    _job = make_env, policy, options
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the main process that is interrupted
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    # The queue of tasks is open for writing in every worker: none would see it end.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@functools.cache
def _environment() -> GFNEnv:
    env: GFNEnv = pickle.loads(_job[0])()  # noqa: S301 (its own parent made it)
    return env


def _sample(worker: int, n: int, seed: int) -> dict[str, np.ndarray]:
    """Return trajectories as arrays, which are pickled whole and leave nothing open behind."""
    try:
        env, (_, policy, options) = _environment(), _job
        torch.manual_seed(seed)  # conditions too are drawn from torch's own generator
        td = Sampler(policy).sample_trajectories(env, n, **options).to_tensordict()
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        # Another type may not survive pickling; the executor adds the traceback as its cause.
        raise WorkerError(f"worker {worker}: {type(error).__name__}: {first_line}") from error
    return {name: value.numpy(force=True) for name, value in td.items()}
