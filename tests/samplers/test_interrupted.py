"""Samplers after an interrupt at any line of the package that a draw or an update runs."""

import pytest
import torch
from factories import Fault, seeded
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


def interrupted(n):
    """A block that an interrupt ends at the n-th line of the package."""
    return Fault(KeyboardInterrupt, n, lambda code: "/gfn_rb/" in code.co_filename)


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
        with interrupted(n) as fault:
            calls[call]()
        fresh = SAMPLERS[kind]()
        if kind == "priority":
            fresh.load_state_dict(rb.sampler.state_dict())
        law = rb.sampler.log_probs(rb.storage)
        torch.testing.assert_close(law, fresh.log_probs(rb.storage))
        rb.sample(3)
        if not fault.was_raised:
            break
        n += 1
    assert n > 10


def test_masses_whose_origin_moves_are_whole_after_an_interrupt():
    n, is_over = 1, False
    while not is_over:
        weights = Weights(3)
        weights.update(torch.arange(3), torch.tensor([700.0, 701.0, 702.0]))
        with interrupted(n) as fault:
            assert weights.has_mass
        is_over = not fault.was_raised
        law = torch.arange(3.0, dtype=torch.float64).log_softmax(0)
        torch.testing.assert_close(weights.log_probs(3), law)
        n += 1
    assert n > 10
