"""QM9Strings: molecules of five building blocks, rewarded by a predicted HOMO-LUMO gap."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import check_power
from gfn_rb.envs.sequence import ScoredSequenceEnv
from gfn_rb.shapes import Float64

BLOCKS = ("C", "O", "N", "C-F", "C=O", "C=C", "C#C", "c1ccccc1", "C1CCCCC1", "C1CCNCC1", "CCC")
LENGTH = 5
PATH = Path(__file__).parent / "data" / "qm9_strings.npz"
N_MODES = 805  # int(0.005 * 11^5), the number that is published
MAX_REWARD = 100.0


def load_scores(path: str | Path = PATH) -> Float64[Tensor, "161051"]:
    """Return the score of every string, in the order of its letters 0..10."""
    with np.load(path) as table:
        return torch.from_numpy(table["score"].reshape(-1).astype(np.float64))


class QM9Strings(ScoredSequenceEnv):
    """Write a string of five of the 11 building blocks ``BLOCKS``, as 0..10.

        log R(x) = beta log(max(r(x), min_reward) / max_x r(x)) + log 100

    where r is the score that Shen et al. (2023, arXiv:2305.07170) published for every string: a
    model's prediction of the molecule's HOMO-LUMO gap. Scores range from -2.77 to 17.37. Modes are
    the 805 strings of highest score, the best 0.5%. ``score`` is r over its maximum.

    Args:
        form: "prepend_append" to write at both ends, as published, "append", or
            "non_autoregressive" to write blocks in any order (see ``SequenceEnv``).
        beta: exponent of the reward, positive; 20 is published.
        min_reward: floor of r, in (0, 1].
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        ArgumentError: an argument is out of range; the message names it.
    """

    alphabet = "0123456789a"

    def __init__(
        self,
        form: str = "prepend_append",
        beta: float = 20.0,
        min_reward: float = 1e-3,
        **options: Unpack[EnvOptions],
    ) -> None:
        check_power(beta, min_reward)
        super().__init__(len(BLOCKS), LENGTH, form, **options)
        self.beta, self.min_reward = beta, min_reward
        score = load_scores()
        best = score.max()
        log_reward = beta * (score.clamp(min=min_reward) / best).log() + math.log(MAX_REWARD)
        modes = score.sort(descending=True, stable=True).indices[:N_MODES]
        self._register_scores(score / best, log_reward, modes)
