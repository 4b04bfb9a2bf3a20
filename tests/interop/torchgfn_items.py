"""Items of torchgfn's, and what its containers hold."""

from functools import lru_cache

import torch
from gfn.containers import StatesContainer, Trajectories, Transitions
from gfn.estimators import ConditionalDiscretePolicyEstimator, DiscretePolicyEstimator
from gfn.gym import ConditionalHyperGrid, HyperGrid
from gfn.preprocessors import KHotPreprocessor
from gfn.samplers import Sampler
from gfn.utils.modules import MLP

GRID = HyperGrid(4, 12, validate_modes=False)
WARM = ConditionalHyperGrid(2, 6, validate_modes=False)
KINDS = ("trajectories", "transitions", "states")


def estimator(env, is_backward=False, scale=1.0, seed=0):
    """Of a large scale, it draws the same action each time."""
    torch.manual_seed(seed)
    khot = KHotPreprocessor(env.height, env.ndim)
    module = MLP(khot.output_dim, env.n_actions - is_backward, hidden_dim=16)
    with torch.no_grad():
        module.last_layer.weight.mul_(scale)
        if not is_backward:
            module.last_layer.bias[-1] -= 2.0  # or most walks are short
    return DiscretePolicyEstimator(module, env.n_actions, khot, is_backward=is_backward)


def conditional_estimator(env, scale=1.0):
    khot, head = KHotPreprocessor(env.height, env.ndim), MLP(9, env.n_actions, hidden_dim=8)
    with torch.no_grad():
        head.last_layer.weight.mul_(scale)
        head.last_layer.bias[-1] -= 2.0
    module = MLP(khot.output_dim, 8, hidden_dim=8)
    return ConditionalDiscretePolicyEstimator(
        module, torch.nn.Identity(), head, env.n_actions, khot
    )


with torch.random.fork_rng():
    SAMPLERS = {GRID: Sampler(estimator(GRID)), WARM: Sampler(conditional_estimator(WARM))}


def rollouts(env=GRID, n=16, ties=True):
    trajectories = SAMPLERS[env].sample_trajectories(
        env, n=n, save_logprobs=True, save_estimator_outputs=False
    )
    if not ties:
        trajectories._log_rewards = trajectories.log_rewards + torch.rand(n)
    return trajectories


@lru_cache
def walks(env, n_batches, n, ties=True):
    """Batches of trajectories, the same at each call; without ties no two rewards are equal."""
    with torch.random.fork_rng():
        torch.manual_seed(n)
        batches = [rollouts(env, n) for _ in range(n_batches)]
        if not ties:
            log_rewards = torch.randperm(n_batches * n) / n
            for batch, each in zip(batches, log_rewards.split(n), strict=True):
                batch._log_rewards = each
    return batches


def of_kind(kind, trajectories):
    if kind == "trajectories":
        return trajectories
    if kind == "transitions":
        return trajectories.to_transitions()
    return trajectories.to_states_container()


def terminating(container):
    """The items that stand for whole objects, as torchgfn's diverse buffer wants them."""
    if isinstance(container, Trajectories):
        return container
    return container[container.is_terminating]


def contents(container):
    """What a container holds, by name; conditions of real steps alone."""
    if container is None:
        return {}
    held = {"states": container.states.tensor, "log_rewards": container.log_rewards}
    conditions = container.states.conditions
    if conditions is not None:
        held["conditions"] = conditions[0] if conditions.ndim == 3 else conditions
    if isinstance(container, Trajectories):
        held.update(actions=container.actions.tensor, length=container.terminating_idx)
    elif isinstance(container, Transitions):
        held.update(actions=container.actions.tensor, next_states=container.next_states.tensor)
    if isinstance(container, Transitions | StatesContainer):
        held["is_terminating"] = container.is_terminating
    return held


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    held, expected = contents(ours), contents(theirs)
    assert held.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            held[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
