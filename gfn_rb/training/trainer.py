"""The training loop: sample, store, replay, learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import ReplayBuffer

from gfn_rb import keys
from gfn_rb.checkpoint import load_checkpoint, load_state, save_checkpoint
from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.metrics import DiscoveryMetrics, make_fit
from gfn_rb.rollout import Sampler
from gfn_rb.shapes import Float
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.losses import Loss
from gfn_rb.training.objectives import (
    backward_policy,
    convert,
    fit_log_z,
    make_loss,
    make_optimizer,
)
from gfn_rb.training.replay import REPLAY, loss_per_item, make_buffer
from gfn_rb.training.sources import make_source

Row = dict[str, int | float | None]

PHASES = ("rollout", "buffer", "learning", "evaluation")


def _store(rb: ReplayBuffer, items: TensorDictBase) -> None:
    rb.extend(items)


@dataclass(frozen=True)
class Hooks:
    """What else is done in the course of a training step.

    Args:
        replayed: given the buffer of the run and its environment, returns the buffer to draw from,
            such as an ensemble of it and others; checkpoints hold what it returns.
        store: puts fresh items into the buffer, and returns trajectories that others have fed in
            the meantime, to be learnt from like those sampled here; None where there are none.
        gradients: called with the loss module when its gradients are there, before they are used.
        stepped: called with the trainer after each step.
    """

    replayed: Callable[[ReplayBuffer, GFNEnv], ReplayBuffer] = lambda rb, env: rb
    store: Callable[[ReplayBuffer, TensorDictBase], TensorDictBase | None] = _store
    gradients: Callable[[Loss], None] = lambda loss: None
    stepped: Callable[["Trainer"], None] = lambda trainer: None


class Trainer:
    """A GFlowNet in training, on fresh and on replayed items.

    One step takes fresh trajectories from its source, stores them, and takes one optimiser step on
    each batch of them and one on each batch of what is replayed. (Separate steps on the two learn
    faster than one step on both together.) What others feed, and a hook returns, is learnt from
    like the fresh ones, and as much more is replayed. Everything random comes from the seed.

    Args:
        config: what to train, on what and how.
        stream: which of the independent streams of random numbers to sample by. Initial weights
            are the same in all of them.
        hooks: what else is done in the course of a step.

    Raises:
        ArgumentError: a field of the configuration is out of its range, or two do not go together.

    Examples:
        >>> trainer = Trainer(TFBind8Config(seed=1))
        >>> for _ in range(500):
        ...     loss = trainer.step()
        >>> trainer.measure()["modes_found"]
    """

    def __init__(self, config: TrainConfig, *, stream: int = 0, hooks: Hooks | None = None) -> None:
        config.validate()
        self.config, self.hooks = config, Hooks() if hooks is None else hooks
        self.watch = Stopwatch(PHASES, config.device)
        self.env = config.make_env()
        initial, rollout, replay = _seeds(config.seed, stream)
        self.loss = make_loss(config, self.env, initial)
        self.optimizer = make_optimizer(config, self.loss)
        self.generator = torch.Generator(config.device).manual_seed(rollout)
        pf, pb = self.loss.forward_policy, backward_policy(self.loss)
        self.backward = Sampler(pb)
        self.source = make_source(config, self.env, pf, pb, self.generator, rollout)
        self.replay = REPLAY[config.replay]
        draws = torch.Generator(config.device).manual_seed(replay)
        self.rb = make_buffer(config, self.env, draws, self._regenerate)
        self.replayed = self.hooks.replayed(self.rb, self.env)
        self.discovery = DiscoveryMetrics(self.env)
        self.fit = make_fit(self.env, pf, self.loss.estimate_log_z)
        self.steps_done = 0
        self.history: list[Row] = []
        self._losses: dict[str, list[float]] = {}  # sum and number since the last row of history

    def step(self) -> float:
        """Take one training step.

        Returns:
            The mean loss of the fresh batches, each before it was learnt from.

        Raises:
            NaNError, ArgumentError: the loss is no longer finite.
        """
        with self.watch("rollout"):
            fresh = self.source.sample(self.config.batch_size)
            self.discovery.add(fresh)
        with self.watch("buffer"):
            fed = self.hooks.store(self.rb, fresh.to_tensordict())
        if self.steps_done == 0 and self.config.log_z is None:
            with self.watch("learning"):  # from 0, log Z would take hundreds of steps to get there
                fit_log_z(self.loss, fresh)
        sampled = self._batches(fresh)
        losses = [float(self._learn(batch).mean()) for batch in sampled]
        from_others = [] if fed is None else self._batches(Trajectories.from_tensordict(fed))
        for batch in from_others:
            self._learn(batch)
        replayed = [float(each.mean()) for each in self._learn_replayed(sampled + from_others)]
        loss = sum(losses) / len(losses)
        self._add_loss("loss", loss)
        if self.config.n_replayed:
            self._add_loss("replay_loss", sum(replayed) / max(len(replayed), 1))
        self.steps_done += 1
        self.hooks.stepped(self)
        return loss

    def close(self) -> None:
        """Release the processes that sample for it."""
        self.source.close()

    def _batches(self, trajectories: Trajectories) -> list[Trajectories]:
        """Return batches alike, as near to the configured size as they can be."""
        n_batches = max(1, round(len(trajectories) / self.config.batch_size))
        size = math.ceil(len(trajectories) / n_batches)
        return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]

    def _learn_replayed(self, batches: Sequence[Trajectories]) -> Iterator[Float[Tensor, "n"]]:
        """Learn from what is replayed after some batches, in batches of their size."""
        n_items = sum(map(self.replay.n_items, batches))
        n_rows = round(self.config.replay_ratio * n_items) if self.config.n_replayed else 0
        if not n_rows:
            return
        with self.watch("buffer"):
            sample = self.replayed.sample(n_rows)
        # Drawn at once, before anything is learnt from it: one pass over the weights of all items.
        for rows in sample.split(math.ceil(n_items / len(batches))):
            batch = self.replay.gives.from_tensordict(rows)
            loss = self._learn(batch)
            if self.config.draw == "priority":
                with self.watch("buffer"):  # by the size of the residual: the loss is its square
                    priority = loss_per_item(batch, loss).sqrt()
                    self.replayed.update_priority(rows.get(keys.INDEX), priority)
            yield loss

    def _learn(self, batch: Container) -> Float[Tensor, "n"]:
        """Take one optimiser step; return the loss of each row before it."""
        with self.watch("learning"):
            self.optimizer.zero_grad()
            rows = convert(batch, self.loss.reads)
            self.discovery.calls += self.loss.n_reward_calls(rows)
            loss = self.loss.row_loss(rows)
            loss.mean().backward()
            self.hooks.gradients(self.loss)
            self.optimizer.step()
            return loss.detach()

    def _regenerate(self, rows: TensorDictBase) -> TensorDictBase:
        """Sample forward trajectories to stored terminating states. Costs no reward calls."""
        with self.watch("rollout"):
            trajectories = self.backward.sample_trajectories(
                self.env,
                states=rows.get(keys.STATE),
                conditions=rows.get(keys.CONDITION, None),
                log_rewards=rows.get(keys.LOG_REWARD),
                generator=self.generator,
            )
            return trajectories.forward().to_tensordict()

    # What is known of it.

    @property
    def log_z(self) -> float:
        """The learned log Z, in nats; where there are conditions, its mean over some."""
        return self.fit.learned_log_z()

    def measure(self) -> Row:
        """Return what there is to know after the steps taken so far, by name.

        Losses are means since the last row of ``history``; None where there is nothing to average.
        Distances are exact. Seconds have ``time`` in their name; everything else repeats with the
        seed.
        """
        with self.watch("evaluation"):
            known = {"log_z": self.log_z, **self.fit.columns()}
        seconds = self.watch.read()
        return {
            "step": self.steps_done,
            **self.discovery.columns(),
            "loss": self._mean_loss("loss"),
            "replay_loss": self._mean_loss("replay_loss"),
            **known,
            "buffer_size": len(self.rb),
            "time_total": sum(seconds.values()),
            **{f"time_{phase}": seconds[phase] for phase in PHASES},
        }

    def record(self) -> Row:
        """Measure, and append the row to ``history``."""
        row = self.measure()
        self.history.append(row)
        self._losses = {}
        return row

    def _add_loss(self, name: str, loss: float) -> None:
        total, n = self._losses.get(name, (0.0, 0))
        self._losses[name] = [total + loss, n + 1]

    def _mean_loss(self, name: str) -> float | None:
        total, n = self._losses.get(name, (0.0, 0))
        return total / n if n else None

    # Keeping it.

    def save(self, path: str | PathLike[str]) -> None:
        """Save everything that the next step depends on, in one file.

        Args:
            path: the file to make or replace, see :func:`gfn_rb.checkpoint.save_checkpoint`.

        Raises:
            CheckpointError: it cannot be written.
        """
        save_checkpoint(
            path,
            self.replayed,
            config=self.config.to_dict(),
            policies=self.loss.state_dict(),
            optimizer=self.optimizer.state_dict(),
            generator=self.generator.get_state(),
            source=self.source.state_dict(),
            steps_done=self.steps_done,
            discovery=self.discovery.state_dict(),
            history=self.history,
            losses=self._losses,
            time=self.watch.read(),
        )

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file of ``save``, bit for bit as if there had been no interruption.

        Args:
            path: saved with the same configuration; only ``steps`` may differ.

        Raises:
            CheckpointError: there is no such file, or it cannot be read.
            CheckpointCorruptError: it is damaged.
            CheckpointMismatchError: it is of another configuration, or not of a training run.
        """
        self._check_same(path)
        extra = load_checkpoint(path, self.replayed)
        self.loss.load_state_dict(extra["policies"])
        self.optimizer.load_state_dict(extra["optimizer"])
        self.generator.set_state(extra["generator"])
        self.source.load_state_dict(extra["source"])
        self.steps_done = extra["steps_done"]
        self.discovery.load_state_dict(extra["discovery"])
        self.history, self._losses = extra["history"], extra["losses"]
        self.watch.restore(extra["time"])

    def _check_same(self, path: str | PathLike[str]) -> None:
        saved, own = load_state(path).get("config"), self.config.to_dict()
        if not isinstance(saved, dict) or "env" not in saved:
            raise CheckpointMismatchError(f"{path} holds no training run")
        for name in [*own, *saved]:
            if name != "steps" and saved.get(name) != own.get(name):
                raise CheckpointMismatchError(
                    f"{path} is of another configuration: {name} is {saved.get(name)!r}, expected "
                    f"{own.get(name)!r}"
                )


def _seeds(seed: int, stream: int) -> list[int]:
    """Return the seeds of the initial weights, of rollouts and of the buffer."""
    # The first is the same in every stream: averaged gradients need equal weights to start from.
    generator = torch.Generator().manual_seed(seed)
    initial, *first = torch.randint(2**62, (3,), generator=generator).tolist()
    others = torch.randint(2**62, (2 * stream,), generator=generator).tolist()
    return [initial, *[*first, *others][2 * stream :]]
