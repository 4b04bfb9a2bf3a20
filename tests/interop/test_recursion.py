"""recursion/gflownet's replay buffer against plain lists."""

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import torch

from gfn_rb import reward_prioritized_buffer

EXAMPLE = Path(__file__).parents[2] / "examples" / "recursion_buffer.py"
ReplayBuffer = run_path(str(EXAMPLE))["ReplayBuffer"]


def config(capacity: int) -> SimpleNamespace:
    return SimpleNamespace(replay=SimpleNamespace(capacity=capacity, warmup=0))


def items(n: int) -> list[tuple]:
    """Items as recursion pushes them: a trajectory, log R, rewards, condition, validity."""
    rng = np.random.default_rng(1)
    return [
        ({"smiles": "C" * int(k)}, torch.tensor(r), rng.random(2), torch.rand(3), True)
        for k, r in zip(rng.integers(1, 30, n), rng.permutation(n) / n, strict=True)
    ]


def smiles(trajectory, *_):
    return trajectory["smiles"]


def test_the_newest_are_kept_and_drawn_as_by_recursion() -> None:
    rb, plain = ReplayBuffer(config(10), np.random.default_rng(0)), [None] * 10
    for i, item in enumerate(items(24)):
        rb.push(*item)
        plain[i % 10] = item
    drawn = rb.sample(16)
    slots = np.random.default_rng(0).choice(10, 16)
    assert drawn[0] == [plain[slot][0] for slot in slots]
    assert drawn[1].equal(torch.stack([plain[slot][1] for slot in slots]))
    assert (drawn[2] == np.stack([plain[slot][2] for slot in slots])).all()
    assert drawn[4] == [True] * 16
    assert len(rb) == 10


def test_the_newest_item_of_each_object_is_kept() -> None:
    rb, plain = ReplayBuffer(config(10), key=smiles), {}
    for item in items(200):
        rb.push(*item)
        plain.pop(smiles(*item), None)
        plain[smiles(*item)] = item[1]
        plain = dict(list(plain.items())[-10:])
        assert {smiles(*each): each[1] for each in rb.buffer} == plain


def test_another_buffer_keeps_and_draws_by_reward() -> None:
    law = reward_prioritized_buffer(10, unique="state", temperature=0.01)
    rb, rewards = ReplayBuffer(config(10), key=smiles, rb=law), {}
    for trajectory, *rest in items(200):
        length = len(trajectory["smiles"])
        rewards[length] = torch.tensor(float(length * 7 % 31))
        rb.push(trajectory, rewards[length], *rest[1:])
    kept = torch.stack(sorted(rewards.values())[-10:])
    assert torch.stack(sorted(each[1] for each in rb.buffer)).equal(kept)
    assert rb.sample(10)[1].sort().values.equal(kept)
