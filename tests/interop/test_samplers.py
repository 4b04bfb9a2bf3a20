"""torchgfn's samplers and ours behind its interface give the same containers and distributions."""

from functools import partial

import pytest
import torch

gym = pytest.importorskip("gfn.gym")
box_utils = pytest.importorskip("gfn.gym.helpers.box_utils")

import gfn.samplers as theirs  # noqa: E402
from gfn.estimators import (  # noqa: E402
    DiscretePolicyEstimator,
    RecurrentDiscretePolicyEstimator,
)
from gfn.preprocessors import IdentityPreprocessor  # noqa: E402
from gfn.utils.modules import (  # noqa: E402
    DiscreteUniform,
    RecurrentDiscreteSequenceModel,
)
from gfn.utils.prob_calculations import get_trajectory_pfs  # noqa: E402
from interop import torchgfn_items as items  # noqa: E402
from scipy.stats import chi2_contingency  # noqa: E402
from statistics_of_draws import chi_square_p  # noqa: E402

import gfn_rb.interop.torchgfn as ours  # noqa: E402
from gfn_rb.errors import ArgumentError  # noqa: E402

GRID = gym.HyperGrid(2, 4, validate_modes=False)
BOX = gym.Box(delta=0.25)
estimator = partial(items.estimator, GRID)
FIELDS = "log_rewards", "log_probs", "estimator_outputs", "terminating_idx", "is_backward"


def assert_same(mine, other) -> None:
    assert mine.states.tensor.equal(other.states.tensor)
    assert mine.actions.tensor.equal(other.actions.tensor)
    for name in FIELDS:
        torch.testing.assert_close(getattr(mine, name), getattr(other, name), msg=name)


KEPT = {"save_estimator_outputs": True, "save_logprobs": True}


def test_containers_and_gradients_are_torchgfns() -> None:
    forward, backward = estimator(scale=1e4), estimator(True, scale=1e4)
    start = GRID.states_from_tensor(torch.tensor([[0, 0], [2, 1], [3, 3], [1, 0]]))
    for each, given in ((forward, {"n": 3}), (forward, {"states": start})):
        mine, other = (
            m.Sampler(each).sample_trajectories(GRID, **given, **KEPT) for m in (ours, theirs)
        )
        assert_same(mine, other)
    mine, other = (
        m.Sampler(backward).sample_trajectories(GRID, states=start, **KEPT) for m in (ours, theirs)
    )
    assert_same(mine, other)
    assert_same(mine.reverse_backward_trajectories(), other.reverse_backward_trajectories())
    weight, gradients = backward.module.last_layer.weight, []
    for batch in (mine, other):
        finite = batch.estimator_outputs[batch.estimator_outputs.isfinite()]
        gradients += torch.autograd.grad((batch.log_probs.sum() + finite.sum()), weight)
    torch.testing.assert_close(*gradients)


def test_objects_are_drawn_as_torchgfn_draws_them() -> None:
    pf, options = estimator(), {"epsilon": 0.2, "temperature": 1.5, "sf_bias": 0.5}
    counts = []
    for module in (ours, theirs):
        found = module.Sampler(pf).sample_trajectories(GRID, n=6000, **options, save_logprobs=True)
        counts.append(
            torch.bincount(found.terminating_states.tensor @ torch.tensor([4, 1]), minlength=16)
        )
        recomputed = pf.to_probability_distribution(
            found.states[0], pf(found.states[0]), **options
        ).log_prob(found.actions[0].tensor)
        torch.testing.assert_close(found.log_probs[0], recomputed)
    assert chi2_contingency(torch.stack(counts).numpy() + 1).pvalue > 1e-3


def test_metropolis_hastings_leaves_the_target_invariant() -> None:
    search = ours.LocalSearchSampler(estimator(), estimator(True, seed=1))
    every = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    target = GRID.log_reward(GRID.states_from_tensor(every)).softmax(0)
    x = every[target.multinomial(4000, replacement=True)]
    walks = search.backward_sampler.sample_trajectories(GRID, states=GRID.states_from_tensor(x))
    now = walks.reverse_backward_trajectories()
    for _ in range(2):
        found, updated = search.local_search(GRID, now, back_steps=torch.tensor(9))
        ends = found.terminating_states.tensor.where(
            updated[:, None], now.terminating_states.tensor
        )
        walks = search.backward_sampler.sample_trajectories(
            GRID, states=GRID.states_from_tensor(ends)
        )
        now = walks.reverse_backward_trajectories()
    index = ends @ torch.tensor([4, 1])
    assert chi_square_p(torch.bincount(index, minlength=16), target) > 1e-3


