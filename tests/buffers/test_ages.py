"""Rows know which version of the policy made them: what is too old goes, and ages are told."""

import random
from functools import partial

import pytest
import torch
from factories import DEVICES, Ladder, rows, seeded, trajectories, without_waits
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.collectors import Collector

import gfn_rb
from gfn_rb import (
    ActionSampler,
    MergedReplayBuffer,
    PackTrajectories,
    RaggedStorage,
    fifo_buffer,
)
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.policies import ForwardPolicy

PRESETS = {
    "best": gfn_rb.reward_prioritized_buffer,
    "best objects": partial(gfn_rb.reward_prioritized_buffer, unique="x"),
    "diverse": partial(gfn_rb.diverse_buffer, features="x", cutoff_distance=0.0),
    "newest": gfn_rb.fifo_buffer,
    "newest objects": partial(gfn_rb.fifo_buffer, unique="x"),
}


def versioned(version, log_reward=None, start=0):
    version = torch.as_tensor(version)
    log_reward = version.float() if log_reward is None else log_reward
    return rows(log_reward, start, policy_version=version)


def kept_by_rule(preset, stored, batch, newest, max_age, capacity):
    """What is stored after a batch: (x, version), each x once, so that no object repeats."""
    fresh = [row for row in stored + batch if row[1] >= newest - max_age]
    if "newest" in preset:
        return fresh[-capacity:]
    ranked = sorted(fresh, key=lambda row: row[2])  # stable: the newest of equal ones last
    chosen = {row[0] for row in ranked[-capacity:]}
    return [row for row in fresh if row[0] in chosen]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_too_old_is_dropped_and_never_drawn(preset, device):
    for seed in range(4):
        rng = random.Random(seed)
        capacity, max_age, newest, serial = rng.choice([1, 5, 12]), rng.randrange(4), 0, 0
        rb = PRESETS[preset](capacity, max_age=max_age, device=device)
        stored = []
        for _ in range(12):
            n = rng.randrange(6)
            batch = [
                (serial + i, max(0, newest + rng.randrange(-5, 3)), rng.choice([-1.0, 0.0, 2.0]))
                for i in range(n)
            ]
            serial += n
            _, version, key = zip(*batch, strict=True) if batch else ((), (), ())
            data = versioned(
                torch.tensor(version, dtype=torch.int64), torch.tensor(key), serial - n
            )
            data = data.to(device)
            slots = [rb.add(data[0])] if n == 1 else rb.extend(data).tolist()
            newest = max([newest, *version])
            if rng.random() < 0.2:
                newest += 1
                rb.policy_version = newest
                assert rb.policy_version == newest
                stored = kept_by_rule(preset, stored, batch, newest - 1, max_age, capacity)
                batch, slots = [], None
            stored = kept_by_rule(preset, stored, batch, newest, max_age, capacity)
            held = rb[:]["x"].tolist() if len(rb) else []
            assert sorted(held) == sorted(row[0] for row in stored), seed
            if slots is not None:  # each row is where extend said
                named = {slot: row[0] for slot, row in zip(slots, batch, strict=True) if slot >= 0}
                assert all(held[slot] == x for slot, x in named.items())
            if stored:
                assert int(rb.sample(4)["policy_version"].min()) >= newest - max_age
        stats = rb.stats()
        assert stats["offered"] == serial
        assert stats["accepted"] - stats["evicted"] == stats["size"] == len(stored)


@pytest.mark.parametrize("limit", [{"max_age": 2}, {"statistics": True}])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_refused_batch_makes_nothing_older(preset, limit):
    rb = PRESETS[preset](20, **limit)
    rb.extend(versioned([1, 2, 3]))
    before = rb[:], rb.stats()
    batch = versioned([9, 9])
    for refused in (batch.exclude("x"), batch.clone().set("y", torch.zeros(2))):
        with pytest.raises(KeyMismatchError):
            rb.extend(refused)
        with pytest.raises(KeyMismatchError):
            rb.add(refused[0])
    assert (rb[:] == before[0]).all()
    assert rb.stats() == before[1]


def test_ages_are_those_of_what_was_drawn():
    rb = gfn_rb.reward_prioritized_buffer(20, statistics=True, generator=seeded())
    rb.extend(versioned(torch.arange(10)))
    ages = [9 - int(v) for _ in range(5) for v in rb.sample(7)["policy_version"]]
    rb.policy_version = 12
    ages += [12 - int(v) for v in rb.sample(7)["policy_version"]]
    stats = rb.stats()
    assert stats["mean_age"] == sum(ages) / len(ages)
    assert stats["largest_age"] == max(ages)
    assert stats["policy_version"] == 12
    rb.statistics.forget_ages()
    assert "mean_age" not in rb.stats()
    assert rb.stats()["drawn"] == 42


def test_the_largest_age_is_that_of_all_draws():
    rb = gfn_rb.fifo_buffer(1, statistics=True)
    for version, newest in ((0, 3), (4, 4)):
        rb.extend(versioned([version]))
        rb.policy_version = newest
        rb.sample(1)
    assert (rb.stats()["largest_age"], rb.stats()["mean_age"]) == (3, 1.5)


