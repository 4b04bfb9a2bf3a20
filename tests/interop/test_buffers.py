"""Our buffers behind torchgfn's names hold what torchgfn's do, add for add."""

import os
import zipfile

import pytest
import torch
from statistics_of_draws import chi_square_p

theirs = pytest.importorskip("gfn.containers")

from interop.torchgfn_items import (  # noqa: E402
    GRID,
    KINDS,
    WARM,
    assert_same,
    of_kind,
    rollouts,
    terminating,
    walks,
)

import gfn_rb.interop.torchgfn as ours  # noqa: E402
from gfn_rb.errors import ArgumentError, CheckpointError  # noqa: E402

BUFFERS = {
    "fifo": ("ReplayBuffer", {}),
    "prioritised": ("ReplayBuffer", {"prioritized_capacity": True}),
    "diverse": ("NormBasedDiversePrioritizedReplayBuffer", {"cutoff_distance": 0.0}),
    "diverse 1": ("NormBasedDiversePrioritizedReplayBuffer", {"cutoff_distance": 1.0}),
    "diverse p=2": (
        "NormBasedDiversePrioritizedReplayBuffer",
        {"cutoff_distance": 1.5, "p_norm_distance": 2.0},
    ),
    "undiverse": ("NormBasedDiversePrioritizedReplayBuffer", {"cutoff_distance": -1.0}),
    "terminating": ("TerminatingStateBuffer", {"prioritized_capacity": True}),
}


def pair(name, capacity, env=GRID, **options):
    kind, more = BUFFERS[name]
    return tuple(
        getattr(module, kind)(env, capacity, **more, **options) for module in (ours, theirs)
    )


