from dataclasses import replace

import pytest
import torch
from training.training_runs import (
    DNA,
    GRID,
    WARM_GRID,
    ForkedContext,
    equal,
    grid,
    resumed_beside,
    timeless,
    trained,
)  # fmt: skip

from gfn_rb.containers import Trajectories
from gfn_rb.rollout import LocalSearchSampler
from gfn_rb.training import SearchOptions, Trainer
from gfn_rb.training.sources import LocalSearchSource, PolicySource, Source


class ScriptedSearch(LocalSearchSampler):
    """Proposes and accepts what it is told, and notes what it was asked."""

    def __init__(self, proposed=(), accepted=()):
        self.proposed, self.accepted = list(proposed), [torch.tensor(row) for row in accepted]
        self.started_from, self.options = [], []

    def local_search(self, env, trajectories, **options):
        self.started_from.append(trajectories)
        self.options.append(options)
        return self.proposed.pop(0), self.accepted.pop(0)


class Scripted(Source):
    """A source that gives what it is told."""

    def __init__(self, *batches):
        self.batches, self.closed, self.learnt = list(batches), False, []

    def sample(self, n):
        return self.batches.pop(0)

    def learn(self, batch, residual):
        self.learnt.append((batch, residual))

    def close(self):
        self.closed = True

    def state_dict(self):
        return {"closed": self.closed}

    def load_state_dict(self, state_dict):
        self.closed = state_dict["closed"]


@pytest.fixture(scope="module")
def batches():
    trainer = Trainer(GRID)
    return [trainer.source.sample(3) for _ in range(3)]


def test_the_policy_is_sampled_as_told():
    trainer = Trainer(grid(epsilon=0.25))
    options = {"epsilon": 0.25, "generator": torch.Generator().manual_seed(3)}
    trainer.generator.manual_seed(3)
    expected = trainer.source._sampler.sample_trajectories(trainer.env, n=9, **options)
    equal(trainer.source.sample(9).to_tensordict().to_dict(), expected.to_tensordict().to_dict())
    assert type(trainer.source) is PolicySource


def test_each_loop_goes_on_from_what_was_accepted(batches):
    first, second, third = batches
    start = Scripted(first)
    search = ScriptedSearch([second, third], [[True, False, True], [False] * 3])
    generator = torch.Generator()
    source = LocalSearchSource(start, search, GRID.make_env(), 2, 0.25, generator)
    found = source.sample(3)
    equal(found.state.tolist(), Trajectories.cat(batches).state.tolist())
    assert len(found) == 9
    assert search.started_from[0] is first
    x = torch.stack([second.terminating_states[0], first.terminating_states[1],
                     second.terminating_states[2]])  # fmt: skip
    assert torch.equal(search.started_from[1].terminating_states, x)
    reward = torch.stack([second.log_reward[0], first.log_reward[1], second.log_reward[2]])
    assert torch.equal(search.started_from[1].log_reward, reward)
    expected = {"back_ratio": 0.25, "generator": generator}
    assert search.options == [expected, expected]


def test_what_is_searched_around_keeps_its_state_and_is_closed(batches):
    start = Scripted(*batches)
    source = LocalSearchSource(start, ScriptedSearch(), GRID.make_env(), 1, 0.5, torch.Generator())
    source.load_state_dict({"source": {"closed": False}})
    assert source.state_dict() == {"source": {"closed": False}}
    residual = torch.zeros(3)
    source.learn(batches[0], residual)
    assert start.learnt == [(batches[0], residual)]
    source.close()
    assert start.closed


@pytest.mark.parametrize("config", [DNA, GRID, WARM_GRID], ids=lambda config: config.env)
def test_searching_pays_for_every_proposal(config):
    trainer = Trainer(replace(config, search=SearchOptions(3, 0.4)))
    found = trainer.source.sample(5)
    search = trainer.source._search
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


def test_workers_sample_and_go_on_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr("gfn_rb.training.sources.worker._SpawnContext", ForkedContext)
    whole = trained(grid(workers=1, search=SearchOptions(1), batch_size=6), 2)
    n_stored, n_calls = len(whole.rb), whole.discovery.calls
    restored = resumed_beside(whole, tmp_path, 2)
    assert n_stored == 24
    assert n_calls == 24
    assert timeless(restored.measure()) == timeless(whole.measure())
