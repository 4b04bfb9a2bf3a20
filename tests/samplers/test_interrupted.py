"""Samplers after an interrupt at any line of the package that a draw or an update runs."""

import sys

import pytest
import torch
from factories import seeded
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.kernels.weights import Weights
from gfn_rb.samplers import (
    GroupSampler,
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    SoftmaxRewardSampler,
)

SAMPLERS = {
    "softmax": lambda: SoftmaxRewardSampler(temperature=2.0),
    "rank": RankRewardSampler,
    "quantile": QuantileRewardSampler,
    "priority": PrioritySampler,
    "stored priority": lambda: PrioritySampler("log_reward"),
    "group": lambda: GroupSampler("prompt", samples_per_group=1, weight="best", temperature=2.0),
}


def rows(n, generator):
    log_reward = torch.rand(n, generator=generator)
    prompt = torch.randint(3, (n,), generator=generator)
    return TensorDict({"log_reward": log_reward, "prompt": prompt}, [n])


def interrupted_at(n, work):
    """Whether an interrupt at the n-th line of the package ended the work."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "/gfn_rb/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == n:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("call", ["sample", "log_probs", "update"])
def test_draws_follow_the_storage_after_an_interrupt(kind, call):
    if call == "update" and "priority" not in kind:
        pytest.skip("has no priorities to update")
    generator, n = seeded(), 1
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12), sampler=SAMPLERS[kind](), generator=generator
    )
    rb.extend(rows(12, generator))
    calls = {
        "sample": lambda: rb.sample(3),
        "log_probs": lambda: rb.sampler.log_probs(rb.storage),
        "update": lambda: rb.update_priority(torch.tensor([1, 5]), torch.tensor([0.25, 2.0])),
    }
    calls[call]()
    while True:
        rb.extend(rows(2, generator))
        was_interrupted = interrupted_at(n, calls[call])
        fresh = SAMPLERS[kind]()
        if kind == "priority":
            fresh.load_state_dict(rb.sampler.state_dict())
        law = rb.sampler.log_probs(rb.storage)
        torch.testing.assert_close(law, fresh.log_probs(rb.storage))
        rb.sample(3)
        if not was_interrupted:
            break
        n += 1
    assert n > 10


def test_masses_whose_origin_moves_are_whole_after_an_interrupt():
    n, was_interrupted = 1, True
    while was_interrupted:
        weights = Weights(3)
        weights.update(torch.arange(3), torch.tensor([700.0, 701.0, 702.0]))
        was_interrupted = interrupted_at(n, lambda weights=weights: weights.has_mass)
        law = torch.arange(3.0, dtype=torch.float64).log_softmax(0)
        torch.testing.assert_close(weights.log_probs(3), law)
        n += 1
    assert n > 10
