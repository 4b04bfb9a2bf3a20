"""torchgfn's replay buffers, on the writers and samplers of ours."""

from __future__ import annotations

import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from gfn.containers import StatesContainer, Trajectories, Transitions
from gfn.env import Env
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.checkpoint import load_checkpoint, save_checkpoint
from gfn_rb.errors import ArgumentError
from gfn_rb.interop.torchgfn.remote import endpoint, require_sendable, rows_to_send, scores_of
from gfn_rb.interop.torchgfn.rows import GraphTable, end_features, near_better, rows_of
from gfn_rb.interop.torchgfn.store import RowStore
from gfn_rb.remote import (
    Awaited,
    BaselineFilter,
    Deferred,
    NonBlocking,
    ReplayBufferWorker,
)
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.shapes import Float
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

_KINDS = (Trajectories, Transitions, StatesContainer)


class ReplayBuffer:
    """torchgfn's ``ReplayBuffer``: its constructor, members, containers and errors.

    What is kept after each ``add`` is the same, to the row; what one costs does not grow with what
    is stored. ``training_container`` is a copy in torchgfn's order (by reward where the capacity is
    prioritised, else by age), made when it is asked for; change it by assigning a container.

    Args:
        env: the environment of torchgfn's that items are of.
        capacity: the number of items kept.
        prioritized_capacity: whether those of highest reward are kept, or the newest.
        prioritized_sampling: whether items are drawn in proportion to their reward, or uniformly.
        remote_manager_rank: of the manager that is sent what is added, see
            :class:`ReplayBufferManager`; None for none.
        remote_buffer_freq: of how many adds the items are sent together.
        communication_backend: ``"mpi"``; or ``"torch"``, likewise ``"gloo"``: Gloo, between the
            processes of torch.distributed. Its first use in a process waits for all processes.
        timing: whether to note in ``timing_data`` how long each add and each draw takes.
        async_score: see :class:`~gfn_rb.remote.Deferred`: scores are one add old.
        async_comm: see :class:`~gfn_rb.remote.NonBlocking`: scores are those that have come.
        lazy_sort: has no effect: there is no sorting to put off.
        baseline_filtering: see :class:`~gfn_rb.remote.BaselineFilter`.
        scoring_only: whether terminating states and their log-rewards alone are sent.
        baseline_refresh_after: of how many batches in a row nothing is left by the filter before
            one is sent whole.

    Raises:
        ValueError: ``baseline_filtering`` without a manager, or an argument breaks its rule.
        NotImplementedError: a manager is given, and states are graphs; or actions are continuous,
            and several adds are to be sent at once.
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
        if baseline_filtering and remote_manager_rank is None:
            raise ValueError("baseline_filtering=True requires remote_manager_rank to be set.")
        self.env, self.capacity = env, capacity
        self.prioritized_capacity = prioritized_capacity
        self.prioritized_sampling = prioritized_sampling
        self.remote_manager_rank, self.remote_buffer_freq = remote_manager_rank, remote_buffer_freq
        self.communication_backend, self.timing = communication_backend, timing
        self.timing_data: dict[str, list[float]] = {}
        self.pending_container = None
        self._kind: Any = None
        self._copy: Any = None
        self._graphs = None if isinstance(env.s0, Tensor) else GraphTable(env)
        self._rows = self._new_rows()
        self._worker: ReplayBufferWorker | None = None
        if remote_manager_rank is not None:
            require_sendable(env, remote_buffer_freq)
            mode = NonBlocking if async_comm else Deferred if async_score else Awaited
            self._worker = endpoint(communication_backend).worker(
                remote_manager_rank,
                mode=mode(),
                frequency=remote_buffer_freq,
                filter=BaselineFilter(baseline_refresh_after) if baseline_filtering else None,
                payload="terminating" if scoring_only else "items",
            )

    def add(self, training_container: Any) -> dict[str, float] | None:
        """Add items, and send what is due; the first ones decide of which kind all are.

        Args:
            training_container: torchgfn's ``Trajectories``, ``Transitions`` or ``StatesContainer``.

        Returns:
            The newest scores that the manager has answered with, and its
            ``"baseline_log_reward"``; None if there are none, or no manager.

        Raises:
            AssertionError: it is none of these, of another kind than those stored, or transitions
                are to be filtered or reduced to states.
            ValueError: it has no log-rewards, and the capacity is prioritised or it is to be sent.
            RemoteError: the manager could not store or score what it was sent.
        """
        assert isinstance(training_container, _KINDS), "Must be a container type"
        worker, start = self._worker, time.perf_counter()
        rows = None if worker is None else rows_to_send(training_container, worker)
        self._local_add(training_container)
        self._note("local_add", start)
        if worker is None or rows is None:
            return None
        start = time.perf_counter()
        reply = worker.extend(rows)
        self._note("send_objs", start)
        return scores_of(reply)

    def drain_pending_score(self, timeout_sec: float = 30.0) -> dict[str, float] | None:
        """Send what is pending, and wait for all answers.

        Args:
            timeout_sec: how long, in seconds. What is unanswered then is counted as lost.

        Returns:
            The newest scores that nobody has seen; None if there are none.

        Raises:
            RemoteError: the manager could not store or score what it was sent.
        """
        replies = [] if self._worker is None else self._worker.drain(timeout_sec)
        return scores_of(replies[-1]) if replies else None

    def sample(self, n_samples: int) -> Any:
        """Draw items: by reward, with replacement if there are fewer than asked for; or uniformly.

        Uniform draws are distinct: no more than are stored.

        Args:
            n_samples: how many.

        Raises:
            ValueError: the buffer is empty, or items have no log-rewards to be drawn by.
        """
        if not len(self):
            raise ValueError("Buffer is empty")
        start = time.perf_counter()
        rows = self._rows
        draw = rows.draw_by_reward if self.prioritized_sampling else rows.draw_distinct
        drawn = rows.at(draw(n_samples))
        self._note("sample", start)
        return drawn

    @property
    def training_container(self) -> Any:
        """All items as one container of torchgfn's, in its order; None before the first add."""
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
        """Those of all items, in any order; there must be some."""
        assert len(self), "Buffer is empty, it has no log-rewards!"
        return self._rows.log_rewards()

    @property
    def device(self) -> torch.device:
        """Where items are; there must be some."""
        assert self._kind is not None, "Buffer is empty, it has no device!"
        return self.env.device

    def initialize(self, training_container: Any) -> Any:
        """Return an empty container of the same kind.

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
        """Save what is stored; nothing if that is nothing.

        Args:
            path: a file ``*.pt`` as torchgfn writes it, or any other as a checkpoint of this
                library; in a folder, ``replay_buffer.pt``.

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
        """Put what was saved in the place of what is stored, into a fresh buffer too.

        Args:
            path: see :meth:`save`. torchgfn's files are read with ``weights_only``.
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
        """Return how long adds and draws took, as text."""
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
    """torchgfn's buffer of that name: of high reward, and once full, apart from each other.

    A batch that finds it full is thinned out: an item goes that lies near one of higher reward in
    the batch (kept or not), or near a stored one. Draws are uniform.

    Args:
        env: see :class:`ReplayBuffer`, as ``capacity``.
        capacity: likewise.
        cutoff_distance: items this close or closer are near; below 0 nothing is compared.
        p_norm_distance: p of the norm between terminating states, conditions appended.
        *remote: further options of :class:`ReplayBuffer`, from ``remote_manager_rank`` on.
        **options: likewise.

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
    """torchgfn's buffer of that name: of what is added, the terminating states are stored.

    Args:
        env: see :class:`ReplayBuffer`.
        capacity: likewise.
        communication_backend: likewise.
        timing: likewise.
        **options: likewise.
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
