"""The conformance suites are seen to fail: each broken environment is caught by its test."""

from __future__ import annotations

import pytest
import torch
from factories import CountOnes, Ladder
from torch import Tensor
from torch.nn.functional import one_hot

from gfn_rb.envs import EnumerableEnv, GFNEnv, HyperGrid
from gfn_rb.envs.conformance import EnumerableEnvConformance, GFNEnvConformance
from gfn_rb.envs.core import takes_arrays
from gfn_rb.errors import GfnRbError


def broken(base: type[GFNEnv] = HyperGrid, **methods: object) -> type[GFNEnv]:
    """An environment with some methods replaced."""
    return type("Broken", (base,), methods)


class ExitStays(HyperGrid):
    def forward_step(self, state: Tensor, action: Tensor) -> Tensor:
        moved = super().forward_step(state, action)
        return torch.where((action == self.exit_action)[:, None], state, moved)


class WrongSpec(HyperGrid):
    def _observe(self, *args):
        td = super()._observe(*args)
        return td.set("log_reward", td["log_reward"].double())


class HostDiffers(HyperGrid):
    @takes_arrays
    def backward_mask(self, state):
        return state > 0 if isinstance(state, torch.Tensor) else state >= 0


class OneRowOnly(HyperGrid):
    def _observe(self, state, log_reward, condition, batch):
        return super()._observe(state, log_reward, condition, batch[:1])


class StaleGraph(HyperGrid):
    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self.__dict__["_graph"] = self._graph._replace(log_reward=torch.zeros(16, device="meta"))
        return self


def with_attribute(name: str, value: object) -> type[GFNEnv]:
    """A grid that says something else about itself."""

    class Mistaken(HyperGrid):
        def __init__(self, *args: int) -> None:
            super().__init__(*args)
            setattr(self, name, value)

    return Mistaken


def masked(backward_mask: object, base: type[GFNEnv] = HyperGrid) -> type[GFNEnv]:
    return broken(base, backward_mask=lambda self, state: backward_mask(state))


