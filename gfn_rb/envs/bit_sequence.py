"""BitSequence: write a string of bits, word by word, close to one of a few hidden strings."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from typing_extensions import Unpack

from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import check_positive, from_digits, to_digits
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.envs.sequence import SequenceEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Floats, Int64, Integers, Modes, StateBatch

BLOCKS = ("00000000", "11111111", "11110000", "00001111", "00111100")
BLOCK_BITS = 8
MOST_WORD_BITS = 16


class BitSequence(SequenceEnv, EnumerableEnv):
    """Write ``n_bits`` bits in words of ``word_bits`` bits (Malkin et al. 2022, section 5.3).

    A state holds one number per word, its first bit the most significant. With the modes M,

        R(x) = exp(-min_{y in M} d(x, y) / n_bits) ^ beta

    where d is the Hamming distance, as in torchgfn and in Tiapkin et al. 2024 (the original counts
    edits, and has a further constant factor, which leaves the distribution as it is). Beta = n_bits
    makes it exp(-d): each bit astray costs one nat.

    Modes are strings of blocks drawn from {00000000, 11111111, 11110000, 00001111, 00111100}, all
    different. A mode is found by any x within distance ``delta`` of it, so that one x may find
    several; ``mode_index`` names the nearest. Networks see each bit as -1 or 1, empty words as 0.

    The default is the original's: 120 bits and 60 modes, found within 28 bits. It is far too large
    to enumerate; strings of up to about 20 bits have exact distributions (``is_enumerable``).

    Args:
        n_bits: bits in a finished string, a positive multiple of 8.
        word_bits: bits in a word, a divisor of ``n_bits`` of at most 16; there are 2^word_bits
            words.
        form: "append", "prepend_append" to write at both ends, or "non_autoregressive" to write
            words in any order.
        n_modes: number of modes, at most 5^(n_bits / 8).
        beta: exponent of the reward, positive; 2 n_bits if None.
        delta: distance within which a mode is found, in bits, in [0, n_bits]; 28/120 of ``n_bits``,
            rounded down, if None.
        seed: which modes are drawn.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    n_modes: int

    def __init__(
        self,
        n_bits: int = 120,
        word_bits: int = 8,
        form: str = "append",
        n_modes: int = 60,
        beta: float | None = None,
        delta: int | None = None,
        seed: int = 0,
        **options: Unpack[EnvOptions],
    ) -> None:
        beta = 2.0 * n_bits if beta is None else beta
        delta = 28 * n_bits // 120 if delta is None else delta
        if n_bits < 1 or n_bits % BLOCK_BITS:
            raise ArgumentError(f"n_bits must be a positive multiple of {BLOCK_BITS}, got {n_bits}")
        if not 1 <= word_bits <= MOST_WORD_BITS or n_bits % word_bits:
            raise ArgumentError(
                f"word_bits must be a divisor of n_bits={n_bits} in [1, {MOST_WORD_BITS}], "
                f"got {word_bits}"
            )
        most = len(BLOCKS) ** (n_bits // BLOCK_BITS)
        if not 1 <= n_modes <= most:
            raise ArgumentError(f"n_modes must be in [1, {most}] for {n_bits} bits, got {n_modes}")
        check_positive(beta=beta)
        if not 0 <= delta <= n_bits:
            raise ArgumentError(f"delta must be in [0, {n_bits}], got {delta}")
        super().__init__(
            2**word_bits,
            n_bits // word_bits,
            form,
            letter_code=to_digits(torch.arange(2**word_bits), 2, word_bits) * 2.0 - 1,
            **options,
        )
        self.n_bits, self.word_bits = n_bits, word_bits
        self.alphabet = [f"{word:0{word_bits}b}" for word in range(2**word_bits)]
        self.n_modes, self.beta, self.delta = n_modes, beta, delta
        modes = self.parse(draw_modes(n_bits, n_modes, seed))
        self._register(modes=modes, _mode_code=self.encode(modes).T)

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x), in nats (the class's equation)."""
        return -self.beta / self.n_bits * self.distances(state).amin(1).float()

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return the share of bits that agree with the nearest mode."""
        return 1 - self.distances(state).amin(1).float() / self.n_bits

    def distances(self, state: StateBatch) -> Int64[Tensor, "n modes"]:
        """Return the Hamming distance of each finished string to each mode, in bits.

        It raises as :meth:`check_terminating` does.
        """
        self.check_terminating(state)
        agreeing_less_others = self.encode(state) @ self._mode_code  # of -1s and 1s
        return ((self.n_bits - agreeing_less_others) / 2).long()

    def mode_index(self, state: StateBatch) -> Integers:
        """Return the nearest mode of each string, if within ``delta``, else -1; ties by number."""
        distance, mode = self.distances(state).min(1)
        return mode.where(distance <= self.delta, -1)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return every mode within ``delta`` of some string, each once."""
        return (self.distances(state) <= self.delta).any(0).nonzero()[:, 0]

    def test_states(self) -> Int64[Tensor, "m *state"]:
        """Return each mode, and strings of each with 1, 2, ..., n_bits - 1 of its bits flipped.

        On these Tiapkin et al. (2024, arXiv:2310.12934) measure how sampling follows the reward:
        7,200 strings by default, the same at each call.
        """
        generator = torch.Generator().manual_seed(0)
        bits = to_digits(self.modes.cpu(), 2, self.word_bits).flatten(1)
        place = torch.rand(self.n_modes, self.n_bits, self.n_bits, generator=generator).argsort(2)
        flip = place < torch.arange(self.n_bits)[:, None]
        flipped = (bits[:, None] ^ flip).view(-1, self.length, self.word_bits)
        return from_digits(flipped, 2).to(self.modes.device)


def draw_modes(n_bits: int, n_modes: int, seed: int) -> list[str]:
    """Draw different strings of blocks; a seed gives the same ones on any machine."""
    rng = random.Random(seed)
    modes: dict[str, None] = {}
    while len(modes) < n_modes:
        modes["".join(rng.choices(BLOCKS, k=n_bits // BLOCK_BITS))] = None
    return list(modes)
