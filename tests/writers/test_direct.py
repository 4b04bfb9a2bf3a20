"""Batches that are written as they come have the effect of those that go the longer way."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from gfn_rb import (
    DiversityWriter,
    FIFOWriter,
    RewardPrioritizedWriter,
    RowTensorStorage,
    SoftmaxRewardSampler,
)
from gfn_rb.errors import NaNError
from gfn_rb.writers.direct import DirectWrite

WRITERS = {
    "best": {},
    "oldest of equal ones": {"tie": "oldest"},
    "smallest": {"largest": False},
    "refreshed": {"unique": "state"},
    "kept": {"unique": "state", "on_duplicate": "keep", "track_generations": True},
    "groups": {"group": "goal", "per_group": 3},
    "objects in groups": {"unique": "state", "group": "goal", "per_group": 2, "largest": False},
    "computed": {"unique": lambda rows: rows["state"].sum(1)},
}
NOISE = torch.arange(4) * -50.0
KINDS = [*WRITERS, "far apart", "newest"]


def buffer(kind: str) -> TensorDictReplayBuffer:
    if kind == "newest":
        rows = FIFOWriter(unique="state", group="goal", per_group=6)
    else:
        rows = (
            DiversityWriter() if kind == "far apart" else RewardPrioritizedWriter(**WRITERS[kind])
        )
    return TensorDictReplayBuffer(
        storage=RowTensorStorage(20), writer=rows, sampler=SoftmaxRewardSampler(), batch_size=8
    )


def batch(n: int, dtype: torch.dtype, generator: torch.Generator) -> TensorDict:
    """Return rows with ties and with few objects."""
    return TensorDict(
        {
            "state": torch.randint(3, (n, 3), generator=generator),
            "goal": torch.randint(4, (n, 1), generator=generator),
            "log_reward": torch.randint(-5, 6, (n,), generator=generator).to(dtype) / 4,
        },
        [n],
    )


@pytest.fixture
def taken(monkeypatch):
    """Count the batches that are written as they came."""
    counts, write = [], DirectWrite.write

    def counted(self, *args):
        index = write(self, *args)
        counts.append(index is not None)
        return index

    monkeypatch.setattr(DirectWrite, "write", counted)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_write_the_same_rows(kind, dtype, taken, monkeypatch):
    generator = torch.Generator().manual_seed(len(kind))
    direct, other = buffer(kind), buffer(kind)
    monkeypatch.setattr(other.writer, "_written_directly", lambda data: None)
    for i in range(60):
        rows = batch(1 + i % 13, dtype, generator)
        index = direct.extend(rows.clone())
        assert torch.equal(index, other.extend(rows))
        assert len(direct) == len(other)
        assert (direct[:] == other[:]).all()
        assert direct.writer.rejected == other.writer.rejected
        assert direct.writer.state_dict().keys() == other.writer.state_dict().keys()
        assert torch.equal(direct.writer.state_dict()["rank"], other.writer.state_dict()["rank"])
        assert direct._storage._last_cursor == other._storage._last_cursor
        stamps = [each.writer.generations_of(torch.arange(len(other))) for each in (direct, other)]
        assert torch.equal(*stamps)
        laws = [each.sampler.log_probs(each._storage) for each in (direct, other)]
        torch.testing.assert_close(*laws)
    # The first batch lays the storage out, and the second reads what it holds.
    assert sum(taken) >= 57


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.set("index", torch.arange(4)),
        lambda rows: rows.set("log_reward", rows["log_reward"].requires_grad_()),
        lambda rows: rows.set("state", rows["state"].to(torch.int32).to(torch.int64).T.clone().T),
        lambda rows: rows.set("log_reward", torch.stack([rows["log_reward"], NOISE], 1)[:, 0]),
        lambda rows: rows.set("log_reward", torch._neg_view(-rows["log_reward"])),
        lambda rows: rows.set("state", torch.stack([rows["state"], rows["state"] + 9], 1)[:, 0]),
    ],
    ids=["bookkeeping", "gradients", "columns", "strides", "negatives", "strided objects"],
)
def test_other_batches_are_written_too(change):
    generator = torch.Generator().manual_seed(0)
    rb = buffer("refreshed")
    for _ in range(3):
        rb.extend(batch(8, torch.float32, generator))
    rows = batch(4, torch.float32, generator)
    rows["log_reward"] += 10 + torch.arange(4)
    rows["state"] += 5 + torch.arange(4)[:, None]
    expected = rows.clone()
    change(rows)
    index = rb.extend(rows)
    assert (index >= 0).all()
    assert torch.equal(rb[index]["state"], expected["state"])
    assert torch.equal(rb[index]["log_reward"], expected["log_reward"])
    # What the writer compares by is what the rows have.
    known = torch.from_numpy(rb.writer._exchange.keys[: len(rb)].copy())
    assert torch.equal(known, rb[:]["log_reward"].double())
    assert torch.equal(rb.writer.slots_of(expected), index)


def test_refused_batches_change_nothing(taken):
    generator = torch.Generator().manual_seed(0)
    rb = buffer("best")
    for _ in range(4):
        rb.extend(batch(8, torch.float32, generator))
    before, state = rb[:].clone(), rb.writer.state_dict()
    rows = batch(8, torch.float32, generator)
    rows["log_reward"][3] = np.nan
    with pytest.raises(NaNError, match="position 3"):
        rb.extend(rows)
    assert not taken[-1]
    assert (rb[:] == before).all()
    assert torch.equal(rb.writer.state_dict()["rank"], state["rank"])
    assert rb.extend(batch(8, torch.float32, generator)).shape == (8,)
    assert taken[-1]


def test_columns_of_other_code_are_written_to():
    """A column that other code replaces is found at the next write."""
    generator = torch.Generator().manual_seed(0)
    rb = buffer("best")
    for _ in range(4):
        rb.extend(batch(8, torch.float32, generator))
    rb._storage._storage["goal"] = rb._storage._storage["goal"].clone()
    rows = batch(1, torch.float32, generator)
    rows["log_reward"][:], rows["goal"][:] = 9.0, 77
    index = rb.extend(rows)
    assert rb[index]["goal"].item() == 77


def test_user_code_may_change_the_batch(taken):
    """Rows that a callable replaces are written as it left them."""

    def rounded(rows):
        rows["goal"] = rows["goal"] + 100
        return rows["state"].sum(1)

    generator = torch.Generator().manual_seed(0)
    writer = RewardPrioritizedWriter(unique=rounded)
    rb = TensorDictReplayBuffer(storage=RowTensorStorage(20), writer=writer, batch_size=8)
    for _ in range(4):
        rb.extend(batch(8, torch.float32, generator))
    assert taken[-1]
    rows = batch(1, torch.float32, generator)
    rows["log_reward"][:] = 9.0
    goal = int(rows["goal"])
    index = rb.extend(rows)
    assert int(rb[index]["goal"]) == goal + 100
