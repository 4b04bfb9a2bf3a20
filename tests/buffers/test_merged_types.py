"""Merged batches are of their members' type, and give each member its priorities."""

import pytest
import torch
from buffers.merging import member
from factories import rows, seeded
from tensordict import tensorclass
from torchrl.data import LazyTensorStorage, ReplayBuffer

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.errors import ShapeError
from gfn_rb.samplers import PrioritySampler
from gfn_rb.writers import FIFOWriter


@tensorclass
class Item:
    x: torch.Tensor
    log_reward: torch.Tensor


def items(first, n):
    x = torch.arange(first, first + n)
    return Item(x=x, log_reward=torch.zeros(n), batch_size=[n])


def member_of(data):
    rb = ReplayBuffer(storage=LazyTensorStorage(8), writer=FIFOWriter())
    rb.extend(data)
    return rb


@pytest.mark.parametrize("p", ["size", [0.5, 0.5]])
@pytest.mark.parametrize("make", [items, lambda first, n: torch.arange(first, first + n)])
def test_rows_are_of_the_members_type(make, p):
    firsts = (0, 100)
    members = [member_of(make(first, 4)) for first in firsts]
    merged = MergedReplayBuffer(*members, p=p, generator=seeded())
    batch, info = merged.sample(12, return_info=True)
    assert type(batch) is type(make(0, 1))
    assert batch.shape == (12,)
    x = batch if isinstance(batch, torch.Tensor) else batch.x
    assert torch.equal(x, torch.tensor(firsts)[info["buffer_id"]] + info["index"])


def test_rows_of_several_types_are_refused():
    merged = MergedReplayBuffer(member_of(items(0, 4)), member_of(torch.arange(4)), p="size")
    with pytest.raises(ShapeError, match=r"rows of one type, got \['Item', 'Tensor'\]"):
        merged.sample(20)


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
