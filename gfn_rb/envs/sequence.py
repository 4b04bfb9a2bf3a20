"""Environments that write a sequence of fixed length, letter by letter."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from gfn_rb.envs.base import GFNEnv
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.shapes import Bool, Float, Int64

EMPTY = -1
SINK = -2
_ENDS = {"append": 1, "prepend_append": 2}


class SequenceEnv(GFNEnv):
    """Write ``length`` letters; only then is the exit action legal, and then it is the only one.

    A state holds letters 0 .. n_letters-1, aligned left, then -1 for places still empty. Form
    "append" has the moves 0 .. n_letters-1, which write a letter at the right end (its graph is a
    tree); "prepend_append" adds n_letters .. 2 n_letters-1, which write one at the left end. The
    two moves of one letter may give the same string and are then still two edges. Strings of them
    are spelt in the letters of ``alphabet``.

    Args:
        n_letters: size of the alphabet, at least 1.
        length: letters in a finished sequence, at least 1.
        form: "append" or "prepend_append".
        letter_code: what ``encode`` writes for each letter, [n_letters, width], no two rows the
            same and none all zeros; one-hot vectors if None.
        batch_size, device: see :class:`GFNEnv`.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    alphabet: str = string.digits + string.ascii_uppercase

    def __init__(
        self,
        n_letters: int,
        length: int,
        form: str = "append",
        *,
        letter_code: Float[Tensor, "letters width"] | None = None,
        batch_size: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        if form not in _ENDS:
            raise ArgumentError(f"form must be one of {sorted(_ENDS)}, got {form!r}")
        for name, value in {"n_letters": n_letters, "length": length}.items():
            if value < 1:
                raise ArgumentError(f"{name} must be at least 1, got {value}")
        letter_code = torch.eye(n_letters) if letter_code is None else letter_code
        super().__init__(
            torch.full((length,), EMPTY),
            torch.full((length,), SINK),
            n_actions=n_letters * _ENDS[form] + 1,
            max_length=length + 1,
            encoded_size=length * letter_code.shape[1],
            batch_size=batch_size,
            device=device,
        )
        self.n_letters, self.length, self.form = n_letters, length, form
        self.state_range = (SINK, n_letters - 1)
        code = torch.cat([torch.zeros_like(letter_code[:1]).expand(2, -1), letter_code])
        self.register_buffer("_code", code.to(device), persistent=False)  # of SINK, EMPTY, 0, ...
        mask = torch.zeros(n_letters + 2, self.n_actions, dtype=torch.bool)
        mask[EMPTY - SINK, :-1] = True
        mask[-SINK:, -1] = True
        self.register_buffer("_mask", mask.to(device), persistent=False)
        self._writes_left = form == "prepend_append"

    @property
    def n_states(self) -> int:
        """Number of strings of at most ``length`` letters."""
        return sum(self.n_letters**written for written in range(self.length + 1))

    def is_source(self, state: Int64[Tensor, "n *state"]) -> Bool[Tensor, "n"]:
        """Tell which rows hold no letter yet."""
        return state[:, 0] == EMPTY

    def forward_mask(self, state: Int64[Tensor, "n *state"]) -> Bool[Tensor, "n actions"]:
        """Allow every move until the sequence is full, then the exit action."""
        return self._mask[state[:, -1] - SINK]  # the last place is the last to be filled

    def backward_mask(self, state: Int64[Tensor, "n *state"]) -> Bool[Tensor, "n moves"]:
        """Tell which letter stands last, and for "prepend_append" also which stands first."""
        letters = torch.arange(self.n_letters, device=state.device)
        last = state.gather(1, self._last_written(state)) == letters
        return torch.cat([last, state[:, :1] == letters], 1) if self._writes_left else last

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n T1 *state"]:
        """Read each state off the finished sequence: it is a stretch of it, from its own start."""
        n_steps = action.shape[1]
        step = torch.arange(n_steps + 1, device=action.device)[:, None]
        place = torch.arange(self.length, device=action.device)
        move = action[:, : self.length]
        if n_steps < self.length:  # only where no trajectory has ended
            move = pad(move, (0, self.length - n_steps), value=EMPTY)
        if self._writes_left:
            finished, start = self._finished(move, place)
            start = start[:, step[:, 0].clamp(max=self.length)]
            at = (start[:, :, None] + place).clamp(max=self.length - 1)
            text = finished[:, None].expand(-1, n_steps + 1, -1).gather(2, at)
        else:
            text = move[:, None]
        state = text.where(place < step, EMPTY)
        return state.masked_fill_((step >= length[:, None, None]), SINK)

    def encode(self, state: Int64[Tensor, "n *state"]) -> Float[Tensor, "n encoded"]:
        """Return the code of the letter in each place; zeros where it is empty."""
        return embedding(state - SINK, self._code).flatten(1)

    def state_key(self, state: Int64[Tensor, "n *state"]) -> Int64[Tensor, "n"]:
        """Read the places as digits in base n_letters + 1, empty being 0: dictionary order."""
        powers = torch.arange(self.length - 1, -1, -1, device=state.device)
        return ((state + 1) * (self.n_letters + 1) ** powers).sum(1)

    def to_strings(self, state: Int64[Tensor, "n *state"]) -> list[str]:
        """Spell out states, finished or not.

        Raises:
            ShapeError: ``state`` is no batch of states.
            ArgumentError: a row is the sink.
        """
        self.check_state(state)
        return spell(state, self.alphabet)

    def from_strings(self, strings: Sequence[str]) -> Int64[Tensor, "n length"]:
        """Return the states that ``strings`` spell.

        Raises:
            ShapeError: a string is longer than ``length``.
            ArgumentError: a string holds other letters than ``alphabet``.
        """
        return read(strings, self.alphabet, self.length).to(self.source_state.device)

    def _move(
        self, state: Int64[Tensor, "n *state"], move: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n *state"]:
        next_place = (state[:, :-1] >= 0).sum(1, keepdim=True)
        if not self._writes_left:
            return state.scatter(1, next_place, move[:, None])
        letter = (move % self.n_letters)[:, None]
        prepended = torch.cat([letter, state[:, :-1]], 1)
        return prepended.where(self._at_left(move), state.scatter(1, next_place, letter))

    def _undo(
        self, state: Int64[Tensor, "n *state"], move: Int64[Tensor, "n"]
    ) -> Int64[Tensor, "n *state"]:
        shortened = state.scatter(1, self._last_written(state), EMPTY)
        if not self._writes_left:
            return shortened
        beheaded = torch.cat([state[:, 1:], torch.full_like(state[:, :1], EMPTY)], 1)
        return beheaded.where(self._at_left(move), shortened)

    def _finished(
        self, move: Int64[Tensor, "n *state"], place: Int64[Tensor, "*state"]
    ) -> tuple[Int64[Tensor, "n *state"], Int64[Tensor, "n starts"]]:
        """Return what moves at both ends have written in the end, and where each state starts."""
        is_left = move >= self.n_letters
        n_left = pad(is_left.cumsum(1), (1, 0))  # letters put at the left before each step
        start = n_left[:, -1:] - n_left
        # A letter moves on with each one put to its left later.
        target = place.where(~is_left, 0) + start[:, 1:]
        return torch.empty_like(move).scatter_(1, target, move % self.n_letters), start

    def _at_left(self, move: Int64[Tensor, "n"]) -> Bool[Tensor, "n 1"]:
        return move[:, None] >= self.n_letters

    def _last_written(self, state: Int64[Tensor, "n *state"]) -> Int64[Tensor, "n 1"]:
        """Return the place of the last letter; 0 where there is none."""
        return (state[:, 1:] >= 0).sum(1, keepdim=True)


def spell(letter: Int64[Tensor, "n length"], alphabet: str) -> list[str]:
    """Spell out rows of letters: places in ``alphabet``, aligned left, then -1.

    Raises:
        ArgumentError: a row holds other numbers, as the sink does.
    """
    if (letter < -1).any():
        raise ArgumentError("state must hold letters, got the sink")
    characters = np.frombuffer(alphabet.encode() + b"\0", dtype="S1")  # -1, empty, is the last
    rows = np.ascontiguousarray(characters[letter.cpu().numpy()])
    return [text.decode() for text in rows.view(f"S{letter.shape[1]}")[:, 0]]


def read(strings: Sequence[str], alphabet: str, length: int) -> Int64[Tensor, "n length"]:
    """Return the rows of letters that strings of at most ``length`` spell, on the CPU.

    Raises:
        ShapeError: a string is too long.
        ArgumentError: a string holds another letter.
    """
    if too_long := [text for text in strings if len(text) > length]:
        raise ShapeError(f"strings must have at most {length} letters, got {too_long[0]!r}")
    if wrong := [text for text in strings if set(text) - set(alphabet)]:
        raise ArgumentError(f"strings must hold only the letters {alphabet}, got {wrong[0]!r}")
    rows = [[alphabet.find(c) for c in text.ljust(length)] for text in strings]  # -1 is empty
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, length)
