"""Diffusion samplers beside Sendera et al. 2024: ``python -m benchmarks.diffusion [TASK ...]``.

    --share X     share of the published 25,000 iterations, by default .1
    --seeds ...   by default 0 and 1

Runs ``published``, trajectory balance with exploration and local search in the paper's settings
(its appendices D and E), and ``ours``, the defaults of ``gfn-rb train TASK`` on as many walks.
Prints, of 2,000 walks of each trained policy, how far the evidence lower bound and the importance
estimate are from log Z, and the 2-Wasserstein distance to as many samples of the target. The local
search of ``published`` takes 60,000 rewards and gradients every 100 iterations beside its walks.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from benchmarks.records import RESULTS, keep
from gfn_rb import RankRewardSampler, Sampler, Trajectories
from gfn_rb.buffers import terminating_state_buffer
from gfn_rb.envs import DiffusionEnv, Funnel, Gaussians25, Manywell
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import LogZ, ReferencePolicy
from gfn_rb.training import Trainer
from gfn_rb.training.config import CONFIGS
from gfn_rb.training.metrics.evaluation import log_mean_exp, log_weights
from gfn_rb.writers import FIFOWriter

TASKS = {"gaussians25": Gaussians25, "funnel": Funnel, "manywell": Manywell}
N, BATCH, WIDTH, ITERATIONS = 2000, 300, 64, 25_000
# Table C.1 of arXiv:2402.05098, TB + Expl. + LS after 25,000 iterations: both errors and distance.
PUBLISHED = {
    "gaussians25": (".171 ± .013", ".004 ± .011", "1.25 ± .18"),
    "funnel": (".653 ± .025", ".285 ± .099", "21.9 ± 4.0"),
    "manywell": ("4.57 ± 2.13", ".19 ± .29", "5.66 ± .05"),
}


class PISPolicy(TensorDictModuleBase):
    """A normal step of fixed variance, whose drift is the network of Zhang and Chen 2022.

    Attributes:
        exploration: standard deviation that a move has in addition.
    """

    is_backward = False

    def __init__(self, env: DiffusionEnv) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["state"], ["logits"]
        self.exploration, self._n, d = 0.0, env.n_steps, env.action_shape[0] - 1
        self._std = env.sigma / math.sqrt(env.n_steps)
        self.register_buffer("_frequency", torch.linspace(0.1, 100, WIDTH))
        self._phase = nn.Parameter(torch.randn(WIDTH))
        hidden = [nn.GELU(), nn.Linear(WIDTH, WIDTH)]
        self._time = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), *hidden)
        self._place = nn.Linear(d, WIDTH)
        self._joint = nn.Sequential(*hidden, nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self._head = nn.Linear(WIDTH, d)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)

    def get_dist(self, tensordict: TensorDictBase) -> Distribution:
        """Write "logits" and return the density of moves."""
        state = tensordict.get("state")
        angle = state[:, -1:] / self._n * self._frequency + self._phase
        waves = torch.cat([angle.sin(), angle.cos()], 1)
        drift = self._head(self._joint(self._place(state[:, :-1]) + self._time(waves)))
        tensordict.set("logits", state.new_zeros(len(state), 2))
        std = math.hypot(self._std, self.exploration)
        return Independent(Normal(drift / self._n, std, validate_args=False), 1, False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write "logits"."""
        self.get_dist(tensordict)
        return tensordict


