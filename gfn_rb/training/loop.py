"""The training loop: sample, store, replay, learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb import keys
from gfn_rb.checkpoint import load_checkpoint, load_state, save_checkpoint
from gfn_rb.containers import Trajectories
from gfn_rb.envs import EnumerableEnv, jensen_shannon_distance, total_variation
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.rollout import Sampler, action_log_probs
from gfn_rb.shapes import Float64
from gfn_rb.training.config import TrainConfig
from gfn_rb.training.losses import TrajectoryBalance
from gfn_rb.training.policies import BackwardPolicy, ForwardPolicy, LogZ, UniformBackwardPolicy
from gfn_rb.training.replay import REPLAY
from gfn_rb.training.tally import Stopwatch, Tally

Row = dict[str, int | float | None]

PHASES = ("rollout", "buffer", "learning", "evaluation")


class Trainer:
    """A GFlowNet in training by trajectory balance, on fresh and on replayed trajectories.

    One step samples a fresh batch with the forward policy, stores it, and takes one optimiser step
    on it and one on each batch of replayed trajectories. (Separate steps on the two learn faster
    than one step on both together.) Everything random comes from the seed.

    Args:
        config: what to train, on what and how.

    Raises:
        ArgumentError: a field of the configuration is out of its range, or the environment is too
            large to enumerate.

    Examples:
        >>> trainer = Trainer(TFBind8Config(seed=1))
        >>> for _ in range(500):
        ...     loss = trainer.step()
        >>> trainer.measure()["modes_found"]
    """

    def __init__(self, config: TrainConfig) -> None:
        config.validate()
        self.config = config
        self.watch = Stopwatch(PHASES, config.device)
        self.env = config.make_env()
        initial, rollout, replay = _seeds(config.seed)
        self.loss = _make_loss(config, self.env, initial)
        self.optimizer = _make_optimizer(config, self.loss)
        self.generator = torch.Generator(config.device).manual_seed(rollout)
        self.forward = Sampler(self.loss.forward_policy)
        self.backward = Sampler(self.loss.backward_policy)
        self.rb = REPLAY[config.replay](
            config,
            self.env,
            self._regenerate,
            torch.Generator(config.device).manual_seed(replay),
        )
        self.tally = Tally(self.env)
        self.target = self.env.target_log_prob()
        self.steps_done = 0
        self.history: list[Row] = []
        self._loss_sums = [0.0, 0.0]  # fresh and replayed, since the last row of the history

    def step(self) -> float:
        """Take one training step.

        Returns:
            The loss of the fresh batch, before it was learnt from.

        Raises:
            NaNError, ArgumentError: the loss is no longer finite.
        """
        with self.watch("rollout"):
            fresh = self.forward.sample_trajectories(
                self.env,
                n=self.config.batch_size,
                epsilon=self.config.epsilon,
                generator=self.generator,
            )
            self.tally.add(fresh.terminating_states)
        with self.watch("buffer"):
            self.rb.extend(fresh.to_tensordict())
        if self.steps_done == 0 and self.config.log_z is None:
            self._fit_log_z(fresh)
        loss = self._learn(fresh)
        replayed = [self._learn(batch) for batch in self._replayed()]
        self._loss_sums[0] += loss
        self._loss_sums[1] += sum(replayed) / max(len(replayed), 1)
        self.steps_done += 1
        return loss

    def _replayed(self) -> Iterator[TensorDictBase]:
        """Draw what is replayed in one step, in batches of at most the size of a fresh one."""
        if self.config.n_replayed:
            with self.watch("buffer"):
                drawn = self.rb.sample(self.config.n_replayed)
            yield from drawn.split(self.config.batch_size)

    def _learn(self, batch: Trajectories | TensorDictBase) -> float:
        with self.watch("learning"):
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            return float(loss.detach())

    @torch.no_grad()
    def _fit_log_z(self, batch: Trajectories) -> None:
        """Set log Z to where the loss of a batch is least: its mean residual becomes 0."""
        with self.watch("learning"):
            self.loss.get_parameter("log_z.value").sub_(self.loss.residual(batch).mean())

    def _regenerate(self, rows: TensorDictBase) -> TensorDictBase:
        """Sample forward trajectories to stored terminating states. Costs no reward calls."""
        with self.watch("rollout"):
            trajectories = self.backward.sample_trajectories(
                self.env,
                states=rows.get(keys.STATE),
                log_rewards=rows.get(keys.LOG_REWARD),
                generator=self.generator,
            )
            return trajectories.forward().to_tensordict()

    # What is known of it.

    @property
    def log_z(self) -> float:
        """The learned log Z, in nats."""
        return float(self.loss.get_parameter("log_z.value").detach())

    def policy_log_prob(self) -> Float64[Tensor, "m"]:
        """Return the policy's exact log-probability of each terminating state."""
        log_pf = partial(action_log_probs, self.loss.forward_policy, self.env)
        return self.env.policy_log_prob(log_pf)

    def measure(self) -> Row:
        """Return what there is to know after the steps taken so far, by name.

        Losses are means since the last row of ``history``; None where there is nothing to average.
        Distances are exact. Seconds have ``time`` in their name; everything else repeats with the
        seed.
        """
        with self.watch("evaluation"):
            log_p = self.policy_log_prob()
            distance = {
                "total_variation": total_variation(log_p, self.target),
                "jensen_shannon_distance": jensen_shannon_distance(log_p, self.target),
            }
        losses = self._mean_losses()
        seconds = self.watch.read()
        return {
            "step": self.steps_done,
            "reward_calls": self.tally.calls,
            "distinct_reward_calls": self.tally.distinct_calls,
            "modes_found": self.tally.modes_found,
            "loss": losses[0],
            "replay_loss": losses[1],
            "log_z": self.log_z,
            **distance,
            "buffer_size": len(self.rb),
            "time_total": sum(seconds.values()),
            **{f"time_{phase}": seconds[phase] for phase in PHASES},
        }

    def record(self) -> Row:
        """Measure, and append the row to ``history``."""
        row = self.measure()
        self.history.append(row)
        self._loss_sums = [0.0, 0.0]
        return row

    def _mean_losses(self) -> tuple[float | None, float | None]:
        """Return the mean losses since the last row, fresh and replayed."""
        last = self.history[-1]["step"] if self.history else 0
        n_steps = self.steps_done - int(last or 0)
        fresh, replayed = self._loss_sums
        if not n_steps:
            return None, None
        return fresh / n_steps, replayed / n_steps if self.config.n_replayed else None

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
            self.rb,
            config=self.config.to_dict(),
            policies=self.loss.state_dict(),
            optimizer=self.optimizer.state_dict(),
            generator=self.generator.get_state(),
            steps_done=self.steps_done,
            reward_calls=self.tally.calls,
            seen=self.tally.seen,
            history=self.history,
            loss_sums=self._loss_sums,
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
        extra = load_checkpoint(path, self.rb)
        self.loss.load_state_dict(extra["policies"])
        self.optimizer.load_state_dict(extra["optimizer"])
        self.generator.set_state(extra["generator"])
        self.steps_done = extra["steps_done"]
        self.tally.restore(extra["reward_calls"], extra["seen"])
        self.history, self._loss_sums = extra["history"], extra["loss_sums"]
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


def _seeds(seed: int) -> list[int]:
    """Return the seeds of the initial weights, of rollouts and of the buffer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (3,), generator=generator).tolist()


def _make_loss(config: TrainConfig, env: EnumerableEnv, seed: int) -> TrajectoryBalance:
    """Return the loss with new policies. Their weights are drawn on the CPU, for any device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        forward = ForwardPolicy(env, config.hidden)
        backward = _BACKWARD[config.backward](env, config.hidden)
    return TrajectoryBalance(forward, backward, env, LogZ(config.log_z or 0.0)).to(config.device)


_BACKWARD: dict[str, Callable[[EnumerableEnv, tuple[int, ...]], TensorDictModuleBase]] = {
    "learned": BackwardPolicy,
    "uniform": lambda env, _: UniformBackwardPolicy(env),
}


def _make_optimizer(config: TrainConfig, loss: TrajectoryBalance) -> torch.optim.Adam:
    log_z = loss.get_parameter("log_z.value")
    policies = [parameter for parameter in loss.parameters() if parameter is not log_z]
    groups = [{"params": policies, "lr": config.lr}, {"params": [log_z], "lr": config.lr_log_z}]
    return torch.optim.Adam(groups, fused=True)
