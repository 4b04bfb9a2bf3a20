import math

import pytest
import torch
import torch.multiprocessing as mp
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    TensorDictReplayBuffer,
)

from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    KeyMismatchError,
    NaNError,
    ShapeError,
)
from gfn_rb.writers import RewardPrioritizedWriter

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def buffer(capacity, tie="newest", storage=LazyTensorStorage, **kwargs):
    writer = RewardPrioritizedWriter(tie=tie)
    return TensorDictReplayBuffer(storage=storage(capacity, **kwargs), writer=writer)


def rows(keys, first=0, device=None):
    """Items whose payload is their serial number."""
    n = len(keys)
    return TensorDict(
        {
            "log_reward": torch.tensor(keys, dtype=torch.float32),
            "state": torch.arange(first, first + n)[:, None].expand(n, 3).clone(),
        },
        [n],
        device=device,
    )


def contents(rb):
    data = rb[:]
    return sorted(zip(data["log_reward"].tolist(), data["state"][:, 0].tolist(), strict=True))


def test_ten_thousand_items_in_batches_of_any_size():
    generator = torch.Generator().manual_seed(0)
    rb, everything = buffer(700), []
    for size in torch.randint(1, 400, (50,), generator=generator).tolist():
        keys = torch.randn(size, generator=generator).mul(3).round().tolist()
        rb.extend(rows(keys, len(everything)))
        everything += keys
    best = sorted(((k, i) for i, k in enumerate(everything)), reverse=True)[:700]
    assert contents(rb) == sorted(best)


def test_a_batch_larger_than_the_buffer_keeps_its_best():
    rb = buffer(3)
    assert rb.extend(rows([1.0, 5.0, 3.0, 4.0, 2.0])).tolist() == [-1, 2, 0, 1, -1]
    assert contents(rb) == [(3.0, 2), (4.0, 3), (5.0, 1)]


def test_add_returns_a_slot_or_minus_one():
    rb = buffer(1)
    assert rb.add(rows([1.0])[0]) == 0
    assert rb.add(rows([0.0])[0]) == -1


def test_memory_mapped_storage(tmp_path):
    rb = buffer(3, storage=LazyMemmapStorage, scratch_dir=tmp_path / "scratch")
    rb.extend(rows([1.0, 5.0, 3.0, 4.0, 2.0]))
    rb.extend(rows([3.5], 5))
    assert contents(rb) == [(3.5, 5), (4.0, 3), (5.0, 1)]
    rb.dumps(tmp_path / "saved")
    again = buffer(3, storage=LazyMemmapStorage, scratch_dir=tmp_path / "scratch2")
    again.loads(tmp_path / "saved")
    again.extend(rows([3.5, 9.0], 6))
    assert contents(again) == [(4.0, 3), (5.0, 1), (9.0, 7)]


def test_a_key_of_shape_n_1():
    rb = buffer(4)
    batch = rows([1.0, 2.0])
    batch["log_reward"] = batch["log_reward"][:, None]
    rb.extend(batch)
    assert rb[:]["log_reward"].tolist() == [[1.0], [2.0]]


def test_rows_sampled_from_one_buffer_enter_another():
    rb, other = buffer(4), buffer(4)
    rb.extend(rows([1.0, 2.0, 3.0]))
    other.extend(rows([4.0], 7))
    other.extend(rb.sample(2))  # carries the "index" that TorchRL adds to what it samples
    assert len(other) == 3
    assert sorted(other.storage._storage.keys()) == ["log_reward", "state"]


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda b: b.exclude("log_reward"), KeyMismatchError, r"lacks the key 'log_reward'.*state"),
        (lambda b: b.exclude("state"), KeyMismatchError, r"missing keys \['state'\]"),
        (lambda b: b.set("extra", b["state"]), KeyMismatchError, r"unknown keys \['extra'\]"),
        (lambda b: b.set("log_reward", torch.tensor([1.0, math.nan])), NaNError, "NaN in 1 of 2"),
        (
            lambda b: b.set("log_reward", torch.zeros(2, 3)),
            ShapeError,
            r"number per item.*2, 3",
        ),
        (lambda b: b.set("log_reward", torch.zeros(2).long()), ShapeError, "int64.*float32"),
        (lambda b: b.set("state", torch.zeros(2, 4).long()), ShapeError, r"\(4,\).*\(3,\)"),
        (lambda b: b.set("state", torch.zeros(2, 3)), ShapeError, "float32.*int64"),
        (lambda b: b.unsqueeze(0), ShapeError, r"batch size \[n\].*\[1, 2\]"),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(spoil, error, message):
    rb = buffer(4)
    rb.extend(rows([1.0]))
    with pytest.raises(error, match=message) as caught:
        rb.extend(spoil(rows([7.0, 8.0], 1)))
    assert "\n" not in str(caught.value)
    assert contents(rb) == [(1.0, 0)]
    assert rb.write_count == 1
    rb.extend(rows([2.0], 1))
    assert contents(rb) == [(1.0, 0), (2.0, 1)]


