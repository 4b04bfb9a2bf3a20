"""Fresh trajectories from several processes, side by side and under the current weights."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase

from gfn_rb.containers import Trajectories
from gfn_rb.envs.core import GFNCore
from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.rollout.checks import exploration_from
from gfn_rb.rollout.log_probs import require_direction
from gfn_rb.training.workers import start, stop


class WorkerSource:
    """Samples batches of trajectories in several processes, each with its share of every batch.

    A batch is sampled when it is asked for, under the weights the policy then has, and is complete
    when it is returned. What worker w adds to batch b depends on (seed, b, w) and the weights
    alone: a run with the same seed and as many workers repeats exactly, and one that goes on from a
    checkpoint need only know how many batches were drawn. Worth it where rewards take long to
    compute; a cheap environment is sampled faster in one process.

    TorchRL's collectors, which fill buffers in the background, cut batches by frames and let
    episodes go on under newer weights; here every trajectory is of one policy.

    The processes are started afresh ("spawn"), so a script must guard its entry point by
    ``if __name__ == "__main__":``. Each computes in one thread. They ignore Ctrl-C, and end with
    the source, with the main process, or at the first error, which the main process raises.

    Args:
        make_env: returns the environment; called once in each worker.
        policy: a forward policy. Workers use a copy of it, in shared memory.
        n_workers: number of processes.
        seed: of everything random, at least 0.
        device: where the batches that ``sample`` returns live.
        **policy_kwargs: fields of :class:`gfn_rb.rollout.Exploration` other than the generator.

    Raises:
        ArgumentError: an option breaks its rule, or something cannot be pickled.
        WorkerError: a worker could not make its environment, or died.

    Examples:
        >>> with WorkerSource(TFBind8, ForwardPolicy(TFBind8()), n_workers=4) as source:
        ...     batch = source.sample(256)
    """

    def __init__(
        self,
        make_env: Callable[[], GFNCore],
        policy: TensorDictModuleBase,
        n_workers: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        **policy_kwargs: Any,
    ) -> None:
        _check(policy, n_workers, seed, policy_kwargs)
        self.batches_drawn = 0
        self._policy, self._seed, self._device = policy, seed, device
        self._mirror = copy.deepcopy(policy).requires_grad_(False).share_memory()
        self._workers = start(n_workers, make_env, self._mirror, policy_kwargs)
        self._stop = weakref.finalize(self, stop, self._workers)
        self._receive(range(n_workers))

    @property
    def n_workers(self) -> int:
        """Number of processes."""
        return len(self._workers)

    def sample(self, n: int) -> Trajectories:
        """Sample ``n`` trajectories from the source state, those of the first worker first.

        Raises:
            ArgumentError: ``n`` is negative, or the workers are stopped.
            WorkerError: a worker failed or died; all are stopped then.
        """
        if n < 0:
            raise ArgumentError(f"n must be at least 0, got {n}")
        if not self._stop.alive:
            raise ArgumentError("the workers are stopped: make a new WorkerSource")
        shares = [n // self.n_workers + (i < n % self.n_workers) for i in range(self.n_workers)]
        busy = [i for i, share in enumerate(shares) if share or i == 0]
        self._update_weights()
        for i in busy:
            self._workers[i].send((shares[i], _seed_of(self._seed, self.batches_drawn, i)))
        batch = Trajectories.cat([part for part in self._receive(busy) if part is not None])
        self.batches_drawn += 1
        return batch.to(self._device)

    def close(self) -> None:
        """Stop the workers. Done at the end of the program too."""
        self._stop()

    def state_dict(self) -> dict[str, int]:
        """Return what the next batch depends on, besides the weights."""
        return {
            "seed": self._seed,
            "n_workers": self.n_workers,
            "batches_drawn": self.batches_drawn,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on after the batches that another source has drawn.

        Args:
            state_dict: from a source with the same seed and number of workers.

        Raises:
            CheckpointMismatchError: from another.
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

    @torch.no_grad()
    def _update_weights(self) -> None:
        """Write the policy's weights into the memory that the workers' policies use."""
        state = self._policy.state_dict()
        for name, value in self._mirror.state_dict().items():
            value.copy_(state[name])

    def _receive(self, workers: Sequence[int]) -> list[Trajectories | None]:
        """Return the answer of each worker; stop all of them if one has none."""
        try:
            return [self._workers[i].receive() for i in workers]
        except BaseException:
            self.close()
            raise


def _seed_of(seed: int, batch: int, worker: int) -> int:
    words = np.random.SeedSequence((seed, batch, worker)).generate_state(1, np.uint64)
    return int(words[0])


def _check(
    policy: TensorDictModuleBase, n_workers: int, seed: int, policy_kwargs: dict[str, Any]
) -> None:
    if n_workers < 1:
        raise ArgumentError(f"n_workers must be at least 1, got {n_workers}")
    if seed < 0:
        raise ArgumentError(f"seed must be at least 0, got {seed}")
    if require_direction(policy):
        raise ArgumentError("policy must be a forward one, got one with is_backward=True")
    if policy_kwargs.get("generator") is not None:
        raise ArgumentError("generator must not be given: seed, batch and worker seed each draw")
    exploration_from(policy_kwargs, is_backward=False)