def local_search(env: DiffusionEnv, x: Tensor, n: int = 200, burn_in: int = 100) -> Tensor:
    """Return what parallel MALA accepts after burn-in, its step adapted to 57.4% acceptance."""

    def of(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        log_r = env.log_density(x)
        return log_r.detach(), torch.autograd.grad(log_r.sum(), x)[0]

    step, kept, (log_r, slope) = 0.1, [], of(x)
    for i in range(n):
        new = x + step * slope + math.sqrt(2 * step) * torch.randn_like(x)
        new_log_r, new_slope = of(new)
        there = (new - x - step * slope).square().sum(1) / (4 * step)
        back = (x - new - step * new_slope).square().sum(1) / (4 * step)
        accepted = torch.rand(len(x)).log() < new_log_r - log_r + there - back
        if i > burn_in:
            kept.append(new[accepted])
        flag = accepted[:, None]
        x, slope = new.where(flag, x), new_slope.where(flag, slope)
        log_r = new_log_r.where(accepted, log_r)
        step *= 1.1 if float(accepted.float().mean()) > 0.574 else 0.9
    return torch.cat(kept)


def published(name: str, n: int, seed: int) -> tuple[Any, DiffusionEnv]:
    """Train for n iterations in the published settings; return the policy and its environment."""
    torch.manual_seed(seed)
    env = TASKS[name]()
    policy, log_z = PISPolicy(env), LogZ()
    loss = TrajectoryBalance(policy, ReferencePolicy(env), env, log_z)
    groups = [{"params": policy.parameters()}, {"params": log_z.parameters(), "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, 1e-3)
    walks, found = (
        terminating_state_buffer(
            600_000, writer=FIFOWriter(), sampler=RankRewardSampler(k=0.01), batch_size=BATCH
        )
        for _ in range(2)
    )
    back = Sampler(ReferencePolicy(env))
    for i in range(n):
        policy.exploration = 0.1 * max(0.0, 1 - i / (n / 5))
        if i % 2 == 0:
            rows = Sampler(policy).sample_trajectories(env, BATCH)
            walks.extend(rows.to_tensordict())
        else:
            if i % 100 == 1:
                x = local_search(env, walks.sample()["state"][:, :-1])
                state = env.at_end(x)
                found.extend({"state": state, "log_reward": env.log_reward(state)})
            drawn = found.sample()
            rows = back.sample_trajectories(
                env, states=drawn["state"], log_rewards=drawn["log_reward"]
            )
        policy.exploration = 0.0
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
    return policy, env


def ours(name: str, n: int, seed: int) -> tuple[Any, DiffusionEnv]:
    """Train with the defaults of the command line, on as many fresh walks."""
    config = CONFIGS[name]
    steps = round(n / 2 * BATCH / config.batch_size)
    trainer = Trainer(config(seed=seed, steps=steps))
    for _ in range(steps):
        trainer.step()
    assert isinstance(trainer.env, DiffusionEnv)
    return trainer.average.loss.forward_policy, trainer.env


FIGURES = ("log_z_minus_elbo", "log_z_minus_importance", "wasserstein")


def measure(policy: Any, env: DiffusionEnv) -> tuple[float, float, float]:
    """Return both errors of log Z, and the 2-Wasserstein distance, of 2,000 samples."""
    generator = torch.Generator().manual_seed(1)
    rows: Trajectories = Sampler(policy).sample_trajectories(env, N, generator=generator)
    weight = log_weights(policy, ReferencePolicy(env), env, rows)
    x, y = rows.terminating_states[:, :-1], env.sample_target(N, generator)
    cost = torch.cdist(x, y).square().numpy()
    distance = cost[linear_sum_assignment(cost)].mean() ** 0.5
    log_z = env.true_log_z
    assert log_z is not None
    return log_z - float(weight.mean()), log_z - float(log_mean_exp(weight)), float(distance)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", default=[*TASKS], metavar="TASK")
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--store", action="store_true", help="keep them in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    n = max(4, round(options.share * ITERATIONS))
    print("| task | run | log Z - ELBO | log Z - importance | 2-Wasserstein | CPU s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.tasks:
        print(f"| {name} | paper, {ITERATIONS:,} iterations | {' | '.join(PUBLISHED[name])} | |")
        for run in (published, ours):
            start, figures = time.process_time(), []
            for seed in options.seeds:
                figures.append(measure(*run(name, n, seed)))
            seconds = (time.process_time() - start) / len(options.seeds)
            spread = stdev if len(figures) > 1 else lambda _: 0.0
            shown = [
                f"{mean(each):.2f} ± {spread(each):.2f}" for each in zip(*figures, strict=True)
            ]
            part, facts = f"{name}, {run.__name__}, {n} iterations", {"share": options.share}
            rows = [
                {**dict(zip(FIGURES, each, strict=True)), "cpu_seconds": seconds}
                for each in figures
            ]
            places = [options.json, RESULTS / "diffusion.json" if options.store else None]
            for path in filter(None, places):
                keep(path, "diffusion", part, rows, options=facts, seeds=options.seeds)
            print(f"| | {run.__name__}, {n} | {' | '.join(shown)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
