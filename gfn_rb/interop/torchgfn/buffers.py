"""torchgfn's replay buffers, built on the writers and samplers of this package."""

from __future__ import annotations

import time
import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gfn.containers import StatesContainer, Trajectories, Transitions
from gfn.env import Env
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.arguments import as_count, require_kind
from gfn_rb.checkpoint import load_checkpoint, save_checkpoint
from gfn_rb.errors import ArgumentError
from gfn_rb.interop.torchgfn.remote import check_backend, endpoint, require_sendable
from gfn_rb.interop.torchgfn.rows import GraphTable, RowStore, end_features, near_better, rows_of
from gfn_rb.remote import Awaited, BaselineFilter, Deferred, NonBlocking, ReplayBufferWorker, Reply
from gfn_rb.samplers import SoftmaxRewardSampler
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
    container to change the content.

    Args:
        env: torchgfn environment of the items.
        capacity: the number of items kept.
        prioritized_capacity: keep the items of highest reward instead of the newest.
        prioritized_sampling: draw items in proportion to their reward instead of uniformly.
        remote_manager_rank: rank of the :class:`ReplayBufferManager` that added items are sent
            to; None sends nothing.
        remote_buffer_freq: number of adds whose items are sent together.
        communication_backend: ``"mpi"``; or ``"torch"`` or ``"gloo"``, both Gloo between the
            processes of torch.distributed. Its first use in a process waits for all processes.
        timing: record in ``timing_data`` how long each add and each draw takes.
        async_score: read the reply to a batch at the next add, so that scores are one add old.
        async_comm: never wait for a reply; scores are the newest that have arrived.
        lazy_sort: no effect, as nothing is sorted.
        baseline_filtering: send only rows above the manager's baseline.
        scoring_only: send only terminating states and their log-rewards.
        baseline_refresh_after: number of batches in a row that the filter empties before one is
            sent whole.

    Raises:
        ValueError: ``baseline_filtering`` without a manager, or an argument breaks its rule.
        NotImplementedError: a manager is given and states are graphs, or actions are continuous
            and ``remote_buffer_freq`` is above 1.
    """

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
        self.env, self.capacity = env, capacity
        self.prioritized_capacity = prioritized_capacity
        self.prioritized_sampling = prioritized_sampling
        self.remote_manager_rank, self.remote_buffer_freq = remote_manager_rank, remote_buffer_freq
        self.communication_backend, self.timing = communication_backend, timing
        self.async_score, self.async_comm = async_score, async_comm
        self.lazy_sort, self.scoring_only = lazy_sort, scoring_only
        self.baseline_filtering = baseline_filtering
        self.baseline_refresh_after = baseline_refresh_after
        self.timing_data: dict[str, list[float]] = {}
        self.pending_container = None
        self._kind: Any = None
        self._copy: Any = None
        self._graphs = None if isinstance(env.s0, Tensor) else GraphTable(env)
        self._rows = self._new_rows()
        check_backend(communication_backend)
        if remote_manager_rank is not None:
            as_count("remote_manager_rank", remote_manager_rank, 0)
            require_sendable(env, remote_buffer_freq)

    @cached_property
    def _worker(self) -> ReplayBufferWorker | None:
        """The connection to the manager, made on first use, if there is a manager."""
        if self.remote_manager_rank is None:
            return None
        mode = NonBlocking if self.async_comm else Deferred if self.async_score else Awaited
        refresh_after = self.baseline_refresh_after
        return endpoint(self.communication_backend).worker(
            self.remote_manager_rank,
            mode=mode(),
            frequency=self.remote_buffer_freq,
            filter=BaselineFilter(refresh_after) if self.baseline_filtering else None,
            payload="terminating" if self.scoring_only else "items",
        )

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
            RemoteError: the manager could not store or score what it was sent.
        """
        assert isinstance(training_container, _KINDS), "Must be a container type"
        worker, start = self._worker, time.perf_counter()
        rows = None if worker is None else _rows_to_send(training_container, worker)
        self._local_add(training_container)
        self._note("local_add", start)
        if worker is None or rows is None:
            return None
        start = time.perf_counter()
        reply = worker.extend(rows)
        self._note("send_objs", start)
        return _scores_of(reply)

    def drain_pending_score(self, timeout_sec: float = 30.0) -> dict[str, float] | None:
        """Send pending items, and wait for all answers.

        Args:
            timeout_sec: longest wait, in seconds. Batches still unanswered are counted as lost.

        Returns:
            The newest scores not returned before; None if there are none.

        Raises:
            RemoteError: the manager could not store or score the items.
        """
        replies = [] if self._worker is None else self._worker.drain(timeout_sec)
        return _scores_of(replies[-1] if replies else None)

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
        start, rows = time.perf_counter(), self._rows
        draw = rows.draw_by_reward if self.prioritized_sampling else rows.draw_distinct
        drawn = rows.at(draw(n_samples))
        self._note("sample", start)
        return drawn

    @property
    def training_container(self) -> Any:
        """All items as one torchgfn container, in its order; None before the first add."""
        if self._copy is None and self._kind is not None:
            rows = self._rows
            self._copy = rows.at(rows.in_order()) if len(self) else self._kind(self.env)
        return self._copy

    @training_container.setter
    def training_container(self, container: Any) -> None:
        self._rows, self._kind, self._copy = self._new_rows(), None, None
        if container is not None:
            ReplayBuffer._local_add(self, container)

    @property
    def log_rewards(self) -> Float[Tensor, "n"]:
        """The log-rewards of all items, in any order; there must be at least one item."""
        assert len(self), "Buffer is empty, it has no log-rewards!"
        return self._rows.log_rewards()

    @property
    def device(self) -> torch.device:
        """The device of the items; there must be at least one item."""
        assert self._kind is not None, "Buffer is empty, it has no device!"
        return self.env.device

    def initialize(self, training_container: Any) -> Any:
        """Return an empty container of the same class.

        Args:
            training_container: torchgfn's ``Trajectories``, ``Transitions`` or ``StatesContainer``.

        Raises:
            ValueError: it is none of these.
        """
        for kind in _KINDS:
            if isinstance(training_container, kind):
                return kind(self.env)
        raise ValueError(f"Unsupported type: {type(training_container)}")

    def save(self, path: str) -> None:
        """Save the items; an empty buffer writes no file.

        Args:
            path: a file. ``*.pt`` is written in torchgfn's format, any other as a checkpoint of
                this library. A folder means ``replay_buffer.pt`` in it.

        Raises:
            ArgumentError: states are graphs.
        """
        if self._graphs is not None:
            raise ArgumentError("states must be tensors to be saved, got graphs")
        file = _file(path)
        if not len(self):
            return
        if file.suffix == ".pt":
            self.training_container.save(str(file))
        else:
            save_checkpoint(file, self._rows.rb)

    def load(self, path: str) -> None:
        """Replace the items by those of a file.

        Args:
            path: a file or folder as in :meth:`save`. torchgfn's files are read with
                ``weights_only``.
        """
        file = _file(path)
        if zipfile.is_zipfile(file):
            raw = torch.load(file, weights_only=True, map_location=self.env.device)
            kind = _KINDS["terminating_idx" not in raw and 1 + ("next_states" not in raw)]
            self.training_container = kind.from_tensordict(self.env, TensorDict(raw, []))
            return
        rows = self._new_rows()
        load_checkpoint(file, rows.rb)
        self._rows, self._copy = rows, None
        self._kind = type(rows.at(torch.tensor([0])))

    def timing_log(self) -> str:
        """Return a text of how long adds and draws took."""
        lines = ["Replay Buffer Timing Information:"]
        for name, times in self.timing_data.items():
            total, n = sum(times), len(times)
            lines.append(f"  {name}: total={total:.4f}s, count={n}, mean={total / n:.4f}s")
        return "\n".join([*lines, ""])

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        kind = "empty" if self._kind is None else self._kind.__name__
        return f"ReplayBuffer(capacity={self.capacity}, containing {len(self)} {kind})"

    # What derived buffers change.

    def _local_add(self, training_container: Any) -> None:
        self._kind = self._kind or type(self.initialize(training_container))
        assert isinstance(training_container, self._kind), (
            f"Must be {self._kind.__name__}, as what is stored"
        )
        if not len(training_container):
            return
        if self.prioritized_capacity or self.prioritized_sampling:
            log_reward = training_container.log_rewards  # computed where they are not yet
            if log_reward is None and self.prioritized_capacity:
                raise ValueError("log_rewards must be defined for prioritized replay.")
        self._store(rows_of(training_container, self._graphs))

    def _writer(self) -> Writer:
        return RewardPrioritizedWriter() if self.prioritized_capacity else FIFOWriter()

    def _store(self, rows: TensorDict) -> None:
        if not self.prioritized_capacity and len(rows) > self.capacity:
            rows = rows[-self.capacity :]
        self._rows.extend(rows)
        self._copy = None

    def _new_rows(self) -> RowStore:
        sampler = SoftmaxRewardSampler if self.prioritized_sampling else RandomSampler
        return RowStore(self.env, self.capacity, self._writer, sampler, self._graphs)

    def _note(self, name: str, start: float) -> None:
        if self.timing:
            self.timing_data.setdefault(name, []).append(time.perf_counter() - start)


