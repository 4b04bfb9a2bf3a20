"""Environments that write a sequence of fixed length, letter by letter."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import EnvOptions, GFNEnv
from gfn_rb.envs.core import EitherBatch, EitherIntegers, from_digits, passes_on, takes_arrays
from gfn_rb.envs.orders import EMPTY, ORDERS, SINK
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Float, Int64, Integers, StateBatch

S = TypeVar("S", bound="SequenceEnv")


class SequenceEnv(GFNEnv):
    """Write ``length`` letters; only then is the exit action legal, and then it is the only one.

    A state holds letters 0 .. n_letters-1, and -1 in places still empty. Form "append" has the
    moves 0 .. n_letters-1, which write a letter at the right end (its graph is a tree);
    "prepend_append" adds n_letters .. 2 n_letters-1, which write one at the left end, all letters
    being aligned left. The two moves of one letter may give the same string and are then still two
    edges. In form "non_autoregressive" move p n_letters + m writes letter m at place p, in any
    order (Tiapkin et al. 2024, arXiv:2310.12934).

    Args:
        n_letters: size of the alphabet, at least 1.
        length: letters in a finished sequence, at least 1.
        form: "append", "prepend_append" or "non_autoregressive".
        letter_code: what ``encode`` writes for each letter, [n_letters, width], no two rows the
            same and none all zeros; one-hot vectors if None.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Attributes:
        alphabet: text of each letter, at least ``n_letters`` of them; of equal width if
            ``separator`` is empty.
        separator: text between letters, which no letter contains.
    """

    alphabet: Sequence[str] = string.digits + string.ascii_uppercase
    separator = ""

    def __init__(
        self,
        n_letters: int,
        length: int,
        form: str = "append",
        *,
        letter_code: Float[Tensor, "letters width"] | None = None,
        **options: Unpack[EnvOptions],
    ) -> None:
        if form not in ORDERS:
            raise ArgumentError(f"form must be one of {sorted(ORDERS)}, got {form!r}")
        as_count("n_letters", n_letters)
        as_count("length", length)
        order = ORDERS[form](n_letters, length, options.get("device"))
        letter_code = torch.eye(n_letters) if letter_code is None else letter_code
        letter_code = letter_code.float()
        super().__init__(
            torch.full((length,), EMPTY),
            torch.full((length,), SINK),
            n_actions=order.n_moves + 1,
            max_length=length + 1,
            encoded_size=length * letter_code.shape[1],
            **options,
        )
        self.n_letters, self.length = n_letters, length
        self.form, self.order = form, order
        self.state_range = (SINK, n_letters - 1)
        code = torch.cat([torch.zeros_like(letter_code[:1]).expand(2, -1), letter_code])
        self._register(_code=code)  # of SINK, EMPTY, 0, ...

    @property
    def n_states(self) -> int:
        """Number of sequences, unfinished and finished."""
        return self.order.n_states

    @takes_arrays
    def is_source(self, state: EitherBatch) -> Bool[Any, "n"]:
        """Return which rows hold no letter yet."""
        return (state == EMPTY).all(1)

    @passes_on("order")
    def forward_mask(self, state: EitherBatch) -> Bool[Any, "n actions"]:
        """Allow every move until the sequence is full, then the exit action."""
        return self.order.forward_mask(state)

    @passes_on("order")
    def backward_mask(self, state: EitherBatch) -> Bool[Any, "n moves"]:
        """Return which letters could have been written last, and how."""
        return self.order.backward_mask(state)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 *state"]:
        """Write each letter at its place, see :mod:`gfn_rb.envs.orders`."""
        return self.order.states_of(action, length)

    @takes_arrays
    def encode(self, state: EitherBatch) -> Float[Any, "n encoded"]:
        """Return the code of the letter in each place; zeros where it is empty."""
        if isinstance(state, np.ndarray):
            return self._code.numpy().take(state - SINK, 0).reshape(len(state), -1)
        return embedding(state - SINK, self._code).flatten(1)

    def state_key(self, state: StateBatch) -> Integers:
        """Read the places as digits in base n_letters + 1, empty being 0: dictionary order."""
        return from_digits(state + 1, self.n_letters + 1)

    def describe(self, state: StateBatch) -> list[str]:
        """Return the letters of each sequence, joined by ``separator``; "-" in empty places."""
        letters = [*self.alphabet, "-", "-"]  # SINK and EMPTY are the last two
        return [self.separator.join(letters[i] for i in row) for row in state.tolist()]

    def parse(self, words: Sequence[str]) -> StateBatch:
        """Return the finished sequences that texts spell. See the base class."""
        index = {letter: i for i, letter in enumerate(self.alphabet[: self.n_letters])}
        width = len(self.alphabet[0])
        rows = []
        for text in words:
            if self.separator:
                letters = text.split(self.separator)
            else:
                letters = [text[i : i + width] for i in range(0, len(text), width)]
            if len(letters) != self.length or not index.keys() >= {*letters}:
                known = ", ".join(index) if len(index) < 12 else f"{min(index)} to {max(index)}"
                joined = f" joined by {self.separator!r}" if self.separator else ""
                raise ArgumentError(
                    f"words must be {self.length} letters among {known}{joined}, got {text!r:.80}"
                )
            rows.append([index[letter] for letter in letters])
        state = torch.tensor(rows, dtype=torch.int64, device=self.source_state.device)
        return state.reshape(-1, self.length)

    def fingerprint(self, state: StateBatch) -> Integers:
        """Return each sequence's key, or a hash where keys do not fit into 63 bits."""
        fits = (self.n_letters + 1) ** self.length < 2**63
        return self.state_key(state) if fits else super().fingerprint(state)

    @passes_on("order")
    def move(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Write one letter per row."""
        return self.order.move(state, move)

    @passes_on("order")
    def undo(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Remove one letter per row."""
        return self.order.undo(state, move)

    def _apply(self: S, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> S:
        super()._apply(fn, recurse)
        self.order = type(self.order)(self.n_letters, self.length, self.source_state.device)
        return self
