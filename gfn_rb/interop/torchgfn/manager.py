"""torchgfn's manager of a replay buffer, built on this package's."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from functools import cached_property
from typing import Any

from gfn.env import Env
from tensordict import TensorDictBase

from gfn_rb import remote
from gfn_rb.arguments import require_choice, require_kind, require_number
from gfn_rb.errors import ArgumentError
from gfn_rb.interop.torchgfn.buffers import NormBasedDiversePrioritizedReplayBuffer, ReplayBuffer
from gfn_rb.interop.torchgfn.remote import BACKENDS, PATIENCE, begin, endpoint, require_sendable
from gfn_rb.interop.torchgfn.rows import container_of
from gfn_rb.remote.baseline import Baseline
from gfn_rb.transports import Transport


class ReplayBufferManager:
    """torchgfn's ``ReplayBufferManager``: receives containers, keeps the best, and scores them.

    Batches that are malformed or cannot be scored are refused: their sender raises an error, and
    the manager continues. A lost training rank counts as one that has left.

    Args:
        env: torchgfn environment of the items.
        rank: rank of this process.
        num_training_ranks: number of ranks that send to it; :meth:`run` ends when that many have
            left.
        scoring_function: maps a container to scores by name, each a number for the batch; it is
            also given ``sender_rank`` if it has an argument of that name, or ``**kwargs``. By
            default the score is infinite.
        diverse_replay_buffer: keep items apart from each other, too.
        capacity: the number of items kept.
        remote_manager_rank: must be None, as a manager has no manager of its own.
        communication_backend: ``"mpi"``; or ``"torch"`` or ``"gloo"``, both sockets between
            the processes of torch.distributed. Its first use in a process waits for all processes.
        timing: print the seconds of each phase of :meth:`run` and of each add at its end.
        store_locally: keep the items instead of only scoring them.
        baseline_strategy: the log-reward that workers with ``baseline_filtering`` compare with.
            Once the buffer is full, the lowest one in it (``"min"``) or a percentile of it
            (``"percentile"``); before that, and always with ``"ema"``, the running mean of each
            batch's lowest log-reward.
        baseline_percentile: the share of the kept items below the baseline, in [0, 1].
        baseline_ema_alpha: the share of the newest batch in the running mean, in (0, 1].
        num_buffer_managers: number of managers beside and with this one. Above 1 it warns that each
            of them has a baseline of its own items.

    Attributes:
        replay_buffer: the items kept. Another :class:`ReplayBuffer` can be assigned.
        exit_counter: number of training ranks that have left. When it is ``num_training_ranks``,
            :meth:`run` ends.
        is_running: whether :meth:`run` goes on. If False is assigned, as a scoring function may
            do, it ends after the message it is at, whose reply is sent.

    Raises:
        ValueError: an argument breaks its rule.
        NotImplementedError: ``remote_manager_rank`` is given, or states are graphs.
    """

    def __init__(
        self,
        env: Env,
        rank: int,
        num_training_ranks: int,
        scoring_function: Callable[..., dict[str, float]] | None = None,
        diverse_replay_buffer: bool = False,
        capacity: int = 10000,
        remote_manager_rank: int | None = None,
        communication_backend: str = "mpi",
        timing: bool = False,
        store_locally: bool = True,
        baseline_strategy: str = "min",
        baseline_percentile: float = 0.1,
        baseline_ema_alpha: float = 0.1,
        num_buffer_managers: int = 1,
    ) -> None:
        if remote_manager_rank is not None:
            raise NotImplementedError(
                f"remote_manager_rank of a manager must be None, got {remote_manager_rank}: "
                "managers have none of their own"
            )
        require_sendable(env)
        require_choice("communication_backend", communication_backend, BACKENDS)
        self.remote_manager_rank, self.communication_backend = None, communication_backend
        self.timing, self.num_buffer_managers = timing, num_buffer_managers
        self.env, self.rank, self.num_training_ranks = env, rank, num_training_ranks
        self.diverse_replay_buffer, self.capacity = diverse_replay_buffer, capacity
        self.store_locally = store_locally
        self.scoring_function = scoring_function or self.default_scoring_function
        if num_buffer_managers > 1 and store_locally and baseline_strategy != "ema":
            warnings.warn(
                f"num_buffer_managers={num_buffer_managers} managers have a baseline each, of the "
                "items that each one keeps: torchgfn's BASELINE_SYNC is not supported",
                stacklevel=2,
            )
        self._baseline = _KeptBaseline(baseline_strategy, baseline_percentile, baseline_ema_alpha)
        self.replay_buffer = (
            NormBasedDiversePrioritizedReplayBuffer(env, capacity, timing=timing)
            if diverse_replay_buffer
            else ReplayBuffer(env, capacity, prioritized_capacity=True, timing=timing)
        )
        self.is_running = True
        begin(communication_backend)

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The items kept."""
        return self._baseline.buffer

    @replay_buffer.setter
    def replay_buffer(self, buffer: ReplayBuffer) -> None:
        require_kind("replay_buffer", buffer, ReplayBuffer)
        self._baseline.buffer = buffer

    @property
    def baseline_strategy(self) -> str:
        """The source of the baseline."""
        return self._baseline.strategy

    @baseline_strategy.setter
    def baseline_strategy(self, strategy: str) -> None:
        self._baseline.configure(strategy, self.baseline_percentile, self.baseline_ema_alpha)

    @property
    def baseline_percentile(self) -> float:
        """The share of the kept items below the baseline."""
        return self._baseline.share

    @baseline_percentile.setter
    def baseline_percentile(self, share: float) -> None:
        self._baseline.configure(self.baseline_strategy, share, self.baseline_ema_alpha)

    @property
    def baseline_ema_alpha(self) -> float:
        """The share of the newest batch in the running mean."""
        return self._baseline.alpha

    @baseline_ema_alpha.setter
    def baseline_ema_alpha(self, alpha: float) -> None:
        self._baseline.configure(self.baseline_strategy, self.baseline_percentile, alpha)

    @property
    def exit_counter(self) -> int:
        """The number of training ranks that have left."""
        return self._manager.n_left if "_manager" in vars(self) else 0

    @cached_property
    def _manager(self) -> _Manager:
        """The manager that serves, connected on first use."""
        transport = endpoint(self.communication_backend).transport
        if self.rank != transport.rank:
            raise ArgumentError(
                f"rank must be that of this process, {transport.rank}, got {self.rank}"
            )
        if not 1 <= self.num_training_ranks < transport.size:
            raise ArgumentError(
                f"num_training_ranks must be from 1 to {transport.size - 1}, all other ranks, got "
                f"{self.num_training_ranks}"
            )
        return _Manager(
            self,
            transport,
            score=self._add_and_score,
            baseline=self._baseline,
            metadata=lambda _: {
                "stored": len(self.replay_buffer),
                "capacity": self.replay_buffer.capacity,
                **self._compute_metadata(),
            },
            worker_timeout=math.inf,
        )

    def run(self, async_send: bool = True) -> None:
        """Serve until all training ranks have left.

        Args:
            async_send: no effect, as sending an answer never waits.

        Raises:
            ArgumentError: ``rank`` is not that of this process, or there are fewer other ranks than
                ``num_training_ranks``.
        """
        self._manager.run()
        self.is_running = False
        if self.timing:
            known = self._manager.metadata()
            print(f"Manager {self.rank}: {known['batches']} batches")
            for rank, sent in known["senders"].items():
                print(f"  rank {rank}: {sent['batches']} batches, {sent['bytes']:,} bytes")
            for phase, seconds in known["seconds"].items():
                print(f"  {phase}: total={seconds:.4f}s")
            print(self.replay_buffer.timing_log(), end="", flush=True)

    def default_scoring_function(self, obj: Any, sender_rank: int = -1) -> dict[str, float]:
        """Return an infinite score."""
        return {"score": math.inf}

    def _compute_metadata(self) -> dict[str, Any]:
        """Return entries to add to those of :meth:`get_metadata`, as JSON."""
        return {}

    @staticmethod
    def send_termination_signal(manager_rank: int, backend: str | None = None) -> None:
        """Leave a manager, once it has answered all that this process sent.

        Args:
            manager_rank: rank of the manager.
            backend: ``"mpi"``, ``"torch"`` or ``"gloo"``; None means that of this process's
                buffers.
        """
        endpoint(backend).leave(manager_rank)

    @staticmethod
    def get_metadata(manager_rank: int, backend: str | None = None) -> dict[str, Any]:
        """Return a manager's metadata, see :meth:`~gfn_rb.remote.ManagerQueries.metadata`.

        Args:
            manager_rank: rank of the manager.
            backend: ``"mpi"``, ``"torch"`` or ``"gloo"``; None means that of this process's
                buffers.
        """
        return endpoint(backend).queries.metadata(manager_rank, PATIENCE)

    def _add_and_score(self, rows: TensorDictBase, sender: int) -> dict[str, Any]:
        # The buffer here is torchgfn's rather than our manager's: it takes rows of any width and
        # thins them out as torchgfn does.
        container = container_of(rows.to(self.env.device), self.env)
        if self.store_locally:
            self.replay_buffer.add(container)
        takes = inspect.signature(self.scoring_function).parameters.values()
        named = any(each.name == "sender_rank" or each.kind is each.VAR_KEYWORD for each in takes)
        given = {"sender_rank": sender} if named else {}
        return self.scoring_function(container, **given)