class NormBasedDiversePrioritizedReplayBuffer(ReplayBuffer):
    """torchgfn's buffer that keeps items of high reward and, once full, apart from each other.

    Once it is full, it drops each item of a batch that is near an item of higher reward in the
    batch (kept or not), or near a stored one. Draws are uniform.

    Args:
        env: torchgfn environment of the items.
        capacity: the number of items kept.
        cutoff_distance: items at most this far apart are near; below 0 nothing is compared.
        p_norm_distance: p of the norm between terminating states with their conditions.
        *remote: keywords below by position.
        **options: keywords below.

    Keyword Args:
        remote_manager_rank: rank of the manager that added items are sent to. Default: None, which
            sends nothing.
        remote_buffer_freq: number of adds whose items are sent together. Default: 1.
        communication_backend: ``"mpi"``; or ``"torch"`` or ``"gloo"``, both Gloo between the
            processes of torch.distributed. Its first use in a process waits for all processes.
            Default: "mpi".
        timing: record in ``timing_data`` how long each add and each draw takes. Default: False.
        async_score: read the reply to a batch at the next add. Default: False.
        async_comm: never wait for a reply. Default: False.
        lazy_sort: no effect.
        baseline_filtering: send only rows above the manager's baseline. Default: False.
        scoring_only: send only terminating states and their log-rewards. Default: False.
        baseline_refresh_after: number of batches in a row that the filter empties before one is
            sent whole. Default: 10.

    Raises:
        ArgumentError: states are graphs, between which there are no distances.
    """

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

    def _store(self, rows: TensorDict) -> None:
        if self.cutoff_distance >= 0 and len(self) == self.capacity:
            rows = rows[~near_better(rows, self.cutoff_distance, self.p_norm_distance)]
        super()._store(rows)


