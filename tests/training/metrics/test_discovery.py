import pytest
import torch

from gfn_rb.containers import Trajectories
from gfn_rb.envs import HyperGrid
from gfn_rb.training.metrics import DiscoveryMetrics, mean_distance, norm_distance

# On the 8 x 8 grid the modes are the four states whose coordinates are 1 or 6, of reward 2.6; the
# others of the outer bands have 0.6, the rest 0.1.
CITY_BLOCK = norm_distance(1.0)
MODES = torch.tensor([[1, 1], [1, 6], [6, 1], [6, 6]])


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
    return discovery.calls, len(discovery._seen), discovery.modes_found


def test_every_call_counts_and_every_state_and_mode_once(discovery, monkeypatch):
    assert counts(discovery) == (0, 0, 0)
    assert discovery.columns()["top_100_score"] is discovery.columns()["top_100_diversity"] is None
    discovery.add([[0, 0], [3, 4], [0, 0], [7, 7]])
    assert counts(discovery) == (4, 3, 0)
    discovery.add([[3, 4], [4, 3]])
    assert counts(discovery) == (6, 4, 0)
    discovery.add(MODES[[0, 0, 2]])
    assert counts(discovery) == (9, 6, 2)
    paid_for = ending_in(discovery.env, MODES)
    monkeypatch.setattr(discovery.env, "log_reward", None)  # no reward is asked for again
    DiscoveryMetrics.add(discovery, paid_for)
    assert counts(discovery) == (13, 8, 4)


def test_the_best_are_compared_with_each_other(discovery):
    """(1, 1), (1, 6) and (6, 6) differ in 1, 1 and 2 places; in 5, 5 and 10 steps."""
    discovery.add(MODES[[0, 1, 3, 3]])
    assert discovery.columns()["top_100_diversity"] == pytest.approx(4 / 3)
    steps = DiscoveryMetrics(HyperGrid(2, 8), norm_distance(1.0))
    steps.add(ending_in(discovery.env, MODES[[0, 1, 3, 3]]))
    assert steps.columns()["top_100_diversity"] == pytest.approx(20 / 3)


def test_the_top_forgets_what_is_not_among_the_100_best():
    discovery = Counted(HyperGrid(1, 401))
    x = torch.arange(401)[:, None]
    for part in x.split(37):
        discovery.add(part)
    best = discovery.env.log_reward(x).exp().sort(descending=True).values[:100]
    assert torch.equal(discovery.top, best)
    assert torch.equal(discovery.env.score(discovery.top_state), best)


def test_mean_distance_by_hand():
    state = torch.tensor([[0, 0], [0, 3], [1, 0]])  # 3, 1 and 4 apart
    assert mean_distance(state, CITY_BLOCK) == pytest.approx(8 / 3)
    assert mean_distance(state[:1]) is mean_distance(state[:0]) is None
    assert mean_distance(torch.tensor([0, 3, 1]), CITY_BLOCK) == pytest.approx(2)
    assert mean_distance(state, lambda a, b: (a.sum(1)[:, None] - b.sum(1)).abs()) == 2
