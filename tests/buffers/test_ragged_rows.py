"""Rows of different lengths and rows with text in merged buffers and presets."""

from functools import partial

import pytest
import torch
from factories import objects
from tensordict import TensorDict, lazy_stack
from torchrl.data import ConsumingSampler
from torchrl.envs.transforms import Transform
from torchrl.objectives.llm import MCAdvantage

from gfn_rb import (
    FIFOWriter,
    MergedReplayBuffer,
    RaggedStorage,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)
from gfn_rb.envs import HyperGrid


def rows(serials):
    """Tokens, text and a state that tell the serial number of their row."""
    return [
        TensorDict(
            {
                "tokens": torch.full((1 + i % 5,), i),
                "values": torch.full((1 + i % 5, 2), float(i)),
                "text": str(i),
                "state": torch.tensor([i]),
                "log_reward": torch.tensor(i % 7 / 7),
            }
        )
        for i in serials
    ]


RAGGED = {"tokens": 9, "values": "tokens"}
MEMBERS = {
    "padded": (lambda: RaggedStorage(20, RAGGED), ["text"]),
    "text": (lambda: RaggedStorage(20, {**RAGGED, "text": 4}, text=["text"]), []),
}


@pytest.mark.parametrize("kind", MEMBERS)
@pytest.mark.parametrize("p", ["mass", "size", [0.3, 0.7]])
def test_merged_draws_return_whole_rows(kind, p):
    torch.manual_seed(0)
    members = []
    for start in (0, 40):
        make, dropped = MEMBERS[kind]
        members.append(reward_prioritized_buffer(20, storage=make()))
        members[-1].extend(lazy_stack(rows(range(start, start + 12))).exclude(*dropped))
    rb = MergedReplayBuffer(*members, p=p, batch_size=16)
    seen = set()
    for _ in range(3):
        batch = rb.sample()
        assert batch.batch_size == (16,)
        for row in batch.unbind(0):
            i = int(row["state"])
            assert int(row["buffer_id"]) == (i >= 40)
            assert int(members[i >= 40].storage.get(int(row["index"]))["state"]) == i
            if "text" in row.keys():  # noqa: SIM118
                assert row["text"] == str(i)
            if "tokens" in row.keys():  # noqa: SIM118
                n = int(row["tokens_mask"].sum()) if "tokens_mask" in row else len(row["tokens"])
                assert row["tokens"].tolist() == [i] * n + [0] * (len(row["tokens"]) - n)
                assert n == 1 + i % 5
                assert row["values"].shape == (len(row["tokens"]), 2)
            seen.add(int(row["buffer_id"]))
    assert seen == {0, 1}


class Hold(Transform):
    """Holds rows back until there are three batches."""

    def __init__(self):
        super().__init__()
        self.held = []

    def _inv_call(self, tensordict):
        self.held.append(tensordict)
        if len(self.held) < 3:
            return None
        held, self.held = self.held, []
        return torch.cat([each if each.ndim else each[None] for each in held])


PRESETS = {
    "reward": reward_prioritized_buffer,
    "diverse": partial(diverse_buffer, cutoff_distance=0.0),
    "fifo": fifo_buffer,
    "states": terminating_state_buffer,
    "tracked": partial(fifo_buffer, statistics=True),
    "narrow": partial(fifo_buffer, statistics=True, compact="narrow", env=HyperGrid(2, 8)),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("is_late", [False, True])
def test_presets_pass_on_that_rows_are_held_back(preset, is_late):
    rb = PRESETS[preset](20, **({} if is_late else {"transform": Hold()}))
    if is_late:
        rb.append_transform(Hold())
    for i in range(3):
        assert len(rb) == rb.stats().get("offered", 0) == 0
        index = rb.extend(objects([2 * i, 2 * i + 1]))
        assert len(index) == (6 if i == 2 else 0)
    assert sorted(rb[:]["state"][:, 0].tolist()) == list(range(6))


def test_advantages_of_completions_are_computed_on_the_way_in():
    storage = RaggedStorage(8, {"tokens": 9})
    transform = MCAdvantage(grpo_size=2, prompt_key="prompt")
    rb = fifo_buffer(8, storage=storage, transform=transform)
    for i in range(4):
        done = torch.ones(1, 1, dtype=torch.bool)
        after = {"reward": torch.full((1, 1, 1), float(i)), "done": done, "terminated": done}
        tokens = torch.full((1, 1 + i), i)
        prompt = torch.tensor([[i % 2]])
        row = TensorDict({"tokens": tokens, "prompt": prompt, "next": after}, [1])
        rb.extend(row)
        assert len(rb) == [0, 0, 2, 4][i]
    assert {int(t[0]) for t in rb[:]["tokens"]} == set(range(4))
    assert "advantage" in rb[:].keys()  # noqa: SIM118


def test_consumed_slots_take_new_rows():
    rb = fifo_buffer(6, storage=RaggedStorage(6, {"tokens": 9}), sampler=ConsumingSampler())
    assert isinstance(rb.writer, FIFOWriter)
    rb.extend(lazy_stack(rows(range(6))).select("tokens", "state"))
    drawn = set(rb.sample(4)["state"].flatten().tolist())
    rb.extend(lazy_stack(rows(range(10, 14))).select("tokens", "state"))
    left = set(rb.sample(6)["state"].flatten().tolist())
    assert left == (set(range(6)) - drawn) | {10, 11, 12, 13}
