"""The table of TFBind8 scores that ships with the package, and how it was made.

``write_table("SIX6_REF_R1_8mers.txt")`` writes it anew from the original file; ``data/README.md``
tells where that file comes from.
"""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Int64

LETTERS = "ACGT"
LENGTH = 8
PATH = Path(__file__).parent / "data" / "tfbind8_six6_ref_r1.npz"


def load_scores(path: str | Path = PATH) -> Int64[Tensor, "65536"]:
    """Return the E-score of every 8-mer in alphabetical order, in units of 1e-5."""
    with np.load(path) as table:
        return torch.from_numpy(table["e_score"].astype(np.int64))


def read_scores(source: str | Path) -> Int64[Tensor, "65536"]:
    """Read the original tab-separated file.

    Args:
        source: a header, then rows of an 8-mer, its reverse complement, the E-score of both, and
            columns that are not read.

    Returns:
        The E-score of every 8-mer in alphabetical order, in units of 1e-5 (the file's precision).

    Raises:
        ArgumentError: an 8-mer has no score, or two.
    """
    scores: dict[str, int] = {}
    with Path(source).open(newline="") as lines:
        for row in list(csv.reader(lines, delimiter="\t"))[1:]:
            score = round(float(row[2]) * 1e5)
            for sequence in row[:2]:
                if scores.setdefault(sequence, score) != score:
                    raise ArgumentError(f"source must give {sequence} one score, got two")
    sequences = ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]
    missing = [sequence for sequence in sequences if sequence not in scores]
    if missing:
        raise ArgumentError(f"source must give every 8-mer a score, got none for {missing[0]}")
    return torch.tensor([scores[sequence] for sequence in sequences])


def write_table(source: str | Path, target: str | Path = PATH) -> None:
    """Write ``read_scores(source)`` to ``target``, as int32 in a compressed .npz."""
    np.savez_compressed(target, e_score=read_scores(source).numpy().astype(np.int32))
