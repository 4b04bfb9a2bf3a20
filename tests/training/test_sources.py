from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from training.training_runs import (
    DNA,
    GRID,
    WARM_GRID,
    equal,
    grid,
)

from gfn_rb import Trajectories
from gfn_rb.rollout import LocalSearchSampler
from gfn_rb.training import SearchOptions, Trainer
from gfn_rb.training.sources import LocalSearchSource, Source


@pytest.fixture(scope="module")
def batches():
    trainer = Trainer(GRID)
    return [trainer.source.sample(3) for _ in range(3)]


def test_the_policy_is_sampled_as_told():
    trainer = Trainer(grid(epsilon=0.25))
    options = {"epsilon": 0.25, "generator": torch.Generator().manual_seed(3)}
    trainer.generator.manual_seed(3)
    expected = trainer.source.sampler.sample_trajectories(trainer.env, n=9, **options)
    equal(trainer.source.sample(9).to_tensordict().to_dict(), expected.to_tensordict().to_dict())
    assert type(trainer.source) is Source


def test_each_loop_goes_on_from_what_was_accepted(batches):
    first, second, third = batches
    start = Mock(Source, sample=Mock(return_value=first))
    accepted = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool)
    proposals = [(second, accepted[0]), (third, accepted[1])]
    search = Mock(LocalSearchSampler, local_search=Mock(side_effect=proposals))
    generator = torch.Generator()
    source = LocalSearchSource(start, search, GRID.make_env(), SearchOptions(2, 0.25), generator)
    found = source.sample(3)
    equal(found.state.tolist(), Trajectories.cat(batches).state.tolist())
    calls = search.local_search.call_args_list
    assert [call.kwargs for call in calls] == [{"back_ratio": 0.25, "generator": generator}] * 2
    assert calls[0].args[1] is first
    for name in ("terminating_states", "log_reward"):
        expected = getattr(second, name).clone()
        expected[1] = getattr(first, name)[1]
        assert torch.equal(getattr(calls[1].args[1], name), expected)


@pytest.mark.parametrize("config", [DNA, GRID, WARM_GRID], ids=lambda config: config.env)
def test_searching_pays_for_every_proposal(config):
    trainer = Trainer(replace(config, search=SearchOptions(3, 0.4)))
    found = trainer.source.sample(5)
    search = trainer.source.search
    assert type(search) is LocalSearchSampler
    assert len(found) == 20
    assert search.n_reward_calls == 15
    condition = found.condition
    torch.testing.assert_close(
        found.log_reward, trainer.env.log_reward(found.terminating_states, condition)
    )
    if condition is not None:
        assert torch.equal(condition[:5], condition[15:])


def test_a_search_undoes_the_share_it_is_told():
    """8-mers have 8 moves: with a quarter undone, the first 6 letters stay."""
    trainer = Trainer(replace(DNA, search=SearchOptions(1, 0.25)))
    before, after = trainer.source.sample(20).terminating_states.chunk(2)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before, after)
