"""Runs of several ranks: some train, some manage, and rank 0 speaks for all.

Started by a launcher, every process is a rank. Otherwise managers are threads of this process, and
the same code runs over :class:`~gfn_rb.transports.LocalTransport`. All ranks of a run end together:
a rank that is lost or fails ends the others, and the run can be resumed.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDict

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
from gfn_rb.remote.metrics import Metric, MetricsServer, as_numbers
from gfn_rb.remote.ranks import RankRoles, assign_roles
from gfn_rb.training import page
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.metrics.discovery import N_TOP
from gfn_rb.training.session import RefusedError, run
from gfn_rb.training.session.folder import RunFolder, run_secret, write_json
from gfn_rb.training.session.joining import Star, connect, join
from gfn_rb.training.session.rank_hooks import (
    GradientAverage,
    ManagerHooks,
    Meetings,
    longest_silence,
    make_manager,
)
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.training.trainer import Hooks, Trainer
from gfn_rb.transports import LocalTransport, Transport
from gfn_rb.transports.base import SHUTDOWN_SECONDS, ShutdownBudget, never
from gfn_rb.transports.launch import Launch, node_name

log = logging.getLogger(__name__)

_CLOSING = 30.0  # seconds that managers have at the end
MODES = "modes", "modes_at"  # of what a rank has discovered


def run_distributed(
    config: TrainConfig,
    started: Launch,
    prepare: Callable[[], RunFolder],
    fault: GfnRbError | None = None,
) -> run.RunResult | None:
    """Run this process's rank of a run, a new or an earlier one, from beginning to end."""
    with connect(started, config.patience) as transport:
        with suppress(ArgumentError):  # which is a fault already
            transport.secret = run_secret()
        plan = {"gfn_rb": version("gfn_rb"), **config.to_dict()}

        def prepared(nodes: list[str]) -> Path:
            roles = roles_of(config, nodes)
            path = prepare().path
            check_kept_roles(path, roles)
            check_journals([RunFolder(path, rank) for rank in roles.managers])
            agree_on_step([RunFolder(path, rank) for rank in roles.workers])
            return path

        star = Star(transport, range(transport.size), config.patience)
        path, nodes = join(star, plan, fault, prepared)
        roles = roles_of(config, nodes)
        if transport.rank == 0:  # told first: mpiexec may hand on nothing after Ctrl-C
            how = f"to go on after a stop: {RunFolder(path).how_to_resume()}"
            print(f"{transport.size} ranks; {how}", file=sys.stderr, flush=True)
        return run_rank(config, transport, roles, RunFolder(path, transport.rank))


def run_with_threads(config: TrainConfig, prepare: Callable[[], RunFolder]) -> run.RunResult | None:
    """Train in this thread, and manage in others, which end when their worker has gone."""
    n_managers = 1 if config.managers.n == "node" else int(config.managers.n)
    first, *managing = LocalTransport.group(1 + n_managers, timeout=config.patience)
    roles = roles_of(config, [node_name()] * first.size)
    path = prepare().path
    check_journals([RunFolder(path, rank) for rank in roles.managers])

    def manage(transport: Transport) -> None:
        try:
            with transport:
                run_rank(config, transport, roles, RunFolder(path, transport.rank))
        except RefusedError:  # this thread's worker has failed, and says why
            pass
        except GfnRbError as error:
            log.error("%s", error)

    threads = [threading.Thread(target=manage, args=(each,), daemon=True) for each in managing]
    for thread in threads:
        thread.start()
    try:
        with first:
            return run_rank(config, first, roles, RunFolder(path))
    finally:
        for thread in threads:
            thread.join(_CLOSING)


