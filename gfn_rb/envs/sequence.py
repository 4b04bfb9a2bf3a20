"""Environments that write a sequence of fixed length, letter by letter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Bool, Float, Int64

EMPTY = -1
SINK = -2
_ENDS = {"append": 1, "prepend_append": 2}


class SequenceEnv(GFNEnv):
    """Write ``length`` letters; only then is the exit action legal, and then it is the only one.

    A state holds letters 0 .. n_letters-1, aligned left, then -1 for places still empty. Form
    "append" has the moves 0 .. n_letters-1, which write a letter at the right end (its graph is a
    tree); "prepend_append" adds n_letters .. 2 n_letters-1, which write one at the left end. The
    two moves of one letter may give the same string and are then still two edges.

    Args:
        n_letters: size of the alphabet, at least 1.
        length: letters in a finished sequence, at least 1.
        form: "append" or "prepend_append".
        batch_size: batch size of the TorchRL interface; () takes any.
        device: where the environment's tensors live.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    def __init__(
        self,
        n_letters: int,
        length: int,
        form: str = "append",
        *,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if form not in _ENDS:
            raise ArgumentError(f"form must be one of {sorted(_ENDS)}, got {form!r}")
        for name, value in {"n_letters": n_letters, "length": length}.items():
            if value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")
        super().__init__(
            torch.full((length,), EMPTY),
            torch.full((length,), SINK),
            n_actions=n_letters * _ENDS[form] + 1,
            max_length=length + 1,
            encoded_size=length * n_letters,
            batch_size=batch_size,
            device=device,
        )
        self.n_letters, self.length, self.form = n_letters, length, form

    def forward_mask(self, state: Int64[Tensor, "n *state"]) -> Bool[Tensor, "n actions"]:
        """Allow every move until the sequence is full, then the exit action."""
        room = (state == EMPTY).any(1, keepdim=True)
        full = (state >= 0).all(1, keepdim=True)
        return torch.cat([room.expand(-1, self.n_actions - 1), full], 1)

    def backward_mask(self, state: Int64[Tensor, "n *state"]) -> Bool[Tensor, "n moves"]:
        """Tell which letter stands last, and for "prepend_append" also which stands first."""
        last = state.gather(1, (self._n_written(state) - 1).clamp(min=0)[:, None])
        letters = torch.arange(self.n_letters, device=state.device)
        ends = torch.cat([last == letters, state[:, :1] == letters], 1)
        return ends[:, : self.n_actions - 1]

    def encode(self, state: Int64[Tensor, "n *state"]) -> Float[Tensor, "n encoded"]:
        """Return one one-hot vector per place; zeros where it is empty."""
        letters = torch.arange(self.n_letters, device=state.device)
        return (state[:, :, None] == letters).flatten(1).float()

    def state_key(self, state: Int64[Tensor, "n *state"]) -> Int64[Tensor, "n"]:
        """Read the places as digits in base n_letters + 1, empty being 0: dictionary order."""
        powers = torch.arange(self.length - 1, -1, -1, device=state.device)
        return ((state + 1) * (self.n_letters + 1) ** powers).sum(1)

    def _move(
        self, state: Int64[Tensor, "n *state"], move: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n *state"]:
        letter = (move % self.n_letters)[:, None]
        place = self._n_written(state).clamp(max=self.length - 1)[:, None]
        prepended = torch.cat([letter, state[:, :-1]], 1)
        return prepended.where(self._at_left(move), state.scatter(1, place, letter))

    def _undo(
        self, state: Int64[Tensor, "n *state"], move: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n *state"]:
        place = (self._n_written(state) - 1).clamp(min=0)[:, None]
        beheaded = torch.cat([state[:, 1:], torch.full_like(state[:, :1], EMPTY)], 1)
        return beheaded.where(self._at_left(move), state.scatter(1, place, EMPTY))

    def _at_left(self, move: Int64[Tensor, "n"]) -> Bool[Tensor, "n 1"]:
        return move[:, None] >= self.n_letters

    def _n_written(self, state: Int64[Tensor, "n *state"]) -> Int64[Tensor, "n"]:
        return (state >= 0).sum(1)
