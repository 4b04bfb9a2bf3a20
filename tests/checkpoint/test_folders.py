"""Folders that contain a buffer as one checkpoint, with nothing pickled."""

import pickle

import pytest
import torch
from factories import assert_equal
from tensordict import TensorDict

from gfn_rb import MergedReplayBuffer, reward_prioritized_buffer
from gfn_rb.checkpoint import AtomicCheckpoint
from gfn_rb.checkpoint.api import CHECKPOINT_NAME
from gfn_rb.errors import CheckpointError

torchrl_checkpoint = pytest.importorskip("torchrl.checkpoint")


def filled(k=0):
    rb = reward_prioritized_buffer(9, batch_size=4, prefetch=2)
    rb.extend(TensorDict({"log_reward": torch.full((9,), float(k)), "x": torch.rand(9)}, [9]))
    rb.sample()
    return rb


def test_a_folder_holds_one_file_and_nothing_pickled(tmp_path, monkeypatch):
    rb, again = (MergedReplayBuffer(filled(), filled(), p="size", batch_size=8) for _ in range(2))
    for module in (pickle, torch):
        for name in ("load", "loads", "dump", "dumps", "save"):
            monkeypatch.delattr(module, name, raising=False)
    AtomicCheckpoint(rb).dump(tmp_path / "rb")
    assert [path.name for path in (tmp_path / "rb").iterdir()] == [CHECKPOINT_NAME]
    (tmp_path / "rb" / "prefetch.pkl").write_bytes(b"\x80\x04.")  # would not unpickle
    AtomicCheckpoint(again).load(tmp_path / "rb")
    for member in (0, 1):
        assert_equal(again[member][:], rb[member][:])
        assert_equal(again[member].sample(), rb[member].sample())


@pytest.mark.parametrize("name", ["run", "run.zip"])
def test_torchrls_checkpoint_holds_them(name, tmp_path):
    rb, again = filled(3), filled()
    for each, act in ((rb, "save"), (again, "load")):
        checkpoint = torchrl_checkpoint.Checkpoint()
        checkpoint.register("rb", AtomicCheckpoint(each))
        getattr(checkpoint, act)(tmp_path / name)
    assert_equal(again.sample(), rb.sample())


def test_a_folder_without_a_dump_is_refused(tmp_path):
    rb = filled(1)
    before = rb[:].clone()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        AtomicCheckpoint(rb).load(tmp_path)
    assert_equal(rb[:], before)
