"""Make TFBind8's table of scores: python -m tools.tfbind8_table SIX6_REF_R1_8mers.txt."""

from __future__ import annotations

import csv
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gfn_rb.envs.scored_sequences import BASES, N_BASES, TFBIND8_PATH
from gfn_rb.errors import ArgumentError


def read_scores(source: str | Path) -> Tensor:
    """Return E-scores from the original file: tab-separated 8-mer, reverse complement, E-score."""
    scores: dict[str, int] = {}
    with Path(source).open(newline="") as lines:
        for row in list(csv.reader(lines, delimiter="\t"))[1:]:
            score = round(float(row[2]) * 1e5)
            for sequence in row[:2]:
                if scores.setdefault(sequence, score) != score:
                    raise ArgumentError(f"source must give {sequence} one score, got two")
    sequences = ["".join(letters) for letters in product(BASES, repeat=N_BASES)]
    missing = [sequence for sequence in sequences if sequence not in scores]
    if missing:
        raise ArgumentError(f"source must give every 8-mer a score, got none for {missing[0]}")
    return torch.tensor([scores[sequence] for sequence in sequences])


def write_table(source: str | Path, target: str | Path = TFBIND8_PATH) -> None:
    """Write ``read_scores(source)`` to ``target``, as int32 in a compressed .npz."""
    np.savez_compressed(target, e_score=read_scores(source).numpy().astype(np.int32))


if __name__ == "__main__":
    write_table(sys.argv[1])