@pytest.mark.parametrize(
    ("index", "key", "error", "message"),
    [
        ([2], [1.0], ArgumentError, "stored items, 0 to 1, got 2 to 2"),
        ([-1, 0], [1.0, 2.0], ArgumentError, "got -1 to 0"),
        ([0], [1.0, 2.0], ShapeError, "one length, got 1 and 2"),
        ([0], [math.nan], NaNError, "NaN in 1 of 1"),
    ],
)
def test_bad_updates_are_named_and_nothing_is_changed(index, key, error, message, unchecked):
    rb = buffer(4)
    rb.extend(rows([1.0, 2.0]))
    with pytest.raises(error, match=message):
        rb.writer.update(torch.tensor(index), torch.tensor(key))
    assert contents(rb) == [(1.0, 0), (2.0, 1)]


def test_bad_construction(unchecked):
    with pytest.raises(ArgumentError, match="tie must be 'newest' or 'oldest', got 'any'"):
        RewardPrioritizedWriter(tie="any")


def test_a_state_of_another_tie_is_refused():
    rb = buffer(2, "oldest")
    rb.extend(rows([1.0]))
    with pytest.raises(CheckpointMismatchError, match=r"tie='oldest'.*expected tie='newest'"):
        buffer(2).writer.load_state_dict(rb.writer.state_dict())


def _replace_in_child(rb, event):
    event.wait()
    rb.extend(rows([0.0] * 16, 48))


def test_ties_are_decided_by_age_whoever_wrote_last():
    # Two blocks of 16 rows: the parent knows which block holds the oldest row, then the child
    # replaces all rows of that block.
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(32), writer=RewardPrioritizedWriter(), batch_size=4, shared=True
    )
    rb.extend(rows([0.0] * 32))
    context = mp.get_context()
    event = context.Event()
    child = context.Process(target=_replace_in_child, args=(rb, event))
    child.start()  # moves all into shared memory
    rb.extend(rows([0.0] * 15, 32))
    rb.extend(rows([0.0], 47))
    event.set()
    child.join(120)
    assert child.exitcode == 0
    rb.extend(rows([0.0], 64))
    assert sorted(rb[:]["state"][:, 0].tolist()) == list(range(33, 65))


@pytest.mark.parametrize("n_stored", [0, 3])
def test_an_empty_batch_is_nothing_to_write(n_stored):
    rb = buffer(3)
    rb.extend(rows([1.0] * n_stored))
    assert rb.extend(rows([])).tolist() == []
    assert (len(rb), rb.write_count) == (n_stored, n_stored)


def test_a_storage_that_another_process_lays_out():
    rb = buffer(3, shared_init=True)
    view = object.__new__(LazyTensorStorage)
    view.__dict__.update(rb._storage.__dict__)  # shares what processes share
    other = TensorDictReplayBuffer(storage=view, writer=RewardPrioritizedWriter(), batch_size=2)
    assert other.writer.threshold == -math.inf
    rb.extend(rows([1.0, 5.0, 3.0]))
    assert (len(other), other._storage.initialized) == (3, False)
    assert other.extend(rows([2.0], 3)).tolist() == [0]
    assert contents(rb) == contents(other) == [(2.0, 3), (3.0, 2), (5.0, 1)]
    assert rb.writer.threshold == 2.0


@pytest.mark.parametrize("offer", ["add", "extend"])
@pytest.mark.parametrize("data", [{"log_reward": torch.zeros(2)}, torch.zeros(2)])
def test_data_that_are_no_rows_are_named(offer, data):
    writer = RewardPrioritizedWriter()
    writer.register_storage(LazyTensorStorage(4))
    # TensorDictMaxValueWriter raises a RuntimeError, which code written for it catches.
    with pytest.raises(
        RuntimeError, match=r"expects data to be a tensor collection.*got a"
    ) as caught:
        getattr(writer, offer)(data)
    assert isinstance(caught.value, ShapeError)
    assert isinstance(caught.value, ValueError)
