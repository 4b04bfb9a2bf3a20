"""Three landscapes over short sequences. Defaults were chosen on words and ising, not on nk.

Letters are written from left to right. All objects can be listed, so that fits are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gfn_rb.envs.core import to_digits
from gfn_rb.envs.scored_sequences import ScoredSequenceEnv
from gfn_rb.training import TrainConfig

Kind = Literal["ising", "words", "nk"]


class Landscape(ScoredSequenceEnv):
    """Write a sequence whose log-reward is one of three functions of its letters.

    - "ising": 12 spins s in {-1, 1} with log R = sum over i < j of J_ij s_i s_j, J normal of
      standard deviation 0.35. Modes are its local optima.
    - "words": 8 of 4 letters. 60 random words have R = 1 and are the modes, their neighbours by one
      letter 0.03, all others 1e-4.
    - "nk": 16 bits, each of whose fitness is a random number given itself and the 4 bits after it;
      log R = 30 (f / max f - 1). Modes are its 50 best local optima (Kauffman and Levin 1987).

    Args:
        kind: which of them.
        seed: of its random numbers.
    """

    def __init__(self, kind: Kind, seed: int, device: str = "cpu") -> None:
        n_letters, length = (4, 8) if kind == "words" else (2, 12 if kind == "ising" else 16)
        self.alphabet = "ACGT" if n_letters == 4 else "01"
        super().__init__(n_letters, length, "append", device=device)
        generator = torch.Generator().manual_seed(seed)
        letter = to_digits(torch.arange(n_letters**length), n_letters, length)
        log_reward, modes = _made(kind, letter, neighbours(letter, n_letters), generator)
        self._register_scores(log_reward.exp(), log_reward, modes)


def neighbours(letter: Tensor, n_letters: int) -> Tensor:
    """Return the sequences with one other letter, [N, length * (n_letters - 1)].

    Args:
        letter: letters of all sequences in order, [N, length].
        n_letters: size of the alphabet.
    """
    n, length = letter.shape
    power = n_letters ** torch.arange(length - 1, -1, -1)
    other = (letter[:, :, None] + torch.arange(1, n_letters)) % n_letters
    near = torch.arange(n)[:, None, None] + (other - letter[:, :, None]) * power[:, None]
    return near.flatten(1)


def _made(
    kind: Kind, letter: Tensor, near: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the log-reward of each sequence, and the modes, the best first."""
    n, length = letter.shape
    if kind == "words":
        word = torch.randperm(n, generator=generator)[:60]
        reward = torch.full((n,), 1e-4, dtype=torch.float64)
        reward[near[word]] = 0.03
        reward[word] = 1.0
        return reward.log(), word
    if kind == "ising":
        coupling = 0.35 * torch.randn(length, length, generator=generator).triu(1).double()
        spin = 2.0 * letter.double() - 1
        log_reward = ((spin @ coupling) * spin).sum(1)
    else:
        table = torch.rand(length, 2**5, generator=generator).double()
        place = (torch.arange(length)[:, None] + torch.arange(5)) % length
        seen = letter[:, place] @ (2 ** torch.arange(5))  # [N, length]
        fitness = table[torch.arange(length), seen].mean(1)
        log_reward = 30 * (fitness / fitness.max() - 1)
    optima = (log_reward > log_reward[near].amax(1)).nonzero()[:, 0]
    best = optima[log_reward[optima].argsort(descending=True)]
    return log_reward, best[:50] if kind == "nk" else best


@dataclass(frozen=True, kw_only=True)
class LandscapeConfig(TrainConfig):
    """Sample one of three landscapes.

    Attributes:
        kind: which of them.
        landscape_seed: of its random numbers.
    """

    env: ClassVar[str] = "landscape"

    kind: Kind = "ising"
    landscape_seed: int = 3

    def make_env(self) -> Landscape:
        """Return the environment."""
        return Landscape(self.kind, self.landscape_seed, self.device)
