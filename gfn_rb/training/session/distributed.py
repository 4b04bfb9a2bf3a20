"""Runs of several ranks: some train, some manage, and rank 0 speaks for all.

Started by an MPI launcher, every process is a rank. Otherwise managers are threads of this
process, and the same code runs over :class:`~gfn_rb.transports.LocalTransport`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING, Any, NamedTuple

from gfn_rb.checkpoint.summary import outline
from gfn_rb.errors import (
    ArgumentError,
    GfnRbError,
    TransportError,
    TransportTimeoutError,
    WorkerError,
)
from gfn_rb.remote.protocol.roles import RankRoles, assign_roles
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session import run
from gfn_rb.training.session.averaging import GradientAverage
from gfn_rb.training.session.coordinator import Found, RefusedError, Team
from gfn_rb.training.session.folder import RunFolder, read_metrics, write_json
from gfn_rb.training.session.manager_hooks import Exchange, longest_silence, make_manager
from gfn_rb.training.session.progress import progress_bar, quiet
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.training.trainer import Hooks, Row, Trainer
from gfn_rb.transports import LocalTransport, MPITransport, Transport
from gfn_rb.transports.deadline import GRACE
from gfn_rb.transports.launch import Launch, end_process, is_fault_tolerant, launched

if TYPE_CHECKING:
    from gfn_rb.training.report import Others

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds that managers have at the end


def is_distributed(config: TrainConfig) -> bool:
    """Return whether a run has more than one rank.

    Args:
        config: of the run.
    """
    return config.managers > 0 or n_ranks() > 1


def n_ranks() -> int:
    """Return how many processes a launcher started, 1 where none did."""
    started = launched()
    return 1 if started is None else started.size


def take_part(config: TrainConfig, prepare: Callable[[], RunFolder]) -> run.Outcome | None:
    """Do this process's part of a run, a new or an earlier one, from its beginning to its end.

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
        return _with_threads(config, prepare)
    with _connected(started, config) as transport:
        hosts = [transport.host(rank) for rank in range(transport.size)]
        roles = assign_roles(transport.size, config.managers, hosts)
        part = _as_rank(config, transport, roles, prepare)
    if transport.rank == 0:
        return part.outcome
    if part.stopped_by is not None and is_fault_tolerant():
        # MPI would wait for others that have left, and mpiexec hold back what rank 0 says.
        end_process(0)
    return None


def _with_threads(config: TrainConfig, prepare: Callable[[], RunFolder]) -> run.Outcome | None:
    """Train in this thread, and manage in others."""
    size = 1 + config.managers
    first, *managing = LocalTransport.group(size, timeout=config.patience)
    roles = RankRoles(size, tuple(range(1, size)), {0: 1})
    with _threads(config, managing, roles), first:
        return _as_rank(config, first, roles, prepare).outcome


@contextmanager
def _threads(config: TrainConfig, transports: list[Any], roles: RankRoles) -> Iterator[None]:
    """Run managers in threads, which end when their worker has gone."""

    def manage(transport: Transport) -> None:
        try:
            with transport:
                _as_rank(config, transport, roles, _unprepared)
        except RefusedError:
            pass  # which the main thread tells
        except GfnRbError as error:
            log.error("%s", error)

    threads = [threading.Thread(target=manage, args=(each,), daemon=True) for each in transports]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(_CLOSING)


def _unprepared() -> RunFolder:
    raise AssertionError("rank 0 prepares the folder")


def _connected(started: Launch, config: TrainConfig) -> Transport:
    """Connect the ranks by MPI. Where that cannot be, rank 0 says so for all."""
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


class Part(NamedTuple):
    """What became of a rank's part of a run."""

    stopped_by: Signals | None
    """The signal that stopped it, None if it came to its end."""
    outcome: run.Outcome | None = None
    """How it ended, where it trains."""


def _as_rank(
    config: TrainConfig, transport: Transport, roles: RankRoles, prepare: Callable[[], RunFolder]
) -> Part:
    team = Team(transport, roles, longest_silence(config, roles))
    rank = transport.rank
    folder = RunFolder(team.agree(lambda: prepare().path), rank)
    try:
        if rank in roles.managers:
            return _manage(config, transport, roles, folder)
        outcome = _train(config, transport, team, folder)
        return Part(outcome.stopped_by, outcome)
    except (GfnRbError, OSError) as error:
        raise WorkerError(f"{type(error).__name__}: {error}") from error


