"""torchgfn's replay buffers, built on the writers and samplers of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gfn.containers import StatesContainer, Trajectories, Transitions
from gfn.env import Env
from gfn.utils.common import Timer
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.arguments import as_count, require_choice, require_kind, shown
from gfn_rb.containers.steps import reduce_to_states
from gfn_rb.errors import ArgumentError, CheckpointError
from gfn_rb.interop.torch_files import read_torch_file, write_torch_file
from gfn_rb.interop.torchgfn.remote import (
    BACKENDS,
    SharedWorker,
    begin,
    endpoint,
    require_sendable,
    scores_of,
)
from gfn_rb.interop.torchgfn.rows import GraphTable, RowStore, end_features, near_better, rows_of
from gfn_rb.remote import BaselineFilter, Reply
from gfn_rb.remote.worker import Mode
from gfn_rb.shapes import Float
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

ContainerUnion = Trajectories | Transitions | StatesContainer
"""The containers that a buffer takes."""

_KINDS = (Trajectories, Transitions, StatesContainer)


class ReplayBuffer:
    """torchgfn's ``ReplayBuffer``: same constructor, members, containers and errors.

    After each ``add``, the buffer keeps the same rows as torchgfn's. The cost of an ``add`` does
    not grow with the number of stored rows. Each access to ``training_container`` makes a copy in
    torchgfn's order: by reward if ``prioritized_capacity`` is True, otherwise by age. Assign a
    container to change the content. Other attributes can be assigned, and are used from the next
    add on; ``env`` and ``capacity`` cannot.

    Args:
        env: torchgfn environment of the items.
        capacity: the number of items kept.
        prioritized_capacity: keep the items of highest reward instead of the newest.
        prioritized_sampling: draw items in proportion to their reward instead of uniformly.
        remote_manager_rank: rank of the :class:`ReplayBufferManager` that added items are sent
            to; None sends nothing.
        remote_buffer_freq: number of adds whose items are sent together.
        communication_backend: ``"mpi"``; or ``"torch"`` or ``"gloo"``, both sockets between
            the processes of torch.distributed. Its first use in a process waits for all processes.
        timing: record in ``timing_data`` the seconds of each add, draw, serialization, sending and
            waiting for a reply.
        async_score: read the reply to a batch at the next add, so that scores are one add old.
        async_comm: never wait for a reply; scores are the newest that have arrived.
        lazy_sort: no effect, as no add sorts what is stored; accepted because torchgfn has it.
        baseline_filtering: send only rows above the manager's baseline.
        scoring_only: send only terminating states and their log-rewards.
        baseline_refresh_after: number of batches in a row that the filter empties before one is
            sent whole.

    Attributes:
        pending_container: items that wait for ``remote_buffer_freq``; None without any.
        timing_data: seconds by what they were spent on, one number per call.

    Raises:
        ValueError: ``baseline_filtering`` without a manager, or an argument breaks its rule.
        NotImplementedError: a manager is given and states are graphs.
    """

    # What cannot be assigned later, and what decides from the next add on which items are kept.
    _fixed: tuple[str, ...] = ("env", "capacity")
    _rules: tuple[str, ...] = ("prioritized_capacity",)

    def __init__(
        self,
        env: Env,
        capacity: int = 1000,
        prioritized_capacity: bool = False,
        prioritized_sampling: bool = False,
        remote_manager_rank: int | None = None,
        remote_buffer_freq: int = 1,
        communication_backend: str = "mpi",
        timing: bool = False,
        async_score: bool = False,
        async_comm: bool = False,
        lazy_sort: bool = False,
        baseline_filtering: bool = False,
        scoring_only: bool = False,
        baseline_refresh_after: int = 10,
    ) -> None:
        require_kind("env", env, Env)
        if baseline_filtering and remote_manager_rank is None:
            raise ValueError("baseline_filtering=True requires remote_manager_rank to be set.")
        require_choice("communication_backend", communication_backend, BACKENDS)
        as_count("remote_buffer_freq", remote_buffer_freq)
        self._filter = BaselineFilter()
        self.baseline_refresh_after = baseline_refresh_after
        self.env, self.capacity = env, as_count("capacity", capacity)
        self.prioritized_capacity = prioritized_capacity
        self.prioritized_sampling = prioritized_sampling
        self.remote_manager_rank, self.remote_buffer_freq = remote_manager_rank, remote_buffer_freq
        self.communication_backend, self.timing = communication_backend, timing
        self.async_score, self.async_comm = async_score, async_comm
        self.lazy_sort, self.scoring_only = lazy_sort, scoring_only
        self.baseline_filtering = baseline_filtering
        self.timing_data: dict[str, list[float]] = {}
        self.pending_container: Any = None
        self._n_adds, self._replies = 0, list[Reply]()
        self._graphs = None if isinstance(env.s0, Tensor) else GraphTable(env)
        self._kind: Any = None  # of containers; None before the first
        self.rows, self._is_outdated = self._store(), False
        if remote_manager_rank is not None:
            as_count("remote_manager_rank", remote_manager_rank, 0)
            require_sendable(env)
            begin(communication_backend)

    def add(self, training_container: Any) -> dict[str, float] | None:
        """Add items, and send those that are due to the manager.

        Args:
            training_container: torchgfn's ``Trajectories``, ``Transitions`` or
                ``StatesContainer``, of the same class in every call.

        Returns:
            The newest scores that the manager has answered with, and its
            ``"baseline_log_reward"``; None if there are none, or no manager.

        Raises:
            AssertionError: it is of another class, or transitions are to be filtered or reduced
                to states.
            ValueError: it has no log-rewards, and the capacity is prioritised or it is to be sent.
            RemoteError: the manager could not store or score what was sent.
        """
        assert isinstance(training_container, _KINDS), "Must be a container type"
        worker = self._worker()
        if worker is not None:
            if self.baseline_filtering or self.scoring_only:
                assert not isinstance(training_container, Transitions), (
                    "baseline_filtering and scoring_only support Trajectories or StatesContainer "
                    "only; got Transitions"
                )
            waiting = self.pending_container
            assert waiting is None or isinstance(training_container, type(waiting)), (
                f"Must be {type(waiting).__name__}, as what is to be sent with it"
            )
            _require_log_rewards(training_container, True)
        with Timer(self.timing_data, "local_add", self.timing):
            self._local_add(training_container)
        if worker is None:
            return None
        self._n_adds += 1
        is_due = self._n_adds % self.remote_buffer_freq == 0
        if self.pending_container is not None or not is_due:
            if self.pending_container is None:
                self.pending_container = self.initialize(training_container)
            self.pending_container.extend(training_container)
            training_container = self.pending_container
            # One batch may have what another lacks, and a manager reads neither.
            for stale in {"log_probs", "estimator_outputs"} & vars(training_container).keys():
                setattr(training_container, stale, None)
            worker.waiting.add(self)
        if is_due:
            self._send(training_container, worker)
        else:
            worker.collect()  # unread replies would make the manager lose this process
        return scores_of(self._replies)

    def drain_pending_score(self, timeout_sec: float = 30.0) -> dict[str, float] | None:
        """Send pending items, and wait for all answers.

        Args:
            timeout_sec: longest wait, in seconds. Batches still unanswered are counted as lost.

        Returns:
            The newest scores not returned before; None if there are none.

        Raises:
            RemoteError: the manager could not store or score the items.
        """
        worker = self._worker()
        if worker is not None:
            self.send_pending()
            worker.drain(timeout_sec)
        return scores_of(self._replies)

    def sample(self, n_samples: int) -> Any:
        """Draw items, by reward or uniformly.

        Draws by reward are with replacement if fewer than ``n_samples`` items are stored. Uniform
        draws are distinct, so at most as many as are stored.

        Args:
            n_samples: the number of items.

        Raises:
            ValueError: the buffer is empty, or items have no log-rewards to be drawn by.
        """
        if not len(self):
            raise ValueError("Buffer is empty")
        n_samples = as_count("n_samples", n_samples, 0)
        rows = self.rows
        draw = rows.draw_by_reward if self.prioritized_sampling else rows.draw_distinct
        with Timer(self.timing_data, "sample", self.timing):
            return rows.at(draw(n_samples))

    @property
    def training_container(self) -> Any:
        """All items as one torchgfn container, in its order; None before the first add."""
        if self._kind is None or not len(self):
            return None if self._kind is None else self._kind(self.env)
        return self.rows.at(self.rows.in_order())

    @training_container.setter
    def training_container(self, container: Any) -> None:
        kind, rows = None, self._store()
        if container is not None:
            kind = type(self.initialize(container))
            _require_log_rewards(container, self.prioritized_capacity)
            rows.extend(rows_of(container, self._graphs))
        self.rows, self._kind, self._is_outdated = rows, kind, False

    @property
    def baseline_refresh_after(self) -> int:
        """The number of batches in a row that the filter empties before one is sent whole."""
        return self._filter.refresh_after

    @baseline_refresh_after.setter
    def baseline_refresh_after(self, number: int) -> None:
        self._filter.refresh_after = as_count("baseline_refresh_after", number)

    @property
    def log_rewards(self) -> Float[Tensor, "n"]:
        """The log-rewards of all items, in any order; there must be at least one item."""
        assert len(self), "Buffer is empty, it has no log-rewards!"
        return self.rows.log_rewards()

    @property
    def device(self) -> torch.device:
        """The device of the items; there must be at least one item."""
        assert self._kind is not None, "Buffer is empty, it has no device!"
        return self.env.device

    def initialize(self, training_container: Any) -> Any:
        """Return an empty container of the same class, or raise a ValueError for other classes."""
        for kind in _KINDS:
            if isinstance(training_container, kind):
                return kind(self.env)
        raise ValueError(f"Unsupported type: {type(training_container)}")

    def save(self, path: str) -> None:
        """Save the items in torchgfn's format; an empty buffer writes no file.

        Args:
            path: a file, which is replaced in one step. A folder means ``replay_buffer.pt`` in it.

        Raises:
            ArgumentError: states are graphs.
            CheckpointError: writing to the disk failed.
        """
        if self._graphs is not None:
            raise ArgumentError("states must be tensors to be saved, got graphs")
        if len(self):
            write_torch_file(_file(path), self.training_container.to_tensordict().to_dict())

    def load(self, path: str) -> None:
        """Replace the items by those of a file.

        Args:
            path: a file or folder as in :meth:`save`, read with ``weights_only``.

        Raises:
            CheckpointError: the file is missing, damaged, compressed or other. Nothing changes.
        """
        file = _file(path)
        raw = read_torch_file(file, self.env.device)
        kind = _KINDS["terminating_idx" not in raw and 1 + ("next_states" not in raw)]
        try:
            container = kind.from_tensordict(self.env, TensorDict(raw, []))
        except Exception as error:
            raise CheckpointError(f"{file} contains no {kind.__name__}: {error}") from error
        self.training_container = container

    def timing_log(self) -> str:
        """Return a text of how long adds and draws took."""
        lines = ["Replay Buffer Timing Information:"]
        for name, times in self.timing_data.items():
            total, n = sum(times), len(times)
            lines.append(f"  {name}: total={total:.4f}s, count={n}, mean={total / n:.4f}s")
        return "\n".join([*lines, ""])

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        kind = "empty" if self._kind is None else self._kind.__name__
        return f"ReplayBuffer(capacity={self.capacity}, containing {len(self)} {kind})"

    def send_pending(self) -> None:
        """Send the items that wait for ``remote_buffer_freq``."""
        worker, pending = self._worker(), self.pending_container
        if worker is not None and pending is not None:
            self._send(pending, worker)

    # What derived buffers change.

    def _local_add(self, training_container: Any) -> None:
        self._kind = self._kind or type(self.initialize(training_container))
        assert isinstance(training_container, self._kind), (
            f"Must be {self._kind.__name__}, as what is stored"
        )
        if not len(training_container):
            return
        if self.prioritized_capacity or self.prioritized_sampling:
            _require_log_rewards(training_container, self.prioritized_capacity)
        if self._is_outdated:  # attributes were assigned: their rule decides about all items anew
            if len(self):
                self.training_container = self.training_container
            else:
                self.rows, self._is_outdated = self._store(), False
        self.rows.extend(self._chosen(rows_of(training_container, self._graphs)))

    def _writer(self) -> Writer:
        return RewardPrioritizedWriter() if self.prioritized_capacity else FIFOWriter()

    def _chosen(self, rows: TensorDict) -> TensorDict:
        return rows

    # Within.

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name)
        is_made = "rows" in vars(self)
        if is_made and name in self._fixed:
            raise ArgumentError(
                f"{name} cannot be assigned, it stays {shown(before)}: make another "
                f"{type(self).__name__} with {name}=... and add training_container to it"
            )
        super().__setattr__(name, value)
        if is_made and name in self._rules:
            try:
                self._writer()
            except Exception:  # now rather than at the next add
                super().__setattr__(name, before)
                raise
            self._is_outdated = True

    def _store(self) -> RowStore:
        return RowStore(self.env, self.capacity, self._writer, self._graphs)

    def _worker(self) -> SharedWorker | None:
        """Return this process's connection to the manager, if there is a manager."""
        rank = self.remote_manager_rank
        return None if rank is None else endpoint(self.communication_backend).worker(rank)

    def _send(self, container: Any, worker: SharedWorker) -> None:
        self.pending_container = None
        worker.waiting.discard(self)
        times, known = self.timing_data, worker.statistics
        before = known.seconds_sending, known.seconds_blocked
        with Timer(times, "send_objs", self.timing):
            with Timer(times, "serialize_objs", self.timing):
                rows: Any = rows_of(container)
                if self.scoring_only:
                    rows = reduce_to_states(rows)
            mode: Mode = "deferred" if self.async_score else "awaited"
            mode = "nonblocking" if self.async_comm else mode
            worker.send(
                rows, self._replies, mode, self._filter if self.baseline_filtering else None
            )
        if self.timing:
            times.setdefault("send_data", []).append(known.seconds_sending - before[0])
            times.setdefault("recv_score", []).append(known.seconds_blocked - before[1])


