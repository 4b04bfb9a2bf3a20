"""The training loop: sample, store, replay, learn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from statistics import fmean
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.optim.lr_scheduler import LinearLR
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from gfn_rb import keys
from gfn_rb.arguments import require_kind
from gfn_rb.buffers import MergedReplayBuffer, terminating_state_buffer
from gfn_rb.buffers.statistics import ReplayStatistics, total
from gfn_rb.checkpoint import import_table, load_checkpoint, save_checkpoint
from gfn_rb.checkpoint.api import outline
from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs import ContinuousEnv, GFNEnv
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, EmptyBufferError
from gfn_rb.losses import Loss
from gfn_rb.numerics.flat import flat_rows
from gfn_rb.rollout import LocalSearchSampler, Sampler
from gfn_rb.shapes import Float
from gfn_rb.stopwatch import Stopwatch
from gfn_rb.torchrl_compat import members_of
from gfn_rb.training import objectives
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.metrics import DiscoveryMetrics, Evaluation, norm_distance
from gfn_rb.training.options import PriorityDraw, SoftmaxDraw, TeacherDraw
from gfn_rb.training.replay import REPLAY, TeacherReward
from gfn_rb.training.session.folder import Row, run_secret

FLOW = ("offered", "accepted", "evicted", "drawn", "mean_age", "largest_age")
PHASES = ("rollout", "buffer", "learning", "evaluation")


@dataclass(frozen=True)
class Hooks:
    """Callables that run during a training step.

    Args:
        replayed: receives the buffer of the run and its environment, and returns the buffer to draw
            from, such as an ensemble of it and others. Checkpoints contain what it returns.
        store: adds fresh items to the buffer, instead of its ``extend``. It returns trajectories
            that other ranks fed meanwhile, to train on like fresh ones, or None.
        gradients: receives the loss module when its gradients are computed and not yet used.
        stepped: receives the trainer after each step.
        saving: runs before a checkpoint is written.
    """

    replayed: Callable[[ReplayBuffer, GFNEnv], ReplayBuffer] = lambda rb, env: rb
    store: Callable[[ReplayBuffer, TensorDictBase], TensorDictBase | None] | None = None
    gradients: Callable[[Loss], None] | None = None
    stepped: Callable[["Trainer"], None] | None = None
    saving: Callable[[], None] = lambda: None
    part: Any = None  # with a state that checkpoints keep


class Trainer:
    """Trains a GFlowNet on fresh and replayed items.

    One step samples fresh trajectories, stores them, and takes one optimizer step on each of their
    batches and one on each replayed batch. Trajectories that other ranks fed are treated like fresh
    ones. The seed determines all random numbers.

    Args:
        config: configuration of the run.
        stream: number of the stream of random numbers to sample with. Initial weights are the same
            in all streams.
        hooks: callables that run during a step.

    Raises:
        ArgumentError: a field of the configuration is out of range, or two exclude each other.

    Examples:
        >>> trainer = Trainer(TFBind8Config(seed=1))
        >>> for _ in range(500):
        ...     loss = trainer.step()
        >>> trainer.measure()["modes_found"]
    """

    def __init__(self, config: TrainConfig, *, stream: int = 0, hooks: Hooks | None = None) -> None:
        require_kind("config", config, TrainConfig)
        config.validate()
        self.config, self.hooks = config, Hooks() if hooks is None else hooks
        self._secret = run_secret()
        self.watch = Stopwatch(PHASES, config.device)
        self.env = config.make_env()
        initial, rollout, replay = _seeds(config.seed, stream)
        self.loss = objectives.make_loss(config, self.env, initial)
        self.optimizer = objectives.make_optimizer(config, self.loss)
        self.schedule: LinearLR | objectives.FallingRates
        if config.lr_end is None and self.hooks.gradients is None:
            self.schedule = objectives.FallingRates(self.optimizer)
        else:  # ranks that share gradients need the same rates, and each sees a loss of its own
            end, n = (1.0, 1) if config.lr_end is None else (config.lr_end, config.n_anneal_steps)
            self.schedule = LinearLR(self.optimizer, 1.0, end, n)
        self.average = objectives.WeightAverage(self.loss)
        self.clip = objectives.AdaptiveClip()
        self._clip = objectives.clip_at(config.clip_grad_norm) or self.clip
        self.generator = torch.Generator(config.device).manual_seed(rollout)
        self.search = LocalSearchSampler(
            self.loss.forward_policy, objectives.backward_policy(self.loss)
        )
        self.temperature = 1.0  # of exploring batches
        self.sampler, self.teacher = Sampler(self.loss.forward_policy), None
        if config.teacher.share:
            self.teacher = objectives.Teacher(config, self.env, initial + 1)
        self._priority_of: Callable[[Tensor], Tensor] = torch.abs  # residuals
        if isinstance(config.draw, TeacherDraw):
            self._priority_of = TeacherReward(config.draw.c)
        self.replay = REPLAY[config.replay_name]
        draws = torch.Generator(config.device).manual_seed(replay)
        self.rb = config.make_buffer(self.env, draws, self._regenerate)
        self.replayed = self.hooks.replayed(self.rb, self.env)
        if config.offline_data is not None:
            share = config.offline_share
            members = self.rb, self._offline_buffer(config.offline_data, draws)
            self.replayed = MergedReplayBuffer(*members, p=[1 - share, share], generator=draws)
        between = config.make_distance()
        distance = between if callable(between) else norm_distance(between)
        self.discovery = DiscoveryMetrics(
            self.env, lambda a, b: distance(flat_rows(a), flat_rows(b))
        )
        average = self.average.loss
        self.evaluation = Evaluation(
            self.env, average.forward_policy, objectives.backward_policy(average),
            average.estimate_log_z, config.metrics.names, n_samples=config.metrics.samples,
            n_backward=config.metrics.backward, seed=rollout,
        )  # fmt: skip
        self.fit = self.evaluation.fit
        # What has a state of its own, by its name in checkpoints.
        self._parts: dict[str, Any] = {
            "policies": self.loss, "average": self.average, "optimizer": self.optimizer,
            "schedule": self.schedule, "discovery": self.discovery,
        }  # fmt: skip
        if self.teacher is not None:
            self._parts["teacher"] = self.teacher
        if self.hooks.part is not None:
            self._parts["rank"] = self.hooks.part
        self.steps_done, self._is_replayed = 0, config.n_replayed > 0
        self._share_new = 1.0  # of the fresh objects of the last step
        self.history: list[Row] = []
        self._losses: dict[str, list[float]] = {"loss": [], "replay_loss": []}  # since the last row

    def step(self) -> float:
        """Take one training step.

        Returns:
            The mean loss of the fresh batches, each before its optimizer step.

        Raises:
            NaNError, ArgumentError: the loss is not finite.
        """
        if isinstance(draw := self.config.draw, SoftmaxDraw) and draw.temperature_end is not None:
            self.rb.sampler.temperature = self.config.annealed(
                draw.temperature, draw.temperature_end, self.steps_done
            )
        fresh, fed = self._sample()
        self.watch.switch("learning")
        if self.steps_done == 0 and self.config.log_z is None:
            self.loss.fit_log_z(fresh)  # it moves with the reward, as all that follows does
        sampled = self._batches(fresh)
        from_others = [] if fed is None else self._batches(Trajectories.from_tensordict(fed))
        batches = sampled + from_others
        losses, _ = zip(*map(self._learn, batches), strict=True)
        replayed = self._replay(batches)
        loss = fmean(losses[: len(sampled)])
        self._losses["loss"].append(loss)
        if self._is_replayed:
            self._losses["replay_loss"].append(fmean(replayed) if replayed else 0.0)
        self.average.update()
        if isinstance(self.schedule, objectives.FallingRates):
            self.schedule.observe(self._share_new, fmean([*losses, *replayed]))
        else:
            self.schedule.step()
        self.steps_done += 1
        self.watch.switch("other")
        if self.hooks.stepped is not None:
            self.hooks.stepped(self)
        return loss

    def sample(self, n: int) -> Trajectories:
        """Return ``n`` fresh trajectories of the policy, or of its teacher, with their rewards."""
        config, sampler, temperature = self.config, self.sampler, self.config.temperature
        if self.teacher is not None and self.teacher.is_next():
            sampler, temperature = self.teacher.sampler, 1.0
        elif temperature is None:  # every other batch explores
            explores = self.steps_done % 2 == 0 and not isinstance(self.env, ContinuousEnv)
            temperature = self.temperature if explores else 1.0
        epsilon = config.annealed(config.epsilon, config.epsilon_end, self.steps_done)
        return sampler.sample_trajectories(
            self.env, n, generator=self.generator, epsilon=epsilon, temperature=temperature
        )

    def _batches(self, trajectories: Trajectories) -> list[Trajectories]:
        """Return batches alike, as near to the configured size as they can be."""
        n_batches = max(1, round(len(trajectories) / self.config.batch_size))
        if n_batches == 1:
            return [trajectories]
        size = math.ceil(len(trajectories) / n_batches)
        return [trajectories[i : i + size] for i in range(0, len(trajectories), size)]

    def _sample(self) -> tuple[Trajectories, TensorDictBase | None]:
        """Store fresh trajectories; return them, and what others have fed in the meantime."""
        # Phases of a step follow each other: to switch takes a fourth of the calls of contexts.
        self.watch.switch("rollout")
        fresh, search = self.sample(self.config.batch_size), self.config.search
        if search.loops:  # around each fresh trajectory (Kim et al. 2023, arXiv:2310.02710)
            options = {"back_ratio": search.back_ratio, "generator": self.generator}
            proposals = self.search.proposals(self.env, fresh, search.loops, **options)
            fresh = Trajectories.cat([fresh, *proposals])
        length = fresh.length
        self._share_new = self.discovery.add(fresh) / length.shape[0]
        self.temperature = objectives.adapted(self.temperature, self._share_new)
        self.watch.switch("buffer")
        version = torch.full_like(length, self.steps_done)
        items = fresh.to_tensordict().set(keys.POLICY_VERSION, version)
        if self.hooks.store is None:
            self.rb.extend(items)
            return fresh, None
        with self._same_draws():
            return fresh, self.hooks.store(self.rb, items)

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Reset the generator: terminating states that a hook sends again draw trajectories."""
        state = self.generator.get_state()
        yield
        self.generator.set_state(state)

    def _replay(self, batches: Sequence[Trajectories]) -> list[float]:
        """Take optimiser steps on what is replayed after some batches; return the losses."""
        n_items = sum(map(self.replay.n_items, batches))
        n_rows = round(self.config.replay_ratio * n_items) if self._is_replayed else 0
        if not n_rows:
            return []
        # Drawn at once, before anything is learnt from it: one pass over the weights of all items.
        self.watch.switch("buffer")
        try:
            sample = self.replayed.sample(n_rows)
        except EmptyBufferError:  # no stored object has a reward yet that the draw could go by
            return []
        self.watch.switch("learning")
        rows, size = self.replay.gives.from_tensordict(sample), math.ceil(n_items / len(batches))
        losses = []
        for start in range(0, n_rows, size):
            replayed = rows[start : start + size]
            loss, residual = self._learn(replayed)
            losses.append(loss)
            if isinstance(self.config.draw, PriorityDraw):
                with self.watch("buffer"):
                    index = sample.get(keys.INDEX)[start : start + size]
                    priority = objectives.mean_per_item(replayed, self._priority_of(residual))
                    self.replayed.update_priority(index, priority)
        return losses

    def _learn(self, batch: Container) -> tuple[float, Float[Tensor, "m"]]:
        """Take one optimiser step on a batch; return its loss and its residual before that."""
        reads, rows = self.loss.reads, batch
        if type(batch) is not reads:  # but trajectories or transitions, which have all it reads
            rows = getattr(batch, f"to_{reads.__name__.lower()}")()
        self.discovery.calls += self.loss.n_reward_calls(rows)
        loss, residual = self.loss.evaluate(rows)
        cost, residual = loss.mean(), residual.detach()
        objectives.take_step(self.optimizer, self.loss, cost, self._clip, self.hooks.gradients)
        if self.teacher is not None:
            self.teacher.learn(batch, residual)
        return float(cost.detach()), residual

    def _offline_buffer(self, path: str, generator: torch.Generator) -> ReplayBuffer:
        """Return a buffer of the objects of a table, which is not written to."""
        rows = import_table(path, self.env)
        if self.env.condition_shape is not None:
            raise ArgumentError(f"offline_data must be None with conditions, got {path}")
        version = torch.zeros(len(rows), dtype=torch.int64, device=rows.get(keys.LOG_REWARD).device)
        rows.set(keys.POLICY_VERSION, version)
        rb = terminating_state_buffer(
            len(rows), regenerate=self._regenerate, sampler=RandomSampler(),
            device=self.config.device, generator=generator,
        )  # fmt: skip
        rb.extend(rows)
        return rb

    def _regenerate(self, rows: TensorDictBase) -> TensorDictBase:
        """Sample forward trajectories to stored terminating states. Costs no reward calls."""
        with self.watch("rollout"):
            trajectories = self.search.backward_sampler.sample_trajectories(
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
        """The averaged log Z in nats; with conditions, its mean over some of them."""
        return self.fit.learned_log_z()

    def measure(self) -> Row:
        """Return the metrics after the steps so far, by name.

        Metrics of the policy and log Z are of the averaged weights, ``average.loss``.

        Losses and ages are means over what was trained on since the last row of ``history``; None
        without any. Ages are in steps. ``evicted`` of the ``accepted`` rows have been overwritten.

        Metrics by samples use random numbers of their own. Names of seconds contain ``time``; all
        other values repeat with the seed.
        """
        with self.watch("evaluation"):
            found = self.discovery.columns()
            known = self.evaluation.columns(self.steps_done)
        seconds = self.watch.read()
        flow = {**self.rb.stats(), **total(self._statistics())}
        return {
            "step": self.steps_done,
            **found,
            **{name: fmean(losses) if losses else None for name, losses in self._losses.items()},
            **known,
            "buffer_size": len(self.rb),
            **{name: flow.get(name) for name in FLOW},
            "time_total": sum(seconds.values()),
            **{f"time_{phase}": seconds[phase] for phase in PHASES},
        }

    def record(self) -> Row:
        """Measure, and append the row to ``history``."""
        row = self.measure()
        self.history.append(row)
        self._losses = {"loss": [], "replay_loss": []}
        for statistics in self._statistics():
            statistics.forget_ages()
        return row

    def _statistics(self) -> list[ReplayStatistics]:
        """Return the statistics of the run's buffer, and of what it is replayed together with."""
        return [rb.statistics for rb in members_of(self.replayed) or [self.rb]]

    # Keeping it.

    def save(self, path: str | PathLike[str]) -> None:
        """Save everything that the next step depends on in one file.

        Args:
            path: file to create or replace.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with self._same_draws():
            self.hooks.saving()
        save_checkpoint(
            path,
            self.replayed,
            secret=self._secret,
            config=self.config.to_dict(),
            **{name: part.state_dict() for name, part in self._parts.items()},
            temperature=self.temperature,
            clip=vars(self.clip),
            generator=self.generator.get_state(),
            steps_done=self.steps_done,
            history=self.history,
            losses=self._losses,
            time=self.watch.read(),
        )

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file of ``save``, bit for bit as without an interruption.

        Args:
            path: file of a run with the same configuration; only ``steps`` may differ.

        Raises:
            CheckpointError: the file does not exist or cannot be read.
            CheckpointCorruptError: the file is damaged.
            CheckpointMismatchError: the file is of another configuration, or not of a training run.
            SecretError: the file was made with another secret, or was changed.
        """
        saved, own = outline(path, self._secret).get("config"), self.config.to_dict()
        if not isinstance(saved, dict) or "env" not in saved:
            raise CheckpointMismatchError(f"{path} holds no training run")
        for name in [*own, *saved]:
            if name != "steps" and saved.get(name) != own.get(name):
                raise CheckpointMismatchError(
                    f"{path} is of another configuration: {name} is {saved.get(name)!r}, expected "
                    f"{own.get(name)!r}"
                )
        extra = load_checkpoint(path, self.replayed, secret=self._secret)
        for name, part in self._parts.items():
            part.load_state_dict(extra[name])
        self.temperature = extra["temperature"]
        vars(self.clip).update(extra["clip"])
        self.generator.set_state(extra["generator"])
        self.steps_done = extra["steps_done"]
        self.history, self._losses = extra["history"], extra["losses"]
        self.watch.restore(extra["time"])


def _seeds(seed: int, stream: int) -> list[int]:
    """Return the seeds of the initial weights, of rollouts and of the buffer."""
    # The first is the same in every stream: averaged gradients need equal weights to start from.
    generator = torch.Generator().manual_seed(seed)
    initial, *first = torch.randint(2**62, (3,), generator=generator).tolist()
    others = torch.randint(2**62, (2 * stream,), generator=generator).tolist()
    return [initial, *[*first, *others][2 * stream :]]
