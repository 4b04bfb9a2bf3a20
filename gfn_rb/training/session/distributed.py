"""Runs of several ranks: some train, some manage, and rank 0 speaks for all.

Started by a launcher, every process is a rank. Otherwise managers are threads of this process, and
the same code runs over :class:`~gfn_rb.transports.LocalTransport`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from gfn_rb.checkpoint.api import outline
from gfn_rb.checkpoint.recovery import verify_journal
from gfn_rb.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointMismatchError,
    GfnRbError,
    TransportTimeoutError,
    WorkerError,
)
from gfn_rb.remote.protocol.membership import LOST
from gfn_rb.remote.protocol.ownership import RankRoles, assign_roles
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.session import RefusedError, run
from gfn_rb.training.session.coordinator import RankCoordinator, RankResult
from gfn_rb.training.session.folder import RunFolder, run_secret, write_json
from gfn_rb.training.session.joining import connect, join
from gfn_rb.training.session.rank_hooks import (
    GradientAverage,
    ManagerHooks,
    longest_silence,
    make_manager,
    worker_silence,
)
from gfn_rb.training.trainer import Hooks, Trainer
from gfn_rb.transports import LocalTransport, MPITransport, Transport
from gfn_rb.transports.deadline import SHUTDOWN_SECONDS, ShutdownBudget
from gfn_rb.transports.launch import Launch, end_at_exit, end_process, is_fault_tolerant

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds that managers have at the end


class RankEnd(NamedTuple):
    """How a rank of a run ended."""

    stopped_by: signal.Signals | None
    result: run.RunResult | None = None
    lost: frozenset[int] = frozenset()
    hanging: tuple[int, ...] = ()


def end_without(end: RankEnd, transport: Transport, folder: RunFolder, since: float) -> None:
    """Have this process end at its exit, and with it the job, though other ranks do not."""
    # MPI finalizes with all processes together, and a launcher waits for all. Where others go on
    # without a process that dies, one that hangs on this machine is killed; else MPI ends the job.
    is_mpi, left = isinstance(transport, MPITransport), [*end.hanging]
    if not is_mpi or is_fault_tolerant():
        left = [rank for rank in left if not _is_killed(RunFolder(folder.path, rank), since)]
    if is_mpi and (left or (is_fault_tolerant() and end.lost)):
        if left:
            log.warning("rank %d: has MPI end the job, for ranks %s hang", transport.rank, left)
        end_at_exit(aborts=bool(left))


def _is_killed(folder: RunFolder, since: float) -> bool:
    """Kill the process of a rank if it is one of this machine, as the rank itself wrote down."""
    host, process, start = folder.read_process() or ("", 0, 0.0)
    # Process 0 would be every process, and 1 the machine's first.
    if host != socket.gethostname() or start < since or process <= 1:
        return False
    try:
        os.kill(process, signal.SIGKILL)
    except OSError:
        return False
    log.warning("killed rank %d, which hangs", folder.rank)
    return True


def run_distributed(
    config: TrainConfig,
    started: Launch,
    prepare: Callable[[], RunFolder],
    fault: GfnRbError | None = None,
) -> run.RunResult | None:
    """Run this process's rank of a run, a new or an earlier one, from beginning to end."""
    since = time.time()
    with connect(started, config.patience) as transport:
        with suppress(ArgumentError):  # which is a fault already
            transport.secret = run_secret()
        hosts = [transport.host(rank) for rank in range(transport.size)]
        roles = RankRoles(transport.size, ())
        try:
            roles = assign_roles(transport.size, config.managers.n, hosts)
        except ArgumentError as error:
            fault = fault or error
        plan = {"gfn_rb": version("gfn_rb"), **config.to_dict()}

        def prepared() -> Path:
            path = prepare().path
            check_journals([RunFolder(path, rank) for rank in roles.managers])
            if config.average_gradients:
                agree_on_step([RunFolder(path, rank) for rank in roles.workers])
            return path

        path = join(transport, plan, fault, prepared, config.patience)
        if transport.rank == 0:  # told first: mpiexec may hand on nothing after Ctrl-C
            how = f"to go on after a stop: {RunFolder(path).how_to_resume()}"
            print(f"{transport.size} ranks; {how}", file=sys.stderr, flush=True)
        folder = RunFolder(path, transport.rank)
        end = run_rank(config, transport, roles, folder)
    end_without(end, transport, folder, since)
    if end.stopped_by is None or transport.rank == 0:
        return end.result
    if is_fault_tolerant():
        # MPI would wait for others that have left, and mpiexec hold back what rank 0 says.
        end_process(0)
    return None