class StableTorch:
    """torch, but argsort keeps equal numbers in order, of which it otherwise promises none."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def argsort(values, descending=False):
        return torch.argsort(values, descending=descending, stable=True)


def batches(kind, name, env, n_adds, n, ties=True):
    for trajectories in walks(env, n_adds, n, ties):
        container = of_kind(kind, trajectories)
        only = name.startswith(("diverse", "terminating"))
        yield terminating(container) if only else container


def assert_same_after_every_add(mine, other, containers):
    for container in containers:
        mine.add(container)
        other.add(container)
        assert len(mine) == len(other)
        assert_same(mine.training_container, other.training_container)


ADDS = int(os.environ.get("GFN_RB_ADDS", "0"))  # how many at least: the long form
# Capacity, trajectories in a batch, adds: the buffer is full before the last ones.
SIZES = [(10, 16, 9), (100, 24, 9), (1000, 160, 9), (10_000, 2100, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize(("capacity", "n", "n_adds"), SIZES)
def test_contents_are_torchgfns_after_every_add(
    kind, name, capacity, n, n_adds, monkeypatch
) -> None:
    monkeypatch.setattr("gfn.containers.replay_buffer.torch", StableTorch())
    containers = batches(kind, name, GRID, max(n_adds, ADDS), n)
    assert_same_after_every_add(*pair(name, capacity), containers)


@pytest.mark.parametrize("kind", ["trajectories", "states"])
@pytest.mark.parametrize("name", ["prioritised", "diverse", "diverse 1", "terminating"])
@pytest.mark.parametrize(("capacity", "n", "n_adds"), SIZES[:3])
def test_contents_are_torchgfns_where_rewards_differ(kind, name, capacity, n, n_adds) -> None:
    containers = map(terminating, batches(kind, name, GRID, n_adds, n, ties=False))
    assert_same_after_every_add(*pair(name, capacity), containers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BUFFERS)
def test_contents_are_torchgfns_under_conditions(kind, name, monkeypatch) -> None:
    monkeypatch.setattr("gfn.containers.replay_buffer.torch", StableTorch())
    assert_same_after_every_add(*pair(name, 30, WARM), batches(kind, name, WARM, 5, 12))


def test_width_grows_by_itself_and_is_trimmed() -> None:
    mine, other = pair("fifo", 20)
    for longest in (3, 9, 5, 30, 31, 2):
        trajectories = rollouts(n=40)
        short = trajectories[trajectories.terminating_idx <= longest]
        assert_same_after_every_add(mine, other, [short[:4]])


def test_what_is_added_is_cut_off_from_gradients() -> None:
    for kind in KINDS:
        container = of_kind(kind, rollouts(n=4))
        container._log_rewards = container.log_rewards.clone().requires_grad_()
        for name in ("fifo", "prioritised"):
            mine = pair(name, 3)[0]
            for _ in range(2):
                mine.add(container)
            assert not mine.training_container.log_rewards.requires_grad
            assert not mine.sample(2).log_rewards.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_uniform_draws_are_distinct(kind) -> None:
    buffer = ours.ReplayBuffer(GRID, 1000)
    container = of_kind(kind, rollouts(n=40))
    container._log_rewards = torch.arange(len(container)).float()
    buffer.add(container)
    for n in (3, len(buffer) // 2, len(buffer) + 5):
        drawn = buffer.sample(n)
        assert type(drawn) is type(container)
        assert len(drawn.log_rewards.unique()) == len(drawn) == min(n, len(buffer))
    torch.manual_seed(0)
    first = buffer.sample(3).log_rewards
    torch.manual_seed(0)
    assert buffer.sample(3).log_rewards.equal(first)


def test_draws_by_reward_follow_the_softmax() -> None:
    for n, total in ((1, 1000), (8, 125)):  # one by one, and more than there are: with replacement
        buffer = ours.ReplayBuffer(GRID, 10, prioritized_sampling=True)
        container = rollouts(n=5)
        container._log_rewards = torch.arange(5.0)
        buffer.add(container)
        torch.manual_seed(0)
        drawn = torch.cat([buffer.sample(n).log_rewards for _ in range(total)]).long().bincount()
        assert chi_square_p(drawn, torch.arange(5.0).softmax(0)) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fifo", "prioritised"])
@pytest.mark.parametrize("file", ["rows.pt", "rows", ""])
def test_saved_buffers_are_loaded_into_fresh_ones_and_go_on(kind, name, file, tmp_path) -> None:
    mine, other = pair(name, 30, WARM)
    first, second = (of_kind(kind, rollouts(WARM, 12, ties=False)) for _ in range(2))
    if name == "prioritised":
        first, second = terminating(first), terminating(second)
    mine.add(first)
    other.add(first)
    mine.save(str(tmp_path / file))
    fresh = pair(name, 30, WARM)[0]
    fresh.load(str(tmp_path / file))
    for buffer in (fresh, other):
        buffer.add(second)
    assert_same(fresh.training_container, other.training_container)


def test_files_go_both_ways(tmp_path) -> None:
    for kind in KINDS:
        mine, other = pair("fifo", 200)
        other.add(of_kind(kind, rollouts(n=8)))
        other.save(str(tmp_path / "theirs.pt"))
        mine.load(str(tmp_path / "theirs.pt"))
        assert_same(mine.training_container, other.training_container)
        mine.save(str(tmp_path / "ours.pt"))
        assert_same(
            type(other.training_container).load(GRID, tmp_path / "ours.pt"),
            other.training_container,
        )


def test_errors_are_torchgfns() -> None:
    for module in (ours, theirs):
        buffer = module.ReplayBuffer(GRID, 5)
        buffer.add(rollouts(n=3))
        assert buffer.device == GRID.device
        assert "containing 3 Trajectories" in repr(buffer)
        with pytest.raises(AssertionError):
            buffer.add(of_kind("states", rollouts(n=2)))
        backward = rollouts(n=2)
        backward.is_backward, backward._log_rewards = True, None
        with pytest.raises(ValueError, match="log_rewards must be defined"):
            module.ReplayBuffer(GRID, 5, prioritized_capacity=True).add(backward)
    drawn = ours.ReplayBuffer(GRID, 5, prioritized_sampling=True)
    drawn.add(backward)
    with pytest.raises(ValueError, match="must be defined for prioritized sampling"):
        drawn.sample(1)


def test_backward_trajectories_stay_backward() -> None:
    backward = rollouts(n=4)
    backward.is_backward, backward._log_rewards = True, None
    buffer = ours.ReplayBuffer(GRID, 3)
    buffer.add(backward)
    assert buffer.training_container.is_backward
    assert buffer.sample(2).log_rewards is None


def test_rewards_that_were_not_asked_for_are_not() -> None:
    trajectories = rollouts(n=4)
    trajectories._log_rewards = None
    buffer = ours.ReplayBuffer(GRID, 3)
    buffer.add(trajectories)
    assert buffer.training_container._log_rewards is None
    torch.testing.assert_close(buffer.training_container.log_rewards, trajectories[-3:].log_rewards)


def test_a_container_takes_the_place_of_what_is_stored() -> None:
    buffer = ours.ReplayBuffer(GRID, 5)
    assert buffer.training_container is None
    buffer.add(rollouts(n=4)[:0])
    assert isinstance(buffer.training_container, theirs.Trajectories)
    buffer.training_container = of_kind("states", rollouts(n=2))[:3]
    assert len(buffer) == len(buffer.training_container) == 3
    buffer.training_container = None
    assert len(buffer) == 0
    assert "empty" in repr(buffer)


def test_times_are_noted_on_request() -> None:
    buffer = ours.ReplayBuffer(GRID, 5, timing=True)
    buffer.add(rollouts(n=4))
    buffer.sample(2)
    assert [*map(len, buffer.timing_data.values())] == [1, 1]
    assert "local_add: total=" in buffer.timing_log()
    assert "count=1" in buffer.timing_log()


@pytest.mark.parametrize("name", ["fifo", "prioritised"])
def test_a_file_longer_than_the_capacity_is_cut(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("gfn.containers.replay_buffer.torch", StableTorch())
    first, second = walks(GRID, 2, 20)
    long = pair("fifo", 100)[1]
    long.add(first)
    long.save(str(tmp_path / "long.pt"))
    mine, other = pair(name, 8)
    other.add(second)
    for buffer in (mine, other):
        buffer.load(str(tmp_path / "long.pt"))
    assert (len(mine), len(other)) == (8, 20)
    assert_same_after_every_add(mine, other, [second])


def test_unreadable_files_change_nothing(tmp_path) -> None:
    buffer = ours.ReplayBuffer(GRID, 5)
    buffer.add(rollouts(n=3))
    torch.save({"states": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"a": torch.zeros(100_000)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for each in plain.namelist():
            packed.writestr(each, plain.read(each))
    for name, why in {
        "other.pt": "contains no StatesContainer",
        "list.pt": "must contain a dictionary, got a list",
        "packed.pt": "must not be compressed",
        "missing.pt": "missing.pt",
    }.items():
        with pytest.raises(CheckpointError, match=why):
            buffer.load(str(tmp_path / name))
        assert len(buffer) == 3


CHANGES = {
    "keep the best": ("fifo", "prioritized_capacity", True),
    "keep the newest": ("prioritised", "prioritized_capacity", False),
    "of states": ("terminating", "prioritized_capacity", False),
    "further apart": ("diverse", "cutoff_distance", 2.0),
    "closer": ("diverse p=2", "cutoff_distance", 0.0),
    "no longer apart": ("diverse 1", "cutoff_distance", -1.0),
    "by another norm": ("diverse 1", "p_norm_distance", 4.0),
    "by reward": ("fifo", "prioritized_sampling", True),
}


@pytest.mark.parametrize("when", [0, 1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_assigned_attributes_count_from_the_next_add(change, when, monkeypatch) -> None:
    monkeypatch.setattr(theirs.replay_buffer, "torch", StableTorch())
    torch.manual_seed(0)
    name, attribute, value = CHANGES[change]
    mine, other = pair(name, 20)
    for i, container in enumerate(batches("trajectories", name, GRID, 6, 8)):
        if i == when:
            setattr(mine, attribute, value)
            setattr(other, attribute, value)
            assert getattr(mine, attribute) == value
            if len(other):
                assert_same(mine.training_container, other.training_container)
        mine.add(container)
        other.add(container)
        assert_same(mine.training_container, other.training_container)


def test_attributes_that_are_fixed_name_the_option(unchecked) -> None:
    rb, diverse = ours.ReplayBuffer(GRID, 5), ours.NormBasedDiversePrioritizedReplayBuffer(GRID, 5)
    with pytest.raises(ArgumentError, match=r"capacity cannot be assigned, it stays 5: make"):
        rb.capacity = 10
    with pytest.raises(ArgumentError, match="env cannot be assigned"):
        rb.env = WARM
    with pytest.raises(ArgumentError, match=r"prioritized_capacity cannot be assigned.* True"):
        diverse.prioritized_capacity = False
    with pytest.raises(ArgumentError, match="cutoff_distance"):
        diverse.cutoff_distance = "far"
    with pytest.raises(ArgumentError, match="baseline_refresh_after"):
        rb.baseline_refresh_after = 0
    assert (rb.capacity, rb.env, diverse.cutoff_distance) == (5, GRID, 0.0)
    assert diverse.prioritized_capacity
