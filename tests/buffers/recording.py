"""A transform that writes down what a buffer is offered, in whatever process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Transform


class Recorder(Transform):
    """Saves each batch on its way in, as ``NAME-PROCESS-NUMBER.pt``."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.folder, self.name, self.count = Path(folder), name, 0

    def _inv_call(self, tensordict):
        path = self.folder / f"{self.name}-{os.getpid()}-{self.count:05d}.pt"
        torch.save(tensordict.clone().contiguous().to_dict(), path)
        self.count += 1
        return tensordict

    def forward(self, tensordict):
        return tensordict


def recorded(folder: Path, name: str) -> dict[str, list[TensorDict]]:
    """Return the batches of each process but this one, in order."""
    batches: dict[str, list[TensorDict]] = {}
    for path in sorted(folder.glob(f"{name}-*.pt")):
        process = path.stem.split("-")[1]
        if process != str(os.getpid()):
            values = torch.load(path)
            sizes = (values["next"] if name == "frames" else values)["log_reward"].shape
            batches.setdefault(process, []).append(TensorDict(values, sizes))
    return batches
