"""What writers do beside what test_oracle.py checks, over rows and storages of every kind."""

import math
from threading import Thread

import pytest
import torch
import torch.multiprocessing as mp
from factories import DEVICES, assert_equal, journaled, run_in_process, seeded, trajectories
from tensordict import NonTensorStack, TensorDict, lazy_stack, tensorclass
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers.writers import TensorDictRoundRobinWriter

from gfn_rb.buffers import reward_prioritized_buffer
from gfn_rb.errors import (
    KeyMismatchError,
    NaNError,
    ShapeError,
)
from gfn_rb.samplers import PrioritySampler, RankRewardSampler
from gfn_rb.torchrl_compat import replay_lock
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

WRITERS = {
    "best": RewardPrioritizedWriter,
    "unique": lambda: RewardPrioritizedWriter(unique="state"),
    "diverse": DiversityWriter,
    "newest": FIFOWriter,
    "newest unique": lambda: FIFOWriter("state"),
}
every_writer = pytest.mark.parametrize("writer", WRITERS)


@tensorclass
class Scored:
    state: torch.Tensor
    log_reward: torch.Tensor


def rows(keys, states=None, dtype=torch.float32, **more):
    n = len(keys)
    state = torch.arange(n) if states is None else torch.tensor(states, dtype=torch.int64)
    data = {"state": state[:, None], "log_reward": torch.tensor(keys, dtype=dtype)}
    return TensorDict({**data, **more}, [n])


def objects(*states, **more):
    return rows([0.0] * len(states), states, **more)


def walk(end, length, key):
    """A trajectory 0 -> ... -> end of a length of its own."""
    state = torch.full((length + 1, 1), -1)
    state[:length] = 0
    state[length - 1] = end
    action = torch.ones(length, dtype=torch.int64)
    key = torch.tensor(key)
    return TensorDict(state=state, action=action, length=torch.tensor(length), log_reward=key)


def buffer(writer="best", capacity=3, storage=LazyTensorStorage, kind=TensorDictReplayBuffer, **kw):
    writer = WRITERS[writer]() if isinstance(writer, str) else writer
    return kind(storage=storage(capacity), writer=writer, **kw)


def keys(rb):
    return sorted(rb.storage.get(i).get("log_reward").item() for i in range(len(rb)))


def states(rb):
    return [int(rb.storage.get(i)["state"][0]) for i in range(len(rb))]


# Rows.


@every_writer
def test_rows_that_no_column_can_hold_are_refused(writer):
    words = rows([1.0, 2.0]).set("word", NonTensorStack("a", "b"))
    rb, walks = buffer(writer), lazy_stack([walk(1, 2, 1.0), walk(2, 3, 2.0)])
    for bad, message in ((words, "'word' must hold tensors, got words"), (walks, "equal shapes")):
        with pytest.raises(ShapeError, match=f"{message}.*a RaggedStorage"):
            rb.extend(bad)
        assert len(rb) == 0
    assert len(rb.extend(lazy_stack([*rows([3.0, 4.0]).unbind(0)]))) == 2


@every_writer
def test_rows_of_a_tensorclass_stay_what_they_are(writer):
    sampler = RankRewardSampler(replacement=True)
    rb = buffer(writer, 2, kind=ReplayBuffer, sampler=sampler, batch_size=4)
    for first in (1.0, 4.0):
        scores = first + torch.arange(3.0)
        rb.extend(Scored(state=torch.arange(3)[:, None], log_reward=scores, batch_size=[3]))
    rb.add(Scored(state=torch.tensor([7]), log_reward=torch.tensor(9.0), batch_size=[]))
    assert keys(rb) == [6.0, 9.0]
    assert isinstance(rb.sample(), Scored)
    assert isinstance(rb.storage.get(0), Scored)


@every_writer
def test_drawn_rows_come_back_without_what_was_added(writer):
    rb = buffer(writer, 4, sampler=PrioritySampler(), batch_size=3)
    rb.extend(rows([1.0, 2.0, 3.0]))
    drawn = rb.sample().clone().set("buffer_id", torch.zeros(3, dtype=torch.int64))
    assert {"index", "priority_weight", "draw_log_prob"} < set(drawn.keys())
    rb.extend(drawn)
    stored = {name for i in range(len(rb)) for name in rb.storage.get(i).keys()}  # noqa: SIM118
    assert stored - {"index"} == {"state", "log_reward"}


