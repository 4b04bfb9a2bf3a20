"""Sequences of fixed length, and the orders in which their letters may be written."""

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
from gfn_rb.envs.core import (
    EitherBatch,
    EitherIntegers,
    from_digits,
    passes_on,
    states_of_writes,
    takes_arrays,
)
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Float, Int64, Integers, StateBatch

S = TypeVar("S", bound="SequenceEnv")

EMPTY = -1
SINK = -2


class Append:
    """Move m writes letter m at the right end. Methods are as in ``GFNEnv``."""

    n_ends = 1

    def __init__(self, n_letters: int, length: int, device: torch.device | str | None) -> None:
        self.n_letters, self.length = n_letters, length
        self.n_moves = n_letters * self.n_ends
        self.n_states = sum(n_letters**written for written in range(length + 1))
        # By the letter in the last place. Index EMPTY, -1, is the last row, and SINK that before.
        self._legal = torch.zeros(n_letters + 2, self.n_moves + 1, dtype=torch.bool, device=device)
        self._legal[EMPTY, :-1] = True
        self._legal[:n_letters, -1] = True
        self._letters = torch.arange(n_letters, device=device)
        self._places = torch.arange(length, device=device)

    def forward_mask(self, state: EitherBatch) -> Bool[Any, "n actions"]:
        """Look at the last place, which is the last to be filled."""
        if isinstance(state, np.ndarray):
            return self._legal.numpy().take(state[:, -1], 0)
        return self._legal[state[:, -1]]

    def backward_mask(self, state: EitherBatch) -> Bool[Any, "n moves"]:
        """Return which letter is the last."""
        last_place = (state[:, 1:] >= 0).sum(1)  # 0 if there is none
        if isinstance(state, np.ndarray):
            return state[np.arange(len(state)), last_place][:, None] == self._letters.numpy()
        return state.gather(1, last_place[:, None]) == self._letters

    def move(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Write after the last letter."""
        first_empty = state.argmin(1)  # the first of several minima
        return written(state, self._places, first_empty, move[:, None])

    def undo(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Empty the last place."""
        return written(state, self._places, (state[:, 1:] >= 0).sum(1), EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 places"]:
        """Write each letter at the place of its step."""
        step = torch.arange(action.shape[1], device=action.device)
        return states_of_writes(step.expand_as(action), action, length, self.length, EMPTY, SINK)


class PrependAppend(Append):
    """Append, and moves from ``n_letters`` on write at the left end."""

    n_ends = 2

    def backward_mask(self, state: EitherBatch) -> Bool[Any, "n moves"]:
        """Return which letter is the last, and which the first."""
        at, letters = (
            (np, self._letters.numpy()) if isinstance(state, np.ndarray) else (torch, self._letters)
        )
        return at.concatenate([super().backward_mask(state), state[:, :1] == letters], 1)

    def move(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Write after the last letter, or before the first."""
        at: Any = np if isinstance(state, np.ndarray) else torch
        letter, is_left = move % self.n_letters, move >= self.n_letters
        prepended = at.concatenate([letter[:, None], state[:, :-1]], 1)
        return at.where(is_left[:, None], prepended, super().move(state, letter))

    def undo(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Remove the last letter, or the first."""
        at: Any = np if isinstance(state, np.ndarray) else torch
        is_left = move >= self.n_letters
        beheaded = at.concatenate([state[:, 1:], at.full_like(state[:, :1], EMPTY)], 1)
        return at.where(is_left[:, None], beheaded, super().undo(state, move))

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 places"]:
        """Write each letter at its place in the finished sequence, and move each state left."""
        step = torch.arange(action.shape[1] + 1, device=action.device)
        is_move = step[1:] < length[:, None]
        is_left = (action >= self.n_letters) & is_move
        n_left = torch.zeros_like(step).repeat(len(action), 1)
        n_left[:, 1:] = is_left.cumsum(1)
        start = n_left[:, -1:] - n_left  # place of each state's first letter
        place = start[:, 1:] + step[:-1].where(~is_left, 0)
        letter = action % self.n_letters
        text = states_of_writes(place, letter, length, self.length, EMPTY, SINK)
        column = torch.arange(self.length, device=action.device) + start[:, :, None]
        return text.gather(2, column % self.length)  # what is left of the start is empty


class AnyPlace:
    """Move p n_letters + m writes letter m at place p, where it is still empty."""

    def __init__(self, n_letters: int, length: int, device: torch.device | str | None) -> None:
        self.n_letters, self.length = n_letters, length
        self.n_moves, self.n_states = length * n_letters, (n_letters + 1) ** length
        self._places = torch.arange(length, device=device)
        self._letters = torch.arange(n_letters, device=device)

    def forward_mask(self, state: EitherBatch) -> Bool[Any, "n actions"]:
        """Allow each letter at each empty place."""
        is_empty, is_full = state == EMPTY, (state >= 0).all(1)[:, None]
        if isinstance(state, np.ndarray):
            return np.concatenate([is_empty.repeat(self.n_letters, 1), is_full], 1)
        return torch.cat([is_empty.repeat_interleave(self.n_letters, 1), is_full], 1)

    def backward_mask(self, state: EitherBatch) -> Bool[Any, "n moves"]:
        """Return which letter is at each place."""
        letters = self._letters.numpy() if isinstance(state, np.ndarray) else self._letters
        return (state[:, :, None] == letters).reshape(len(state), self.n_moves)

    def move(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Write at the place of the move."""
        place, letter = move // self.n_letters, move % self.n_letters
        return written(state, self._places, place, letter[:, None])

    def undo(self, state: EitherBatch, move: EitherIntegers) -> EitherBatch:
        """Empty the place of the move."""
        return written(state, self._places, move // self.n_letters, EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 places"]:
        """Write each letter at the place of its move."""
        place, letter = action // self.n_letters, action % self.n_letters
        return states_of_writes(place, letter, length, self.length, EMPTY, SINK)


def written(
    state: EitherBatch, places: Tensor, place: EitherIntegers, letter: Int64[Any, "n 1"] | int
) -> EitherBatch:
    """Return states with a letter written at one place of each row."""
    if isinstance(state, np.ndarray):
        return np.where(places.numpy() == place[:, None], letter, state)
    return torch.where(places == place[:, None], letter, state)


ORDERS: dict[str, type[Append | AnyPlace]] = {
    "append": Append,
    "prepend_append": PrependAppend,
    "non_autoregressive": AnyPlace,
}


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
        """Write each letter at its place, see :class:`Append`."""
        return self.order.states_of(action, length)

    def only_moves(self, state: StateBatch) -> Int64[Tensor, "n T"] | None:
        """Return the letters where each move writes one at the right end. See the base class."""
        is_tree = type(self.order) is Append and type(self).undo is SequenceEnv.undo
        return state if is_tree else None

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
