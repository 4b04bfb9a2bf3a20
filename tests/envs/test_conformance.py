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


class WrongSize(HyperGrid):
    def backward_mask(self, state: Tensor) -> Tensor:
        return torch.cat([state > 0, state[:, :1] > 0], 1)


class SourceWithParents(HyperGrid):
    def backward_mask(self, state: Tensor) -> Tensor:
        return state >= 0


class SinkWithActions(HyperGrid):
    def forward_mask(self, state: Tensor) -> Tensor:
        return torch.cat([state < self.height - 1, state[:, :1] > -2], 1)


class ExitStays(HyperGrid):
    def forward_step(self, state: Tensor, action: Tensor) -> Tensor:
        moved = super().forward_step(state, action)
        return torch.where((action == self.exit_action)[:, None], state, moved)


class TooShort(HyperGrid):
    def __init__(self, ndim: int, height: int) -> None:
        super().__init__(ndim, height)
        self.max_length = 2


class Orphans(HyperGrid):
    def backward_mask(self, state: Tensor) -> Tensor:
        return (state > 0) & (state.sum(1, keepdim=True) != 2)


class MissingParent(HyperGrid):
    def backward_mask(self, state: Tensor) -> Tensor:
        return (state > 0) & ~((state[:, :1] == 1) & (state > 1))


class ExtraParent(HyperGrid):
    def backward_mask(self, state: Tensor) -> Tensor:
        return (state > 0) | ((state > -1) & (state[:, :1] == 2))


class AnyLetter(CountOnes):
    def backward_mask(self, state: Tensor) -> Tensor:
        return (state[:, :1] >= 0).expand(-1, self.n_letters)


class UndoesTwo(HyperGrid):
    def undo(self, state: Tensor, move: Tensor) -> Tensor:
        return state - 2 * one_hot(move, self.n_dims)


class OffTheGrid(HyperGrid):
    def forward_mask(self, state: Tensor) -> Tensor:
        mask = torch.cat([state < self.height, torch.ones_like(state[:, :1]) > 0], 1)
        return mask & ~self.is_sink(state)[:, None]


class Indistinct(HyperGrid):
    def encode(self, state: Tensor) -> Tensor:
        return super().encode(state.sort(1).values)


class DoubleReward(HyperGrid):
    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        return super().log_reward(state).double()


class Unchecked(HyperGrid):
    def check_terminating(self, state: Tensor) -> None:
        pass


class MixesRows(HyperGrid):
    def encode(self, state: Tensor) -> Tensor:
        return super().encode(state) + state.float().mean()


class InPlace(HyperGrid):
    def move(self, state: Tensor, move: Tensor) -> Tensor:
        return state.add_(one_hot(move, self.n_dims))


class DefaultDevice(HyperGrid):
    def encode(self, state: Tensor) -> Tensor:
        return (state[:, :, None] == torch.arange(self.height)).flatten(1).float()


class LeftBehind(HyperGrid):
    def _rows(self, *args):  # as if tensors of the interface stayed on another device
        return super()._rows(*args).to("meta")


class WrongSpec(HyperGrid):
    def _observe(self, *args):
        td = super()._observe(*args)
        return td.set("log_reward", td["log_reward"].double())


class OneRowOnly(HyperGrid):
    def _observe(self, state, log_reward, condition, batch):
        return super()._observe(state, log_reward, condition, batch[:1])


class RewardsEverywhere(HyperGrid):
    def _exit_log_reward(self, state: Tensor, condition: Tensor | None, exits: Tensor) -> Tensor:
        return self.log_reward(state)


class Lenient(HyperGrid):
    def _check_legal(self, *args) -> None:
        pass


