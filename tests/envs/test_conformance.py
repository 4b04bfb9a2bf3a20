"""The conformance suites are seen to fail: each broken environment is caught by its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from factories import CountOnes, Ladder
from torch import Tensor
from torch.nn.functional import one_hot

from gfn_rb import envs
from gfn_rb.envs import EnumerableEnv, GFNEnv, HyperGrid
from gfn_rb.envs.conformance import EnumerableEnvConformance, GFNEnvConformance


def broken(base: type[GFNEnv] = HyperGrid, **methods: object) -> type[GFNEnv]:
    """An environment with some methods replaced."""
    return type("Broken", (base,), methods)


class UndoesTwo(HyperGrid):
    def undo(self, state: Tensor, move: Tensor) -> Tensor:
        return state - 2 * one_hot(move, self.n_dims)


class Shortcut(HyperGrid):
    """Move 0 jumps two steps from the source, so that one state is in two layers."""

    def move(self, state: Tensor, move: Tensor) -> Tensor:
        jump = self.is_source(state) & (move == 0)
        return super().move(state, move) + jump[:, None] * one_hot(move, self.n_dims)


class ExitStays(HyperGrid):
    def forward_step(self, state: Tensor, action: Tensor) -> Tensor:
        moved = super().forward_step(state, action)
        return torch.where((action == self.exit_action)[:, None], state, moved)


class OffTheGrid(HyperGrid):
    def forward_mask(self, state: Tensor) -> Tensor:
        mask = torch.cat([state < self.height, torch.ones_like(state[:, :1]) > 0], 1)
        return mask & ~self.is_sink(state)[:, None]


class WrongSpec(HyperGrid):
    def _observe(self, *args):
        td = super()._observe(*args)
        return td.set("log_reward", td["log_reward"].double())


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
BROKEN = [
    (masked(lambda x: torch.cat([x > 0, x[:, :1] > 0], 1)), "test_attributes_agree"),
    (masked(lambda x: x >= 0), "test_source_has_no_parents"),
    (
        broken(forward_mask=lambda self, x: torch.cat([x < self.height - 1, x[:, :1] > -2], 1)),
        "test_sink_is_an_end",
    ),
    (ExitStays, "test_exit_leads_to_sink"),
    (with_attribute("max_length", 2), "test_walks_end_within_max_length"),
    (
        masked(lambda x: (x > 0) & (x.sum(1, keepdim=True) != 2)),
        "test_backward_walks_end_in_source",
    ),
    (
        masked(lambda x: (x > 0) & ~((x[:, :1] == 1) & (x > 1))),
        "test_backward_step_undoes_each_legal_move",
    ),
    (UndoesTwo, "test_backward_step_undoes_each_legal_move"),
    (
        masked(lambda x: (x[:, :1] >= 0).expand(-1, 3), CountOnes),
        "test_forward_step_redoes_each_parent_move",
    ),
    (
        broken(encode=lambda self, x: Grid.encode(self, x.sort(1).values)),
        "test_encode_tells_states_apart",
    ),
    (
        broken(log_reward=lambda self, x, c=None: Grid.log_reward(self, x).double()),
        "test_log_reward_is_a_float32_vector",
    ),
    (
        broken(check_terminating=lambda self, x, name="": None),
        "test_log_reward_refuses_other_states",
    ),
    (
        broken(encode=lambda self, x: Grid.encode(self, x) + x.float().mean()),
        "test_rows_do_not_depend_on_each_other",
    ),
    (
        broken(
            states_of=lambda self, a, length: Grid.states_of(
                self, a, torch.full_like(length, a.shape[1] + 1)
            )
        ),
        "test_states_are_made_again_from_actions",
    ),
    (with_attribute("state_range", (0, 3)), "test_states_keep_to_their_range"),
    (
        broken(move=lambda self, x, move: x.add_(one_hot(move, self.n_dims))),
        "test_inputs_are_left_alone",
    ),
    (
        broken(
            encode=lambda self, x: (x[:, :, None] == torch.arange(self.height)).flatten(1).float()
        ),
        "test_results_stay_on_the_input_device",
    ),
    (  # as if tensors of the interface stayed on another device
        broken(_rows=lambda self, *args: Grid._rows(self, *args).to("meta")),
        "test_environment_moves_to_a_device",
    ),
    (WrongSpec, "test_specs"),
    (
        broken(_observe=lambda self, x, r, c, n: Grid._observe(self, x, r.fill_(0), c, n)),
        "test_rollout_equals_the_functions",
    ),
    (broken(_check_legal=lambda self, *args: None), "test_step_refuses_illegal_actions"),
    (
        broken(Ladder, sample_condition=lambda self, n, generator=None: torch.rand(n, 2)),
        "test_conditions_have_their_shape",
    ),
    (broken(fingerprint=lambda self, x: x.sum(1)), "test_fingerprints_tell_states_apart"),
    (
        broken(score=lambda self, x, log_reward=None: -Grid.score(self, x)),
        "test_scores_order_states_as_rewards_do",
    ),
    (
        broken(modes_reached=lambda self, x, log_reward=None: self.mode_index(x)),
        "test_modes_reached_are_numbered",
    ),
    (broken(state_key=lambda self, x: x.sum(1)), "test_walks_stay_within_the_layers"),
    (OffTheGrid, "test_layers_hold_each_state_once"),
    (Shortcut, "test_layers_hold_each_state_once"),
    (
        broken(layers=lambda self: iter(list(Grid.layers(self))[:-1])),
        "test_walks_stay_within_the_layers",
    ),
    (
        masked(lambda x: (x > 0) | ((x > -1) & (x[:, :1] == 2))),
        "test_backward_mask_is_the_set_of_edges",
    ),
    (
        broken(terminating_states=lambda self: Grid.terminating_states(self).flip(0)),
        "test_terminating_states_are_indexed_in_order",
    ),
    (
        broken(target_log_prob=lambda self, c=None: Grid.target_log_prob(self) + 0.1),
        "test_target_is_the_normalised_reward",
    ),
    (
        broken(policy_log_prob=lambda self, p, **_: Grid.policy_log_prob(self, p) - 0.1),
        "test_policy_distribution_sums_to_one",
    ),
    (
        broken(mode_index=lambda self, x: Grid.mode_index(self, x).clamp(max=0)),
        "test_modes_are_where_the_reward_is_highest",
    ),
    (StaleGraph, "test_graph_follows_the_environment_to_a_device"),
]


def suite_for(env: type[GFNEnv]) -> GFNEnvConformance:
    enumerable = issubclass(env, EnumerableEnv)
    suite = EnumerableEnvConformance if enumerable else GFNEnvConformance

    class Suite(suite):
        def make_env(self) -> GFNEnv:
            return env(3, 4) if enumerable else env(3)

    return Suite()


FAILURES = (Exception, pytest.fail.Exception)  # pytest's own does not derive from Exception


@pytest.mark.parametrize(("env", "test"), BROKEN)
def test_a_broken_environment_is_caught(env: type[GFNEnv], test: str) -> None:
    with pytest.raises(FAILURES):
        getattr(suite_for(env), test)()


def test_a_lost_batch_shape_is_caught() -> None:
    with pytest.raises(FAILURES):
        suite_for(OneRowOnly).test_any_batch_size((2, 3))


def test_every_conformance_test_is_seen_to_fail() -> None:
    names = {name for name in dir(EnumerableEnvConformance) if name.startswith("test_")}
    assert names == {test for _, test in BROKEN} | {"test_any_batch_size"}


def test_suites_ask_for_an_environment() -> None:
    with pytest.raises(TypeError, match="make_env"):
        EnumerableEnvConformance()
    assert isinstance(CountOnes(2, 2), EnumerableEnv)


def imported_names(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_only_the_suites_import_pytest() -> None:
    folder = Path(envs.__file__).parent
    files = {path.stem: imported_names(path) for path in folder.rglob("*.py")}
    assert "pytest" in files.pop("conformance")
    for names in files.values():
        assert not any(name.startswith(("pytest", "gfn_rb.envs.conformance")) for name in names)
