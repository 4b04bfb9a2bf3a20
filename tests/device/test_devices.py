"""Devices that are named, left to the rows, missing, or not all the same."""

import pytest
import torch
from device.test_rows import CAPACITY, PRESETS, content, options_of, trajectories
from device.test_waits import buffer
from factories import linear_policy, rows as numbered
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb import (
    ExperienceMemory,
    MergedReplayBuffer,
    PrioritySampler,
    RewardPrioritizedWriter,
    SoftmaxRewardSampler,
    fifo_buffer,
    load_checkpoint,
    reward_prioritized_buffer,
    save_checkpoint,
)
from gfn_rb.envs import BitSequence, HyperGrid
from gfn_rb.errors import ArgumentError
from gfn_rb.rollout import Sampler as GFNSampler
from gfn_rb.storages.tensors import staged

MISSING = {
    "a preset": lambda: reward_prioritized_buffer(4, device="cuda"),
    "a storage": lambda: fifo_buffer(4, storage=LazyTensorStorage(4, device="cuda:1")),
    "a memory": lambda: ExperienceMemory("cpu", "cuda", 4),
    "a grid": lambda: HyperGrid(2, 3, device="cuda"),
    "sequences": lambda: BitSequence(4, 2, device=torch.device("cuda", 0)),
    "an environment that moves": lambda: HyperGrid(2, 3).to("cuda"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("what", MISSING)
def test_a_missing_device_is_named(what):
    with pytest.raises(ArgumentError, match="must be cpu, or cuda where torch finds such a device"):
        MISSING[what]()


@pytest.mark.parametrize("make", [SoftmaxRewardSampler, PrioritySampler])
def test_a_storage_takes_the_device_of_its_first_rows(make, device):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8, device="auto"),
        writer=RewardPrioritizedWriter(unique="x"),
        sampler=make(),
    )
    for start in range(0, 30, 5):
        rb.extend(numbered(torch.arange(5) + float(start), start).to(device))
    assert rb.storage.device == device
    assert sorted(rb[:]["x"].tolist()) == list(range(22, 30))
    assert rb.sample(4)["x"].device == device


def test_a_generator_of_another_device_is_named(device):
    with pytest.raises(ArgumentError, match=f"generator must be on {device.type}.*got one on cpu"):
        fifo_buffer(4, device=device, generator=torch.Generator())
    rb = reward_prioritized_buffer(4, device=device)
    rb.extend(numbered(torch.arange(4.0)).to(device))
    rb.set_rng(torch.Generator())
    with pytest.raises(ArgumentError, match=f"generator must be on {device.type}.*got one on cpu"):
        rb.sample(2)
    env = HyperGrid(2, 3, device=device)
    sampler = GFNSampler(linear_policy(env, False))
    with pytest.raises(ArgumentError, match="as the states are, got one on cpu"):
        sampler.sample_trajectories(env, 2, generator=torch.Generator())


def test_members_on_two_devices_are_refused(device):
    with pytest.raises(ArgumentError, match="needs members on one device, got"):
        MergedReplayBuffer(buffer("cpu", "softmax"), buffer(device, "softmax")).sample(4)


def test_rows_of_a_device_are_not_pinned(device):
    rb = MergedReplayBuffer(*(buffer(device, "softmax", i) for i in range(2)), pin_memory=True)
    assert rb.sample(4).device == device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_nothing_is_pinned():
    rb = MergedReplayBuffer(buffer("cpu", "softmax"), pin_memory=True)
    assert len(rb.sample(4)) == 4


@pytest.mark.parametrize("preset", ["plain", "unique", "fifo", "diverse", "terminating", "narrow"])
@pytest.mark.parametrize("from_device", [True, False])
def test_a_checkpoint_is_loaded_on_another_device(preset, from_device, device, tmp_path):
    devices = ["cpu", device] if not from_device else [device, "cpu"]
    one, other = (PRESETS[preset](CAPACITY, device=d, **options_of(preset)) for d in devices)
    for seed in range(3):
        one.extend(trajectories(seed).to(devices[0]))
    save_checkpoint(tmp_path / "rb", one)
    load_checkpoint(tmp_path / "rb", other)
    assert content(one) == content(other)
    assert other.sample(4).device == torch.device(devices[1])
    for rb, where in zip((one, other), devices, strict=True):
        rb.extend(trajectories(3).to(where))
    assert content(one) == content(other)


def test_rows_go_to_cuda_through_pinned_memory(monkeypatch):
    rows, calls = numbered([1.0]), []
    monkeypatch.setattr(
        type(rows), "to", lambda self, *to, **how: (calls.append((to, how)), self)[1]
    )
    staged(rows, torch.device("cuda"))
    staged(rows, torch.device("cpu"))
    there = (torch.device("cuda"),), {"non_blocking_pin": True, "num_threads": 0}
    assert calls == [there, ((torch.device("cpu"),), {})]
