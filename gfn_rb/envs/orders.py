"""Orders in which the letters of a sequence are written: the moves, masks and states of each."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gfn_rb.envs.core import EitherIntegers, states_of_writes
from gfn_rb.shapes import Bool, Int64, Integers

EMPTY = -1
SINK = -2

TextBatch: TypeAlias = Int64[Any, "n places"]
"""States in a tensor or in a NumPy array, as the methods of an order take them."""


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

    def forward_mask(self, state: TextBatch) -> Bool[Any, "n actions"]:
        """Look at the last place, which is the last to be filled."""
        if isinstance(state, np.ndarray):
            return self._legal.numpy().take(state[:, -1], 0)
        return self._legal[state[:, -1]]

    def backward_mask(self, state: TextBatch) -> Bool[Any, "n moves"]:
        """Return which letter is the last."""
        last_place = (state[:, 1:] >= 0).sum(1)  # 0 if there is none
        if isinstance(state, np.ndarray):
            return state[np.arange(len(state)), last_place][:, None] == self._letters.numpy()
        return state.gather(1, last_place[:, None]) == self._letters

    def move(self, state: TextBatch, move: EitherIntegers) -> TextBatch:
        """Write after the last letter."""
        first_empty = state.argmin(1)  # the first of several minima
        return written(state, self._places, first_empty, move[:, None])

    def undo(self, state: TextBatch, move: EitherIntegers) -> TextBatch:
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

    def backward_mask(self, state: TextBatch) -> Bool[Any, "n moves"]:
        """Return which letter is the last, and which the first."""
        at, letters = (
            (np, self._letters.numpy()) if isinstance(state, np.ndarray) else (torch, self._letters)
        )
        return at.concatenate([super().backward_mask(state), state[:, :1] == letters], 1)

    def move(self, state: TextBatch, move: EitherIntegers) -> TextBatch:
        """Write after the last letter, or before the first."""
        at: Any = np if isinstance(state, np.ndarray) else torch
        letter, is_left = move % self.n_letters, move >= self.n_letters
        prepended = at.concatenate([letter[:, None], state[:, :-1]], 1)
        return at.where(is_left[:, None], prepended, super().move(state, letter))

    def undo(self, state: TextBatch, move: EitherIntegers) -> TextBatch:
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

    def forward_mask(self, state: TextBatch) -> Bool[Any, "n actions"]:
        """Allow each letter at each empty place."""
        is_empty, is_full = state == EMPTY, (state >= 0).all(1)[:, None]
        if isinstance(state, np.ndarray):
            return np.concatenate([is_empty.repeat(self.n_letters, 1), is_full], 1)
        return torch.cat([is_empty.repeat_interleave(self.n_letters, 1), is_full], 1)

    def backward_mask(self, state: TextBatch) -> Bool[Any, "n moves"]:
        """Return which letter is at each place."""
        letters = self._letters.numpy() if isinstance(state, np.ndarray) else self._letters
        return (state[:, :, None] == letters).reshape(len(state), self.n_moves)

    def move(self, state: TextBatch, move: EitherIntegers) -> TextBatch:
        """Write at the place of the move."""
        place, letter = move // self.n_letters, move % self.n_letters
        return written(state, self._places, place, letter[:, None])

    def undo(self, state: TextBatch, move: EitherIntegers) -> TextBatch:
        """Empty the place of the move."""
        return written(state, self._places, move // self.n_letters, EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 places"]:
        """Write each letter at the place of its move."""
        place, letter = action // self.n_letters, action % self.n_letters
        return states_of_writes(place, letter, length, self.length, EMPTY, SINK)


def written(
    state: TextBatch, places: Tensor, place: EitherIntegers, letter: Int64[Any, "n 1"] | int
) -> TextBatch:
    """Return states with a letter written at one place of each row."""
    if isinstance(state, np.ndarray):
        return np.where(places.numpy() == place[:, None], letter, state)
    return torch.where(places == place[:, None], letter, state)


ORDERS: dict[str, type[Append | AnyPlace]] = {
    "append": Append,
    "prepend_append": PrependAppend,
    "non_autoregressive": AnyPlace,
}
