"""How often the host waits for the device: counted on the emulated one, none of it on CUDA."""

import sys
from functools import partial

import pytest
import torch
from device.test_rows import CAPACITY, PRESETS, options_of, trajectories
from factories import rows as numbered
from torchrl.data.replay_buffers.samplers import RandomSampler

from benchmarks import device as benchmark
from gfn_rb import (
    MergedReplayBuffer,
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
    reward_prioritized_buffer,
)
from gfn_rb.envs import HyperGrid

# Of a batch that comes once the storage is full, rows and storage on the device.
OF_EXTEND = dict.fromkeys(PRESETS, 1) | {"fifo": 0, "transitions": 2, "states": 2, "narrow": 2}
OF_EXTEND |= {"rebuilt": 2, "diverse when full": 1}
SAMPLERS = {
    "random": RandomSampler,
    "softmax": SoftmaxRewardSampler,
    "rank": RankRewardSampler,
    "quantile": QuantileRewardSampler,
    "priority": partial(PrioritySampler, "log_reward", alpha=1.0, eps=0.0),
    "own priority": PrioritySampler,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_an_extend_waits_rarely(preset, device, counted):
    options = options_of(preset)
    if preset in ("narrow", "rebuilt"):
        options["env"] = HyperGrid(2, 4, device=device)
    rb = PRESETS[preset](CAPACITY, device=device, **options)
    for seed in range(4):
        rows = trajectories(seed).to(device)
        rows["log_reward"] += seed
        with counted() as waits:
            rb.extend(rows)
    assert sum(waits.values()) == OF_EXTEND[preset], waits.places


def test_the_benchmark_counts_waits_where_there_is_no_gpu(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.setattr(benchmark, "step_on", benchmark.rollout_on)  # counted by test_training
    monkeypatch.setattr(sys, "argv", ["benchmarks.device"])
    benchmark.main()
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "no accelerator: the waits of an emulated one"
    assert {line.rsplit(maxsplit=2)[1] for line in lines} == {"0", "1"}


def buffer(device, sampler, start=0, replacement=None):
    sampler = SAMPLERS[sampler]()
    if replacement is not None and hasattr(sampler, "replacement"):
        sampler.replacement = replacement
    rb = reward_prioritized_buffer(CAPACITY, device=device, sampler=sampler)
    log_reward = torch.rand(CAPACITY, generator=torch.Generator().manual_seed(start))
    rb.extend(numbered(log_reward, start).to(device))
    return rb


@pytest.mark.parametrize("replacement", [True, "auto"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_draw_waits_for_nothing(sampler, replacement, device, counted):
    rb = buffer(device, sampler, replacement=replacement)
    for n in (8, 8, 100):
        rb.extend(rb.sample(4))
        with counted() as waits:
            rows = rb.sample(n)
        assert not waits, waits.places
        assert rows["x"].device == device


@pytest.mark.parametrize("sampler", ["priority", "own priority"])
def test_priorities_wait_once(sampler, device, counted):
    rb = buffer(device, sampler)
    rows = rb.sample(8)
    with counted() as waits:
        rb.update_priority(rows["index"], torch.arange(1.0, 9.0, device=device))
    assert sum(waits.values()) == 1, waits.places
    rb.extend(numbered(torch.full((CAPACITY,), 9.0), 50).to(device))
    rb.update_priority(rows["index"], torch.ones(8, device=device))
    assert rb.sampler.n_late == 8


@pytest.mark.parametrize("p", ["mass", "size", None, [1.0, 2.0]])
@pytest.mark.parametrize("sampler", ["softmax", "rank"])
def test_a_merged_draw_waits_by_mass_alone(sampler, p, device, counted):
    if p == "mass" and sampler != "softmax":
        pytest.skip("mass needs a softmax")
    rb = MergedReplayBuffer(*(buffer(device, sampler, 100 * i) for i in range(2)), p=p)
    rb.sample(8)
    with counted() as waits:
        rows = rb.sample(16)
    # By mass the number of rows of each member is known to the device alone.
    assert sum(waits.values()) == (p == "mass"), waits.places
    assert torch.equal(rows["x"].cpu() // 100, rows["buffer_id"].cpu())