def run_rank(
    config: TrainConfig, transport: Transport, roles: RankRoles, folder: RunFolder
) -> run.RunResult | None:
    """Run one rank, which trains or manages, from beginning to end, and close its transport."""
    # Made before what waits for others, all of which share the one second left after a signal.
    stop = StopSignals()
    shutdown = ShutdownBudget(lambda: stop.received is not None)
    silence = longest_silence(config, roles)
    everyone = Star(transport, range(roles.size), silence, shutdown)
    # The ranks that a failure is told to. A manager that serves workers expects other messages, and
    # notices that they have left.
    star, result = everyone, None
    try:
        if transport.rank in roles.managers:
            manager = make_manager(config, transport, roles, folder)
            with stop, _metrics_server(config, manager.metrics, folder.rank):
                manager.run()  # it ends when its workers have
                write_json(folder.manager, manager.metadata())
                assert manager.buffer is not None  # which make_manager gave it
                manager.buffer.journal.close()
                if any(e["state"] == "lost" for e in manager.metadata()["senders"].values()):
                    raise RefusedError("a rank that trains is lost, as the others say", code=1)
                everyone.gather({"metrics": as_numbers(manager.metrics())})
                everyone.share()
        else:
            sends: ManagerHooks | None = None
            waiting: Callable[[], object] = never
            if roles.managers:
                sends = ManagerHooks(config, transport, roles, shutdown.stopped)
                waiting = sends.keep_alive
            star = Star(transport, roles.workers, silence, shutdown, waiting)
            result = _train(config, star, everyone, roles, sends, folder, stop)
    except RefusedError as error:
        star.fail(str(error), error.code)
        raise
    except Exception as error:
        why = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
        why = f"{why}; continue with: {folder.how_to_resume()}"
        star.fail(why)
        if isinstance(error, (GfnRbError, OSError)):
            raise WorkerError(why) from error
        raise
    # All that matters has come; what others have not taken by now, they may never take.
    with suppress(TransportTimeoutError):
        transport.close(SHUTDOWN_SECONDS if stop.received is not None else None)
    return result


def _train(
    config: TrainConfig,
    trainers: Star,
    everyone: Star,
    roles: RankRoles,
    manager: ManagerHooks | None,
    folder: RunFolder,
    stop: StopSignals,
) -> run.RunResult | None:
    """Train from where the folder's checkpoint is, and report, unless a signal stops it."""
    start, counters, is_first = time.perf_counter(), dict[str, Any](), everyone.is_first
    meetings = Meetings(trainers, stop, config.checkpoint_every)
    hooks: dict[str, Any] = {"stepped": meetings.stepped}
    if config.average_gradients:
        hooks["gradients"] = GradientAverage(trainers, config.gradient_sum)
    if manager is not None:
        hooks |= {name: getattr(manager, name) for name in ("replayed", "store", "saving")}
        hooks["part"] = manager
    trainer = Trainer(config, stream=roles.workers.index(folder.rank), hooks=Hooks(**hooks))
    server: AbstractContextManager[object] = nullcontext()
    if manager is not None:
        server = _metrics_server(config, manager.worker.metrics, folder.rank)
    with stop, server:
        run.restore(trainer, folder)
        result = run.run_training(trainer, folder, stop, meetings.describe, lambda: meetings.stops)
        if manager is not None:
            manager.worker.close(config.patience)
            statistics = asdict(manager.worker.statistics)
            counters = {"managers": manager.worker.managers, **statistics}
        if result.stopped_by is not None:
            if is_first:
                everyone.share()
            return result if is_first else None
        found = trainer.discovery.state_dict()
        names = trainer.env.fingerprint(found["top_state"]).tolist()
        top = [*map(list, zip(names, found["top"].tolist(), strict=True))]
        rows = [*trainer.history, result.row]
        own = {
            "row": result.row,
            "counters": counters,
            "calls": [row["reward_calls"] for row in rows],
            "top": top,
        }
        if manager is not None:
            own["metrics"] = as_numbers(manager.worker.metrics())
        modes = TensorDict({name: found[name] for name in MODES}, [len(found["modes"])])
        messages = everyone.gather(own, modes)
        if is_first:
            reports = {folder.rank: own, **{each.source: each.meta for each in messages}}
            found_by = {each.source: each.rows for each in messages if each.rows is not None}
            together = found_together(reports, {folder.rank: modes, **found_by})
            known = _summary(roles, reports, together)
            seconds = time.perf_counter() - start
            write_json(folder.ranks_report, {**known, "wall_seconds": seconds})
            page.write_report(result.folder, result.trainer)
        everyone.share()
    return result if is_first else None


