"""What the header tells of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from checkpoint.checkpoint_runs import buffer, ensemble, rows, used
from torchrl.data import LazyMemmapStorage

from gfn_rb.checkpoint import inspect_checkpoint, save_checkpoint, save_state


def test_of_a_buffer(tmp_path: Path) -> None:
    rb = used(buffer(storage=LazyMemmapStorage(20), prefetch=2))
    save_checkpoint(tmp_path / "rb", rb, model={"w": torch.zeros(4)}, step=2)
    summary = inspect_checkpoint(tmp_path / "rb")
    assert summary["version"] == 3
    assert summary["nbytes"] == (tmp_path / "rb").stat().st_size
    assert summary["values"] == ["model", "step"]
    assert summary["buffers"] == [
        {
            "class": "TensorDictReplayBuffer",
            "storage": "LazyMemmapStorage",
            "sampler": "RandomSampler",
            "writer": "TensorDictRoundRobinWriter",
            "capacity": 20,
            "length": 13,
            "batch_size": 4,
            "prefetched": 2,
            "rows": {
                "state": {"dtype": "float32", "shape": [3]},
                "log_reward": {"dtype": "float32", "shape": []},
                "next/reward": {"dtype": "float32", "shape": [1]},
                "index": {"dtype": "int64", "shape": []},
            },
        }
    ]
    assert json.loads(json.dumps(summary)) == summary


def test_of_an_ensemble(tmp_path: Path) -> None:
    rb = ensemble()
    rb[1].extend(rows(4))
    save_checkpoint(tmp_path / "rb", rb)
    first, second, whole = inspect_checkpoint(tmp_path / "rb")["buffers"]
    assert (first["capacity"], first["length"], first["rows"]) == (20, 0, {})
    assert (second["capacity"], second["length"]) == (9, 4)
    assert (whole["class"], whole["capacity"]) == ("ReplayBufferEnsemble", None)
    assert whole["sampler"] == "SamplerEnsemble"


def test_of_a_state(tmp_path: Path) -> None:
    save_state(tmp_path / "state", {"a": torch.zeros(3), "b": [torch.zeros(2, 2).half(), 7]})
    summary = inspect_checkpoint(tmp_path / "state")
    assert summary["values"] == ["a", "b"]
    assert summary["buffers"] == []
    assert (summary["n_tensors"], summary["tensor_nbytes"]) == (2, 12 + 8)


def test_tensors_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, {"x": torch.zeros(5000)})
    before, content = inspect_checkpoint(path), bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    assert inspect_checkpoint(path) == before