class NormBasedDiversePrioritizedReplayBuffer(ReplayBuffer):
    """torchgfn's buffer that keeps items of high reward and, once full, apart from each other.

    Once it is full, it drops each item of a batch that is near an item of higher reward in the
    batch (kept or not), or near a stored one. Draws are uniform.

    Args:
        env: torchgfn environment of the items.
        capacity: the number of items kept.
        cutoff_distance: items at most this far apart are near; below 0 nothing is compared.
        p_norm_distance: p of the norm between terminating states with their conditions.
        *remote: the other arguments of :class:`ReplayBuffer` from ``remote_manager_rank`` on.
        **options: these by name.

    Raises:
        ArgumentError: states are graphs, between which there are no distances.
    """

    _fixed = ("env", "capacity", "prioritized_capacity")
    _rules = ("cutoff_distance", "p_norm_distance")

    def __init__(
        self,
        env: Env,
        capacity: int = 1000,
        cutoff_distance: float = 0.0,
        p_norm_distance: float = 1.0,
        *remote: Any,
        **options: Any,
    ) -> None:
        self.cutoff_distance, self.p_norm_distance = cutoff_distance, p_norm_distance
        super().__init__(env, capacity, True, False, *remote, **options)
        if self._graphs is not None:
            raise ArgumentError("states must be tensors to have distances, got graphs")

    def _writer(self) -> Writer:
        return DiversityWriter(
            features=end_features,
            cutoff_distance=self.cutoff_distance,
            p=self.p_norm_distance,
            near="reject",
            when="full",
        )

    def _chosen(self, rows: TensorDict) -> TensorDict:
        if self.cutoff_distance < 0 or len(self) < self.capacity:
            return rows
        return rows[~near_better(rows, self.cutoff_distance, self.p_norm_distance)]


