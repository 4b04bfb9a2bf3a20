"""RNABinding: short RNA rewarded by how strongly it pairs with given targets."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import check_power, to_digits
from gfn_rb.envs.sequence import SequenceEnv
from gfn_rb.errors import ArgumentError, GfnRbError
from gfn_rb.shapes import Float, Floats, Int64, Modes, StateBatch

LETTERS = "ACGU"
SUMS_PATH = Path(__file__).parent / "data" / "rna_l14.csv"
MODES_PATH = Path(__file__).parent / "data" / "rna_l14_modes.npz"
TARGETS = {
    "RNA1": "GAACGAGGCACAUUCCGGCUCGCCCGGCCCAUGUGAGCAUGGGCCGGACC"
    "CCGUCCGCGCGGGGCCCCCGCGCGGACGGGGGCGAGCCGGAAUGUGCCUC",
    "RNA2": "GAGGCACAUUCCGGCUCGCCCCCGUCCGCGCGGGGGCCCCGCGCGGACGG"
    "GGUCCGGCCCGCGCGGGGCCCCCGCGCGGGAGCCGGAAUGUGCCUCGUUC",
    "RNA3": "CCGGUGAUACUGUUAGUGGUCACGGUGCAUUUAUAGCGCUAAAGUACAGU"
    "CUUCCCCUGUUGAACGGCGCCAUUGCAUACAGGGCCAGCCGCGUAACGCC",
    "RNA4": "UAAGAGAGCGUAAAAAUAGAGAUAUGUUCUUGGGUCAGGGCUAUGCGUAC"
    "CCCAUGAGAGUAAAUCAUACCCCCAAUGGGCUUCGGCGGAAAUUCACUUA",
}
_COMPLEMENT = str.maketrans("ACGU", "UGCA")


class RNABinding(SequenceEnv):
    """Write RNA, letters ACGU as 0..3, rewarded by the energy at which it binds to targets.

        log R(x) = beta log max(r(x), min_reward)
        r(x) = mean_t E(x, t) / (E(t's reverse complement, t) length / len(t))

    E is the energy in kcal/mol of the best duplex between the two strands, by the nearest-neighbour
    model of ViennaRNA (``RNA.duplexfold``; Lorenz et al. 2011). t runs over the targets. These are
    the tasks L14_RNA1 to L14_RNA4 of FLEXS (Sinai et al. 2020), and L14_RNA1+2 and so on for two
    targets. beta = 8 and a lower limit of 0.001 are usual (Kim et al. 2023). A sequence that does
    not bind may have r < 0. A short one may bind better than its share of the whole target, with r
    a little above 1.

    ViennaRNA computes each sequence once, which takes most of a millisecond for a target of 100
    letters. Known energies are not part of the environment's ``state_dict``.

    With ``modes="threshold"``, each sequence with r of at least ``threshold`` is a mode. Of 30,000
    random 14-mers 2, 1, 2 and 10 reach 0.8 on the four targets. With ``modes="published"``, modes
    are the sequences of Kim et al. (2024, arXiv:2410.01432) for RNA1, RNA2 and RNA3 with 14
    letters. They are among the best 0.01% of all, and the best within a change of one letter.

    ``true_log_z`` in nats and ``expected_score``, the mean of max(r(x), min_reward) under the
    target, are known for 14 letters, one target of RNA1 to RNA3, a lower limit of 0.001, and whole
    beta up to 50, 64 and 100 (see ``data/README.md``).

    Args:
        targets: names among "RNA1" to "RNA4", or sequences of ACGU; r is the mean over them.
        length: number of letters in a finished sequence, at least 1.
        form: "append", "prepend_append" to write at both ends, or "non_autoregressive" to write
            letters in any order.
        beta: exponent of the reward, above 0.
        min_reward: lower limit of r, above 0 and at most 1.
        threshold: lowest r of a mode.
        modes: which sequences count as modes, "threshold" or "published".
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        GfnRbError: ViennaRNA is not installed.
        ArgumentError: an argument is out of range, or a target cannot be bound.
    """

    n_modes: int | None = None
    true_log_z: float | None = None
    expected_score: float | None = None
    alphabet = LETTERS

    def __init__(
        self,
        targets: Sequence[str] = ("RNA1",),
        length: int = 14,
        form: str = "append",
        beta: float = 8.0,
        min_reward: float = 1e-3,
        threshold: float = 0.8,
        modes: str = "threshold",
        **options: Unpack[EnvOptions],
    ) -> None:
        if find_spec("RNA") is None:
            raise GfnRbError(
                "RNABinding needs ViennaRNA: pip install '.[rna]' in a clone of gfn_rb"
            )
        check_power(beta, min_reward)
        if not min_reward <= threshold < math.inf:
            raise ArgumentError(
                f"threshold must be finite and at least min_reward={min_reward}, got {threshold}"
            )
        super().__init__(len(LETTERS), length, form, **options)
        self.beta, self.min_reward, self.threshold = beta, min_reward, threshold
        if isinstance(targets, str) or not targets:
            raise ArgumentError(f"targets must be a sequence of one or more, got {targets!r}")
        self.targets = tuple(TARGETS.get(target, target) for target in targets)
        if wrong := [text for text in self.targets if not text or set(text) - set(LETTERS)]:
            raise ArgumentError(
                f"targets must be among {list(TARGETS)} or spelt in {LETTERS}, got {wrong[0]!r}"
            )
        best = [lowest_energy(target) / len(target) for target in self.targets]
        self._register(_full_energy=length * torch.tensor(best, dtype=torch.float32))
        self._energies: dict[str, list[float]] = {}  # of each sequence, with each target
        self.modes = modes
        if modes == "published":
            letters = published_modes(self.targets, length)
            self.n_modes = len(letters)
            self._register(_mode_keys=self.state_key(letters.to(self.device)))
        elif modes != "threshold":
            raise ArgumentError(f"modes must be 'threshold' or 'published', got {modes!r}")
        if len(self.targets) == 1 and length == 14 and min_reward == 1e-3:
            known = known_sums().get((self.targets[0], beta), (None, None))
            self.true_log_z, self.expected_score = known

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x), in nats (the class's equation)."""
        return self.beta * self.score(state).clamp(min=self.min_reward).log()

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return r(x); with ``log_reward``, not below ``min_reward``, and without ViennaRNA."""
        if log_reward is not None:
            return (log_reward / self.beta).exp()
        return (self.energy(state) / self._full_energy).mean(1)

    def energy(self, state: StateBatch) -> Float[Tensor, "n targets"]:
        """Return the energy of each finished sequence's duplex with each target, in kcal/mol.

        It raises as :meth:`check_terminating` does.
        """
        self.check_terminating(state)
        sequences = self.describe(state)
        for x in set(sequences) - self._energies.keys():
            self._energies[x] = [_duplex(target, x) for target in self.targets]
        rows = [self._energies[x] for x in sequences]
        energy = torch.tensor(rows, device=state.device, dtype=torch.float32)
        return energy.reshape(-1, len(self.targets))

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the fingerprint of every sequence that is a mode.

        r of a mode may be below ``threshold`` by rounding.
        """
        if self.modes == "published":
            is_mode = torch.isin(self.state_key(state), self._mode_keys)
        else:
            is_mode = self.score(state, log_reward) >= self.threshold * (1 - 1e-6)
        return self.fingerprint(state)[is_mode]


@cache
def known_sums() -> dict[tuple[str, float], tuple[float, float]]:
    """Return log Z and the mean score of 14-mers, by target and beta."""
    with SUMS_PATH.open(newline="") as lines:
        return {
            (TARGETS[row["target"]], float(row["beta"])): (
                float(row["log_z"]),
                float(row["expected_score"]),
            )
            for row in csv.DictReader(lines)
        }


def published_modes(targets: tuple[str, ...], length: int) -> Int64[Tensor, "n 14"]:
    """Return the published modes as letters; raise if none are published for such a task."""
    names = {target: name for name, target in TARGETS.items()}
    with np.load(MODES_PATH) as lists:
        if len(targets) != 1 or length != 14 or names.get(targets[0]) not in lists:
            raise ArgumentError(
                "modes='published' must have one target of RNA1, RNA2 and RNA3, and length=14, got "
                f"targets={list(targets)}, length={length}"
            )
        code = torch.from_numpy(lists[names[targets[0]]].astype(np.int64))
    return to_digits(code, len(LETTERS), 14)


def lowest_energy(target: str) -> float:
    """Return the energy of a target's duplex with its reverse complement, in kcal/mol."""
    energy = _duplex(target.translate(_COMPLEMENT)[::-1], target)
    if energy >= 0:
        raise ArgumentError(f"targets must bind their complement, {target!r} has {energy} kcal/mol")
    return energy


def _duplex(one: str, other: str) -> float:
    from RNA import duplexfold

    return float(duplexfold(one, other).energy)