def run_with_threads(config: TrainConfig, prepare: Callable[[], RunFolder]) -> run.RunResult | None:
    """Train in this thread, and manage in others, which end when their worker has gone."""
    size = 1 + config.managers.n
    first, *managing = LocalTransport.group(size, timeout=config.patience)
    roles = RankRoles(size, tuple(range(1, size)))
    path = prepare().path
    check_journals([RunFolder(path, rank) for rank in roles.managers])

    def manage(transport: Transport) -> None:
        try:
            with transport:
                run_rank(config, transport, roles, RunFolder(path, transport.rank))
        except GfnRbError as error:
            log.error("%s", error)

    threads = [threading.Thread(target=manage, args=(each,), daemon=True) for each in managing]
    for thread in threads:
        thread.start()
    try:
        with first:
            return run_rank(config, first, roles, RunFolder(path)).result
    finally:
        for thread in threads:
            thread.join(_CLOSING)


def run_rank(
    config: TrainConfig, transport: Transport, roles: RankRoles, folder: RunFolder
) -> RankEnd:
    """Run one rank, which trains or manages, from beginning to end, and close its transport."""
    # Made before what waits for others, all of which share the one second left after a signal.
    stop = run.StopSignals()
    shutdown = ShutdownBudget(lambda: stop.received is not None)
    silence, manager_silence = longest_silence(config, roles), worker_silence(config, roles)
    limits = silence, shutdown, manager_silence + config.patience
    coordinator = RankCoordinator(transport, roles, *limits)
    folder.write_process()
    try:
        if transport.rank in roles.managers:
            end = _manage(config, transport, coordinator, folder, stop)
        else:
            end = _train(config, transport, coordinator, shutdown, folder, stop)
        # All that matters has come; what others have not taken by now, they may never take.
        with suppress(TransportTimeoutError):
            transport.close(SHUTDOWN_SECONDS if end.lost or stop.received is not None else None)
        return end
    except (WorkerError, RefusedError):
        raise
    except (GfnRbError, OSError) as error:
        raise WorkerError(f"{type(error).__name__}: {error}") from error


def _manage(
    config: TrainConfig,
    transport: Transport,
    coordinator: RankCoordinator,
    folder: RunFolder,
    stop: run.StopSignals,
) -> RankEnd:
    manager = make_manager(config, transport, coordinator.roles, folder)

    unwritten: list[str] = []
    with stop:  # it ends when its workers have
        with run.noted(unwritten):
            manager.run()
        with run.noted(unwritten):
            write_json(folder.manager, manager.metadata())
        with run.noted(unwritten):
            assert manager.buffer is not None  # which make_manager gave it
            manager.buffer.journal.close()
        if stop.received is None:
            coordinator.unwritten[transport.rank] = unwritten
            coordinator.gather()
    if stop.received is not None and unwritten:
        raise WorkerError("; ".join(unwritten))
    senders = manager.metadata()["senders"].items()
    lost = {int(rank) for rank, each in senders if each["state"] == LOST}
    if coordinator.reporting is None and len(lost) == len(coordinator.roles.workers):
        raise WorkerError("all ranks that train are lost, or have ended the run without this one")
    return RankEnd(stop.received, None, frozenset({*lost, *coordinator.lost}))