def test_each_loop_searches_around_what_the_last_accepted(monkeypatch) -> None:
    search, started = ours.LocalSearchSampler(estimator(), estimator(True)), []
    search_once = search.local_search

    def spy(env, trajectories, *args, **kwargs):
        started.append(trajectories.log_rewards)
        return search_once(env, trajectories, *args, **kwargs)

    monkeypatch.setattr(search, "local_search", spy)
    found = search.sample_trajectories(
        GRID, 16, save_logprobs=True, n_local_search_loops=3, back_ratio=0.5
    )
    rewards = found.log_rewards.view(4, 16)
    assert len(found) == 64
    assert torch.stack(started).equal(rewards.cummax(0).values[:3])
    assert found.log_probs.requires_grad


def test_conditions_reach_the_estimator() -> None:
    grid = gym.ConditionalHyperGrid(2, 4, validate_modes=False)
    pf = items.conditional_estimator(grid, scale=1e4)
    given = torch.rand(8, 1)
    mine, other = (
        m.Sampler(pf).sample_trajectories(grid, 8, None, given, **KEPT) for m in (ours, theirs)
    )
    assert_same(mine, other)
    assert mine.states.conditions.equal(other.states.conditions)


def test_torchgfns_code_samples_what_cannot_be_adapted() -> None:
    bits = gym.BitSequence(2, 8, 2)
    network = {"embedding_dim": 4, "hidden_size": 4, "num_layers": 1, "rnn_type": "lstm"}
    model = RecurrentDiscreteSequenceModel(bits.n_actions, **network, dropout=0.0)
    recurrent = RecurrentDiscretePolicyEstimator(model, bits.n_actions)
    found = ours.Sampler(recurrent).sample_trajectories(bits, n=3, save_logprobs=True)
    assert found.log_probs.shape == (5, 3)
    options, components = {"hidden_dim": 16, "n_hidden_layers": 1}, {"n_components": 1}
    forward = box_utils.BoxPFMLP(n_components_s0=1, **components, **options)
    search = ours.LocalSearchSampler(
        box_utils.BoxPFEstimator(BOX, forward, 1, 1),
        box_utils.BoxPBEstimator(BOX, box_utils.BoxPBMLP(**components, **options), 1),
    )
    found = search.sample_trajectories(BOX, 20, n_local_search_loops=2, back_ratio=0.5)
    assert len(found) == 60
    plain = {"use_metropolis_hastings": False, "back_steps": torch.tensor(9)}
    proposed, updated = search.local_search(BOX, found, save_logprobs=True, debug=True, **plain)
    assert updated.equal(proposed.log_rewards > found.log_rewards)
    assert proposed.log_probs.shape == proposed.actions.batch_shape
    with pytest.raises(
        ArgumentError, match="save_estimator_outputs must be False for BoxCartesian"
    ):
        search.local_search(BOX, found, **{**plain, "save_estimator_outputs": True})


def box_search(seed=0):
    torch.manual_seed(seed)
    options, components = {"hidden_dim": 16, "n_hidden_layers": 1}, {"n_components": 1}
    forward = box_utils.BoxPFMLP(n_components_s0=1, **components, **options)
    return ours.LocalSearchSampler(
        box_utils.BoxPFEstimator(BOX, forward, 1, 1),
        box_utils.BoxPBEstimator(BOX, box_utils.BoxPBMLP(**components, **options), 1),
    )


def box_targets(n):
    """Draw objects of the box in proportion to their reward."""
    x = torch.rand(8 * n, 2)
    reward = BOX.log_reward(BOX.states_from_tensor(x)).exp()
    return x[torch.rand(8 * n) * reward.max() < reward][:n]


def after_one_search(search, env, x, **options):
    """Return the objects x, each replaced by its proposal where that was accepted."""
    walks = search.backward_sampler.sample_trajectories(env, states=env.states_from_tensor(x))
    start = walks.reverse_backward_trajectories()
    found, updated = search.local_search(env, start, debug=True, **options)
    assert 0.01 < updated.double().mean() < 0.99
    return found.terminating_states.tensor.where(updated[:, None], x)


