"""Folders that hold a buffer as one checkpoint: whole, and nothing pickled."""

import pickle
import shutil

import pytest
import torch
from tensordict import TensorDict

from gfn_rb import MergedReplayBuffer, reward_prioritized_buffer
from gfn_rb.checkpoint import AtomicCheckpoint
from gfn_rb.checkpoint.api import CHECKPOINT_NAME
from gfn_rb.errors import CheckpointError

torchrl_checkpoint = pytest.importorskip("torchrl.checkpoint")
ROWS = 500


def rows(k):
    return TensorDict({"log_reward": torch.full((ROWS,), float(k)), "x": torch.rand(ROWS)}, [ROWS])


def buffer():
    return reward_prioritized_buffer(ROWS, batch_size=4, prefetch=2)


def filled(k):
    rb = buffer()
    rb.extend(rows(k))
    rb.sample()
    return rb


def test_nothing_is_pickled(tmp_path, monkeypatch):
    rb, again = filled(1), buffer()
    for module in (pickle, torch):
        for name in ("load", "loads", "dump", "dumps", "save"):
            monkeypatch.delattr(module, name, raising=False)
    AtomicCheckpoint(rb).dump(tmp_path / "rb")
    assert [path.name for path in (tmp_path / "rb").iterdir()] == [CHECKPOINT_NAME]
    (tmp_path / "rb" / "prefetch.pkl").write_bytes(b"\x80\x04.")  # would not unpickle
    AtomicCheckpoint(again).load(tmp_path / "rb")
    assert torch.equal(again.sample()["x"], rb.sample()["x"])


def test_one_file_holds_all_members(tmp_path):
    def merged():
        return MergedReplayBuffer(filled(1), filled(2), p="size", batch_size=8)

    rb, again = merged(), merged()
    again[0].extend(rows(3))
    AtomicCheckpoint(rb).dump(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT_NAME]
    AtomicCheckpoint(again).load(tmp_path)
    assert torch.equal(again[0][:]["x"], rb[0][:]["x"])
    assert torch.equal(again[1][:]["x"], rb[1][:]["x"])


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_torchrls_checkpoint_holds_them(kind, tmp_path):
    rb, again = filled(3), buffer()
    path = tmp_path / ("run" if kind == "folder" else "run.zip")
    checkpoint = torchrl_checkpoint.Checkpoint()
    checkpoint.register("rb", AtomicCheckpoint(rb))
    checkpoint.save(path)
    other = torchrl_checkpoint.Checkpoint()
    other.register("rb", AtomicCheckpoint(again))
    other.load(path)
    assert torch.equal(again.sample()["x"], rb.sample()["x"])


def test_a_folder_without_a_dump_is_refused(tmp_path):
    rb = filled(1)
    before = rb[:].clone()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        AtomicCheckpoint(rb).load(tmp_path)
    AtomicCheckpoint(rb).dump(tmp_path)
    shutil.copy(tmp_path / CHECKPOINT_NAME, tmp_path / "other")
    (tmp_path / CHECKPOINT_NAME).write_bytes((tmp_path / CHECKPOINT_NAME).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is no sound checkpoint"):
        AtomicCheckpoint(rb).load(tmp_path)
    assert torch.equal(rb[:]["x"], before["x"])
