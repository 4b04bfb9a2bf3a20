"""A checkpoint that does not fit a buffer is refused in one line, and changes nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint.checkpoint_runs import (
    CAPACITY,
    buffer,
    continue_both,
    generator,
    restored,
    rows,
    used,
)
from tensordict import tensorclass
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictRoundRobinWriter,
)
from torchrl.envs.transforms import RewardScaling

from gfn_rb.buffers import reward_prioritized_buffer
from gfn_rb.checkpoint import load_checkpoint, save_checkpoint
from gfn_rb.errors import CheckpointError, CheckpointMismatchError
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.writers import RewardPrioritizedWriter


def refused(path, target, message, error=CheckpointMismatchError):
    with pytest.raises(error, match=message) as caught:
        load_checkpoint(path, target)
    assert "\n" not in str(caught.value)


def rewarded(tie):
    return reward_prioritized_buffer(CAPACITY, tie=tie, batch_size=4, generator=generator())


def scaled(scale):
    return buffer(transform=RewardScaling(scale, scale, in_keys=[("next", "reward")]))


class Case(NamedTuple):
    saved: Callable
    target: Callable
    message: str
    saved_rows: Any = rows


CASES = {
    "capacity": Case(
        buffer, lambda: buffer(storage=LazyTensorStorage(21)), "the capacity .* is 20, expected 21 "
    ),
    "sampler": Case(
        buffer,
        lambda: buffer(sampler=SamplerWithoutReplacement()),
        "class of the sampler .* is RandomSampler, expected SamplerWithoutReplacement",
    ),
    "writer": Case(
        lambda: buffer(writer=RewardPrioritizedWriter()), buffer, "class of the writer .* is Reward"
    ),
    "the writer's own terms": Case(
        lambda: rewarded("oldest"), lambda: rewarded("newest"), "tie='oldest'.*expected tie='newest"
    ),
    "what a sampler draws by": Case(
        lambda: buffer(sampler=SoftmaxRewardSampler(("next", "reward"))),
        lambda: buffer(sampler=SoftmaxRewardSampler()),
        "sampler state is of key=.*next.*, expected key='log_reward'",
    ),
    "prefetching": Case(
        lambda: buffer(prefetch=1), buffer, "prefetch capacity .* is 1, expected 0"
    ),
    "PyTorch's generator": Case(
        lambda: buffer(generator=None), buffer, "generator .* is the global one, expected its own"
    ),
    "transform": Case(
        lambda: scaled(torch.ones(1)),
        buffer,
        "the state of the transform does not load into Compose: .*Unexpected key.*transforms.0.loc",
    ),
    "shape of a transform": Case(
        lambda: scaled(1.0),
        lambda: scaled(torch.ones(1)),
        r"size mismatch for transforms.0.loc: .*\[\].*\[1\]",
    ),
}
IN_USE = {
    "keys": Case(
        buffer,
        buffer,
        r"rows of the checkpoint: data does not match the storage: .* unknown keys \['length'\]",
        lambda n: rows(n).set("length", torch.zeros(n)),
    ),
    "dtype": Case(
        buffer,
        buffer,
        "'state' does not fit the storage: got torch.int64 .*expected torch.float32",
        lambda n: rows(n).set("state", torch.zeros(n, 3, dtype=torch.int64)),
    ),
    "shape": Case(
        lambda: buffer(storage=LazyMemmapStorage(CAPACITY)),
        buffer,
        r"'state' .*of shape \(4,\) .*expected .*\(3,\)",
        lambda n: rows(n).set("state", torch.zeros(n, 4)),
    ),
}


@pytest.mark.parametrize(
    ("case", "fresh"),
    [(name, fresh) for name in (*CASES, *IN_USE) for fresh in (False, True)[: 1 + (name in CASES)]],
)
def test_a_buffer_stays_as_it_was(case, fresh, tmp_path):
    make, make_target, message, saved_rows = {**CASES, **IN_USE}[case]
    target, twin = make_target(), make_target()
    if not fresh:
        restored(used(target), twin, tmp_path)
    save_checkpoint(tmp_path / "other", used(make(), saved_rows, 15))
    refused(tmp_path / "other", target, message)
    if fresh:
        assert not target.storage.initialized
        batch = rows(13)
        for each in (target, twin):
            each.extend(batch.clone())
    continue_both(twin, target)


class Fussy(RandomSampler):
    """Notices only half-way through that a state is not to its taste."""

    def __init__(self, taste):
        self.taste = taste
        self.loaded = 0

    def state_dict(self):
        return {"loaded": self.loaded, "taste": self.taste}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict.pop("loaded")
        if state_dict["taste"] != self.taste:
            raise KeyError("not to my\ntaste")


def test_a_state_that_does_not_load_is_taken_back(tmp_path):
    source = used(buffer(sampler=Fussy("sweet")))
    source.sampler.loaded = 5
    save_checkpoint(tmp_path / "rb", source)
    target = used(buffer(sampler=Fussy("sour")))
    message = "state of the sampler does not load into Fussy: KeyError: 'not to my.*taste'"
    refused(tmp_path / "rb", target, message)
    assert target.sampler.loaded == 0
    good = buffer(sampler=Fussy("sweet"))
    assert load_checkpoint(tmp_path / "rb", good) == {}
    assert good.sampler.loaded == 5


def stamped(capacity):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    return buffer(storage=LazyTensorStorage(capacity), writer=writer, generator=None)


def test_members_are_compared_before_any_of_them_changes(tmp_path):
    rb = ReplayBufferEnsemble(stamped(20), stamped(20), batch_size=4)
    for member in (0, 1):
        rb[member].extend(rows(5))
    save_checkpoint(tmp_path / "rb", rb)
    target = ReplayBufferEnsemble(stamped(20), stamped(21), batch_size=4)
    message = "buffer 2 of 3: the capacity of the checkpoint is 20, expected 21"
    refused(tmp_path / "rb", target, message)
    assert not target[0].storage.initialized
    assert target[0].writer.state_dict() == stamped(20).writer.state_dict()


def test_a_storage_that_cannot_be_allocated(tmp_path):
    def on_disk():
        return buffer(storage=LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "scratch"))

    save_checkpoint(tmp_path / "rb", used(on_disk()))
    target = on_disk()  # finds the files of the first
    refused(tmp_path / "rb", target, "the storage cannot be allocated: ", CheckpointError)
    assert len(target) == 0
    assert not target.storage.initialized


# Buffers that cannot be saved.


@tensorclass
class Item:
    x: torch.Tensor


def test_rows_that_cannot_be_saved_are_named_and_nothing_is_written(tmp_path):
    rb = ReplayBuffer(storage=LazyTensorStorage(3))
    rb.extend(Item(x=torch.zeros(2), batch_size=[2]))
    with pytest.raises(CheckpointError, match="rows: a LazyTensorStorage holds a Item, expected t"):
        save_checkpoint(tmp_path / "rb", rb)
    assert list(tmp_path.iterdir()) == []
