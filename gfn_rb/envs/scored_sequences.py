"""Sequences whose scores are in a table: TFBind8's DNA and QM9's strings of building blocks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import check_power, from_digits, to_digits
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.envs.sequence import SequenceEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.near.neighbours import NEVER, NearRows
from gfn_rb.shapes import Float64, Floats, Int64, Integers, Modes, StateBatch

DATA = Path(__file__).parent / "data"
BASES = "ACGT"
N_BASES = 8
TFBIND8_PATH = DATA / "tfbind8_six6_ref_r1.npz"
N_TOP = 327  # int(0.005 * 4^8)
N_APART = 328  # modes that differ in two letters, down to 0.88920, as the published list
N_BEST = 1200  # strings to search for them; the last of them is in place 1,121
FRAGMENTS = ("C", "O", "N", "CF", "C=O", "C=C", "C#C", "c1ccccc1", "C1CCCCC1", "C1CCNCC1", "CCC")
N_BLOCKS = 5
QM9_PATH = DATA / "qm9_strings.npz"
N_QM9_MODES = 805  # int(0.005 * 11^5), the number that is published
MAX_REWARD = 100.0


def load_table(path: str | Path) -> Float64[Tensor, "n"]:
    """Return the scores of all sequences in order of their letters, TFBind8's in units of 1e-5."""
    with np.load(path) as table:
        (name,) = table.files
        return torch.from_numpy(table[name].reshape(-1).astype(np.float64))


class ScoredSequenceEnv(SequenceEnv, EnumerableEnv):
    """Write a sequence whose reward is read from a table. A constructor registers the table."""

    def _register_scores(
        self,
        score: Float64[Tensor, "n"],
        log_reward: Float64[Tensor, "n"],
        modes: Int64[Tensor, "m"],
    ) -> None:
        """Take the score and log R of every sequence, in order of its letters, and the modes."""
        self.n_modes = len(modes)
        mode = torch.full(score.shape, -1).scatter(0, modes, torch.arange(len(modes)))
        self._register(_score=score.float(), _log_reward=log_reward.float(), _mode=mode)

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x), in nats (the class's equation)."""
        return self._log_reward[self.terminating_index(state)]

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return the score of each finished sequence, without floor or exponent."""
        return self._score[self.terminating_index(state)]

    def mode_index(self, state: StateBatch) -> Integers:
        """Return the rank (0 is the best) of each sequence that is a mode, -1 for the others."""
        return self._mode[self.terminating_index(state)]

    def terminating_index(self, state: StateBatch) -> Integers:
        """Read each finished sequence as a number in base ``n_letters``."""
        self.check_terminating(state)
        return from_digits(state, self.n_letters)


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
            letters in any order.
        beta: exponent of the reward, above 0.
        min_reward: lower limit of r, above 0 and at most 1.
        modes: which 8-mers count as modes, "top" or "published".
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    alphabet = BASES

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
        super().__init__(len(BASES), N_BASES, form, **options)
        self.beta, self.min_reward = beta, min_reward
        e_score = load_table(TFBIND8_PATH)
        score = (e_score - e_score.min()) / (e_score.max() - e_score.min())
        ranked = score.sort(descending=True, stable=True).indices
        best = ranked[:N_TOP] if modes == "top" else _apart(ranked[:N_BEST])[:N_APART]
        self._register_scores(score, beta * score.clamp(min=min_reward).log(), best)


def _apart(ranked: Integers) -> Modes:
    """Keep the 8-mers that differ in at least two letters from all that are kept before them."""
    letter, rank = to_digits(ranked, len(BASES), N_BASES), np.arange(len(ranked))
    index = NearRows(1, letter, p=0.0, cutoff=1.0)
    kept, _ = index.choose(index.prepare(letter), -rank.astype(float), np.zeros(1), NEVER)
    return ranked[torch.from_numpy(kept)]


class QM9Strings(ScoredSequenceEnv):
    """Write a string of five of the 11 building blocks ``FRAGMENTS``, as 0..10.

        log R(x) = beta log(max(r(x), min_reward) / max_x r(x)) + log 100

    where r is the score that Shen et al. (2023, arXiv:2305.07170) published for every string: a
    model's prediction of the molecule's HOMO-LUMO gap. Scores range from -2.77 to 17.37. Modes are
    the 805 strings of highest score, the best 0.5%. ``score`` is r over its maximum. A string is
    described as SMILES, its blocks joined by single bonds.

    Args:
        form: "prepend_append" to write at both ends, as published, "append", or
            "non_autoregressive" to write blocks in any order.
        beta: exponent of the reward, positive; 20 is published.
        min_reward: floor of r, in (0, 1].
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    alphabet = FRAGMENTS
    separator = "-"

    def __init__(
        self,
        form: str = "prepend_append",
        beta: float = 20.0,
        min_reward: float = 1e-3,
        **options: Unpack[EnvOptions],
    ) -> None:
        check_power(beta, min_reward)
        super().__init__(len(FRAGMENTS), N_BLOCKS, form, **options)
        self.beta, self.min_reward = beta, min_reward
        score = load_table(QM9_PATH)
        best = score.max()
        log_reward = beta * (score.clamp(min=min_reward) / best).log() + math.log(MAX_REWARD)
        modes = score.sort(descending=True, stable=True).indices[:N_QM9_MODES]
        self._register_scores(score / best, log_reward, modes)
