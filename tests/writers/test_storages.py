"""Writers, and the samplers beside them, over rows and storages of every kind."""

import math

import pytest
import torch
from factories import DEVICES, journaled, seeded
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from torchrl.data import (
    CompressedListStorage,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    RoundRobinWriter,
    StorageEnsemble,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)

from gfn_rb.buffers import MergedReplayBuffer, fifo_buffer
from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.samplers import PrioritySampler, RankRewardSampler, SoftmaxRewardSampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

LISTS = [ListStorage, LazyStackStorage, CompressedListStorage]
WRITERS = {
    "best": RewardPrioritizedWriter,
    "unique": lambda: RewardPrioritizedWriter(unique="state"),
    "diverse": DiversityWriter,
    "newest": FIFOWriter,
    "newest unique": lambda: FIFOWriter("state"),
}


@tensorclass
class Scored:
    state: torch.Tensor
    log_reward: torch.Tensor


def rows(keys, states=None, dtype=torch.float32, **more):
    n = len(keys)
    state = torch.arange(n) if states is None else torch.tensor(states)
    data = {"state": state[:, None], "log_reward": torch.tensor(keys, dtype=dtype)}
    return TensorDict({**data, **more}, [n])


def walk(end, length, key):
    """A trajectory 0 -> ... -> end of a length of its own."""
    state = torch.full((length + 1, 1), -1)
    state[:length] = 0
    state[length - 1] = end
    action = torch.ones(length, dtype=torch.int64)
    key = torch.tensor(key)
    return TensorDict(state=state, action=action, length=torch.tensor(length), log_reward=key)


def keys(rb):
    return sorted(rb.storage.get(i).get("log_reward").item() for i in range(len(rb)))


# Rows.


@pytest.mark.parametrize("storage", LISTS)
@pytest.mark.parametrize(
    ("writer", "slots", "kept"),
    [
        ("best", [[0, 1, 2], [0, 2], 1], [2.0, 5.0, 9.0]),
        ("unique", [[-1, 0, 1], [2, 0], 1], [2.0, 5.0, 9.0]),
        ("diverse", [[0, 1, -1], [1, 2], 0], [2.0, 5.0, 9.0]),
        ("newest", [[0, 1, 2], [0, 1], 2], [2.0, 5.0, 9.0]),
        ("newest unique", [[-1, 0, 1], [2, 0], 1], [2.0, 5.0, 9.0]),
    ],
)
def test_trajectories_of_any_length_are_kept_in_lists(storage, writer, slots, kept):
    rb = TensorDictReplayBuffer(
        storage=storage(3),
        writer=WRITERS[writer](),
        sampler=SoftmaxRewardSampler(temperature=10.0, replacement=True),
        batch_size=64,
        generator=seeded(),
    )
    first = lazy_stack([walk(1, 2, 1.0), walk(2, 3, 2.0), walk(1, 4, 0.5)])
    assert rb.extend(first).tolist() == slots[0]
    assert rb.extend(lazy_stack([walk(3, 2, 5.0), walk(2, 3, 2.0)])).tolist() == slots[1]
    assert rb.add(walk(7, 9, 9.0)) == slots[2]
    assert keys(rb) == kept
    drawn = rb.sample()
    assert sorted(set(drawn["log_reward"].tolist())) == kept
    for row in drawn.unbind(0):
        assert row["state"].shape[0] == row["length"] + 1


def wordy(*keys):
    return rows([float(key) for key in keys], keys).set("word", NonTensorStack(*map(str, keys)))


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("writer", WRITERS)
def test_words_go_where_their_rows_go(storage, writer):
    rb = TensorDictReplayBuffer(storage=storage(4), writer=WRITERS[writer]())
    other = TensorDictReplayBuffer(storage=storage(4), writer=WRITERS[writer]())
    for keys in ((1, 2), (7, 3, 4), (9, 3), (8, 5)):
        rb.extend(wordy(*keys))
        for row in rb[:].unbind(0):
            assert row["word"] == str(row["state"].item())
    other.extend(wordy(6, 0))
    if storage is not ListStorage:
        with pytest.raises(KeyMismatchError, match=r"missing keys \['word'\]"):
            rb.extend(wordy(7).exclude("word"))
    drawn = MergedReplayBuffer(rb, other, p="size").sample(20)
    assert list(drawn["word"]) == [str(each) for each in drawn["state"][:, 0].tolist()]


def test_words_cannot_be_journaled_shared_or_on_disk(tmp_path):
    on_disk = LazyMemmapStorage(4)
    for options in ({"shared": True}, {"storage": on_disk}, {}):
        rb = journaled(fifo_buffer(4, **options), None if options else tmp_path / "x")
        with pytest.raises(ShapeError, match="key 'word' must hold tensors in a buffer with a jo"):
            rb.extend(wordy(1, 2))
        assert len(rb) == 0
    rb.journal.close()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyStackStorage])
