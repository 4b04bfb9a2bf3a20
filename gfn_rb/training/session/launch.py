"""New and earlier runs, alone or as one of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from gfn_rb.checkpoint.atomic import remove_abandoned
from gfn_rb.envs.checks import check_env
from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.training import page
from gfn_rb.training.config import CONFIGS, TrainConfig
from gfn_rb.training.import_path import check_importable, imports_outside
from gfn_rb.training.objectives import make_loss
from gfn_rb.training.options import TransportName
from gfn_rb.training.session import distributed, run
from gfn_rb.training.session.folder import RunFolder, RunLock, run_secret
from gfn_rb.training.session.joining import find_launch
from gfn_rb.training.session.reading import read_json
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.training.trainer import Trainer
from gfn_rb.transports.launch import Launch


def train(config: TrainConfig) -> run.RunResult | None:
    """Train, and write all results into a new folder.

    Under a launcher, this process is one rank of the run, and all ranks call this function.

    Args:
        config: configuration of the run; ``config.threads`` applies to the whole process.

    Returns:
        The result; None on all ranks but rank 0.

    Raises:
        ArgumentError: an option has no effect or is not allowed, ranks do not agree, or the folder
            exists. Nothing is written.
        NaNError: the loss is not finite.
        TransportError: the ranks cannot be connected.
        RefusedError: another rank has raised the reason why there is no run, or why it ended.
        WorkerError: this rank of several failed, or another one is lost.
    """
    started = find_launch(config.transport)
    config = config.with_steps(config.steps)  # what is annealed is so by these, also when resumed

    def prepare() -> RunFolder:
        if started is not None and started.restarts:
            raise ArgumentError(
                "train must begin a run once, got a restart by torchrun after a failure: of the "
                "two, resume alone goes with --max-restarts"
            )
        folder = RunFolder.create(config)
        lock.take(folder)
        folder.write_ranks(started)
        return folder

    with RunLock() as lock:
        return _run(config, started, prepare)


def resume(
    path: Path,
    steps: int | None = None,
    transport: TransportName = "auto",
    trust: bool = False,
) -> run.RunResult | None:
    """Continue a run from its last checkpoint, as if it had never stopped.

    A run of several ranks continues with the same number of ranks, from the newest step of which
    all have a checkpoint. If the configuration names a class of your own and the folder is trusted,
    that class is imported, and stderr says so before. Nothing is imported from the folder itself.

    Args:
        path: the run folder.
        steps: total number of training steps; None for those of the configuration.
        transport: transport of the ranks, as in a new run.
        trust: whether to run code outside gfn_rb that the folder names, and to follow its links.

    Returns:
        The result; None on all ranks but rank 0.

    Raises:
        ArgumentError: no run is in the folder, it had another number of ranks, ``steps`` are fewer
            than were taken, another process resumes it, or it needs ``trust``.
        CheckpointCorruptError: the checkpoint is damaged.
        CheckpointMismatchError: the checkpoint is of another configuration, or the checkpoints of
            several ranks have no step in common.
    """
    folder, started = RunFolder.open(path), find_launch(transport)
    if not trust:
        folder.require_own()
    had, has = folder.n_ranks(), 1 if started is None else started.size
    if has != had:
        raise ArgumentError(
            f"run must go on with the number of ranks it had, {had}, got {has}: "
            f"{folder.how_to_resume()}"
        )
    env = read_json(folder.config).get("env")
    if isinstance(env, str) and ":" in env and (started is None or started.rank == 0):
        print(f"importing {env!r:.200}, as {folder.config} says", file=sys.stderr, flush=True)
    with imports_outside(path), RunLock() as lock:
        config = folder.read_config()
        config = config if steps is None else config.with_steps(steps)

        def prepare() -> RunFolder:
            lock.take(folder)
            remove_abandoned(folder.path)
            distributed.check_steps(folder, config.steps)
            folder.write_config(config)
            lock.take(folder)  # of the new file: a lock belongs to a file, not to its name
            folder.write_ranks(started)
            return folder

        return _run(config, started, prepare, folder)


def _run(
    config: TrainConfig,
    started: Launch | None,
    prepare: Callable[[], RunFolder],
    earlier: RunFolder | None = None,
) -> run.RunResult | None:
    # All that can be refused is refused before the folder is made: a trainer validates too late
    # where there are several ranks.
    fault = _fault(config, started)
    if started is not None:
        return distributed.run_distributed(config, started, prepare, fault)
    if fault is not None:
        raise fault
    if config.managers.n:
        return distributed.run_with_threads(config, prepare)
    trainer = Trainer(config)
    if earlier is not None:
        run.restore(trainer, earlier)
    folder = prepare()
    with StopSignals() as stop:
        result = run.run_training(trainer, folder, stop)
        if result.stopped_by is None:
            page.write_report(result.folder, result.trainer)
    return result


def _fault(config: TrainConfig, started: Launch | None) -> GfnRbError | None:
    """Return what is wrong with a configuration in this process, None if nothing is."""
    try:
        config.validate()
        check_importable(type(config))
        if started is None:
            defaults = {f.name: f.default for f in fields(config)}
            of_managers = "patience", "metrics_port", "metrics_address"
            useless = "average_gradients", *(() if config.managers.n else of_managers)
            for name in useless:
                if (value := getattr(config, name)) != defaults[name]:
                    raise ArgumentError(
                        f"{name} has no effect unless several ranks are started, got {value} with 1"
                    )
        if type(config) not in CONFIGS.values():  # one of the user's: has it parts that fit?
            own = replace(config, device="cpu")
            with torch.random.fork_rng(devices=[]):
                check_env(own.make_env(), True if own.every_state_terminates else None)
            make_loss(own, own.make_env(), own.seed)
        if config.metrics_port and find_spec("prometheus_client") is None:
            message = "metrics_port needs prometheus_client: pip install prometheus_client"
            raise ArgumentError(message)
        run.check_installed(config.logger)
        run_secret()
    except GfnRbError as error:
        return error
    torch.set_num_threads(config.threads)
    return None
