"""Groups leave whole when a buffer of the newest rows is full."""

import random
from collections import defaultdict

import pytest
import torch
from factories import DEVICES, journaled, rows, seeded

from gfn_rb import GroupSampler, RaggedStorage, fifo_buffer, open_buffer, save_checkpoint
from gfn_rb.errors import ArgumentError, KeyMismatchError

CAPACITY = 20


def grouped(prompts, start, version=0):
    prompt, n = torch.tensor(prompts), len(prompts)
    version = torch.full((n,), version)
    return rows(torch.zeros(n), start, prompt=prompt, policy_version=version)


def batch_of(pick, serial, newest):
    """Rows of a few new groups, perhaps with more rows of the newest group before them."""
    first = serial // 3
    prompts = [first + i for i in range(pick.randrange(1, 4)) for _ in range(pick.randrange(1, 4))]
    if newest is not None and pick.random() < 0.3:
        prompts += [newest] * pick.randrange(1, 3)
    pick.shuffle(prompts)
    return prompts


def kept_by_rule(stored, batch, order):
    """What is stored: (prompt, x, version), group by group."""
    groups, own = defaultdict(list), {row[0] for row in batch}
    for row in stored:
        groups[row[0]].append(row)
    by = (1,) if order == "oldest" else (2, 1)  # of equally stale groups, the oldest
    leaving = sorted(
        (each for prompt, each in groups.items() if prompt not in own),
        key=lambda each: [max(row[i] for row in each) for i in by],
    )
    while sum(map(len, groups.values())) + len(batch) > CAPACITY:
        del groups[leaving.pop(0)[0][0]]
    return [row for each in groups.values() for row in each] + batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", ["oldest", "stalest"])
def test_groups_are_always_whole(order, device, tmp_path):
    for seed in range(8):
        pick, serial, stored = random.Random(seed), 0, []
        rb = fifo_buffer(CAPACITY, group="prompt", whole_groups=order, device=device)
        if seed % 2 and device == "cpu":
            journaled(rb, tmp_path / f"{order}{seed}.journal", "never")
        for step in range(30):
            prompts = batch_of(pick, serial, stored[-1][0] if stored else None)
            version = step if order == "oldest" else 100 * step + pick.randrange(-900, 900)
            rb.extend(grouped(prompts, serial, version).to(device))
            batch = [(prompt, serial + i, version) for i, prompt in enumerate(prompts)]
            stored = kept_by_rule(stored, batch, order)
            serial += len(prompts) + 3
            assert sorted(rb[:]["x"].tolist()) == sorted(row[1] for row in stored)
        if seed % 2 and device == "cpu":
            rb.journal.close()
            again = fifo_buffer(CAPACITY, group="prompt", whole_groups=order)
            journaled(again, tmp_path / f"{order}{seed}.journal", "never")
            assert (again[:] == rb[:]).all()
            again.journal.close()


def test_every_group_is_drawn_whole_and_equally_often():
    sampler = GroupSampler("prompt", samples_per_group=4)
    rb = fifo_buffer(18, group="prompt", whole_groups="oldest", sampler=sampler, generator=seeded())
    for prompt in range(40):  # plain rows would leave two of the oldest group behind
        rb.extend(grouped([prompt] * 4, 4 * prompt))
    assert len(rb) == 16
    drawn = rb.sample(16)
    assert drawn["prompt"].reshape(4, 4)[:, 0].sort().values.tolist() == [36, 37, 38, 39]
    assert len(drawn["x"].unique()) == 16


def test_too_old_rows_and_whole_groups_leave_together():
    rb = fifo_buffer(9, group="prompt", whole_groups="stalest", max_age=5)
    for version in range(6):
        rb.extend(grouped([version] * 3, 3 * version, version))
    assert rb[:]["prompt"].unique().tolist() == [3, 4, 5]
    rb.extend(grouped([10] * 3, 99, 10))
    assert rb[:]["prompt"].unique().tolist() == [5, 10]


def test_groups_of_ragged_rows():
    storage = RaggedStorage(6, {"tokens": 4, "prompt": 8}, text=["prompt"])
    storage_rows = [{"tokens": torch.arange(i % 3 + 1), "prompt": f"p{i // 3}"} for i in range(12)]
    rb = fifo_buffer(6, group="prompt", whole_groups="oldest", storage=storage)
    for start in range(0, 12, 3):
        rb.extend(storage_rows[start : start + 3])
    assert {str(each) for each in rb.sample(60)["prompt"]} == {"p2", "p3"}


def test_a_batch_that_would_cut_a_group_is_refused():
    rb = fifo_buffer(4, group="prompt", whole_groups="oldest")
    rb.extend(grouped([1, 1, 1], 0))
    before = rb[:].clone()
    for prompts in ([1, 1], [2, 2, 2, 2, 2]):
        with pytest.raises(ArgumentError, match="must fit into the storage of 4 rows with its gro"):
            rb.extend(grouped(prompts, 3))
        assert (rb[:] == before).all()
    rb = fifo_buffer(4, group="prompt", whole_groups="stalest")
    without = grouped([1, 1, 1], 0).exclude("policy_version")
    rb.extend(without)
    with pytest.raises(KeyMismatchError, match="policy_version"):
        rb.extend(without.set("prompt", torch.tensor([2, 2, 2])))


def test_a_described_buffer_keeps_groups_whole(tmp_path):
    rb = fifo_buffer(8, group="prompt", whole_groups="oldest")
    rb.extend(grouped([1, 1, 2], 0))
    save_checkpoint(tmp_path / "rb.ckpt", rb)
    assert open_buffer(tmp_path / "rb.ckpt").writer.whole_groups == "oldest"
