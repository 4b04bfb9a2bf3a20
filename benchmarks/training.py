"""Training iterations per CPU second, beside torchgfn and gfnx: ``python -m benchmarks.training``.

One iteration samples 16 trajectories, computes trajectory balance with a learned backward policy,
and takes one step of Adam; with replay it takes a second step on 16 replayed trajectories. All have
networks of 2 x 256 units, of which the two policies share the hidden layers. 50 nats are subtracted
from the logit of the exit action on grids, so that all trajectories have the maximum length: a
policy that learns to exit early has cheaper iterations. Ours and torchgfn run in turn in one
process; gfnx runs right after them, in a Python of its own, if ``--gfnx`` names it:

    python -m venv gfnx && gfnx/bin/pip install equinox optax flashbax chex jax_tqdm jaxtyping \
        networkx omegaconf matplotlib && gfnx/bin/pip install --no-deps \
        git+https://github.com/d-tiapkin/gfnx
    python -m benchmarks.training --gfnx gfnx/bin/python
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.records import NO_TORCHGFN

if find_spec("gfn") is None:
    sys.exit(NO_TORCHGFN)

import numpy as np
import torch
from gfn.containers import ReplayBuffer
from gfn.estimators import DiscretePolicyEstimator
from gfn.gflownet import TBGFlowNet
from gfn.utils.modules import MLP
from torch import Tensor, nn

from benchmarks.records import RESULTS, keep
from benchmarks.torchgfn_rollouts import environment
from gfn_rb import Sampler, Trajectories, reward_prioritized_buffer
from gfn_rb.envs import GFNEnv, HyperGrid, TFBind8
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import BackwardPolicy, ForwardPolicy, LogZ

BATCH, HIDDEN, EXIT_BIAS, CAPACITY = 16, (256, 256), 50.0, 1000
TASKS: dict[str, Callable[[], GFNEnv]] = {
    "grid 4 x 8": lambda: HyperGrid(4, 8),
    "grid 4 x 16": lambda: HyperGrid(4, 16),
    "TFBind8": TFBind8,
}


def ours(env: GFNEnv, replays: bool) -> Callable[[], None]:
    """Return an iteration of ours."""
    forward = ForwardPolicy(env, HIDDEN)
    backward = BackwardPolicy(env, trunk=forward.trunk)
    loss = TrajectoryBalance(forward, backward, env, LogZ())
    log_z, networks = [loss.log_z.value], [*forward.parameters(), *backward.head.parameters()]
    groups = [{"params": networks, "lr": 1e-3}, {"params": log_z, "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, fused=True)
    rb = reward_prioritized_buffer(CAPACITY, max_length=env.max_length)
    sampler, bias = Sampler(forward), EXIT_BIAS if isinstance(env, HyperGrid) else 0.0

    def learn(rows: Trajectories) -> None:
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()

    def iterate() -> None:
        rows = sampler.sample_trajectories(env, BATCH, exit_bias=bias)
        learn(rows)
        if replays:
            rb.extend(rows.to_tensordict())
            learn(Trajectories.from_tensordict(rb.sample(BATCH)))

    return iterate


class _Biased(nn.Module):
    """A head on a shared trunk, with the bias of the exit action."""

    def __init__(self, trunk: nn.Module, width: int, bias: float) -> None:
        super().__init__()
        self.trunk, self.head, self.input_dim = trunk, nn.Linear(HIDDEN[-1], width), None
        self.register_buffer("bias", bias * torch.eye(width)[-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x)) - self.bias


def torchgfn(env: GFNEnv, replays: bool) -> Callable[[], None]:
    """Return an iteration of torchgfn's."""
    peer, preprocessor = environment(env)
    trunk = MLP(env.encoded_size, HIDDEN[-1], HIDDEN[0], n_hidden_layers=1)
    trunk = nn.Sequential(trunk, nn.ReLU())
    n = env.n_actions
    pf, pb = (
        DiscretePolicyEstimator(
            _Biased(trunk, n - is_backward, 0.0 if is_backward else EXIT_BIAS),
            n,
            preprocessor=preprocessor,
            is_backward=is_backward,
        )
        for is_backward in (False, True)
    )
    gflownet = TBGFlowNet(pf=pf, pb=pb, init_logZ=0.0)
    networks = {*gflownet.pf.parameters(), *gflownet.pb.parameters()}
    optimizer = torch.optim.Adam(
        [{"params": [*networks], "lr": 1e-3}, {"params": gflownet.logz_parameters(), "lr": 0.1}]
    )
    rb = ReplayBuffer(peer, capacity=CAPACITY, prioritized_capacity=True)

    def learn(rows: object, stored: bool) -> None:
        optimizer.zero_grad()
        gflownet.loss(peer, rows, recalculate_all_logprobs=stored).backward()
        optimizer.step()

    def iterate() -> None:
        rows = gflownet.sample_trajectories(peer, n=BATCH, save_logprobs=True)
        learn(rows, stored=False)
        if replays:
            rb.add(rows)
            learn(rb.sample(BATCH), stored=True)

    return iterate


def rates(iterations: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """Return iterations per CPU second of several, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in iterations}
    for iterate in iterations.values():
        iterate()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, iterate in iterations.items():
            start = time.process_time()
            iterate()
            times[name].append(time.process_time() - start)
    return {name: 1 / median(each) for name, each in times.items()}


def gfnx(python: str, env: GFNEnv, seconds: float) -> tuple[str, float]:
    """Return versions and iterations per CPU second of gfnx, in an interpreter that has it."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rewards.npy"
        height = str(getattr(env, "height", 0))
        if isinstance(env, TFBind8):
            np.save(table, env.log_reward(env.terminating_states()).exp().numpy())
        script = Path(__file__).with_name("gfnx_training.py")
        command = [python, str(script), height, str(table), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    versions, rate = done.stdout.splitlines()
    return versions, float(rate)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="wall time per row and peer")
    parser.add_argument("--gfnx", help="Python that has gfnx")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--store", action="store_true", help="keep them in benchmarks/results")
    options = parser.parse_args()
    rows, versions = [], ""
    torch.set_num_threads(1)
    print(f"{'task':<12} {'replay':<7} {'ours':>8} {'torchgfn':>9} {'gfnx':>8}   per CPU second")
    for name, make in TASKS.items():
        for replays in (False, True):
            env = make()
            contenders = {"ours": ours(env, replays)}
            if isinstance(env, HyperGrid):
                contenders["torchgfn"] = torchgfn(env, replays)
            found = rates(contenders, options.seconds)
            if options.gfnx and not replays:
                versions, found["gfnx"] = gfnx(options.gfnx, env, options.seconds)
            rows.append({"task": name, "replay": replays, "steps_per_cpu_second": found})
            cells = [
                f"{found[peer]:.1f}" if peer in found else ""
                for peer in ("ours", "torchgfn", "gfnx")
            ]
            of = [f"{found['ours'] / rate:.2f} x {peer}" for peer, rate in found.items()][1:]
            print(
                f"{name:<12} {'yes' if replays else 'no':<7} {cells[0]:>8} {cells[1]:>9} "
                f"{cells[2]:>8}   {', '.join(of)}",
                flush=True,
            )
    facts = {"seconds": options.seconds, "gfnx": versions}
    for path in filter(None, [options.json, RESULTS / "training.json" if options.store else None]):
        keep(path, "training", "steps", rows, options=facts)


if __name__ == "__main__":
    main()
