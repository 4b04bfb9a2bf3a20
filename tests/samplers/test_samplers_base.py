"""What all samplers share: their parameters, and annealing them by TorchRL's schedulers."""

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from gfn_rb import fifo_buffer
from gfn_rb.errors import ArgumentError, CheckpointMismatchError
from gfn_rb.samplers import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)

# Sampler, parameter, two values of it, one out of its range.
PARAMETERS = [
    (SoftmaxRewardSampler, "temperature", 2.0, 0.5, -1.0),
    (RankRewardSampler, "k", 1.0, 0.01, 0.0),
    (QuantileRewardSampler, "top_fraction", 0.9, 0.1, 1.5),
    (QuantileRewardSampler, "top_share", 1.0, 0.2, -0.25),
    (PrioritySampler, "alpha", 1.0, 0.25, -0.5),
    (PrioritySampler, "beta", 1.0, 0.4, -0.5),
    (PrioritySampler, "eps", 1.0, 0.125, -0.5),
]
parameters = pytest.mark.parametrize(
    ("kind", "name", "start", "end", "bad"), PARAMETERS, ids=[name for _, name, *_ in PARAMETERS]
)


def buffer(kind, **options):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30), sampler=kind(**options, replacement=True)
    )
    log_reward = torch.linspace(-3, 3, 30)
    index = rb.extend(TensorDict({"log_reward": log_reward}, [30]))
    if kind is PrioritySampler:
        rb.update_priority(index, log_reward.exp())
    return rb


def draws_like(rb, kind, name, value):
    """Whether a buffer draws what one does whose parameter was that value from the start."""
    fresh = buffer(kind, **{name: value})
    for each in (rb, fresh):
        each.set_rng(torch.Generator().manual_seed(3))
    return bool((rb.sample(200) == fresh.sample(200)).all())


@parameters
def test_linear_schedules(kind, name, start, end, bad):
    rb = buffer(kind, **{name: start})
    anneal = LinearScheduler(rb, name, final_value=end, num_steps=4)
    for i in range(1, 6):
        rb.sample(5)
        anneal.step()
        expected = start + (end - start) * min(i / 4, 1)
        assert getattr(rb.sampler, name) == pytest.approx(expected)
        assert draws_like(rb, kind, name, getattr(rb.sampler, name))
    assert not draws_like(rb, kind, name, start)


@parameters
def test_a_schedule_that_leaves_the_range_is_named_and_changes_nothing(kind, name, start, end, bad):
    rb = buffer(kind, **{name: end})
    rb.sample(5)
    anneal = LinearScheduler(rb, name, final_value=bad, num_steps=1)
    with pytest.raises(ArgumentError, match=rf"^{name} must be .*, got {bad}$"):
        anneal.step()
    assert getattr(rb.sampler, name) == end
    assert draws_like(rb, kind, name, end)


@parameters
def test_parameters_are_saved(kind, name, start, end, bad, tmp_path):
    rb, again = buffer(kind, **{name: end}), buffer(kind)
    rb.dumps(tmp_path / "rb")
    again.loads(tmp_path / "rb")
    assert getattr(again.sampler, name) == end
    assert draws_like(again, kind, name, end)


@pytest.mark.parametrize("kind", [SoftmaxRewardSampler, RankRewardSampler, QuantileRewardSampler])
def test_foreign_state_and_repr(kind):
    sampler = kind()
    with pytest.raises(CheckpointMismatchError, match=r"holds \['gamma'\].*expects \["):
        sampler.load_state_dict({"gamma": 1.0})
    with pytest.raises(CheckpointMismatchError, match="key='other'"):
        sampler.load_state_dict({**sampler.state_dict(), "key": "other"})
    values = ", ".join(f"{name}={value!r}" for name, value in sampler.state_dict().items())
    assert repr(sampler) == f"{kind.__name__}({values}, replacement='auto')"


@pytest.mark.skipif(not hasattr(TensorDictReplayBuffer, "as_dataset"), reason="of TorchRL 0.14.1")
@pytest.mark.parametrize(
    "sampler",
    [SoftmaxRewardSampler(), RankRewardSampler(), QuantileRewardSampler(), PrioritySampler("loss")],
    ids=lambda sampler: type(sampler).__name__,
)
def test_workers_of_a_data_loader_draw_from_what_is_stored_now(sampler):
    rb = fifo_buffer(50, sampler=sampler, batch_size=8, generator=torch.Generator())
    rb.extend(numbered(50, 0.0))
    options = {"num_workers": 1, "batch_size": None, "multiprocessing_context": "fork"}
    batches = iter(DataLoader(rb.as_dataset(), collate_fn=lambda x: x, **options))
    assert (next(batches)["log_reward"] < 50).all()
    rb.extend(numbered(50, 100.0))
    newest = [next(batches)["log_reward"] for _ in range(20)][-1]
    assert (newest >= 100).all()


def test_a_sampler_that_holds_priorities_is_not_copied_into_workers():
    assert PrioritySampler().requires_shared_state
    assert not PrioritySampler("loss").requires_shared_state
    assert not SoftmaxRewardSampler().requires_shared_state


def numbered(n, start):
    number = torch.arange(start, start + n)
    return TensorDict({"log_reward": number, "loss": torch.ones(n)}, [n])
