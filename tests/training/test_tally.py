import pytest
import torch

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.training.tally import Tally

# On the 8 x 8 grid the modes are the four states whose coordinates are 1 or 6, of reward 2.6; the
# others of the outer bands have 0.6, the rest 0.1.
MODES = torch.tensor([[1, 1], [1, 6], [6, 1], [6, 6]])
LARGE = {"ndim": 24, "height": 8}  # 2^72 states


def ending_in(env, states):
    """Trajectories whose last steps are those from the given states to the sink."""
    n = len(states)
    return Trajectories(
        state=torch.stack([states, env.sink_state.expand_as(states)], 1),
        action=torch.full((n, 1), env.exit_action),
        length=torch.ones(n, dtype=torch.int64),
        log_reward=env.log_reward(states),
    )


class Counted(Tally):
    """A tally that is given states."""

    def __init__(self, env):
        super().__init__(env)
        self.env = env

    def add(self, states):
        super().add(ending_in(self.env, torch.as_tensor(states)))


@pytest.fixture
def tally():
    return Counted(HyperGrid(2, 8))


def counts(tally):
    return tally.calls, tally.distinct_calls, tally.modes_found


def test_nothing_is_found_at_first(tally):
    assert counts(tally) == (0, 0, 0)
    assert tally.columns() == {
        "reward_calls": 0, "distinct_reward_calls": 0, "modes_found": 0, "top_100_score": None,
    }  # fmt: skip


def test_every_call_counts_and_every_state_once(tally):
    tally.add([[0, 0], [3, 4], [0, 0], [7, 7]])
    assert counts(tally) == (4, 3, 0)
    tally.add([[3, 4], [4, 3]])
    assert counts(tally) == (6, 4, 0)


def test_modes_count_once(tally):
    tally.add(MODES[[0, 0, 2]])
    assert counts(tally) == (3, 2, 2)
    tally.add(MODES)
    assert counts(tally) == (7, 4, 4)


def test_states_of_one_mode_are_one_mode():
    """At height 31 the inner bands are {4, 5} and {25, 26}."""
    tally = Counted(HyperGrid(1, 31))
    tally.add([[4], [5]])
    assert counts(tally) == (2, 2, 1)
    tally.add([[3], [6], [26]])
    assert counts(tally) == (5, 5, 2)


def test_states_too_many_to_list_are_counted_too():
    tally = Counted(HyperGrid(**LARGE))
    corner = torch.ones(1, 24, dtype=torch.int64)
    tally.add(torch.cat([corner, 6 * corner, 0 * corner, corner]))
    assert counts(tally) == (4, 3, 2)
    assert tally.top_score == pytest.approx((2.6 + 2.6 + 0.6) / 3)


def test_the_top_holds_the_best_100_distinct_states(tally):
    """64 states on the grid: 4 of 2.6, 12 of 0.6 in the corners' bands, 48 of 0.1."""
    tally.add([[0, 0], [0, 0], [1, 1], [1, 1], [1, 1]])
    assert tally.top.tolist() == pytest.approx([2.6, 0.6])
    assert tally.top_score == pytest.approx(1.6)
    every = tally.env.terminating_states()
    tally.add(every.flip(0))
    tally.add(every)
    assert len(tally.top) == 64
    assert tally.top_score == pytest.approx((4 * 2.6 + 12 * 0.6 + 48 * 0.1) / 64)


def test_the_top_forgets_what_is_not_among_the_100_best():
    tally = Counted(HyperGrid(1, 401))
    x = torch.arange(401)[:, None]
    for part in x.split(37):
        tally.add(part)
    best = tally.env.log_reward(x).exp().sort(descending=True).values[:100]
    assert torch.equal(tally.top, best)


def test_a_reward_that_is_paid_for_is_not_asked_for_again(tally, monkeypatch):
    trajectories = ending_in(tally.env, MODES)
    monkeypatch.setattr(tally.env, "log_reward", None)
    Tally.add(tally, trajectories)
    assert tally.top.tolist() == pytest.approx([2.6] * 4)


def test_scores_are_the_environments_own():
    class Scored(HyperGrid):
        def score(self, state, log_reward=None):
            return state.sum(1).float()

    tally = Counted(Scored(2, 8))
    tally.add([[3, 4], [7, 7]])
    assert tally.top.tolist() == [14, 7]


def test_restored_counts_are_the_same(tally):
    tally.add(torch.cat([MODES[:3], torch.tensor([[0, 0], [0, 0]])]))
    restored = Counted(HyperGrid(2, 8))
    restored.restore(tally.state_dict())
    assert counts(restored) == counts(tally) == (5, 4, 3)
    assert restored.columns() == tally.columns()
    restored.add(MODES)
    assert counts(restored) == (9, 5, 4)


def test_restoring_replaces_what_was_counted(tally):
    tally.add(MODES)
    tally.restore(Counted(HyperGrid(2, 8)).state_dict())
    assert counts(tally) == (0, 0, 0)