def _train(
    config: TrainConfig,
    transport: Transport,
    coordinator: RankCoordinator,
    shutdown: ShutdownBudget,
    folder: RunFolder,
    stop: run.StopSignals,
) -> RankEnd:
    """Train from where the folder's checkpoint is, and report, unless a signal stops it."""
    roles, rank, start = coordinator.roles, transport.rank, time.perf_counter()
    ranks = roles.workers if config.average_gradients else (rank,)
    patience, advice = longest_silence(config, roles), f"; continue with: {folder.how_to_resume()}"
    average = GradientAverage(transport, ranks, patience, shutdown, stop.request, advice)
    hooks, manager = Hooks(gradients=average, stepped=coordinator.report_progress), None
    if roles.managers:
        manager = ManagerHooks(config, transport, roles, shutdown.stopped)
        hooks = replace(
            hooks, replayed=manager.replayed, store=manager.store, saving=manager.saving
        )
    trainer = Trainer(config, stream=roles.workers.index(rank), hooks=hooks)
    reported, counters, hanging = _stamp(folder.ranks_report), dict[str, Any](), tuple[int, ...]()
    with stop:
        run.restore(trainer, folder)
        result = run.run_training(trainer, folder, stop, coordinator.describe)
        average.close(finished=result.stopped_by is None)
        if manager is not None:
            manager.worker.close(config.patience)
        reports = False
        if result.stopped_by is None:
            if manager is not None:
                worker = manager.worker
                counters = {"managers": worker.managers, **worker.statistics.to_json()}
                for lost, why in worker.lost.items():
                    coordinator.lose(lost, why)
            coordinator.unwritten[rank] = result.unwritten
            modes = trainer.discovery.state_dict()["modes"]
            reports = coordinator.gather(RankResult(result.row, counters, modes))
        if reports:
            if _stamp(folder.ranks_report) != reported:  # by others, who were not heard
                raise WorkerError(f"the run has ended without rank {rank}")
            with run.noted(result.unwritten):
                write_json(folder.ranks_report, _summary(coordinator, time.perf_counter() - start))
            n, n_lost = len(coordinator.results), len(coordinator.lost)
            several = n > 1 or n_lost > 0
            run.write_report(result, (n, coordinator.modes_found(), n_lost) if several else None)
            for other in coordinator.unwritten.keys() - {rank}:
                reasons = coordinator.unwritten[other]
                result.unwritten.extend(f"rank {other}: {each}" for each in reasons)
            hanging = coordinator.end()
    own = result if reports or result.stopped_by else None
    return RankEnd(result.stopped_by, own, frozenset(coordinator.lost), hanging)


def _summary(known: RankCoordinator, seconds: float) -> dict[str, Any]:
    results = sorted(known.results.items())
    return {
        "size": known.roles.size,
        "managers": [*known.roles.managers],
        "lost": {str(rank): why for rank, why in known.lost.items()},
        "unwritten": {str(rank): why for rank, why in known.unwritten.items() if why},
        "reward_calls": sum(int(each.row["reward_calls"] or 0) for _, each in results),
        "modes_found": known.modes_found(),
        "wall_seconds": seconds,
        "ranks": {str(r): {"measured": each.row, "counters": each.counters} for r, each in results},
    }


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written anew, None while there is none."""
    known = path.stat() if path.exists() else None
    return None if known is None else (known.st_ino, known.st_mtime_ns)


def check_steps(folder: RunFolder, steps: int) -> None:
    """Check that no rank of an earlier run has taken more steps than it is to take in all."""
    paths = [RunFolder(folder.path, rank).checkpoint for rank in range(folder.n_ranks())]
    taken = max([step for path in paths for step in _saved_steps(path)], default=0)
    if taken > steps:
        raise ArgumentError(f"steps must be at least the {taken} taken already, got {steps}")


def _saved_steps(*checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints that exist."""
    secret = run_secret()
    return [outline(p, secret).get("steps_done", 0) for p in checkpoints if p.exists()]


def check_journals(managers: Sequence[RunFolder]) -> None:
    """Raise unless each manager that has saved has a valid journal, or a new one."""
    for each in managers:
        journal, is_there = each.journal, each.journal.exists()
        try:
            if is_there:
                verify_journal(journal, run_secret())
            elif each.checkpoint.exists():
                raise CheckpointError(f"{journal} is missing, which {each.checkpoint} belongs to")
        except CheckpointError as error:
            raise ArgumentError(
                f"{error}; to save the valid part of a journal: gfn-rb recover {journal} --to NEW; "
                f"then put NEW and NEW-mark in its place"
            ) from error


def agree_on_step(ranks: Sequence[RunFolder]) -> None:
    """Take ranks that average gradients back to the newest step of which all have a checkpoint."""
    # A rank takes no step before all have saved what was due before it: of the two checkpoints that
    # each keeps, one is of a step that all have, unless some went on without others.
    kept = {each.rank: _saved_steps(each.checkpoint, each.previous) for each in ranks}
    for steps in kept.values():
        if len(steps) < 2:  # the beginning, too
            steps.append(0)
    common = set.intersection(*map(set, kept.values()))
    if not common:
        raise CheckpointMismatchError(
            f"{ranks[0].path} holds checkpoints of steps {kept}, by rank: expected a step that all "
            "have, as averaged gradients are of one step"
        )
    for each in ranks:
        if kept[each.rank][0] > max(common):
            each.take_back()
