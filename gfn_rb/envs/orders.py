"""Orders in which the letters of a sequence are written: the moves, masks and states of each."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gfn_rb.envs.core import states_of_writes, with_host_form
from gfn_rb.shapes import Bool, Int64, Integers

EMPTY = -1
SINK = -2

TextBatch: TypeAlias = Int64[Tensor, "n places"]


class Append:
    """Move m writes letter m at the right end. Methods are as in ``GFNEnv``."""

    n_ends = 1
    gap = ""  # character for a place that is empty while a later one is not

    def __init__(self, n_letters: int, length: int, device: torch.device | str | None) -> None:
        self.n_letters, self.length = n_letters, length
        self.n_moves = n_letters * self.n_ends
        self.n_states = sum(n_letters**written for written in range(length + 1))
        # By the letter in the last place. Index EMPTY, -1, is the last row, and SINK that before.
        self._legal = torch.zeros(n_letters + 2, self.n_moves + 1, dtype=torch.bool, device=device)
        self._legal[EMPTY, :-1] = True
        self._legal[:n_letters, -1] = True
        self._letters = torch.arange(n_letters, device=device)

    @with_host_form(lambda self: partial(_legal_after_last, self._legal.numpy()))
    def forward_mask(self, state: TextBatch) -> Bool[Tensor, "n actions"]:
        """Look at the last place, which is the last to be filled."""
        return self._legal[state[:, -1]]

    @with_host_form(lambda self: partial(_is_last, self._letters.numpy()))
    def backward_mask(self, state: TextBatch) -> Bool[Tensor, "n moves"]:
        """Return which letter is the last."""
        return state.gather(1, self._last_place(state)) == self._letters

    @with_host_form(lambda self: _appended)
    def move(self, state: TextBatch, move: Integers) -> TextBatch:
        """Write after the last letter."""
        first_empty = state.argmin(1, keepdim=True)  # the first of several minima
        return state.scatter(1, first_empty, move[:, None])

    @with_host_form(lambda self: _shortened)
    def undo(self, state: TextBatch, move: Integers) -> TextBatch:
        """Empty the last place."""
        return state.scatter(1, self._last_place(state), EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 places"]:
        """Write each letter at the place of its step."""
        step = torch.arange(action.shape[1], device=action.device)
        return states_of_writes(step.expand_as(action), action, length, self.length, EMPTY, SINK)

    def _last_place(self, state: TextBatch) -> Int64[Tensor, "n 1"]:
        """Return the place of the last letter; 0 if there is none."""
        return (state[:, 1:] >= 0).sum(1, keepdim=True)


class PrependAppend(Append):
    """Append, and moves from ``n_letters`` on write at the left end."""

    n_ends = 2

    @with_host_form(lambda self: partial(_is_at_an_end, self._letters.numpy()))
    def backward_mask(self, state: TextBatch) -> Bool[Tensor, "n moves"]:
        """Return which letter is the last, and which the first."""
        return torch.cat([super().backward_mask(state), state[:, :1] == self._letters], 1)

    @with_host_form(lambda self: partial(_written, self.n_letters))
    def move(self, state: TextBatch, move: Integers) -> TextBatch:
        """Write after the last letter, or before the first."""
        letter = move % self.n_letters
        prepended = torch.cat([letter[:, None], state[:, :-1]], 1)
        return prepended.where(self._is_left(move), super().move(state, letter))

    @with_host_form(lambda self: partial(_taken_back, self.n_letters))
    def undo(self, state: TextBatch, move: Integers) -> TextBatch:
        """Remove the last letter, or the first."""
        beheaded = torch.cat([state[:, 1:], torch.full_like(state[:, :1], EMPTY)], 1)
        return beheaded.where(self._is_left(move), super().undo(state, move))

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

    def _is_left(self, move: Integers) -> Bool[Tensor, "n 1"]:
        return (move >= self.n_letters)[:, None]


class AnyPlace:
    """Move p n_letters + m writes letter m at place p, where it is still empty."""

    gap = "-"

    def __init__(self, n_letters: int, length: int, device: torch.device | str | None) -> None:
        self.n_letters, self.length = n_letters, length
        self.n_moves, self.n_states = length * n_letters, (n_letters + 1) ** length
        self._first_move = n_letters * torch.arange(length, device=device)  # of each place

    def forward_mask(self, state: TextBatch) -> Bool[Tensor, "n actions"]:
        """Allow each letter at each empty place."""
        is_empty = (state == EMPTY).repeat_interleave(self.n_letters, 1)
        return torch.cat([is_empty, (state >= 0).all(1, keepdim=True)], 1)

    def backward_mask(self, state: TextBatch) -> Bool[Tensor, "n moves"]:
        """Return which letter is at each place."""
        mask = state.new_zeros(len(state), self.n_moves, dtype=torch.bool)
        return mask.scatter_(1, self._first_move + state.clamp(min=0), state >= 0)

    def move(self, state: TextBatch, move: Integers) -> TextBatch:
        """Write at the place of the move."""
        move = move[:, None]
        return state.scatter(1, move // self.n_letters, move % self.n_letters)

    def undo(self, state: TextBatch, move: Integers) -> TextBatch:
        """Empty the place of the move."""
        return state.scatter(1, move[:, None] // self.n_letters, EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 places"]:
        """Write each letter at the place of its move."""
        place, letter = action // self.n_letters, action % self.n_letters
        return states_of_writes(place, letter, length, self.length, EMPTY, SINK)


# The host forms of the methods above.

ArrayBatch: TypeAlias = Int64[np.ndarray, "n places"]


def _legal_after_last(legal: Bool[np.ndarray, "letters actions"], state: ArrayBatch) -> np.ndarray:
    return legal.take(state[:, -1], 0)


def _is_last(letters: Int64[np.ndarray, "letters"], state: ArrayBatch) -> np.ndarray:
    last_place = np.add.reduce(state[:, 1:] >= 0, 1)
    return state[np.arange(len(state)), last_place][:, None] == letters


def _appended(state: ArrayBatch, letter: Int64[np.ndarray, "n"]) -> ArrayBatch:
    place, state = state.argmin(1), state.copy()
    state[np.arange(len(state)), place] = letter
    return state


def _shortened(state: ArrayBatch, move: Int64[np.ndarray, "n"]) -> ArrayBatch:
    last_place, state = np.add.reduce(state[:, 1:] >= 0, 1), state.copy()
    state[np.arange(len(state)), last_place] = EMPTY
    return state


def _is_at_an_end(letters: Int64[np.ndarray, "letters"], state: ArrayBatch) -> np.ndarray:
    return np.concatenate([_is_last(letters, state), state[:, :1] == letters], 1)


def _written(n_letters: int, state: ArrayBatch, move: Int64[np.ndarray, "n"]) -> ArrayBatch:
    letter, is_left = move % n_letters, (move >= n_letters)[:, None]
    prepended = np.concatenate([letter[:, None], state[:, :-1]], 1)
    return np.where(is_left, prepended, _appended(state, letter))


def _taken_back(n_letters: int, state: ArrayBatch, move: Int64[np.ndarray, "n"]) -> ArrayBatch:
    beheaded = np.concatenate([state[:, 1:], np.full_like(state[:, :1], EMPTY)], 1)
    return np.where((move >= n_letters)[:, None], beheaded, _shortened(state, move))


ORDERS: dict[str, type[Append | AnyPlace]] = {
    "append": Append,
    "prepend_append": PrependAppend,
    "non_autoregressive": AnyPlace,
}
