"""Loss-Guided GFlowNets (Malek et al. 2025, arXiv:2505.15251) beside the defaults, on a grid.

The algorithm and its options are those of the published script for grids: 1,000 iterations, each of
16 trajectories of an auxiliary policy and 8 of the main one. The main policy learns from its 8 and
from 8 of the others; the auxiliary policy from its 16, with the reward R(x) + L(tau), where L is
the loss of the main policy. Both learn by trajectory balance with the square, from log Z = 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.published.defaults import FIGURES, figures_of
from benchmarks.published.rows import Row
from gfn_rb import Sampler, Trajectories
from gfn_rb.keys import LOG_REWARD
from gfn_rb.losses import Loss
from gfn_rb.training import HyperGridConfig, TrainConfig, Trainer, objectives

CALLS = 24_000
N_AUXILIARY, N_MAIN = 16, 8
_TASK = HyperGridConfig(ndim=2, height=32, r0=1e-4, r1=1.0, r2=3.0)
_SCRIPT = replace(
    _TASK,
    batch_size=N_AUXILIARY + N_MAIN,
    backward="learned",
    share_trunk=True,
    lr_log_z=0.1,
    log_z=0.0,
    replay_ratio=0.0,
    temperature=1.0,
)


class LossGuided(Trainer):
    """Trains a policy and an auxiliary one that samples what the first fits badly."""

    def __init__(self, config: TrainConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._guide = objectives.make_loss(config, self.env, config.seed + 1)
        self._guide_optimizer = objectives.make_optimizer(config, self._guide)
        self._guide_sampler = Sampler(self._guide.forward_policy)

    def step(self) -> float:
        """Take one step of both policies."""
        guided = self._sampled(self._guide_sampler, N_AUXILIARY)
        own = self._sampled(self.sampler, N_MAIN)
        badly, _ = self.loss.evaluate(guided)
        cost = torch.cat([badly[:N_MAIN], self.loss.evaluate(own)[0]]).mean()
        log_reward = torch.logaddexp(badly.detach().log(), guided.log_reward)
        _take_step(self.optimizer, self.loss, cost)
        rows = guided.to_tensordict().set(LOG_REWARD, log_reward)
        _take_step(
            self._guide_optimizer, self._guide, self._guide(Trajectories.from_tensordict(rows))
        )
        self.average.loss.load_state_dict(self.loss.state_dict())  # the script has no average
        self.steps_done += 1
        return float(cost.detach())

    def _sampled(self, sampler: Sampler, n: int) -> Trajectories:
        fresh = sampler.sample_trajectories(self.env, n, generator=self.generator)
        self.discovery.add(fresh)
        return fresh


def _take_step(optimizer: torch.optim.Optimizer, loss: Loss, cost: torch.Tensor) -> None:
    objectives.take_step(optimizer, loss, cost, clip=None)


def _row(name: str, title: str, config: TrainConfig, trainer: Any = Trainer) -> Row:
    return Row(
        name=f"loss_guided_{name}",
        title=f"grid 32^2, r0 = 0.0001, r1 = 1, r2 = 3: {title}",
        protocol="",
        published="",
        settings="",
        config=config,
        calls=CALLS,
        figures=FIGURES,
        measure=figures_of,
        n_modes=4,
        trainer=trainer,
    )


LOSS_GUIDED = {
    "algorithm": _row("algorithm", "loss-guided, the script's options", _SCRIPT, LossGuided),
    "on_policy": _row("on_policy", "no auxiliary policy, the script's options", _SCRIPT),
    "no_replay": _row("no_replay", "defaults, no replay", replace(_TASK, replay_ratio=0.0)),
    "defaults": _row("defaults", "defaults", _TASK),
    "linex": _row("linex", "defaults, Linex", replace(_TASK, regression="linex")),
}
"""By arm."""