@every_writer
def test_gradients_are_cut_off(writer):
    rb = buffer(writer)
    for first in (0.0, 5.0):
        score = (first + torch.arange(3.0)).requires_grad_()
        rb.extend(objects(0, 1, 2).set("log_reward", score * 1.0))
        rb.add(objects(0)[0].set("log_reward", score[0] * 2.0))
        assert not any(rb.storage.get(i)["log_reward"].requires_grad for i in range(len(rb)))


@every_writer
@pytest.mark.parametrize("n_stored", [0, 3])
def test_an_empty_batch_is_nothing_to_write(writer, n_stored):
    rb = buffer(writer)
    rb.extend(rows([1.0] * n_stored))
    assert rb.extend(rows([])).tolist() == []
    assert (len(rb), rb.write_count) == (n_stored, n_stored)


# Bad rows.


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda b: b.exclude("log_reward"), KeyMismatchError, r"'log_reward'"),
        (lambda b: b.exclude("state"), KeyMismatchError, r"missing keys \['state'\]"),
        (lambda b: b.set("extra", b["state"]), KeyMismatchError, r"unknown keys \['extra'\]"),
        (lambda b: b.set("log_reward", torch.full((2,), math.nan)), NaNError, "is NaN in"),
        (
            lambda b: b.set("log_reward", torch.full((2,), math.inf)),
            NaNError,
            r"is \+inf in .*-inf",
        ),
        (lambda b: b.set("log_reward", torch.zeros(2, 3)), ShapeError, "2, 3|log_reward"),
        (lambda b: b.set("log_reward", torch.zeros(2).long()), ShapeError, "int64.*float32"),
        (lambda b: b.set("state", torch.zeros(2, 4).long()), ShapeError, r"\(4,\).*\(1,\)"),
        (lambda b: b.set("state", torch.zeros(2, 1)), ShapeError, "float32.*int64"),
        (lambda b: b.unsqueeze(0), ShapeError, r"batch size \[n\].*\[1, 2\]"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(spoil, error, message):
    writers = ("best",) if "n\\]" in message or error is NaNError else ("best", "newest")
    for writer in writers:  # the newest may be NaN
        rb = buffer(writer)
        rb.extend(rows([1.0]))
        for write in (rb.extend, lambda batch, rb=rb: rb.add(batch[0])):
            with pytest.raises(error, match=message) as caught:
                write(spoil(rows([7.0, 8.0])))
            assert "\n" not in str(caught.value)
            assert keys(rb) == [1.0]
            assert rb.write_count == 1
        assert rb.extend(rows([2.0])).tolist() == [1]


@pytest.mark.parametrize("offer", ["add", "extend"])
@pytest.mark.parametrize("data", [{"log_reward": torch.zeros(2)}, torch.zeros(2)])
def test_data_that_are_no_rows_are_named(offer, data):
    writer = RewardPrioritizedWriter()
    writer.register_storage(LazyTensorStorage(4))
    # TensorDictMaxValueWriter raises a RuntimeError, which code written for it catches.
    with pytest.raises(RuntimeError, match="data") as caught:
        getattr(writer, offer)(data)
    assert isinstance(caught.value, ShapeError)
    assert isinstance(caught.value, ValueError)


# Objects.


@pytest.mark.parametrize("writer", ["unique", "newest unique"])
def test_trajectories_are_told_apart_by_their_end_and_condition(writer):
    rb = buffer(writer, 8)
    assert rb.extend(trajectories([1, 2, 1])).tolist() == [-1, 0, 1]
    assert rb.extend(trajectories([2, 3], length=1, n_steps=2)).tolist() == [0, 2]
    condition = torch.tensor([[0.1], [0.2], [0.1], [-0.0], [0.0]])
    offered = objects(1, 1, 1, 2, 2, condition=condition)
    assert buffer(writer, 8).extend(offered).tolist() == [-1, 0, 1, -1, 2]
    large = objects(2**53, 2**53 + 1, condition=torch.full((2, 1), 0.5))
    assert buffer(writer).extend(large).tolist() == [0, 1]  # floats do not tell them apart


@pytest.mark.parametrize(
    ("unique", "slots"),
    [
        ("serial", [-1, 0, 1]),
        (["serial", "state"], [0, 1, 2]),
        (lambda td: td["serial"], [-1, 0, 1]),
        (lambda td: torch.stack([td["serial"], td["state"][:, 0] % 2], 1), [0, 1, 2]),
    ],
)
def test_fingerprints_of_several_columns_and_of_any_key_tell_objects_apart(unique, slots):
    rb = buffer(RewardPrioritizedWriter(unique=unique))
    assert rb.extend(objects(1, 2, 3, serial=torch.tensor([7, 7, 8]))).tolist() == slots


def offer(rb, states, key):
    rb.extend(rows([key] * len(states), states))


@pytest.mark.parametrize("writer", ["unique", "newest unique"])
def test_processes_that_share_a_buffer_find_each_others_objects(writer):
    rb = buffer(writer, 4, shared=True)
    offer(rb, [1, 2, 3], 0.0)
    for some, key in [([2, 4], 1.0), ([5, 1], 3.0)]:
        assert run_in_process(offer, rb, some, key) == 0
        offer(rb, some[:1], key + 1)
    # 3 is the oldest and lowest, and gives way to 5; 1 and 5 were refreshed.
    assert dict(zip(states(rb), rb[:]["log_reward"].tolist(), strict=True)) == {
        **{2: 2.0, 4: 1.0},
        **{5: 4.0, 1: 3.0},
    }


def _replace_in_child(rb, event):
    event.wait()
    rb.extend(objects(*range(48, 64)))


def test_ties_are_decided_by_age_whoever_wrote_last():
    # Two blocks of 16 rows: the parent knows which block holds the oldest row, then the child
    # replaces all rows of that block.
    rb = buffer(capacity=32, batch_size=4, shared=True)
    rb.extend(objects(*range(32)))
    context = mp.get_context()
    event = context.Event()
    child = context.Process(target=_replace_in_child, args=(rb, event))
    child.start()  # moves all into shared memory
    rb.extend(objects(*range(32, 47)))
    rb.extend(objects(47))
    event.set()
    child.join(120)
    assert child.exitcode == 0
    rb.extend(objects(64))
    assert sorted(states(rb)) == list(range(33, 65))


@pytest.mark.parametrize("is_journaled", [False, True])
def test_rows_that_other_code_writes_into_slots_given_up_are_the_oldest(is_journaled, tmp_path):
    rb = journaled(buffer(capacity=4), tmp_path / "journal" if is_journaled else None, "never")
    rb.extend(objects(0, 1, 2, 3))
    rb.writer.remove(torch.tensor([2, 3]))
    rb.storage.set(torch.tensor([2, 3]), objects(4, 5))
    rb.extend(objects(6, 7))
    assert sorted(states(rb)) == [0, 1, 6, 7]


def between(a, b):
    return (a - b.T).abs()


@pytest.mark.parametrize("distance", [None, between])
def test_a_row_that_moved_is_found_in_its_new_slot_alone(distance):
    rb = buffer(DiversityWriter(cutoff_distance=2.0, distance=distance), capacity=4)
    rb.extend(rows([1.0, 1.0, 5.0, 5.0], [0, 3, 10, 20]))
    rb.extend(rows([3.0], [2]))  # in place of 0 and 3: the last row, 20, fills the second slot
    assert sorted(states(rb)) == [2, 10, 20]
    rb.extend(rows([9.0], [21]))
    assert sorted(states(rb)) == [2, 10, 21]


@every_writer
def test_a_write_waits_for_the_lock_of_the_buffer(writer):
    rb = buffer(writer, capacity=4)
    rb.extend(rows([1.0, 2.0]))
    thread = Thread(target=rb.writer.extend, args=(rows([3.0], [7]),))
    with replay_lock(rb):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        assert 7 not in states(rb)
    thread.join(30)
    assert 7 in states(rb)


# Storages.


def test_rows_that_are_removed_are_not_drawn_ahead():
    rb = reward_prioritized_buffer(4, batch_size=2, prefetch=2)
    rb.extend(rows([1.0, 2.0]))
    with replay_lock(rb):  # so that no batch is drawn ahead before the rows are gone
        rb.sample()
        rb.writer.remove(torch.arange(2))
    assert len(rb.state_dict()["_storage"]) > 0
    rb.extend(rows([3.0, 4.0]))
    assert {*rb.sample()["log_reward"].tolist()} == {3.0, 4.0}


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_what_is_stored_is_as_by_torchrls_writer(storage, shape):
    generator, n_rows = seeded(), 0
    ours = buffer(FIFOWriter(track_generations=True), 7, storage)
    theirs = buffer(TensorDictRoundRobinWriter(track_generations=True), 7, storage)
    for _ in range(30):
        n = int(torch.randint(1, 8, (), generator=generator))
        data = objects(*range(n_rows, n_rows + n))
        data = data[(...,) + (None,) * len(shape)].expand(n, *shape)
        one, other, n_rows = data.clone(), data.clone(), n_rows + n
        assert torch.equal(ours.extend(one), theirs.extend(other))
        assert (one == other).all()
        assert (ours[:] == theirs[:]).all()
        assert ours.add(one[0]) == theirs.add(other[0])
        assert ours.storage._last_cursor_index == theirs.storage._last_cursor_index
        assert ours.writer.state_dict().keys() == theirs.writer.state_dict().keys()
        for name, value in theirs.writer.state_dict().items():
            assert_equal(ours.writer.state_dict()[name], value)


def test_a_batch_beyond_the_capacity_counts_whole():
    rb = buffer("newest", 3)
    rb.extend(objects(1))
    assert rb.extend(objects(2, 3, 4, 5, 6)).tolist() == [1, 2, 0, 1, 2]
    assert states(rb) == [4, 5, 6]
    assert rb.write_count == 6


def test_a_storage_that_another_process_lays_out():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(3, shared_init=True), writer=RewardPrioritizedWriter()
    )
    view = object.__new__(LazyTensorStorage)
    view.__dict__.update(rb._storage.__dict__)  # shares what processes share
    other = TensorDictReplayBuffer(storage=view, writer=RewardPrioritizedWriter(), batch_size=2)
    assert other.writer.threshold == -math.inf
    rb.extend(rows([1.0, 5.0, 3.0]))
    assert (len(other), other._storage.initialized) == (3, False)
    assert other.extend(rows([2.0])).tolist() == [0]
    assert keys(rb) == keys(other) == [2.0, 3.0, 5.0]
    assert rb.writer.threshold == 2.0


