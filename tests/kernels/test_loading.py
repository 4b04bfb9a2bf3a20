"""Loops are loaded when a buffer is made: those it needs, and none in its first calls."""

import pytest
import torch
from factories import in_fresh_process
from tensordict import TensorDict

from gfn_rb import (
    PrioritySampler,
    QuantileRewardSampler,
    RankRewardSampler,
    RecencySampler,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
)
from gfn_rb.kernels.cache import LoopCache
from gfn_rb.samplers import GroupSampler

pytestmark = pytest.mark.slow

MAKES = {
    "uniform": lambda: fifo_buffer(100),
    "priority": lambda: fifo_buffer(100, sampler=PrioritySampler()),
    "stored priority": lambda: fifo_buffer(100, sampler=PrioritySampler("log_reward")),
    "rank": lambda: fifo_buffer(100, sampler=RankRewardSampler()),
    "quantile": lambda: fifo_buffer(100, sampler=QuantileRewardSampler()),
    "recency": lambda: fifo_buffer(100, sampler=RecencySampler("x")),
    "groups": lambda: fifo_buffer(100, sampler=GroupSampler("x", num_groups=2)),
    "warm groups": lambda: fifo_buffer(
        100, sampler=GroupSampler("x", num_groups=2, weight="best", temperature=2.0)
    ),
    "best": lambda: reward_prioritized_buffer(100),
    "unique": lambda: reward_prioritized_buffer(100, unique="x", group="y", per_group=9),
    "diverse": lambda: diverse_buffer(100, cutoff_distance=0.5, features="x"),
}


def loaded_by(kind):
    """Return the loops that are loaded as a buffer is made, and in its first calls."""
    names, load = [], LoopCache.load_overload

    def noted(self, *args):
        names.append(self._loop.__name__)
        return load(self, *args)

    LoopCache.load_overload = noted
    rb = MAKES[kind]()
    made = list(names)
    for n in (20, 1, 300, 100):
        x = torch.arange(n)
        rb.extend(TensorDict({"x": x, "y": x % 7, "log_reward": x.float()}, [n]))
        rb.sample(8)
        if isinstance(rb.sampler, PrioritySampler):
            rb.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
            rb.sample(90)
        rb.sample(8)
    return made, names[len(made) :]


@pytest.mark.parametrize("kind", MAKES)
def test_loops_are_loaded_when_a_buffer_is_made(kind):
    made, later = in_fresh_process(loaded_by, kind)
    assert bool(made) == (kind != "uniform")
    if kind == "diverse":  # which loop finds near rows depends on the features, which rows bring
        assert "choose" in later
        assert not {"hold", "exchange"} & {*later}
    else:
        assert later == []
