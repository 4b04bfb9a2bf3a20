import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from buffers.merging import member, merged
from factories import rows, seeded
from torchrl.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import StorageEnsemble
from torchrl.data.replay_buffers.writers import WriterEnsemble
from torchrl.envs.transforms import RenameTransform, Transform

from gfn_rb import load_checkpoint, save_checkpoint
from gfn_rb.buffers import (
    MergedReplayBuffer,
    fifo_buffer,
    reward_prioritized_buffer,
)
from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.samplers import PrioritySampler

LOG_REWARDS = [[0.0, 1.0, 2.0], [], [1.5] * 5]


class Marks(Transform):
    """Writes a number into the rows it sees on their way out."""

    def __init__(self, key, value):
        super().__init__()
        self.key, self.value = key, value

    def forward(self, tensordict):
        return tensordict.set(self.key, torch.full(tensordict.batch_size, self.value))


# Flat batches.


def test_a_transform_that_loses_rows_is_named():
    rb = MergedReplayBuffer(member([0.0] * 4), p="size")
    rb[0].append_transform(lambda rows: rows[: len(rows) // 2])
    with pytest.raises(ShapeError, match="member 0 must give one row per item, got batch size"):
        rb.sample(4)


# The habits of an ensemble.


def test_members_are_had_by_index():
    rb = merged(LOG_REWARDS)
    assert isinstance(rb, ReplayBufferEnsemble)
    assert len(rb) == 3
    assert rb.stats()["size"] == 8
    assert rb[0] is rb._rbs[0]
    assert rb[-1] is rb._rbs[2]
    assert rb[:] is rb
    assert repr(merged(LOG_REWARDS, p="size")).startswith("MergedReplayBuffer(")
    assert "p=size" in repr(merged(LOG_REWARDS, p="size"))
    assert rb[2, 1:3]["log_reward"].tolist() == [1.5, 1.5]
    outer = ReplayBufferEnsemble(rb, merged([[3.0], [4.0]]), sample_from_all=True, batch_size=4)
    first, second = outer.sample()["log_reward"].tolist()
    assert max(first) < 3.0 <= min(second)
    rb[1].extend(rows([7.0]))
    assert 1 in rb.sample(9)["buffer_id"]
    with pytest.raises(IndexError):
        rb[3]


@pytest.mark.parametrize(
    "index", [slice(0, 3, 2), [0, 2], range(0, 3, 2), torch.tensor([0, 2]), np.array([0, 2])]
)
@pytest.mark.parametrize("p", ["mass", [3.0, 1.0, 1.0]])
def test_some_members_make_a_merged_buffer(index, p):
    rb = merged(LOG_REWARDS, p=p, batch_size=30)
    some = rb[index]
    assert isinstance(some, MergedReplayBuffer)
    assert some._rbs == (rb[0], rb[2])
    shares = some.sampler.p
    assert shares == p if p == "mass" else shares.tolist() == pytest.approx([0.75, 0.25])
    assert some._rng is rb._rng
    assert set(some.sample()["buffer_id"].tolist()) == {0, 1}
    assert some[:, :2].batch_size == (2, 2)


def test_transforms_of_members_and_of_the_whole():
    rb = merged(LOG_REWARDS, p="size")
    rb[0].append_transform(Marks("mark", 1))
    rb[2].append_transform(Marks("mark", 2))
    rb.append_transform(RenameTransform(["mark"], ["renamed"]))
    batch = rb.sample(40)
    assert torch.equal(batch["renamed"], 1 + batch["buffer_id"] // 2)
    assert "mark" not in batch
    rb = MergedReplayBuffer(member([0.0]), transform=lambda td: td.set("y", td["x"] + 1))
    assert rb.sample(1)["y"].tolist() == [1]


@pytest.mark.parametrize("options", [{"sample_from_all": True}, {"num_buffer_sampled": 2}])
def test_torchrls_ensemble_of_presets_repeats_rows_of_a_small_member(options):
    small, large = reward_prioritized_buffer(8), reward_prioritized_buffer(8)
    small.extend(rows([0.0]))  # draws with replacement, the other without
    large.extend(rows([0.0] * 8))
    rb = ReplayBufferEnsemble(small, large, **options)
    for _ in range(8):
        batch = rb.sample(8)
        assert batch.batch_size == (2, 4)
        p = torch.tensor([1.0, 1 / 8])[batch["index", "buffer_ids"]]
        torch.testing.assert_close(batch["draw_log_prob"].exp(), p.expand_as(batch["log_reward"]))


def test_counts_of_members_that_count_none_are_absent():
    rb = merged(LOG_REWARDS)
    rb.sample(4)
    assert "drawn" not in rb.stats()
    counted = reward_prioritized_buffer(4, statistics=True)
    counted.extend(rows([0.0]))
    rb = MergedReplayBuffer(counted, member([]))
    rb.sample(4)
    assert rb.stats()["drawn"] == 4


def test_it_is_made_of_components_too():
    storages = [LazyTensorStorage(3), LazyTensorStorage(3)]
    made = [TensorDictReplayBuffer(storage=storage) for storage in storages]
    rb = MergedReplayBuffer(
        storages=StorageEnsemble(*storages, transforms=[Marks("mark", 1), None]),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler()),
        writers=WriterEnsemble(*(each.writer for each in made)),
    )
    assert rb.sampler.p is None  # as of members that do not all draw by reward
    for each in made:
        each.extend(rows([0.0] * 3))
    rb.empty()
    assert [len(each) for each in made] == [0, 0]
    rb[1].extend(rows([0.0] * 3))
    assert rb.sample(5)["buffer_id"].tolist() == [1] * 5


def test_writes_are_routed_by_key():
    rb = MergedReplayBuffer(member(capacity=4), member(capacity=4), routing_key="to")
    rb.extend(rows([0.0, 1.0, 2.0], to=torch.tensor([1, 0, 1])))
    assert rb[0][:]["log_reward"].tolist() == [1.0]
    assert rb[1][:]["log_reward"].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("p", ["mass", "size", [1, 2, 3]])
@pytest.mark.parametrize("way", ["dumps", "state_dict", "checkpoint", "pickle"])
def test_it_is_saved_and_goes_on_alike(p, way, tmp_path):
    rb = merged(LOG_REWARDS, p=p)
    other = merged([[0.0] * 3, [0.0], [0.0] * 5], p=None if p == "size" else [0, 0, 1], seed=9)
    other[1].empty()
    rb.sample(3)
    if way == "dumps":
        rb.dumps(tmp_path / "rb")
        other.loads(tmp_path / "rb")
    elif way == "state_dict":
        other.load_state_dict(copy.deepcopy(rb.state_dict()))
    elif way == "checkpoint":
        save_checkpoint(tmp_path / "rb", rb, step=3)
        assert load_checkpoint(tmp_path / "rb", other) == {"step": 3}
    else:
        other = pickle.loads(pickle.dumps(rb))
    shares = other.sampler.p
    assert torch.equal(shares, rb.sampler.p) if isinstance(shares, torch.Tensor) else shares == p
    for each in (rb, other):
        each[1].extend(rows([0.5]))
    for n in (4, 20):
        assert (rb.sample(n) == other.sample(n)).all()


def test_shares_of_another_number_of_members_are_refused_and_nothing_changes(tmp_path):
    rb, other = merged([[0.0], [0.0]], p=[1, 2]), merged([[0.0]] * 3, p="size", temperature=2.0)
    rb.sampler.dumps(tmp_path)
    before = other.sampler.state_dict()
    for load in (
        lambda: other.sampler.load_state_dict(rb.sampler.state_dict()),
        lambda: other.sampler.loads(tmp_path),
    ):
        with pytest.raises(CheckpointMismatchError, match="2 weights, expected one for each of 3"):
            load()
        assert other.sampler.state_dict() == before


def test_losses_find_the_members_that_their_rows_came_from():
    kinds = (PrioritySampler(alpha=1.0), RandomSampler(), PrioritySampler(alpha=1.0))
    rb = MergedReplayBuffer(*(member([0.0] * 3, each) for each in kinds), p="size")
    batch = rb.sample(100)
    assert {"priority_weight"} & set(batch.keys()) == set()  # not all members know it
    loss = (1 + batch["buffer_id"]) * 10 + batch["index"]
    rb.update_tensordict_priority(batch.set("td_error", loss.float()))
    held = [rb[i].sampler.state_dict()["priority"].tolist() for i in (0, 2)]
    assert held == [[10, 11, 12], [30, 31, 32]]
    weighed = rb[[0, 2]].sample(10)
    assert weighed["priority_weight"].shape == (10,)
    with pytest.raises(ShapeError, match=r"must have batch size \[n\], got \[2, 3\]"):
        rb.update_tensordict_priority(batch[:6].reshape(2, 3))
    for key in ("buffer_id", "index"):
        with pytest.raises(KeyMismatchError, match=f"data lacks '{key}'"):
            rb.update_tensordict_priority(batch.exclude(key))


def test_members_keep_their_state_and_their_generators():
    kept = reward_prioritized_buffer(3, generator=torch.Generator().manual_seed(1))
    kept.extend(rows([0.0, 1.0, 2.0]))
    generator = kept._rng
    rb = MergedReplayBuffer(kept, member([0.0]))
    assert kept.sampler._rng is kept.storage._rng is kept._rng is generator
    assert rb[0].extend(rows([-1.0])).tolist() == [-1]  # the writer knows what it keeps
    assert rb[0].extend(rows([5.0])).tolist() == [0]
    torch.manual_seed(0)
    one = rb.sample(4)
    torch.manual_seed(0)
    assert (rb.sample(4) == one).all()
    rb.set_rng(torch.Generator().manual_seed(5))
    assert kept.sampler._rng is rb[1].sampler._rng is rb._rng


def test_members_may_be_written_meanwhile_by_another_thread():
    # Rows and tags belong together: x is written as ten times the log-reward.
    rb = MergedReplayBuffer(*(fifo_buffer(64) for _ in range(2)), p="size")
    stop, failures = threading.Event(), []

    def write():
        i = 0
        while not stop.is_set():
            i += 1
            log_reward = torch.full((32,), float(i % 50))
            rb[i % 2].extend(rows(log_reward).set("x", log_reward.long() * 10))

    rb[0].extend(rows([0.0] * 64).set("x", torch.zeros(64, dtype=torch.int64)))
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(60):
            batch = rb.sample(32)
            if not torch.equal(batch["x"], batch["log_reward"].long() * 10):
                failures.append(batch)
    finally:
        stop.set()
        writer.join()
    assert not failures


def test_late_priorities_are_those_of_the_batch():
    members = [member([0.0] * 4, PrioritySampler(alpha=1.0, eps=0.0)) for _ in range(2)]
    merged = MergedReplayBuffer(*members, p="size", generator=seeded())
    batch = merged.sample(40)
    members[0].extend(rows([0.0, 0.0]))  # over two rows, which are then drawn anew
    merged.sample(40)
    merged.update_tensordict_priority(batch.set("td_error", torch.full((40,), 3.0)))
    late = (batch["buffer_id"] == 0) & (batch["index"] < 2)
    assert [rb.sampler.n_late for rb in members] == [int(late.sum()), 0]
    held = [rb.sampler._column.values(rb.storage).tolist() for rb in members]
    assert held == [[1, 1, 3, 3], [3, 3, 3, 3]]


# Copies.


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
@pytest.mark.parametrize("unique", [None, "x"])
def test_a_copy_takes_and_gives_rows_apart_from_the_original(duplicate, unique):
    members = [reward_prioritized_buffer(8, unique=unique) for _ in range(2)]
    rb = MergedReplayBuffer(*members, routing_key="x", generator=seeded(0))
    rb.extend(rows([0.0, 1.0], x=torch.tensor([0, 1])))
    other = duplicate(rb)
    drawn = rb.sample(20)["log_reward"]
    assert other.sample(20)["log_reward"].equal(drawn)
    added = other.extend(rows([9.0], x=torch.tensor([1])))
    other[0].extend(rows([20.0], x=torch.tensor([5])))
    assert (added["buffer_ids"].tolist(), [len(rb[0]), len(rb[1])]) == ([1], [1, 1])
    assert other[0][:]["log_reward"].tolist() == [0.0, 20.0]
    assert other[1][:]["log_reward"].tolist() == ([1.0, 9.0] if unique is None else [9.0])
    assert other.sample(50)["log_reward"].max() == 20.0


def test_a_copy_of_a_shared_buffer_is_refused():
    for rb in (
        MergedReplayBuffer(member([0.0]), shared=True),
        MergedReplayBuffer(fifo_buffer(4, shared=True)),
        fifo_buffer(4, shared=True),
    ):
        with pytest.raises(ArgumentError, match="save_checkpoint and load_checkpoint copy"):
            copy.deepcopy(rb)
