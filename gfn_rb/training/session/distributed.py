"""Runs of several ranks: some train, some manage, and rank 0 speaks for all.

Started by an MPI launcher, every process is a rank. Otherwise managers are threads of this
process, and the same code runs over :class:`~gfn_rb.transports.LocalTransport`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from signal import Signals
from typing import TYPE_CHECKING, Any

from gfn_rb.checkpoint.api import outline
from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    TransportError,
    TransportTimeoutError,
    WorkerError,
)
from gfn_rb.remote.protocol.roles import RankRoles, assign_roles
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session.averaging import GradientAverage
from gfn_rb.training.session.coordinator import RankCoordinator, RankResult, RefusedError
from gfn_rb.training.session.folder import RunFolder, read_metrics, write_json
from gfn_rb.training.session.manager_hooks import ManagerHooks, longest_silence, make_manager
from gfn_rb.training.session.run import RunResult, StopSignals, run_training, write_report
from gfn_rb.training.trainer import Hooks, Trainer
from gfn_rb.transports import LocalTransport, MPITransport, Transport
from gfn_rb.transports.deadline import GRACE, Grace
from gfn_rb.transports.launch import Launch, end_process, is_fault_tolerant, launched

if TYPE_CHECKING:
    from gfn_rb.training.report import OtherRanks

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds that managers have at the end


def n_ranks() -> int:
    """Return how many processes a launcher started, 1 where none did."""
    started = launched()
    return 1 if started is None else started.size


def run_distributed(config: TrainConfig, prepare: Callable[[], RunFolder]) -> RunResult | None:
    """Run this process's ranks of a run, a new or an earlier one, from beginning to end.

    Args:
        config: of the run, the same on all ranks.
        prepare: called on rank 0, returns the folder of the run.

    Returns:
        How it ended on rank 0; None on others.

    Raises:
        ArgumentError: there are too few ranks for so many managers, or the folder cannot be made.
        TransportError: MPI is not there, or not the one that the launcher belongs to.
        RefusedError: rank 0 raises either of these.
        WorkerError: this rank failed in the course of the run.
    """
    started = launched()
    if started is None:
        return _run_with_threads(config, prepare)
    with _connect(started, config) as transport:
        hosts = [transport.host(rank) for rank in range(transport.size)]
        roles = assign_roles(transport.size, config.managers, hosts)
        stopped_by, result = run_rank(config, transport, roles, prepare)
    if transport.rank == 0:
        return result
    if stopped_by is not None and is_fault_tolerant():
        # MPI would wait for others that have left, and mpiexec hold back what rank 0 says.
        end_process(0)
    return None


def _connect(started: Launch, config: TrainConfig) -> Transport:
    """Connect the ranks by MPI. Where that cannot be, rank 0 raises why for all."""
    try:
        transport = MPITransport(timeout=config.patience)
        if transport.size != started.size:
            raise TransportError(
                f"{started.size} ranks were started, and MPI knows of {transport.size}: mpi4py "
                "uses another MPI library than the launcher belongs to"
            )
    except TransportError as error:
        if started.rank:
            raise RefusedError(str(error)) from error
        raise
    return transport


def _run_with_threads(config: TrainConfig, prepare: Callable[[], RunFolder]) -> RunResult | None:
    """Train in this thread, and manage in others, which end when their worker has gone."""
    size = 1 + config.managers
    first, *managing = LocalTransport.group(size, timeout=config.patience)
    # The one that trains sends to the first manager: others have no workers, and leave.
    roles = RankRoles(size, tuple(range(1, size)), {0: 1})

    def manage(transport: Transport) -> None:
        try:
            with transport:
                run_rank(config, transport, roles, prepare)
        except RefusedError:
            pass  # which the main thread raises
        except GfnRbError as error:
            log.error("%s", error)

    threads = [threading.Thread(target=manage, args=(each,), daemon=True) for each in managing]
    for thread in threads:
        thread.start()
    try:
        with first:
            return run_rank(config, first, roles, prepare)[1]
    finally:
        for thread in threads:
            thread.join(_CLOSING)


def run_rank(
    config: TrainConfig,
    transport: Transport,
    roles: RankRoles,
    prepare: Callable[[], RunFolder],
) -> tuple[Signals | None, RunResult | None]:
    """Run one rank, which trains or manages, from beginning to end; rank 0 prepares the folder.

    Returns:
        The signal that stopped it, None if it came to its end; and the result, where it trains.
    """
    # Made before what waits for others, all of which share the one second left after a signal.
    stop = StopSignals()
    grace = Grace(lambda: stop.received is not None)
    coordinator = RankCoordinator(transport, roles, longest_silence(config, roles), grace)
    folder = RunFolder(coordinator.share_folder(lambda: prepare().path), transport.rank)
    try:
        if transport.rank in roles.managers:
            return _manage(config, transport, roles, folder, stop), None
        result = TrainingRank(config, transport, coordinator, grace).train(folder, stop)
        if stop.received is not None:  # what others have not taken, they may never take
            with suppress(TransportTimeoutError):
                transport.close(GRACE)
        return result.stopped_by, result
    except (GfnRbError, OSError) as error:
        raise WorkerError(f"{type(error).__name__}: {error}") from error


def _manage(
    config: TrainConfig,
    transport: Transport,
    roles: RankRoles,
    folder: RunFolder,
    stop: StopSignals,
) -> Signals | None:
    if not roles.workers_of(transport.rank):
        log.warning("manager %d has no workers, and leaves: fewer will do", transport.rank)
        return None
    manager = make_manager(config, transport, roles, folder)
    with stop:  # it ends when its workers have
        manager.run()
    write_json(folder.manager, manager.metadata())
    return stop.received


class TrainingRank:
    """A rank that trains, and what it shares with the others."""

    def __init__(
        self,
        config: TrainConfig,
        transport: Transport,
        coordinator: RankCoordinator,
        grace: Grace,
    ) -> None:
        roles, rank = coordinator.roles, transport.rank
        ranks = roles.workers if config.average_gradients else (rank,)
        self.config, self.coordinator = config, coordinator
        self.stream = roles.workers.index(rank)
        self.average = GradientAverage(transport, ranks, longest_silence(config, roles), grace)
        self.manager = None
        self.hooks = Hooks(gradients=self.average, stepped=coordinator.report_progress)
        if roles.managers:
            self.manager = ManagerHooks(config, transport, roles, grace.stopped)
            self.hooks = replace(
                self.hooks, replayed=self.manager.replayed, store=self.manager.store
            )
        self._start = time.perf_counter()

    def train(self, folder: RunFolder, stop: StopSignals) -> RunResult:
        """Train from where the folder's checkpoint is, and report, unless a signal stops it."""
        with closing(Trainer(self.config, stream=self.stream, hooks=self.hooks)) as trainer, stop:
            if folder.checkpoint.exists():
                trainer.load(folder.checkpoint)
            result = run_training(trainer, folder, stop, self.coordinator.describe)
            self._leave()
            if result.stopped_by is None:
                self._report(result)
        return result

    def _leave(self) -> None:
        """Have others go on without this rank."""
        self.average.close()
        if self.manager is not None:
            self.manager.worker.close()

    def _report(self, result: RunResult) -> None:
        """Send the results of this rank to rank 0; there, write the reports of all."""
        counters: dict[str, Any] = {}
        if self.manager is not None:
            worker = self.manager.worker
            counters = {"managers": worker.managers, **worker.statistics.to_json()}
        modes = result.trainer.discovery.state_dict()["modes"]
        self.coordinator.gather(RankResult(result.row, counters, modes))
        if result.folder.rank == 0:
            write_json(result.folder.ranks_report, self._summary())
            write_report(result, self._other_ranks(result.folder))

    def _other_ranks(self, folder: RunFolder) -> OtherRanks | None:
        """Return what the tables of other ranks say, as far as this one can read them."""
        from gfn_rb.training.report import OtherRanks  # matplotlib takes a while to load

        results, lost = self.coordinator.results, self.coordinator.peers.lost
        tables = {rank: RunFolder(folder.path, rank).metrics for rank in sorted(results)[1:]}
        rows = {rank: read_metrics(path) for rank, path in tables.items() if path.exists()}
        if not rows and not lost:
            return None
        return OtherRanks(rows, self.coordinator.modes_found(), len(lost))

    def _summary(self) -> dict[str, Any]:
        roles, results = self.coordinator.roles, sorted(self.coordinator.results.items())
        return {
            "size": roles.size,
            "managers": [*roles.managers],
            "lost": {str(rank): why for rank, why in sorted(self.coordinator.peers.lost.items())},
            "reward_calls": sum(int(each.row["reward_calls"] or 0) for _, each in results),
            "modes_found": self.coordinator.modes_found(),
            "wall_seconds": time.perf_counter() - self._start,
            "ranks": {
                str(rank): {"measured": each.row, "counters": each.counters}
                for rank, each in results
            },
        }


# Earlier runs.


def check_ranks(folder: RunFolder) -> None:
    """Check that an earlier run goes on with as many ranks as it had.

    Raises:
        ArgumentError: it does not.
        CheckpointCorruptError: the folder does not tell how many it had.
    """
    size = folder.n_ranks()
    if n_ranks() != size:
        raise ArgumentError(
            f"run must go on with the number of ranks it had, {size}, got {n_ranks()}: "
            f"{folder.how_to_resume()}"
        )


def check_steps(folder: RunFolder, steps: int) -> None:
    """Check that no rank of an earlier run has taken more steps than it is to take in all.

    Raises:
        ArgumentError: one has.
        CheckpointError: a checkpoint cannot be read.
    """
    paths = [RunFolder(folder.path, rank).checkpoint for rank in range(folder.n_ranks())]
    taken = max((outline(p).get("steps_done", 0) for p in paths if p.exists()), default=0)
    if taken > steps:
        raise ArgumentError(f"steps must be at least the {taken} taken already, got {steps}")