def _manage(config: TrainConfig, transport: Transport, roles: RankRoles, folder: RunFolder) -> Part:
    if not roles.workers_of(transport.rank):
        log.warning("manager %d has no workers, and leaves: fewer will do", transport.rank)
        return Part(None)
    manager = make_manager(config, transport, roles, folder)
    with StopSignals() as stop:  # it ends when its workers have
        manager.run()
    write_json(folder.exchange, manager.metadata())
    return Part(stop.received)


def _train(config: TrainConfig, transport: Transport, team: Team, folder: RunFolder) -> run.Outcome:
    roles, rank = team.layout, transport.rank
    together = roles.workers if config.average_gradients else (rank,)
    stop = StopSignals()

    def stopped() -> bool:
        return stop.wanted

    silence = longest_silence(config, roles)
    average = GradientAverage(transport, together, silence, stopped)
    exchange = Exchange(config, transport, roles, stopped) if roles.managers else None
    hooks = Hooks(gradients=average, stepped=team.stepped)
    if exchange is not None:
        hooks = Hooks(exchange.replayed, exchange.store, average, team.stepped)
    ending = _Ending(team, average, exchange, stop)
    watch = quiet if rank else partial(progress_bar, describe=team.progress)
    with closing(Trainer(config, stream=roles.workers.index(rank), hooks=hooks)) as trainer:
        if folder.checkpoint.exists():
            run.restore(trainer, folder)
        outcome = run.carry_out(trainer, folder, watch, ending, stop)
        ending.leave()  # where that was not done, because it was stopped
    if stop.wanted:  # what others have not taken, they may never take
        with suppress(TransportTimeoutError):
            transport.close(GRACE)
    return outcome


class _Ending:
    """What is done when a rank has taken its last step.

    Args:
        team: all ranks.
        average: of gradients.
        exchange: with a manager, where there is one.
        stop: tells of signals.
    """

    def __init__(
        self, team: Team, average: GradientAverage, exchange: Exchange | None, stop: StopSignals
    ) -> None:
        self._team, self._average, self._exchange, self._stop = team, average, exchange, stop
        self._start = time.perf_counter()

    def __call__(self, trainer: Trainer, folder: RunFolder, last: Row) -> None:
        self.leave()
        counters: dict[str, Any] = {}
        if self._exchange is not None:
            worker = self._exchange.worker
            counters = {"managers": worker.managers, **worker.statistics.to_json()}
        found = Found(last, counters, trainer.discovery.state_dict()["modes"])
        self._team.finish(found, lambda: self._stop.wanted)
        if folder.rank == 0:
            write_json(folder.ranks_report, self._report())
            run.write_report(trainer, folder, last, self._others(folder))

    def leave(self) -> None:
        """Have others go on without this rank. Doing so again does nothing."""
        self._average.close()
        if self._exchange is not None:
            self._exchange.worker.close()

    def _others(self, folder: RunFolder) -> Others | None:
        """Return what the tables of other ranks say, as far as this one can read them."""
        from gfn_rb.training.report import Others  # matplotlib takes a while to load

        team = self._team
        tables = {rank: RunFolder(folder.path, rank).metrics for rank in sorted(team.found)[1:]}
        rows = {rank: read_metrics(path) for rank, path in tables.items() if path.exists()}
        return Others(rows, team.modes_found(), len(team.lost)) if rows or team.lost else None

    def _report(self) -> dict[str, Any]:
        team = self._team
        found = sorted(team.found.items())
        return {
            "size": team.layout.size,
            "managers": [*team.layout.managers],
            "lost": {str(rank): why for rank, why in sorted(team.lost.items())},
            "reward_calls": sum(int(each.row["reward_calls"] or 0) for _, each in found),
            "modes_found": team.modes_found(),
            "wall_seconds": time.perf_counter() - self._start,
            "ranks": {
                str(rank): {"measured": each.row, "exchange": each.exchange} for rank, each in found
            },
        }


# Folders.


def new_folder(config: TrainConfig) -> RunFolder:
    """Make the folder of a new run, on rank 0.

    Args:
        config: of the run.

    Raises:
        ArgumentError: there is something in its place.
    """
    folder = RunFolder.create(config)
    write_json(folder.ranks, {"size": n_ranks()})
    return folder


def check_ranks(folder: RunFolder) -> None:
    """Check that an earlier run goes on with as many ranks as it had.

    Args:
        folder: of the run.

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
    """Check that no rank of an earlier run has gone further than it is to go now.

    Args:
        folder: of the run.
        steps: how many each rank is to take in all.

    Raises:
        ArgumentError: one has.
        CheckpointError: a checkpoint cannot be read.
    """
    paths = [RunFolder(folder.path, rank).checkpoint for rank in range(folder.n_ranks())]
    taken = [outline(path).get("steps_done", 0) for path in paths if path.exists()]
    run.require_enough(steps, max(taken, default=0))
