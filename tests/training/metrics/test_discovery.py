import pytest
import torch

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.training.metrics import DiscoveryMetrics, SeparatedModes, norm_distance

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


class Counted(DiscoveryMetrics):
    """A discovery that is given states."""

    def __init__(self, env):
        super().__init__(env)
        self.env = env

    def add(self, states):
        super().add(ending_in(self.env, torch.as_tensor(states)))


@pytest.fixture
def discovery():
    return Counted(HyperGrid(2, 8))


def counts(discovery):
    return discovery.calls, discovery.distinct_calls, discovery.modes_found


def test_nothing_is_found_at_first(discovery):
    assert counts(discovery) == (0, 0, 0)
    assert discovery.columns() == {
        "reward_calls": 0, "distinct_reward_calls": 0, "modes_found": 0, "top_100_score": None,
        "top_100_diversity": None,
    }  # fmt: skip


def test_every_call_counts_and_every_state_once(discovery):
    discovery.add([[0, 0], [3, 4], [0, 0], [7, 7]])
    assert counts(discovery) == (4, 3, 0)
    discovery.add([[3, 4], [4, 3]])
    assert counts(discovery) == (6, 4, 0)


def test_modes_count_once(discovery):
    discovery.add(MODES[[0, 0, 2]])
    assert counts(discovery) == (3, 2, 2)
    discovery.add(MODES)
    assert counts(discovery) == (7, 4, 4)


def test_states_of_one_mode_are_one_mode():
    """At height 31 the inner bands are {4, 5} and {25, 26}."""
    discovery = Counted(HyperGrid(1, 31))
    discovery.add([[4], [5]])
    assert counts(discovery) == (2, 2, 1)
    discovery.add([[3], [6], [26]])
    assert counts(discovery) == (5, 5, 2)


def test_states_too_many_to_list_are_counted_too():
    discovery = Counted(HyperGrid(**LARGE))
    corner = torch.ones(1, 24, dtype=torch.int64)
    discovery.add(torch.cat([corner, 6 * corner, 0 * corner, corner]))
    assert counts(discovery) == (4, 3, 2)
    assert discovery.top_score == pytest.approx((2.6 + 2.6 + 0.6) / 3)


def test_the_top_holds_the_best_100_distinct_states(discovery):
    """64 states on the grid: 4 of 2.6, 12 of 0.6 in the corners' bands, 48 of 0.1."""
    discovery.add([[0, 0], [0, 0], [1, 1], [1, 1], [1, 1]])
    assert discovery.top.tolist() == pytest.approx([2.6, 0.6])
    assert discovery.top_score == pytest.approx(1.6)
    every = discovery.env.terminating_states()
    discovery.add(every.flip(0))
    discovery.add(every)
    assert len(discovery.top) == 64
    assert discovery.top_score == pytest.approx((4 * 2.6 + 12 * 0.6 + 48 * 0.1) / 64)


def test_the_best_are_compared_with_each_other(discovery):
    """(1, 1), (1, 6) and (6, 6) differ in 1, 1 and 2 places; in 5, 5 and 10 steps."""
    discovery.add(MODES[[0, 1, 3, 3]])
    assert discovery.columns()["top_100_diversity"] == pytest.approx(4 / 3)
    steps = DiscoveryMetrics(HyperGrid(2, 8), norm_distance(1.0))
    steps.add(ending_in(discovery.env, MODES[[0, 1, 3, 3]]))
    assert steps.columns()["top_100_diversity"] == pytest.approx(20 / 3)


def test_modes_are_also_counted_by_distance():
    env = HyperGrid(1, 31)
    discovery = DiscoveryMetrics(env, separated=SeparatedModes(2.5, 1.0, norm_distance(1.0)))
    discovery.add(ending_in(env, torch.tensor([[4], [5], [5], [20]])))
    assert discovery.columns()["separated_modes"] == 1
    restored = DiscoveryMetrics(env, separated=SeparatedModes(2.5, 1.0, norm_distance(1.0)))
    restored.load_state_dict(discovery.state_dict())
    for each in (discovery, restored):
        each.add(ending_in(env, torch.tensor([[4], [5], [25], [26]])))
        assert each.columns()["separated_modes"] == 2
        assert each.columns()["modes_found"] == 2


def test_the_top_forgets_what_is_not_among_the_100_best():
    discovery = Counted(HyperGrid(1, 401))
    x = torch.arange(401)[:, None]
    for part in x.split(37):
        discovery.add(part)
    best = discovery.env.log_reward(x).exp().sort(descending=True).values[:100]
    assert torch.equal(discovery.top, best)
    assert torch.equal(discovery.env.score(discovery.top_state), best)


def test_a_reward_that_is_paid_for_is_not_asked_for_again(discovery, monkeypatch):
    trajectories = ending_in(discovery.env, MODES)
    monkeypatch.setattr(discovery.env, "log_reward", None)
    DiscoveryMetrics.add(discovery, trajectories)
    assert discovery.top.tolist() == pytest.approx([2.6] * 4)


def test_scores_are_the_environments_own():
    class Scored(HyperGrid):
        def score(self, state, log_reward=None):
            return state.sum(1).float()

    discovery = Counted(Scored(2, 8))
    discovery.add([[3, 4], [7, 7]])
    assert discovery.top.tolist() == [14, 7]


def test_restored_counts_are_the_same(discovery):
    discovery.add(torch.cat([MODES[:3], torch.tensor([[0, 0], [0, 0]])]))
    restored = Counted(HyperGrid(2, 8))
    restored.load_state_dict(discovery.state_dict())
    assert counts(restored) == counts(discovery) == (5, 4, 3)
    assert restored.columns() == discovery.columns()
    restored.add(MODES)
    assert counts(restored) == (9, 5, 4)


def test_restoring_replaces_what_was_counted(discovery):
    discovery.add(MODES)
    discovery.load_state_dict(Counted(HyperGrid(2, 8)).state_dict())
    assert counts(discovery) == (0, 0, 0)