@pytest.mark.parametrize("writer", WRITERS)
def test_rows_of_a_tensorclass_stay_what_they_are(storage, writer):
    rb = ReplayBuffer(
        storage=storage(2),
        writer=WRITERS[writer](),
        sampler=RankRewardSampler(replacement=True),
        batch_size=4,
    )
    state = torch.arange(3)[:, None]
    for first in (1.0, 4.0):
        scores = first + torch.arange(3.0)
        rb.extend(Scored(state=state, log_reward=scores, batch_size=[3]))
    rb.add(Scored(state=torch.tensor([7]), log_reward=torch.tensor(9.0), batch_size=[]))
    assert keys(rb) == [6.0, 9.0]
    assert isinstance(rb.sample(), Scored)
    assert isinstance(rb.storage.get(0), Scored)


def test_a_list_of_rows_is_a_batch():
    rb = ReplayBuffer(storage=ListStorage(2), writer=RewardPrioritizedWriter())
    assert rb.extend([walk(1, 2, 1.0), walk(2, 3, 2.0), walk(1, 4, 0.5)]).tolist() == [0, 1, -1]


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_whatever_round_robin_takes_fifo_takes(storage):
    rb = ReplayBuffer(storage=storage(3), writer=FIFOWriter(), batch_size=2)
    assert rb.extend(torch.arange(4)).tolist() == [0, 1, 2, 0]
    assert rb.add(torch.tensor(9)) == 1
    assert [int(rb.storage.get(i)) for i in range(3)] == [3, 9, 2]
    rb = ReplayBuffer(storage=LazyTensorStorage(3), writer=FIFOWriter(), batch_size=8)
    tree = {"log_reward": torch.arange(4.0), "pair": (torch.arange(4), torch.ones(4, 2))}
    assert rb.extend(tree).tolist() == [0, 1, 2, 0]
    rb.set_sampler(SoftmaxRewardSampler(replacement=True))
    assert rb.sample()["pair"][1].shape == (8, 2)


def test_rows_in_a_list_neither_change_nor_live_with_their_batch():
    rb = TensorDictReplayBuffer(storage=ListStorage(4), writer=RewardPrioritizedWriter())
    batch = rows([1.0, 2.0])
    rb.extend(batch)
    batch["log_reward"].fill_(7.0)
    assert keys(rb) == [1.0, 2.0]
    assert rb.storage.get(0)["state"].untyped_storage().nbytes() == 8


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_drawn_rows_come_back_without_what_was_added(writer, storage):
    rb = TensorDictReplayBuffer(
        storage=storage(4), writer=WRITERS[writer](), sampler=PrioritySampler(), batch_size=3
    )
    rb.extend(rows([1.0, 2.0, 3.0]))
    drawn = rb.sample().clone().set("buffer_id", torch.zeros(3, dtype=torch.int64))
    assert {"index", "priority_weight", "draw_log_prob"} < set(drawn.keys())
    rb.extend(drawn)
    stored = {name for i in range(len(rb)) for name in rb.storage.get(i).keys()}  # noqa: SIM118
    assert stored - {"index"} == {"state", "log_reward"}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_gradients_are_cut_off(writer, storage):
    rb = TensorDictReplayBuffer(storage=storage(3), writer=WRITERS[writer]())
    for first in (0.0, 5.0):
        score = (first + torch.arange(3.0)).requires_grad_()
        rb.extend(rows([0.0] * 3).set("log_reward", score * 1.0))
        rb.add(rows([0.0])[0].set("log_reward", score[0] * 2.0))
        assert not any(rb.storage.get(i)["log_reward"].requires_grad for i in range(len(rb)))


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_gradients_that_other_writers_leave_poison_no_draw(writer, storage):
    options = {} if writer is RoundRobinWriter else {"rank_key": "log_reward"}
    rb = TensorDictReplayBuffer(storage=storage(6), writer=writer(**options), batch_size=4)
    for _ in range(3):
        score = torch.arange(3.0).requires_grad_() * 1.0
        rb.extend(rows([0.0] * 3).set("log_reward", score))
        for sampler in (SoftmaxRewardSampler, RankRewardSampler, PrioritySampler):
            rb.set_sampler(sampler())
            rb.sample()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_gradients_of_what_are_no_rows_are_cut_off(storage):
    rb = ReplayBuffer(storage=storage(4), writer=FIFOWriter(), batch_size=3)
    for _ in range(2):
        rb.extend(torch.ones(3, 2).requires_grad_() * 2.0)
        rb.add(torch.ones(2).requires_grad_() * 2.0)
    assert not rb.sample().requires_grad