class ForgetfulLadder(Ladder):
    def sample_condition(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.rand(n, 2)


class SharedFingerprints(HyperGrid):
    def fingerprint(self, state: Tensor) -> Tensor:
        return state.sum(1)


class UpsideDown(HyperGrid):
    def score(self, state: Tensor, log_reward: Tensor | None = None) -> Tensor:
        return -super().score(state)


class UnnumberedModes(HyperGrid):
    def modes_reached(self, state: Tensor, log_reward: Tensor | None = None) -> Tensor:
        return self.mode_index(state)


class NeverEnds(HyperGrid):
    def states_of(self, action: Tensor, length: Tensor) -> Tensor:
        return super().states_of(action, torch.full_like(length, action.shape[1] + 1))


class NarrowRange(HyperGrid):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.state_range = (0, self.height - 1)  # the sink is below


class SharedKeys(HyperGrid):
    def state_key(self, state: Tensor) -> Tensor:
        return state.sum(1)


class Shortcut(HyperGrid):
    """Move 0 jumps two steps from the source, so that one state is in two layers."""

    def move(self, state: Tensor, move: Tensor) -> Tensor:
        jump = self.is_source(state) & (move == 0)
        return super().move(state, move) + jump[:, None] * one_hot(move, self.n_dims)


class HiddenStates(HyperGrid):
    def layers(self):
        return iter(list(super().layers())[:-1])


class Unordered(HyperGrid):
    def terminating_states(self) -> Tensor:
        return super().terminating_states().flip(0)


class Unnormalised(HyperGrid):
    def target_log_prob(self, condition: Tensor | None = None) -> Tensor:
        return super().target_log_prob() + 0.1


class LeakyFlow(HyperGrid):
    def policy_log_prob(self, log_pf, chunk_size: int = 1, condition=None) -> Tensor:
        return super().policy_log_prob(log_pf) - 0.1


class MissingMode(HyperGrid):
    def mode_index(self, state: Tensor) -> Tensor:
        return super().mode_index(state).clamp(max=0)


class StaleGraph(HyperGrid):
    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self.__dict__["_terminating_log_reward"] = torch.zeros(16, device="meta")
        return self


BROKEN = [
    (WrongSize, "test_attributes_agree"),
    (SourceWithParents, "test_source_has_no_parents"),
    (SinkWithActions, "test_sink_is_an_end"),
    (ExitStays, "test_exit_leads_to_sink"),
    (TooShort, "test_walks_end_within_max_length"),
    (Orphans, "test_backward_walks_end_in_source"),
    (MissingParent, "test_backward_step_undoes_each_legal_move"),
    (UndoesTwo, "test_backward_step_undoes_each_legal_move"),
    (AnyLetter, "test_forward_step_redoes_each_parent_move"),
    (Indistinct, "test_encode_tells_states_apart"),
    (DoubleReward, "test_log_reward_is_a_float32_vector"),
    (Unchecked, "test_log_reward_refuses_what_is_no_terminating_state"),
    (MixesRows, "test_rows_do_not_depend_on_each_other"),
    (NeverEnds, "test_states_are_made_again_from_actions"),
    (NarrowRange, "test_states_keep_to_their_range"),
    (InPlace, "test_inputs_are_left_alone"),
    (DefaultDevice, "test_results_stay_on_the_input_device"),
    (LeftBehind, "test_environment_moves_to_a_device"),
    (WrongSpec, "test_specs"),
    (RewardsEverywhere, "test_rollout_equals_the_functions"),
    (Lenient, "test_step_refuses_illegal_actions"),
    (ForgetfulLadder, "test_conditions_have_their_shape"),
    (SharedFingerprints, "test_fingerprints_tell_states_apart"),
    (UpsideDown, "test_scores_order_states_as_rewards_do"),
    (UnnumberedModes, "test_modes_reached_are_numbered"),
    (SharedKeys, "test_walks_stay_within_the_layers"),
    (OffTheGrid, "test_layers_hold_each_state_once"),
    (Shortcut, "test_layers_hold_each_state_once"),
    (HiddenStates, "test_walks_stay_within_the_layers"),
    (ExtraParent, "test_backward_mask_is_the_set_of_edges"),
    (Unordered, "test_terminating_states_are_indexed_in_order"),
    (Unnormalised, "test_target_is_the_normalised_reward"),
    (LeakyFlow, "test_policy_distribution_sums_to_one"),
    (MissingMode, "test_modes_are_where_the_reward_is_highest"),
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
    for path in folder.glob("*.py"):
        names = imported_names(path)
        assert not any(name.startswith(("pytest", "gfn_rb.envs.conformance")) for name in names)
    assert "pytest" in imported_names(folder / "conformance" / "interface.py")