def test_a_storage_laid_out_without_entries_takes_the_layout_of_its_first_rows():
    storage = TensorStorage(TensorDict(batch_size=[4]))  # as TorchRL counts, of 4 rows of nothing
    rb = TensorDictReplayBuffer(storage=storage, writer=FIFOWriter())
    for some, slots in ([1.0, 2.0, 3.0], [0, 1, 2]), ([4.0, 5.0], [3, 0]):
        assert rb.extend(rows(some)).tolist() == slots
    assert rb[:]["log_reward"].tolist() == [5.0, 2.0, 3.0, 4.0]
    with pytest.raises(KeyMismatchError, match=r"unknown keys \['extra'\]"):
        rb.extend(rows([7.0], extra=torch.zeros(1)))


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


# State.


@every_writer
def test_a_state_is_taken_before_there_is_a_storage(writer, tmp_path):
    rb = buffer(writer)
    rb.extend(objects(0, 1, 2, 3, 4))
    rb.writer.dumps(tmp_path)
    state, expected = rb.writer.state_dict(), rb[:].clone()
    more = objects(7, 8)
    rb.extend(more.clone())
    for take in (lambda w: w.load_state_dict(state), lambda w: w.loads(tmp_path)):
        again = WRITERS[writer]()
        take(again)
        assert again.state_dict().keys() == state.keys()
        late = buffer(again)
        late.storage.set(torch.arange(3), expected)
        late.extend(more.clone())
        assert states(late) == states(rb)


def test_a_batch_of_stored_columns_under_other_names_is_copied_first():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=FIFOWriter(), batch_size=4)
    rb.extend(TensorDict({"a": torch.arange(4), "b": 10 + torch.arange(4)}, [4]))
    stored = rb.storage[:]
    rb.extend(TensorDict({"a": stored["b"], "b": stored["a"]}, [4]))
    assert rb[:]["a"].tolist() == [10, 11, 12, 13]
    assert rb[:]["b"].tolist() == [0, 1, 2, 3]