# Storages.


def test_a_list_without_bound_grows():
    rb = TensorDictReplayBuffer(
        storage=ListStorage(),
        writer=RewardPrioritizedWriter(unique="state"),
        sampler=PrioritySampler(),
        batch_size=8,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        state = torch.randint(0, 5000, (500,), generator=generator).tolist()
        rb.extend(rows([1.0] * 500, state))
        rb.sample()
    states = [int(rb.storage.get(i)["state"]) for i in range(len(rb))]
    assert len(states) == len(set(states)) > 2048
    assert rb.writer.threshold == -math.inf
    assert rb.writer.state_dict()["rank"].shape == (len(rb),)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("filled_by", ["set", "writer", "state_dict"])
def test_a_full_storage_of_ties_that_others_filled_takes_one_more(storage, writer, filled_by):
    others = rows([0.0, 0.0, 1.0], states=[5, 6, 7])
    rb = TensorDictReplayBuffer(storage=storage(3), writer=WRITERS[writer]())
    if filled_by == "set":
        rb.storage.set(torch.arange(3), others)
    else:
        other = TensorDictReplayBuffer(
            storage=rb.storage if filled_by == "writer" else storage(3),
            writer=TensorDictMaxValueWriter(rank_key="log_reward"),
        )
        other.extend(others)
        if filled_by == "state_dict":
            rb.storage.load_state_dict(other.storage.state_dict())
    assert rb.extend(rows([0.0], states=[8])).tolist() == [0]
    assert keys(rb) == [0.0, 0.0, 1.0]
    assert [int(rb.storage.get(i)["state"][0]) for i in range(3)] == [8, 6, 7]


def test_fifo_goes_on_behind_rows_of_others():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=FIFOWriter())
    rb.storage.set(torch.arange(2), rows([0.0, 1.0]))
    assert rb.extend(rows([2.0])).tolist() == [2]
    assert rb.add(rows([3.0])[0]) == 3
    assert (len(rb), keys(rb)) == (4, [0.0, 1.0, 2.0, 3.0])
    assert rb.extend(rows([4.0])).tolist() == [0]


def test_fifo_keeps_the_newest_steps_of_a_storage_of_several_dimensions():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(6, ndim=2), writer=FIFOWriter(), batch_size=4
    )
    for first in (0.0, 2.0):
        steps = torch.arange(4.0).view(2, 2) + first  # of two episodes
        index = rb.extend(TensorDict({"log_reward": steps}, [2, 2]))
    assert index.tolist() == [[2, 0], [2, 1], [0, 0], [0, 1]]
    assert rb.storage[:]["log_reward"].tolist() == [[3.0, 5.0], [1.0, 3.0], [2.0, 4.0]]
    with pytest.raises(ShapeError, match="does not fit"):
        rb.extend(TensorDict({"log_reward": torch.zeros(3, 2)}, [3, 2]))


def test_storages_without_a_row_for_each_item_are_refused_with_the_reason():
    flat = LazyTensorStorage(3)
    for storage, message in [
        (LazyTensorStorage(3, ndim=2), "ndim=1, got ndim=2: a slot would hold several items"),
        (StorageEnsemble(flat, flat, transforms=[None, None]), "got StorageEnsemble"),
    ]:
        for writer in (RewardPrioritizedWriter(), DiversityWriter(), FIFOWriter("state")):
            with pytest.raises(ShapeError, match=message):
                writer.register_storage(storage)


def test_rows_in_a_list_that_lack_the_key_or_hold_several():
    rb = TensorDictReplayBuffer(storage=ListStorage(2), writer=RewardPrioritizedWriter())
    for row, error, message in [
        (rows([1.0]).exclude("log_reward"), KeyMismatchError, "'log_reward'.*holds.*'state'"),
        (rows([[1.0, 2.0]]), ShapeError, r"one number per row, got shape \(2,\)"),
        (torch.zeros(1), KeyMismatchError, "which holds Tensor"),
    ]:
        rb.storage.set([0, 1], [row[0], row[0]])
        with pytest.raises(error, match=message):
            rb.extend(rows([5.0]))
        assert len(rb) == 2


def test_items_with_more_features_than_others():
    rb = TensorDictReplayBuffer(storage=ListStorage(4), writer=DiversityWriter(features="state"))
    row = TensorDict(state=torch.zeros(2), log_reward=torch.tensor(1.0))
    ragged = lazy_stack([row, row.clone().set("state", torch.zeros(3))])
    with pytest.raises(ShapeError, match="equally many features, got 2 to 3"):
        rb.extend(ragged)
    assert len(rb) == 0


