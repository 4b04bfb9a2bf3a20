"""TFBind8: DNA 8-mers rewarded by how strongly the transcription factor SIX6 binds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import check_power, to_digits
from gfn_rb.envs.sequence import ScoredSequenceEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.near.distances import greedy
from gfn_rb.shapes import Int64, Integers, Modes

LETTERS = "ACGT"
LENGTH = 8
PATH = Path(__file__).parent / "data" / "tfbind8_six6_ref_r1.npz"
N_TOP = 327  # int(0.005 * 4^8)
N_APART = 328  # modes that differ in two letters, down to 0.88920, as the published list
N_BEST = 1200  # strings to search for them; the last of them is in place 1,121


def load_scores(path: str | Path = PATH) -> Int64[Tensor, "65536"]:
    """Return the E-score of every 8-mer in alphabetical order, in units of 1e-5."""
    with np.load(path) as table:
        return torch.from_numpy(table["e_score"].astype(np.int64))


class TFBind8(ScoredSequenceEnv):
    """Write a DNA 8-mer, letters ACGT as 0..3, rewarded by its measured binding to SIX6.

        log R(x) = beta log max(r(x), min_reward)

    r is the E-score of Barrera et al. (2016), min-max normalised over all 65,536 8-mers. beta = 3
    is the usual exponent (Shen et al. 2023; Kim et al. 2023). The weakest 8-mer has r = 0, and
    ``min_reward`` keeps its log R finite. The default is below every other r (0.00196), so that no
    two scores become equal.

    With ``modes="top"``, modes are the int(0.005 * 65536) = 327 8-mers of highest score. The two
    strands of an 8-mer have equal scores, which are ranked in alphabetical order. The last place
    falls between two strands: CCCTATCA is a mode and its reverse complement TGATAGGG is not. With
    ``modes="published"``, modes are the 328 8-mers of Kim et al. (2023, arXiv:2310.02710). In
    descending score, each of them differs in at least two letters from all before it.

    Args:
        form: "append", "prepend_append" to write at both ends, or "non_autoregressive" to write
            letters in any order (see ``SequenceEnv``).
        beta: exponent of the reward, above 0.
        min_reward: lower limit of r, above 0 and at most 1.
        modes: which 8-mers count as modes, "top" or "published".
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        ArgumentError: an argument is out of range; the message names it.
    """

    alphabet = LETTERS

    def __init__(
        self,
        form: str = "append",
        beta: float = 3.0,
        min_reward: float = 1e-3,
        modes: str = "top",
        **options: Unpack[EnvOptions],
    ) -> None:
        check_power(beta, min_reward)
        if modes not in ("published", "top"):
            raise ArgumentError(f"modes must be 'published' or 'top', got {modes!r}")
        super().__init__(len(LETTERS), LENGTH, form, **options)
        self.beta, self.min_reward = beta, min_reward
        e_score = load_scores().double()
        score = (e_score - e_score.min()) / (e_score.max() - e_score.min())
        ranked = score.sort(descending=True, stable=True).indices
        best = ranked[:N_TOP] if modes == "top" else _apart(ranked[:N_BEST])[:N_APART]
        self._register_scores(score, beta * score.clamp(min=min_reward).log(), best)


def _apart(ranked: Integers) -> Modes:
    """Keep the 8-mers that differ in at least two letters from all that are kept before them."""
    letter = to_digits(ranked, len(LETTERS), LENGTH)
    near = (letter[:, None] != letter).sum(2) <= 1
    better, worse = near.triu(1).nonzero(as_tuple=True)
    return ranked[greedy(len(ranked), better, worse)]