class _Manager(remote.ReplayBufferManager):
    """A manager that ends when as many ranks as its owner expects have sent something and left.

    It also ends when the owner's ``is_running`` is False.
    """

    def __init__(self, owner: ReplayBufferManager, transport: Transport, **options: Any) -> None:
        super().__init__(transport, **options)
        self._owner = owner

    @property
    def n_left(self) -> int:
        """Number of ranks that have sent something and left, or are lost."""
        workers = self._workers
        if workers.n_present == len(workers):  # asked before each message
            return 0
        left = self._senders.keys() - workers.present
        return sum(bool(workers[rank].last_seen) for rank in left)

    @property
    def finished(self) -> bool:
        """Whether all expected ranks have left, or the owner was told to end."""
        have_left = self.n_left >= self._owner.num_training_ranks
        return have_left or not self._owner.is_running or super().finished


class _KeptBaseline(Baseline):
    """A baseline of torchgfn's buffer, by torchgfn's names of strategies."""

    buffer: ReplayBuffer

    def __init__(self, strategy: str, share: float, alpha: float) -> None:
        super().__init__()
        self.configure(strategy, share, alpha)

    def configure(self, strategy: str, share: float, alpha: float) -> None:
        """Compute by other rules from now on; the running mean stays."""
        require_choice("baseline_strategy", strategy, ("min", "percentile", "ema"))
        require_number("baseline_percentile", share)
        require_number("baseline_ema_alpha", alpha)
        if not 0 <= share <= 1:
            raise ArgumentError(f"baseline_percentile must be in [0, 1], got {share}")
        if not 0 < alpha <= 1:
            raise ArgumentError(f"baseline_ema_alpha must be above 0 and at most 1, got {alpha}")
        self.percentile = {"min": 0.0, "percentile": share}.get(strategy)
        self.strategy, self.share, self.alpha = strategy, share, alpha

    def value(self, rb: object) -> float | None:
        """Return the baseline, None if nothing is known."""
        self._n_written = math.inf  # nobody counts the rows that torchgfn's buffer takes
        return super().value(self.buffer.rows.rb)