Grid = HyperGrid
BROKEN = {
    "exit_is_legal_where_it_should_be": broken(
        CountOnes,
        forward_mask=lambda self, x: CountOnes.forward_mask(self, x) | (x >= -1).all(1)[:, None],
    ),
    "attributes_agree": masked(lambda x: torch.cat([x > 0, x[:, :1] > 0], 1)),
    "source_and_sink_are_the_ends-source": masked(lambda x: x >= 0),
    "source_and_sink_are_the_ends-sink": broken(
        forward_mask=lambda self, x: torch.cat([x < self.height - 1, x[:, :1] > -2], 1)
    ),
    "functions_are_pure-host": HostDiffers,
    "exit_leads_to_sink": ExitStays,
    "walks_end_within_max_length": with_attribute("max_length", 2),
    "backward_walks_end_in_source": masked(lambda x: (x > 0) & (x.sum(1, keepdim=True) != 2)),
    "moves_are_undone-forward": broken(
        undo=lambda self, x, move: x - 2 * one_hot(move, self.n_dims)
    ),
    "moves_are_undone-backward": masked(lambda x: (x[:, :1] >= 0).expand(-1, 3), CountOnes),
    "states_are_told_apart-encode": broken(
        encode=lambda self, x: Grid.encode(self, x.sort(1).values)
    ),
    "log_reward_is_a_float32_vector": broken(
        log_reward=lambda self, x, c=None: Grid.log_reward(self, x).double()
    ),
    "log_reward_refuses_other_states": broken(check_terminating=lambda self, x, name="": None),
    "functions_are_pure-rows": broken(
        encode=lambda self, x: Grid.encode(self, x) + x.float().mean()
    ),
    "states_are_made_again_from_actions": broken(
        states_of=lambda self, a, n: Grid.states_of(self, a, torch.full_like(n, a.shape[1] + 1))
    ),
    "only_moves_are_the_only_ones": broken(CountOnes, only_moves=lambda self, x: 1 - x),
    "only_moves_are_the_only_ones-ways": masked(
        lambda x: torch.ones(len(x), 2, dtype=torch.bool), CountOnes
    ),
    "walks_end_within_max_length-range": with_attribute("state_range", (0, 3)),
    "functions_are_pure-input": broken(
        move=lambda self, x, move: x.add_(one_hot(move, self.n_dims))
    ),
    "results_stay_on_the_input_device": broken(
        encode=lambda self, x: (x[:, :, None] == torch.arange(self.height)).flatten(1).float()
    ),
    # as if tensors of the interface stayed on another device
    "environment_moves_to_a_device": broken(
        _rows=lambda self, *args: Grid._rows(self, *args).to("meta")
    ),
    "specs": WrongSpec,
    "any_batch_size": OneRowOnly,
    "rollout_equals_the_functions": broken(
        _observe=lambda self, x, r, c, n: Grid._observe(self, x, r.fill_(0), c, n)
    ),
    "step_refuses_illegal_actions": broken(_check_legal=lambda self, *args: None),
    "conditions_have_their_shape": broken(
        Ladder, sample_condition=lambda self, n, generator=None: torch.rand(n, 2)
    ),
    "states_are_told_apart-fingerprint": broken(fingerprint=lambda self, x: x.sum(1)),
    "scores_order_states_as_rewards_do": broken(
        score=lambda self, x, log_reward=None: -Grid.score(self, x)
    ),
    "states_are_told_apart-words": broken(describe=lambda self, x: Grid.describe(self, x[:, 1:])),
    "functions_are_pure-source": broken(source=lambda self, n: self.source_state.expand(n, 3)),
    "modes_reached_are_numbered": broken(
        modes_reached=lambda self, x, log_reward=None: self.mode_index(x)
    ),
    "states_are_as_many_as_is_said-fewer": broken(n_states=65),
    "states_are_as_many_as_is_said-more": broken(n_states=63),
    "states_are_as_many_as_is_said-paths": broken(
        move=lambda self, x, move: Grid.move(
            self,
            x + ((x[:, :1] == 0) & (x[:, 1:2] == 3)) * one_hot(move, 3) * torch.tensor([1, 0, 0]),
            move,
        )
    ),
    "modes_have_terminating_states-none": broken(
        mode_index=lambda self, x: Grid.mode_index(self, x).clamp(max=6)
    ),
    "modes_have_terminating_states-more": with_attribute("n_modes", 7),
    "layers_hold_each_state_once-walks": broken(
        layers=lambda self: iter(list(Grid.layers(self))[:-1])
    ),
    "layers_hold_each_state_once": broken(
        forward_mask=lambda self, x: torch.cat([(x < self.height) & (x >= 0), x[:, :1] >= 0], 1)
    ),
    "backward_mask_is_the_set_of_edges": masked(lambda x: (x > 0) | ((x > -1) & (x[:, :1] == 2))),
    "terminating_states_are_indexed_in_order": broken(
        terminating_states=lambda self: Grid.terminating_states(self).flip(0)
    ),
    "target_is_the_normalised_reward": broken(
        target_log_prob=lambda self, c=None: Grid.target_log_prob(self) + 0.1
    ),
    "policy_distribution_sums_to_one": broken(
        policy_log_prob=lambda self, p, **_: Grid.policy_log_prob(self, p) - 0.1
    ),
    "modes_are_where_the_reward_is_highest": broken(
        mode_index=lambda self, x: Grid.mode_index(self, x).clamp(max=0)
    ),
    "graph_follows_the_environment_to_a_device": StaleGraph,
}


def suite_for(env: type[GFNEnv]) -> GFNEnvConformance:
    enumerable = issubclass(env, EnumerableEnv)
    suite = EnumerableEnvConformance if enumerable else GFNEnvConformance

    class Suite(suite):
        def make_env(self) -> GFNEnv:
            return env(3, 4) if enumerable else env(3)

    return Suite()


@pytest.mark.usefixtures("unchecked")  # types, which would be the first to fail
@pytest.mark.parametrize("test", BROKEN)
def test_a_broken_environment_is_caught(test: str) -> None:
    with pytest.raises((AssertionError, IndexError, RuntimeError, GfnRbError)):
        getattr(suite_for(BROKEN[test]), f"test_{test.partition('-')[0]}")()


def test_every_conformance_test_is_seen_to_fail() -> None:
    names = {name for name in dir(EnumerableEnvConformance) if name.startswith("test_")}
    assert names == {f"test_{test.partition('-')[0]}" for test in BROKEN}