class TerminatingStateBuffer(ReplayBuffer):
    """torchgfn's buffer that stores only the terminating states of added items.

    Args:
        env: torchgfn environment of the items.
        capacity: the number of items kept.
        communication_backend: as of :class:`ReplayBuffer`.
        timing: as of :class:`ReplayBuffer`.
        **options: its other arguments.
    """

    def __init__(
        self,
        env: Env,
        capacity: int = 1000,
        communication_backend: str = "mpi",
        timing: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            env, capacity, communication_backend=communication_backend, timing=timing, **options
        )
        self._kind = StatesContainer

    def _local_add(self, training_container: Any) -> None:
        states, log_reward = training_container.terminating_states, training_container.log_rewards
        if log_reward is not None and not isinstance(training_container, Trajectories):
            log_reward = log_reward[training_container.is_terminating]
        marks = torch.ones(len(states), dtype=torch.bool, device=self.env.device)
        super()._local_add(StatesContainer(self.env, states, marks, log_reward))


def _file(path: str) -> Path:
    file = Path(path)
    return file / "replay_buffer.pt" if file.is_dir() else file


def _require_log_rewards(container: Any, needed: bool) -> None:
    """Have a container compute its log-rewards; raise if they are needed and unknown."""
    if container.log_rewards is None and needed:
        raise ValueError("log_rewards must be defined for prioritized replay.")
