from __future__ import annotations

import copy
import os
import signal
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from factories import Ladder
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
)

from gfn_rb import Sampler, Trajectories
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, WorkerError
from gfn_rb.policies import BackwardPolicy, ForwardPolicy
from gfn_rb.rollout import LocalSearchSampler, trajectory_log_probs
from gfn_rb.training import SearchOptions, TeacherOptions, Trainer, WorkerSource
from gfn_rb.training.sources import LocalSearchSource, PolicySource, Source
from gfn_rb.training.sources.worker import _seed_of


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
    start = Mock(Source, sample=Mock(return_value=first))
    accepted = torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool)
    proposals = [(second, accepted[0]), (third, accepted[1])]
    search = Mock(LocalSearchSampler, local_search=Mock(side_effect=proposals))
    generator = torch.Generator()
    source = LocalSearchSource(start, search, GRID.make_env(), 2, 0.25, generator)
    found = source.sample(3)
    equal(found.state.tolist(), Trajectories.cat(batches).state.tolist())
    calls = search.local_search.call_args_list
    assert [call.kwargs for call in calls] == [{"back_ratio": 0.25, "generator": generator}] * 2
    assert calls[0].args[1] is first
    for name in ("terminating_states", "log_reward"):
        expected = getattr(second, name).clone()
        expected[1] = getattr(first, name)[1]
        assert torch.equal(getattr(calls[1].args[1], name), expected)


def test_what_is_searched_around_keeps_its_state_and_is_closed(batches):
    start = Mock(Source, state_dict=Mock(return_value={"seed": 3}))
    source = LocalSearchSource(
        start, Mock(LocalSearchSampler), GRID.make_env(), 1, 0.5, torch.Generator()
    )
    assert source.state_dict() == {"source": {"seed": 3}}
    source.load_state_dict({"source": {"seed": 4}})
    start.load_state_dict.assert_called_once_with({"seed": 4})
    residual = torch.zeros(3)
    source.learn(batches[0], residual)
    start.learn.assert_called_once_with(batches[0], residual)
    source.close()
    start.close.assert_called_once_with()


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


@pytest.mark.parametrize(
    ("options", "per_step"),
    [({"search": SearchOptions(1)}, 12), ({"teacher": TeacherOptions(0.5)}, 6)],
)
def test_workers_sample_and_go_on_where_they_were(options, per_step, tmp_path, monkeypatch):
    monkeypatch.setattr("gfn_rb.training.sources.worker._SpawnContext", ForkedContext)
    whole = trained(grid(workers=1, batch_size=6, **options), 2)
    assert len(whole.rb) == whole.discovery.calls == 2 * per_step
    restored = resumed_beside(whole, tmp_path, 2)
    assert timeless(restored.measure()) == timeless(whole.measure())
    equal(restored.source.state_dict(), whole.source.state_dict())
    equal(restored.rb.storage[:].to_dict(), whole.rb.storage[:].to_dict())


SEED = 7


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr("gfn_rb.training.sources.worker._SpawnContext", ForkedContext)


def make_policy():
    torch.manual_seed(3)
    return ForwardPolicy(Ladder(4), (8,))


@pytest.fixture(scope="module")
def workers():
    with WorkerSource(lambda: Ladder(4), make_policy(), 2, seed=SEED, epsilon=0.25) as source:
        yield source


@pytest.fixture
def source(workers):
    """A source of two workers, from the start."""
    workers._policy.load_state_dict(make_policy().state_dict())
    workers.batches_drawn = 0
    return workers


def expected(policy, n, batch, worker):
    """What a worker samples, sampled here."""
    with torch.random.fork_rng():
        torch.manual_seed(_seed_of(SEED, batch, worker))
        return Sampler(policy).sample_trajectories(Ladder(4), n, epsilon=0.25)


def assert_equal(one, other):
    assert (one.to_tensordict() == other.to_tensordict()).all()


