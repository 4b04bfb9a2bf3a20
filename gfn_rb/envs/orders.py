"""Orders in which the letters of a sequence are written: the moves, masks and states of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gfn_rb.shapes import Bool, Int64

EMPTY = -1
SINK = -2

Text: TypeAlias = Int64[Tensor, "n places"]
Moves: TypeAlias = Int64[Tensor, "n"]


class Order(nn.Module, ABC):
    """The moves between unfinished sequences of letters 0 .. n_letters-1.

    Methods are those of ``GFNCore``, without the exit action. ``gap`` is how strings show a place
    that is empty while a later one is not.
    """

    n_moves: int
    n_states: int  # sequences, unfinished and finished
    gap = ""

    def __init__(self, n_letters: int, length: int) -> None:
        super().__init__()
        self.n_letters, self.length = n_letters, length

    @abstractmethod
    def forward_mask(self, state: Text) -> Bool[Tensor, "n actions"]:
        """Allow moves until the sequence is full, then the exit action."""

    @abstractmethod
    def backward_mask(self, state: Text) -> Bool[Tensor, "n moves"]:
        """Return which moves could have led here."""

    @abstractmethod
    def move(self, state: Text, move: Moves) -> Text:
        """Write one letter per row."""

    @abstractmethod
    def undo(self, state: Text, move: Moves) -> Text:
        """Take one letter per row back."""

    @abstractmethod
    def states_of(
        self, action: Int64[Tensor, "n T"], length: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n T1 places"]:
        """Return what trajectories pass through, in a closed form."""


class Append(Order):
    """Move m writes letter m at the right end: the graph is a tree."""

    n_ends = 1
    _mask: Tensor

    def __init__(self, n_letters: int, length: int) -> None:
        super().__init__(n_letters, length)
        self.n_moves = n_letters * self.n_ends
        self.n_states = sum(n_letters**written for written in range(length + 1))
        mask = torch.zeros(n_letters + 2, self.n_moves + 1, dtype=torch.bool)
        mask[EMPTY - SINK, :-1] = True
        mask[-SINK:, -1] = True
        self.register_buffer("_mask", mask, persistent=False)  # of SINK, EMPTY, 0, ...

    def forward_mask(self, state: Text) -> Bool[Tensor, "n actions"]:
        """Look at the last place, which is the last to be filled."""
        return self._mask[state[:, -1] - SINK]

    def backward_mask(self, state: Text) -> Bool[Tensor, "n moves"]:
        """Return which letter stands last."""
        letters = torch.arange(self.n_letters, device=state.device)
        return state.gather(1, self._last_written(state)) == letters

    def move(self, state: Text, move: Moves) -> Text:
        """Write behind the last letter."""
        place = (state[:, :-1] >= 0).sum(1, keepdim=True)
        return state.scatter(1, place, move[:, None])

    def undo(self, state: Text, move: Moves) -> Text:
        """Take the last letter back."""
        return state.scatter(1, self._last_written(state), EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n T1 places"]:
        """Read each state off the finished sequence: it is the start of it."""
        step = torch.arange(action.shape[1] + 1, device=action.device)[:, None]
        return self._cut(self._moves(action)[:, None], step, length)

    def _moves(self, action: Int64[Tensor, "n T"]) -> Text:
        """Return one move per place; where there are fewer, no trajectory has ended."""
        move = action[:, : self.length]
        return pad(move, (0, self.length - move.shape[1]), value=EMPTY)

    def _cut(
        self, text: Int64[Tensor, "n starts places"], step: Tensor, length: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n T1 places"]:
        """Cut ``text`` behind as many letters as steps were made."""
        place = torch.arange(self.length, device=step.device)
        state = text.where(place < step, EMPTY)
        return state.masked_fill_(step >= length[:, None, None], SINK)

    def _last_written(self, state: Text) -> Int64[Tensor, "n 1"]:
        """Return the place of the last letter; 0 where there is none."""
        return (state[:, 1:] >= 0).sum(1, keepdim=True)


class PrependAppend(Append):
    """Moves from ``n_letters`` on write at the left end."""

    n_ends = 2

    def backward_mask(self, state: Text) -> Bool[Tensor, "n moves"]:
        """Return which letter stands last, and which first."""
        first = state[:, :1] == torch.arange(self.n_letters, device=state.device)
        return torch.cat([super().backward_mask(state), first], 1)

    def move(self, state: Text, move: Moves) -> Text:
        """Write behind the last letter, or before the first."""
        letter = move % self.n_letters
        prepended = torch.cat([letter[:, None], state[:, :-1]], 1)
        is_left = (move >= self.n_letters)[:, None]
        return prepended.where(is_left, super().move(state, letter))

    def undo(self, state: Text, move: Moves) -> Text:
        """Take the last letter back, or the first."""
        beheaded = torch.cat([state[:, 1:], torch.full_like(state[:, :1], EMPTY)], 1)
        is_left = (move >= self.n_letters)[:, None]
        return beheaded.where(is_left, super().undo(state, move))

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n T1 places"]:
        """Read each state off the finished sequence: it is a stretch of it, from its own start."""
        move, n_steps = self._moves(action), action.shape[1]
        step = torch.arange(n_steps + 1, device=action.device)[:, None]
        place = torch.arange(self.length, device=action.device)
        is_left = move >= self.n_letters
        n_left = pad(is_left.cumsum(1), (1, 0))  # letters put at the left before each step
        start = n_left[:, -1:] - n_left  # of the state before each step, in the finished sequence
        # A letter moves on with each one put to its left later.
        target = place.where(~is_left, 0) + start[:, 1:]
        finished = torch.empty_like(move).scatter_(1, target, move % self.n_letters)
        start = start[:, step[:, 0].clamp(max=self.length)]
        at = (start[:, :, None] + place).clamp(max=self.length - 1)
        return self._cut(finished[:, None].expand(-1, n_steps + 1, -1).gather(2, at), step, length)


class AnyPlace(Order):
    """Move p n_letters + m writes letter m at place p, where it is still empty."""

    gap = "-"

    def __init__(self, n_letters: int, length: int) -> None:
        super().__init__(n_letters, length)
        self.n_moves, self.n_states = length * n_letters, (n_letters + 1) ** length

    def forward_mask(self, state: Text) -> Bool[Tensor, "n actions"]:
        """Allow each letter at each empty place."""
        mask = state.new_empty(len(state), self.n_moves + 1, dtype=torch.bool)
        mask[:, :-1].unflatten(1, (self.length, -1)).copy_((state == EMPTY)[:, :, None])
        mask[:, -1] = (state >= 0).all(1)
        return mask

    def backward_mask(self, state: Text) -> Bool[Tensor, "n moves"]:
        """Return which letter stands at each place."""
        place = torch.arange(self.length, device=state.device)
        mask = state.new_zeros(len(state), self.n_moves, dtype=torch.bool)
        return mask.scatter_(1, place * self.n_letters + state.clamp(min=0), state >= 0)

    def move(self, state: Text, move: Moves) -> Text:
        """Write at the place of the move."""
        move = move[:, None]
        return state.scatter(1, move // self.n_letters, move % self.n_letters)

    def undo(self, state: Text, move: Moves) -> Text:
        """Empty the place of the move."""
        return state.scatter(1, move[:, None] // self.n_letters, EMPTY)

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n T1 places"]:
        """Note when each place is written, and compare with each step."""
        n_steps = action.shape[1]
        step = torch.arange(n_steps + 1, device=action.device)
        is_move = step[1:] < length[:, None]  # the last action of each is the exit action
        place = (action // self.n_letters).where(is_move, self.length)  # one more than there are
        blank = action.new_full((len(action), self.length + 1), n_steps + 1)
        written = blank.scatter(1, place, step[1:].expand_as(place))[:, None, :-1]
        letter = blank.scatter(1, place, action % self.n_letters)[:, None, :-1]
        state = letter.where(written <= step[:, None], EMPTY)
        return state.masked_fill_((step >= length[:, None])[:, :, None], SINK)


ORDERS: dict[str, type[Order]] = {
    "append": Append,
    "prepend_append": PrependAppend,
    "non_autoregressive": AnyPlace,
}