# Keys.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.float64, torch.bfloat16]
)
@pytest.mark.parametrize("largest", [True, False])
def test_keys_of_any_kind_of_number(dtype, largest, device):
    highest = {torch.uint8: 255, torch.bfloat16: 255, torch.int32: 2**31 - 1}.get(dtype, 2**53 - 1)
    values = [highest - 1, 0, highest, 3, highest - 2]
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3, device=device),
        writer=RewardPrioritizedWriter(largest=largest),
        sampler=RankRewardSampler(),
        batch_size=2,
    )
    assert rb.writer.threshold == (-math.inf if largest else math.inf)
    for value in values:
        rb.extend(rows([value], dtype=dtype).to(device))
    kept = sorted(values, reverse=largest)[:3]
    assert sorted(rb[:]["log_reward"].tolist(), reverse=largest) == kept
    assert rb.writer.threshold == kept[-1]
    assert rb.sample()["log_reward"].dtype == dtype
    rb.writer.update(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3], dtype=dtype))
    assert rb.writer.threshold == (1 if largest else 3)


@pytest.mark.parametrize("key", [2**53, -(2**53), -(2**63)])
def test_integers_that_floats_do_not_tell_apart_are_refused(key):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=RewardPrioritizedWriter())
    with pytest.raises(ArgumentError, match=rf"below 2\^53.*got {min(key, 0)} to {max(key, 0)}"):
        rb.extend(rows([key, 0], dtype=torch.int64))
    assert len(rb) == 0


def test_the_smallest_are_kept_apart_from_each_other():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3), writer=DiversityWriter(cutoff_distance=1.0, largest=False)
    )
    assert rb.extend(rows([1.0, 3.0, 2.0])).tolist() == [0, -1, 1]
    assert "largest=False" in repr(rb.writer)
    with pytest.raises(CheckpointMismatchError, match=r"largest=False.*expected.*True"):
        DiversityWriter(cutoff_distance=1.0).load_state_dict(rb.writer.state_dict())


# State before there is a storage.


@pytest.mark.parametrize("writer", WRITERS)
def test_a_state_is_taken_before_there_is_a_storage(writer, tmp_path):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=WRITERS[writer]())
    rb.extend(rows([0.0, 0.0, 0.0, 0.0, 0.0]))
    rb.writer.dumps(tmp_path)
    states, expected = rb.writer.state_dict(), rb[:].clone()
    more = rows([0.0, 0.0], states=[7, 8])
    rb.extend(more.clone())
    for take in (lambda w: w.load_state_dict(states), lambda w: w.loads(tmp_path)):
        again = WRITERS[writer]()
        take(again)
        assert again.state_dict().keys() == states.keys()
        late = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=again)
        late.storage.set(torch.arange(3), expected)
        late.extend(more.clone())
        assert late[:]["state"].tolist() == rb[:]["state"].tolist()


def test_a_state_of_more_rows_than_slots_is_refused_when_these_are_known():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=RewardPrioritizedWriter())
    rb.extend(rows([0.0, 0.0, 0.0]))
    again = RewardPrioritizedWriter()
    again.load_state_dict(rb.writer.state_dict())
    with pytest.raises(CheckpointMismatchError, match="3 items, expected at most 2"):
        again.register_storage(LazyTensorStorage(2))


def test_a_storage_laid_out_without_entries_takes_the_layout_of_its_first_rows():
    storage = TensorStorage(TensorDict(batch_size=[4]))  # as TorchRL counts, of 4 rows of nothing
    rb = TensorDictReplayBuffer(storage=storage, writer=FIFOWriter())
    for keys, slots in ([1.0, 2.0, 3.0], [0, 1, 2]), ([4.0, 5.0], [3, 0]):
        assert rb.extend(rows(keys)).tolist() == slots
    assert rb[:]["log_reward"].tolist() == [5.0, 2.0, 3.0, 4.0]
    with pytest.raises(KeyMismatchError, match=r"unknown keys \['extra'\]"):
        rb.extend(rows([7.0], extra=torch.zeros(1)))


@pytest.mark.parametrize("writer", [RewardPrioritizedWriter, FIFOWriter])
def test_the_state_of_a_smaller_buffer_is_refused(writer):
    small, large = (
        TensorDictReplayBuffer(storage=LazyTensorStorage(n), writer=writer()) for n in (2, 4)
    )
    small.extend(rows([1.0, 2.0]))
    with pytest.raises(CheckpointMismatchError, match="state is of 2 slots, expected 4"):
        large.load_state_dict(small.state_dict())


def test_the_state_of_another_kind_of_writer_is_refused():
    state = RewardPrioritizedWriter().state_dict()
    with pytest.raises(CheckpointMismatchError, match=r"holds \[.*'tie'.*expected that of"):
        FIFOWriter().load_state_dict(state)
