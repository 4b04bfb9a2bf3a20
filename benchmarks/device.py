"""Buffers, rollouts and training steps on CUDA: ``python -m benchmarks.device``.

    --quick        a smoke run, whose figures mean nothing
    --parts ...    some of: extend draw rollout step
    --json PATH    also write the figures to a file

Extends of 1,024 rows and draws of as many from a full storage on the device, against TorchRL's
round-robin writer and random sampler there; rollouts and training steps (trajectory balance, two
hidden layers of 256) of 1,024 trajectories against the same on the CPU. Each call ends with a wait
for the device. See :mod:`benchmarks.timing` for how a ratio is measured.

Where PyTorch finds no CUDA device, it says so and counts how often each of these waits for the
device that the tests emulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from benchmarks.timing import Contender, Effort, Result, compare, options_of, run_parts
from benchmarks.workloads import random_items
from gfn_rb import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    Sampler,
    SoftmaxRewardSampler,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
)
from gfn_rb.envs import HyperGrid
from gfn_rb.losses import TrajectoryBalance
from gfn_rb.policies import BackwardPolicy, ForwardPolicy, LogZ

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SAMPLERS: dict[str, Callable[[], Any]] = {
    "softmax": SoftmaxRewardSampler,
    "rank": RankRewardSampler,
    "quantile": QuantileRewardSampler,
    "priority": PrioritySampler,
}
BUFFERS: dict[str, Callable[..., TensorDictReplayBuffer]] = {
    "plain": reward_prioritized_buffer,
    "unique": lambda n, **options: reward_prioritized_buffer(n, unique="state", **options),
    "diverse": partial(diverse_buffer, cutoff_distance=0.0),
    "fifo": fifo_buffer,
}


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        capacity: rows of a storage.
        batch: rows of a batch.
        effort: for each comparison.
    """

    capacity: int
    batch: int
    effort: Effort


FULL = Scale(1_000_000, 1024, Effort(seconds=10, least=7, most=200, warmup=5))
QUICK = Scale(4096, 128, Effort(seconds=0.3, warmup=1))


def waited(work: Callable[[Any], object]) -> Callable[[Any], None]:
    """Return the work with a wait for CUDA at its end."""

    def run(argument: Any) -> None:
        work(argument)
        torch.cuda.synchronize()

    return run


def round_robin(n: int, device: torch.device) -> TensorDictReplayBuffer:
    """Return TorchRL's buffer of the newest rows, drawn from uniformly."""
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(n, device=device),
        writer=TensorDictRoundRobinWriter(),
        sampler=RandomSampler(),
    )


def filled(rb: TensorDictReplayBuffer, scale: Scale, device: torch.device) -> Any:
    """Fill a buffer, and return it."""
    for start in range(0, scale.capacity, 65_536):
        rb.extend(random_items(min(65_536, scale.capacity - start)).to(device))
    return rb


def extend(scale: Scale) -> list[Result]:
    """Compare writers, half of whose rows come in where they choose."""

    def batch() -> TensorDict:
        return random_items(scale.batch).to(CUDA)

    peer = filled(round_robin(scale.capacity, CUDA), scale, CUDA)
    return [
        compare(
            f"extend, {name}",
            scale.capacity,
            Contender(waited(filled(make(scale.capacity, device=CUDA), scale, CUDA).extend), batch),
            Contender(waited(peer.extend), batch),
            scale.effort,
        )
        for name, make in BUFFERS.items()
    ]


def draw_from(rb: TensorDictReplayBuffer, n: int, _: Any) -> None:
    """Draw n rows."""
    rb.sample(n)


def draw(scale: Scale) -> list[Result]:
    """Compare samplers."""
    peer = filled(round_robin(scale.capacity, CUDA), scale, CUDA)
    results = []
    for name, sampler in SAMPLERS.items():
        rb = reward_prioritized_buffer(scale.capacity, device=CUDA, sampler=sampler())
        ours = filled(rb, scale, CUDA)
        works = [partial(draw_from, each, scale.batch) for each in (ours, peer)]
        contenders = [Contender(waited(work)) for work in works]
        results.append(compare(f"draw, {name}", scale.capacity, *contenders, scale.effort))
    return results


def parts_on(device: torch.device) -> tuple[HyperGrid, TrajectoryBalance]:
    """Return a grid and a loss with its policies."""
    torch.manual_seed(0)
    env = HyperGrid(4, 8)
    policies = ForwardPolicy(env, (256, 256)), BackwardPolicy(env, (256, 256))
    loss = TrajectoryBalance(*policies, env, LogZ()).to(device)
    env.to(device)
    return env, loss


def rollout_on(device: torch.device, n: int) -> Callable[[Any], object]:
    """Return a rollout of n trajectories."""
    env, loss = parts_on(device)
    return lambda _: Sampler(loss.forward_policy).sample_trajectories(env, n)


def step_on(device: torch.device, n: int) -> Callable[[Any], object]:
    """Return a training step on n trajectories."""
    env, loss = parts_on(device)
    rows = Sampler(loss.forward_policy).sample_trajectories(env, n)
    optimizer = torch.optim.Adam(loss.parameters())

    def step(_: Any) -> None:
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()

    return step


def rollout(scale: Scale) -> list[Result]:
    """Compare a rollout on CUDA with the same on the CPU."""
    ours, peer = (rollout_on(device, scale.batch) for device in (CUDA, CPU))
    contenders = Contender(waited(ours)), Contender(peer)
    return [compare("rollout, CUDA against CPU", scale.batch, *contenders, scale.effort)]


def step(scale: Scale) -> list[Result]:
    """Compare a training step on CUDA with the same on the CPU."""
    ours, peer = (step_on(device, scale.batch) for device in (CUDA, CPU))
    contenders = Contender(waited(ours)), Contender(peer)
    return [compare("training step, CUDA against CPU", scale.batch, *contenders, scale.effort)]


def count_waits() -> None:
    """Print how often each kind of work waits for the emulated device, once it is under way."""
    from tests import emulated_device

    device, scale = emulated_device.DEVICE, Scale(256, 64, Effort(0))
    works: dict[str, Callable[[Any], object]] = {}
    for name, make in BUFFERS.items():
        works[f"extend, {name}"] = filled(make(scale.capacity, device=device), scale, device).extend
    for name, sampler in SAMPLERS.items():
        rb = reward_prioritized_buffer(scale.capacity, device=device, sampler=sampler())
        works[f"draw, {name}"] = partial(draw_from, filled(rb, scale, device), scale.batch)
    works["rollout"] = rollout_on(device, scale.batch)
    works["training step"] = step_on(device, scale.batch)
    for name, work in works.items():
        work(random_items(scale.batch).to(device))
        rows = random_items(scale.batch).to(device)
        with emulated_device.counted() as waits:
            work(rows)
        print(f"{name:<24} {sum(waits.values()):>3} waits")


PARTS = {"extend": extend, "draw": draw, "rollout": rollout, "step": step}


def main() -> None:
    """Run from the command line."""
    if torch.cuda.is_available():
        run_parts(__doc__, PARTS, FULL, QUICK, None)
        return
    parser = options_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.parse_args()
    print("no accelerator: the waits of an emulated one")
    count_waits()


if __name__ == "__main__":
    main()
