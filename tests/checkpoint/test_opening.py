"""A buffer is opened from its file alone, and goes on as the saved one does."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from factories import assert_equal, objects, seeded
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)

from gfn_rb import (
    DiversityWriter,
    FIFOWriter,
    GroupSampler,
    MergedReplayBuffer,
    PrioritySampler,
    QuantileRewardSampler,
    RaggedStorage,
    RankRewardSampler,
    RecencySampler,
    RewardPrioritizedWriter,
    Sampler,
    Trajectories,
    diverse_buffer,
    fifo_buffer,
    open_buffer,
    reward_prioritized_buffer,
    save_checkpoint,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.buffers import RateLimiter
from gfn_rb.checkpoint import Journal, Secret
from gfn_rb.checkpoint.description import description_of
from gfn_rb.envs import HyperGrid
from gfn_rb.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
)
from gfn_rb.policies import ForwardPolicy

ENV = HyperGrid(2, 5)
diverse_buffer = partial(diverse_buffer, cutoff_distance=0.0)  # no duplicates
PATHS = [reward_prioritized_buffer, diverse_buffer, fifo_buffer]


class OwnGrid(HyperGrid):
    """An environment outside gfn_rb."""


def state_of(rows):
    """Features that a file can name."""
    return rows["state"].float()


@pytest.fixture(scope="module")
def walks() -> Trajectories:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Sampler(ForwardPolicy(ENV)).sample_trajectories(ENV, n=40)


def assert_goes_on(rb, opened, data) -> None:
    """Assert that two buffers hold the same, and do the same from now on."""
    assert type(opened) is type(rb)
    for _ in range(2):
        for one, other in zip(members(rb), members(opened), strict=True):
            assert_equal(one[:], other[:])
        assert_equal(rb.sample(5)["index"], opened.sample(5)["index"])
        for each in (rb, opened):
            members(each)[0].extend(data.clone())
    assert opened.batch_size == rb.batch_size
    assert_equal(description_of(rb), description_of(opened))


def members(rb):
    return list(rb._rbs) if isinstance(rb, MergedReplayBuffer) else [rb]


@pytest.mark.parametrize("compact", [None, "narrow", "rebuild"])
@pytest.mark.parametrize(
    "preset", [*PATHS, terminating_state_buffer, transition_buffer, state_buffer]
)
def test_a_buffer_of_any_preset_opens_and_continues(preset, compact, walks, tmp_path) -> None:
    if compact == "rebuild" and preset not in PATHS:
        pytest.skip("has no paths")
    options = {"max_length": 9} if preset in PATHS else {}
    rb = preset(25, compact=compact, env=ENV, generator=seeded(), **options)
    rb.extend(walks[:30])
    save_checkpoint(tmp_path / "rb", rb)
    assert_goes_on(rb, open_buffer(tmp_path / "rb"), walks[30:].to_tensordict())


OPTIONS = {
    "statistics": lambda: {"statistics": True, "batch_size": 5},
    "ages": lambda: {"max_age": 3},
    "rates": lambda: {"rate_limiter": RateLimiter(1.0, tolerance=100.0)},
    "priorities": lambda: {"sampler": PrioritySampler(alpha=0.7)},
    "ranks": lambda: {"sampler": RankRewardSampler(k=0.1)},
    "quantiles": lambda: {"sampler": QuantileRewardSampler(top_fraction=0.2)},
    "recency": lambda: {"sampler": RecencySampler(decay=0.9, key="policy_version")},
    "groups drawn": lambda: {"sampler": GroupSampler("state", num_groups=5)},
    "groups kept": lambda: {"group": "state", "per_group": 2},
    "unique": lambda: {"unique": ["state", "log_reward"], "on_duplicate": "keep"},
    "a writer": lambda: {"writer": RewardPrioritizedWriter(tie="oldest", largest=False)},
    "diverse": lambda: {"writer": DiversityWriter(features=state_of, cutoff_distance=1.5, p=2)},
    "the newest": lambda: {"writer": FIFOWriter("state")},
    "on disk": lambda: {"storage": LazyMemmapStorage(8)},
    "ragged": lambda: {"storage": RaggedStorage(8, {"state": 4}, page_size=2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_buffer_with_any_options_opens_and_continues(name, tmp_path) -> None:
    rb = reward_prioritized_buffer(8, generator=seeded(), **OPTIONS[name]())
    rows = objects([4, 1, 9, 4, 3, 2, 7, 7, 5, 8]).set("policy_version", torch.arange(10))
    rb.extend(rows)
    save_checkpoint(tmp_path / "rb", rb)
    opened = open_buffer(tmp_path / "rb", trust=name == "diverse")
    more = objects([6, 6, 1, 0]).set("policy_version", torch.arange(10, 14))
    assert_goes_on(rb, opened, more)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_buffers_made_by_hand(kind, tmp_path) -> None:
    parts = {"storage": LazyTensorStorage(8), "writer": FIFOWriter(), "batch_size": 2}
    rb = kind(**parts, generator=seeded())
    rb.extend(objects(range(5)))
    save_checkpoint(tmp_path / "rb", rb)
    opened = open_buffer(tmp_path / "rb")
    assert type(opened) is kind
    assert_equal(opened[:], rb[:])
    assert opened.batch_size == 2


def test_a_merged_buffer_opens_and_continues(tmp_path) -> None:
    made = [fifo_buffer(8), fifo_buffer(9), terminating_state_buffer(5, batch_size=2)]
    rb = MergedReplayBuffer(*made, p=[1.0, 2.0, 3.0], batch_size=5, generator=seeded())
    for i, member in enumerate(made):
        member.extend(objects(range(i, i + 4)))
    save_checkpoint(tmp_path / "rb", rb)
    assert_goes_on(rb, open_buffer(tmp_path / "rb"), objects([7, 1]))


def test_empty_buffers_folders_and_secrets(tmp_path) -> None:
    rb, secret = reward_prioritized_buffer(4), Secret(b"x" * 32)
    save_checkpoint(tmp_path / "rb.gfnrb", rb, secret=secret)
    assert not len(open_buffer(tmp_path, secret=secret))
    with pytest.raises(SecretError):
        open_buffer(tmp_path)
    save_checkpoint(tmp_path / "checkpoint.gfnrb", fifo_buffer(7))
    assert open_buffer(tmp_path).storage.max_size == 7


def test_a_rollout_is_not_recorded(tmp_path) -> None:
    rb = terminating_state_buffer(4, regenerate=lambda rows: rows)
    rb.extend(objects([1]))
    save_checkpoint(tmp_path / "rb", rb)
    assert open_buffer(tmp_path / "rb").sample(1)["state"].tolist() == [[1, 0]]


@pytest.mark.parametrize("name", ["statistics", "groups kept", "diverse", "ragged"])
def test_a_closed_journal_opens_as_the_buffer_it_is_of(name, tmp_path) -> None:
    rb = reward_prioritized_buffer(8, generator=seeded(), **OPTIONS[name]())
    path = tmp_path / "journal"
    journal = Journal(rb, path)
    rb.extend(objects([4, 1, 9, 4, 3]))
    rb.extend(objects([2, 7, 7, 5, 8]))
    with pytest.raises(ArgumentError, match=r"a journal that no process uses, got .*/journal"):
        open_buffer(path)
    journal.close()
    content = path.read_bytes()
    opened = open_buffer(path, trust=name == "diverse")
    assert path.read_bytes() == content
    assert_equal(opened[:], rb[:])
    opened.extend(objects([6, 11]))  # which no journal keeps
    assert open_buffer(path, trust=name == "diverse")[:]["log_reward"].max() < 11


def test_a_journal_of_code_that_is_not_trusted(tmp_path) -> None:
    rb = diverse_buffer(4, features=state_of)
    with closing(Journal(rb, tmp_path / "journal")):
        rb.extend(objects([1]))
    with pytest.raises(CheckpointError, match="test_opening:state_of, which is not of gfn_rb"):
        open_buffer(tmp_path / "journal")


# What a file names outside gfn_rb.


@pytest.mark.parametrize("compact", ["narrow", "rebuild"])
def test_an_environment_of_the_user(compact, walks, tmp_path, monkeypatch) -> None:
    rb = fifo_buffer(50, max_length=9, compact=compact, env=OwnGrid(2, 5))
    rb.extend(walks)
    save_checkpoint(tmp_path / "rb", rb)
    monkeypatch.setattr(OwnGrid, "__new__", lambda *_, **__: pytest.fail("it was run"))
    with pytest.raises(CheckpointError, match="OwnGrid needs them: pass env=, or trust=True"):
        open_buffer(tmp_path / "rb")
    monkeypatch.undo()
    for options in ({"env": OwnGrid(2, 5)}, {"trust": True}):
        assert_equal(open_buffer(tmp_path / "rb", **options)[:], rb[:])
    with pytest.raises(
        CheckpointMismatchError, match=r"of OwnGrid with states .*, expected .* of HyperGrid"
    ):
        open_buffer(tmp_path / "rb", env=HyperGrid(2, 5))


RB = "gfn_rb.buffers.replay_buffer:GFNReplayBuffer"
STORAGE = "gfn_rb.storages.tensors:RowTensorStorage"


def edited(path: Path, description, monkeypatch) -> Path:
    monkeypatch.setattr("gfn_rb.checkpoint.buffers.description_of", lambda rb: description)
    save_checkpoint(path, fifo_buffer(4))
    return path


@pytest.mark.parametrize(
    ("path", "trust", "message"),
    [
        ("os:system", False, "which is not of gfn_rb: trust=True"),
        ("os:system", True, "os:system is no part of a buffer"),
        ("gfn_rb.checkpoint:save_state", False, "save_state is no part of a buffer"),
        ("gfn_rb.checkpoint:Journal", False, "Journal is no part of a buffer"),
        ("gfn_rb.nowhere:Thing", False, "Thing is no part of a buffer"),
        ("gfn_rb.checkpoint:Journal", True, "Journal is no part of a buffer"),
        (3, False, "3, which is not of gfn_rb"),
    ],
)
def test_what_is_no_part_of_a_buffer_is_not_called(
    path, trust, message, tmp_path, monkeypatch
) -> None:
    described = {"class": path, "arguments": {"command": "true"}}
    file = edited(tmp_path / "rb", described, monkeypatch)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_buffer(file, trust=trust)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (None, "are not recorded: it is of gfn_rb 0.3 or older; make the buffer and call"),
        ({"unknown": "why"}, "are not recorded: why"),
        ({"class": RB}, "make no buffer"),
        ({"class": RB, "arguments": {"x": 1}}, "GFNReplayBuffer takes no x from a file"),
        ({"class": RB, "arguments": {"max_age": -1}}, "make no buffer: ArgumentError: max_age"),
        ({"class": STORAGE, "arguments": {}}, "make no buffer"),
        (
            {"class": STORAGE, "arguments": {"max_size": 4}},
            "no buffer",
        ),
    ],
)
def test_descriptions_that_make_no_buffer(described, message, tmp_path, monkeypatch) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        open_buffer(edited(tmp_path / "rb", described, monkeypatch))