class TerminatingStateBuffer(ReplayBuffer):
    """torchgfn's buffer that stores only the terminating states of added items.

    Args:
        env: torchgfn environment of the items.
        capacity: the number of items kept.
        communication_backend: ``"mpi"``; or ``"torch"`` or ``"gloo"``, both Gloo between the
            processes of torch.distributed. Its first use in a process waits for all processes.
        timing: record in ``timing_data`` how long each add and each draw takes.
        **options: keywords below.

    Keyword Args:
        prioritized_capacity: keep the items of highest reward. Default: False, the newest.
        prioritized_sampling: draw items in proportion to their reward. Default: False, uniformly.
        remote_manager_rank: rank of the manager that added items are sent to. Default: None, which
            sends nothing.
        remote_buffer_freq: number of adds whose items are sent together. Default: 1.
        async_score: read the reply to a batch at the next add. Default: False.
        async_comm: never wait for a reply. Default: False.
        lazy_sort: no effect.
        baseline_filtering: send only rows above the manager's baseline. Default: False.
        scoring_only: send only terminating states and their log-rewards. Default: False.
        baseline_refresh_after: number of batches in a row that the filter empties before one is
            sent whole. Default: 10.
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


def _rows_to_send(container: Any, worker: ReplayBufferWorker) -> TensorDict:
    """Return the rows of a container, if they can be sent."""
    if worker.filter is not None or worker.payload != "items":
        assert not isinstance(container, Transitions), (
            "baseline_filtering and scoring_only support Trajectories or StatesContainer only; "
            "got Transitions"
        )
    if container.log_rewards is None:  # which computes them where they are not yet
        raise ValueError("log_rewards must be defined for prioritized replay.")
    return rows_of(container)


def _scores_of(reply: Reply | None) -> dict[str, float] | None:
    """Return a manager's reply as torchgfn does: the mean of each score over the batch."""
    if reply is None:
        return None
    scores = {name: float(torch.as_tensor(x).double().mean()) for name, x in reply.scores.items()}
    return scores if reply.baseline is None else {**scores, "baseline_log_reward": reply.baseline}