@pytest.mark.slow
@pytest.mark.parametrize("back", [{"back_ratio": 0.5}, {"back_steps": torch.tensor(2)}])
def test_metropolis_hastings_is_exact_on_a_box(back) -> None:
    search, x = box_search(), box_targets(4000)
    cell = torch.tensor([5.0, 1.0])
    before = ((x * 5).floor() @ cell).long().bincount(minlength=25)
    for _ in range(3):
        x = after_one_search(search, BOX, x, **back)
    now = ((x * 5).floor() @ cell).long().bincount(minlength=25)
    assert chi2_contingency(torch.stack([before, now]).numpy() + 1).pvalue > 1e-3


class Bits(gym.BitSequence):
    """Sequences of 4 bits, added one at a time, with rewards that differ."""

    def make_modes_set(self, seed):
        return torch.zeros(1, 4, dtype=torch.long)

    def log_reward(self, states, conditions=None):
        return (states.tensor.clamp(min=0) * torch.tensor([1.0, 0.5, -0.5, 0.25])).sum(-1)


@pytest.mark.slow
def test_metropolis_hastings_is_exact_with_a_recurrent_forward_policy() -> None:
    torch.manual_seed(0)
    bits = Bits(1, 4, 2)
    network = {"embedding_dim": 4, "hidden_size": 4, "num_layers": 1, "rnn_type": "gru"}
    model = RecurrentDiscreteSequenceModel(bits.n_actions, **network, dropout=0.0)
    pf = RecurrentDiscretePolicyEstimator(model, bits.n_actions)
    uniform = DiscreteUniform(bits.n_actions - 1)
    pb = DiscretePolicyEstimator(
        uniform, bits.n_actions, IdentityPreprocessor(4, target_dtype=torch.float), is_backward=True
    )
    search = ours.LocalSearchSampler(pf, pb)
    every = torch.cartesian_prod(*[torch.arange(2)] * 4)
    target = bits.log_reward(bits.states_from_tensor(every)).softmax(0)
    x = every[target.multinomial(4000, replacement=True)]
    for _ in range(3):
        x = after_one_search(search, bits, x, back_steps=torch.tensor(2))
    index = x @ torch.tensor([8, 4, 2, 1])
    assert chi_square_p(torch.bincount(index, minlength=16), target) > 1e-3


def test_the_default_of_local_search_takes_a_box() -> None:
    search = box_search()
    found = search.sample_trajectories(BOX, 8)
    proposed, updated = search.local_search(BOX, found, back_ratio=0.5)
    assert len(proposed) == len(updated) == 8


def test_local_search_keeps_what_it_is_asked_for() -> None:
    pf, options = estimator(scale=3.0), {"epsilon": 0.3, "back_ratio": 0.5}
    search = ours.LocalSearchSampler(pf, estimator(True))
    start = search.sample_trajectories(GRID, 16)
    found, _ = search.local_search(GRID, start, **KEPT, **options, debug=True)
    real = ~found.actions.is_dummy
    torch.testing.assert_close(found.estimator_outputs[real], pf(found.states[:-1][real]))
    # As torchgfn's, they are those of the policy without exploration.
    torch.testing.assert_close(found.log_probs, get_trajectory_pfs(pf, found))
    both = search.sample_trajectories(GRID, 16, n_local_search_loops=1, **KEPT, **options)
    assert both.estimator_outputs.shape[:2] == both.log_probs.shape == both.actions.batch_shape


def test_steps_go_before_a_ratio() -> None:
    search, found = ours.LocalSearchSampler(estimator(), estimator(True)), []
    start = search.sample_trajectories(GRID, 16)
    for ratio in (None, 1.0):
        torch.manual_seed(0)
        steps = torch.ones(16, dtype=torch.int64)
        found += search.local_search(GRID, start, back_steps=steps, back_ratio=ratio)[:1]
    assert found[0].states.tensor.equal(found[1].states.tensor)


def test_states_of_more_than_one_dimension_are_refused() -> None:
    for module in (ours, theirs):
        with pytest.raises(AssertionError, match="batch_shape of length 1"):
            module.Sampler(estimator()).sample_trajectories(GRID, states=GRID.reset((2, 3)))