def found_together(
    told: Mapping[int, Mapping[str, Any]], modes: Mapping[int, Any]
) -> dict[str, Any]:
    """Return what all ranks have found together, an object or mode of several ranks once.

    Args:
        told: of each rank, ``calls``, its reward calls at each of its measurements, and ``top``,
            pairs of fingerprint and score of its best objects.
        modes: of each rank, the ``modes`` that it found, and its reward calls when it found each.

    Returns:
        ``reward_calls`` of all ranks at each measurement that all have made, ``modes_found`` until
        then, and at the end ``top_100_score``, None without objects.
    """
    calls = {rank: each["calls"] for rank, each in told.items() if "calls" in each}
    n = min(map(len, calls.values()))
    first: dict[int, int] = {}  # measurement at which a mode is known
    for rank, found in modes.items():
        seen = torch.searchsorted(torch.tensor(calls[rank]), found["modes_at"]).tolist()
        for mode, at in zip(found["modes"].tolist(), seen, strict=True):
            first[mode] = min(at, first.get(mode, at))
    known = torch.bincount(torch.tensor([*first.values()]).long(), minlength=n).cumsum(0)
    scores = {number: score for each in told.values() for number, score in each.get("top", ())}
    best = sorted(scores.values(), reverse=True)[:N_TOP]
    shared = [own[:n] for own in calls.values()]
    return {
        "reward_calls": [sum(each) for each in zip(*shared, strict=True)],
        "modes_found": known[:n].tolist(),
        "top_100_score": fmean(best) if best else None,
    }


def _summary(
    roles: RankRoles, reports: Mapping[int, Mapping[str, Any]], together: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the report of a run, given those of all ranks."""
    done = {rank: reports[rank] for rank in roles.workers}
    return {
        "size": roles.size,
        "managers": [*roles.managers],
        "reward_calls": sum(int(each["row"]["reward_calls"] or 0) for each in done.values()),
        "modes_found": together["modes_found"][-1],
        "together": together,
        "ranks": {
            str(rank): {"measured": each["row"], "counters": each["counters"]}
            for rank, each in done.items()
        },
        "metrics": {
            str(r): reports[r]["metrics"] for r in sorted(reports) if "metrics" in reports[r]
        },
    }


def _metrics_server(
    config: TrainConfig, metrics: Callable[[], list[Metric]], rank: int
) -> AbstractContextManager[object]:
    """Return what serves the metrics of a rank in its ``with`` block, where it is asked for."""
    if not config.metrics_port:
        return nullcontext()
    return MetricsServer(metrics, rank, config.metrics_port + rank, config.metrics_address)


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


def roles_of(config: TrainConfig, nodes: Sequence[str]) -> RankRoles:
    """Return which ranks of a run train and which manage, given the node of each rank."""
    if config.managers.n == "node":
        return RankRoles.by_node(nodes)
    return assign_roles(len(nodes), int(config.managers.n))


def check_kept_roles(path: Path, roles: RankRoles) -> None:
    """Raise if a rank has managed and is to train, or the reverse, as on other nodes."""
    for rank in range(roles.size) if roles.nodes else ():
        folder = RunFolder(path, rank)
        has_managed = folder.journal.exists()
        if has_managed != (rank in roles.managers) and (has_managed or folder.checkpoint.exists()):
            what = "manage" if has_managed else "train"
            raise ArgumentError(
                f"managers node needs nodes with the same ranks when a run is resumed, got others: "
                f"rank {rank} did {what} before"
            )


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
    """Take ranks that train back to the newest step of which all have a checkpoint."""
    # One of the two that each keeps is of such a step: see Meetings.
    kept = {each.rank: _saved_steps(each.checkpoint, each.previous) for each in ranks}
    for steps in kept.values():
        if len(steps) < 2:  # the beginning, too
            steps.append(0)
    common = set.intersection(*map(set, kept.values()))
    if not common:
        raise CheckpointMismatchError(
            f"{ranks[0].path} holds checkpoints of steps {kept}, by rank: expected a step that all "
            "have"
        )
    for each in ranks:
        if kept[each.rank][0] > max(common):
            each.take_back()