def test_what_a_merged_buffer_draws_counts_at_its_members():
    members = [gfn_rb.reward_prioritized_buffer(20, statistics=True) for _ in range(2)]
    merged = MergedReplayBuffer(*members, p="mass", generator=seeded())
    for i, rb in enumerate(members):
        rb.extend(versioned(torch.arange(5 * i, 5 * i + 5)))
    batch = merged.sample(30)
    newest = torch.tensor([4, 9])[batch["buffer_id"]]
    age = newest - batch["policy_version"]
    drawn = [int((batch["buffer_id"] == i).sum()) for i in range(2)]
    assert [rb.stats()["drawn"] for rb in members] == drawn
    stats = merged.stats()
    assert (stats["offered"], stats["drawn"], stats["size"]) == (10, 30, 10)
    assert stats["mean_age"] == float(age.double().mean())
    assert stats["largest_age"] == int(age.max())


@pytest.mark.parametrize(
    "preset",
    [gfn_rb.transition_buffer, gfn_rb.state_buffer, gfn_rb.terminating_state_buffer],
)
def test_parts_of_trajectories_have_their_version(preset):
    rb = preset(20)
    rb.extend(trajectories([1, 2, 3], length=3).set("policy_version", torch.tensor([4, 5, 6])))
    drawn = rb.sample(40)
    again = preset(100)
    if preset is not gfn_rb.terminating_state_buffer:
        assert torch.equal(drawn["policy_version"], drawn["episode"] + 4)
        drawn = drawn.exclude("index")
    again.extend(drawn)
    assert set(again[:]["policy_version"].tolist()) == set(drawn["policy_version"].tolist())


def test_trajectories_of_a_collector_have_the_version_of_their_first_action():
    env = Ladder(4, (3,))
    policy = ActionSampler(ForwardPolicy(env), generator=seeded())
    rb = gfn_rb.fifo_buffer(200, max_length=env.max_length, transform=PackTrajectories(env))
    collector = Collector(
        env,
        policy,
        frames_per_batch=18,
        total_frames=72,
        track_policy_version=True,
        auto_register_policy_transforms=False,
    )
    first, done = {}, []
    for batch in collector:
        ids, version = batch["collector", "traj_ids"], batch["next", "policy_version"]
        for i, v in zip(ids.reshape(-1).tolist(), version.reshape(-1).tolist(), strict=True):
            first.setdefault(i, v)
        done += ids[batch["next", "done"][..., 0]].tolist()
        rb.extend(batch)
        collector.update_policy_weights_()
    collector.shutdown()
    versions = rb[:]["policy_version"].tolist()
    assert sorted(versions) == sorted(first[i] for i in done)
    assert len(set(versions)) > 2


@pytest.mark.cuda
def test_counting_ages_waits_for_no_device():
    rb = gfn_rb.fifo_buffer(
        8, statistics=True, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    rb.extend(versioned(torch.arange(8)).to("cuda"))
    batch = rb.sample(4)
    with without_waits():
        rb.statistics.count_ages(batch["policy_version"])
        rb.statistics.note_version(batch["policy_version"])
    assert rb.stats()["drawn"] == 4


UUID = "2f8d1c1e-uuid"


@pytest.mark.parametrize("limits", [{"max_age": 2}, {"statistics": True}], ids=str)
@pytest.mark.parametrize(
    ("version", "got"),
    [
        (NonTensorStack(UUID, UUID), "text"),
        (NonTensorData(UUID, batch_size=[2]), "text"),
        (torch.tensor([0.5, 1.5]), "numbers of torch.float32"),
    ],
    ids=["each", "all", "real"],
)
def test_versions_that_do_not_count_are_refused_in_words(version, got, limits):
    for storage in (None, RaggedStorage(9, {"policy_version": 40}, text=["policy_version"])):
        rb = fifo_buffer(9, storage=storage, **limits)
        rows = TensorDict({"x": torch.zeros(2), "policy_version": version}, [2])
        for write in (rb.extend, lambda data, rb=rb: rb.add(data[0])):
            with pytest.raises(ArgumentError, match=rf"must be integers .* got {got}: .*PolicyV"):
                write(rows)
        assert len(rb) == rb.stats()["offered"] == 0


def test_several_versions_of_a_row_are_refused():
    rb = fifo_buffer(9, max_age=2)
    with pytest.raises(ShapeError, match=r"one integer per row, got shape \[2, 3\]"):
        rb.extend({"x": torch.zeros(2), "policy_version": torch.zeros(2, 3, dtype=torch.int64)})
    assert len(rb) == 0


@pytest.mark.parametrize("version", ["new", None, 1.5, True])
def test_a_version_that_does_not_count_cannot_be_assigned(version):
    rb = fifo_buffer(9, max_age=2)
    rb.policy_version = torch.tensor(3)
    with pytest.raises(ArgumentError, match="policy_version must be an integer"):
        rb.policy_version = version
    assert rb.policy_version == 3