@pytest.mark.parametrize("n", [7, 6, 1])
def test_a_batch_is_that_of_each_worker_in_turn(source, n):
    for batch in range(2):
        parts = [expected(make_policy(), k, batch, i) for i, k in enumerate([n - n // 2, n // 2])]
        fresh = source.sample(n)
        assert len(fresh) == n
        assert_equal(fresh, Trajectories.cat(parts))
        assert torch.equal(fresh.log_reward, fresh.condition[:, 0] * fresh.terminating_states)


def test_no_trajectories_and_an_interrupt(source):
    for process in source._processes:
        os.kill(process.pid, signal.SIGINT)  # Ctrl-C is the main process's business
    assert len(source.sample(0)) == 0
    with pytest.raises(ArgumentError, match="n must be at least 0, got -1"):
        source.sample(-1)
    assert len(source.sample(2)) == 2


def test_current_weights_are_used(source):
    before = source.sample(64)
    with torch.no_grad():
        source._policy.head.bias.copy_(torch.tensor([1e6, 0.0]))  # up to the top
    after = source.sample(64)
    assert (before.length < 5).any()
    # A share epsilon of the draws, half of them exits, is uniform.
    assert 0.4 < float((after.length == 5).double().mean()) < 0.8
    assert_equal(after, Trajectories.cat([expected(source._policy, 32, 1, i) for i in range(2)]))
    assert all(p.requires_grad for p in source._policy.parameters())
    trajectory_log_probs(source._policy, Ladder(4), after).sum().backward()  # it still learns


def test_a_source_goes_on_where_another_was(source):
    source.sample(5)
    state = copy.deepcopy(source.state_dict())
    second = source.sample(5)
    source.batches_drawn = 0
    assert not torch.equal(source.sample(5).condition, second.condition)
    source.load_state_dict(state)
    assert_equal(source.sample(5), second)
    seeds = {_seed_of(s, b, w) for s in range(3) for b in range(20) for w in range(5)}
    assert len(seeds) == 300


def test_state_of_another_source_is_refused(source):
    state = source.state_dict()
    assert state == {"seed": SEED, "n_workers": 2, "batches_drawn": 0}
    with pytest.raises(CheckpointMismatchError, match="state is of n_workers=3, expected 2"):
        source.load_state_dict({**state, "n_workers": 3})
    with pytest.raises(CheckpointMismatchError, match="state is of seed=8, expected 7"):
        source.load_state_dict({**state, "seed": 8})


def test_bad_options():
    policy = make_policy()
    for n_workers, options, message in [
        (0, {}, "n_workers must be at least 1, got 0"),
        (1, {"seed": -1}, "seed must be at least 0, got -1"),
        (1, {"generator": torch.Generator()}, "generator must not be given"),
        (1, {"epsilon": 1.5}, r"epsilon must be in \[0, 1\], got 1.5"),
        (1, {"temprature": 1.5}, r"policy_kwargs must be among .* got \['temprature'\]"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            WorkerSource(lambda: Ladder(4), policy, n_workers, **options)
    with pytest.raises(ArgumentError, match="forward one, got one with is_backward=True"):
        WorkerSource(lambda: Ladder(4), BackwardPolicy(Ladder(4)), 1)
    lock = threading.Lock()
    with pytest.raises(ArgumentError, match="make_env must be picklable: cannot pickle"):
        WorkerSource(lambda: (lock, Ladder(4))[1], policy, 1)


class Failing(Ladder):
    """Fails when asked for the reward of the top; ends its process for that of the source."""

    def log_reward(self, state, condition=None):
        if (state == self.top).any():
            raise FileNotFoundError("no table\nof rewards")
        if (state == 0).any():
            os._exit(3)
        return super().log_reward(state, condition)


def test_what_fails_in_a_worker_is_raised_here_and_ends_all(forked):
    policy = make_policy()
    with torch.no_grad():
        policy.head.bias.copy_(torch.tensor([1e6, 0.0]))
    source = WorkerSource(lambda: Failing(3), policy, 2)
    processes = source._processes
    assert len(processes) == 2
    with pytest.raises(WorkerError, match=r"^worker 0: FileNotFoundError: no table$") as caught:
        source.sample(4)
    assert "in log_reward" in str(caught.value.__cause__)
    for process in processes:
        process.join(10)
        assert not process.is_alive()
    with pytest.raises(ArgumentError, match="the workers are stopped"):
        source.sample(4)


@pytest.mark.slow
def test_a_worker_that_dies_is_noticed(forked):
    policy = make_policy()
    with torch.no_grad():
        policy.head.bias.copy_(torch.tensor([0.0, 1e6]))
    source = WorkerSource(lambda: Failing(3), policy, 1)
    with pytest.raises(WorkerError, match=r"^worker 0 died, exit code 3$"):
        source.sample(4)


@pytest.mark.slow
def test_an_environment_that_cannot_be_made(forked):
    with pytest.raises(WorkerError, match=r"^worker 0: ZeroDivisionError: .*by zero$"):
        WorkerSource(lambda: Ladder(1 // 0), make_policy(), 1)
