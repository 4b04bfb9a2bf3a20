"""Grids that are walked upwards from the origin."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.core import from_digits, with_host_form
from gfn_rb.envs.enumerable import EnumerableEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Flags, Float, Int64, Integers, StateBatch


class GridEnv(EnumerableEnv):
    """The points {0, ..., height-1}^ndim; move d adds one to coordinate d, the sink is -1 in all.

    A subclass defines where moves and the exit action are legal (``forward_mask``,
    ``backward_mask``), rewards and modes.

    Args:
        ndim: number of coordinates, at least 1.
        height: grid points per coordinate, at least 2.
        max_length: actions in the longest trajectory, the exit action included.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        ArgumentError: an argument is out of range; the message names it.
    """

    def __init__(
        self, ndim: int, height: int, *, max_length: int, **options: Unpack[EnvOptions]
    ) -> None:
        as_count("ndim", ndim)
        as_count("height", height, 2)
        super().__init__(
            torch.zeros(ndim, dtype=torch.int64),
            torch.full((ndim,), -1),
            n_actions=ndim + 1,
            max_length=max_length,
            encoded_size=ndim * height,
            **options,
        )
        self.n_dims, self.height = ndim, height
        self.state_range = (-1, height - 1)
        # Coordinates share words of 64 bits while moves are summed up. None of them overflows.
        self._packing = (
            torch.int8 if height <= 2**7 else torch.int16 if height <= 2**15 else torch.int64
        )
        per_word = 8 // self._packing.itemsize
        packed = torch.eye(ndim + 1, -(-ndim // per_word) * per_word, dtype=self._packing)
        packed[ndim] = 0  # the exit action
        self._register(
            _code=torch.eye(height + 1, height).roll(1, 0),  # of -1 (the sink), 0, 1, ...
            _increment=torch.eye(ndim, dtype=torch.int64),
            _packed_increment=packed.view(torch.int64),
        )

    @with_host_form(lambda self: lambda state: ~np.logical_or.reduce(state, 1))
    def is_source(self, state: StateBatch) -> Flags:
        """Return which rows are the origin."""
        return state.amax(1) == 0

    def states_of(
        self, action: Int64[Tensor, "n T"], length: Integers
    ) -> Int64[Tensor, "n T1 *state"]:
        """Sum up the moves."""
        step = torch.arange(action.shape[1] + 1, device=action.device)
        past = step >= length[:, None]
        move = action.where((action >= 0) & ~past[:, 1:], self.exit_action)
        words = pad(embedding(move, self._packed_increment).cumsum_(1), (0, 0, 1, 0))
        words.masked_fill_(past[:, :, None], -1)  # in each coordinate: the sink
        return words.view(self._packing)[:, :, : self.n_dims].to(torch.int64)

    @with_host_form(lambda self: partial(_coded, self, self._code.numpy()))
    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return one one-hot vector per coordinate; zeros for the sink."""
        try:
            return embedding(state + 1, self._code).flatten(1)
        except IndexError:
            raise ArgumentError(
                f"state must hold coordinates from 0 to {self.height - 1}, got up to "
                f"{int(state.max())}: is it a state of another environment?"
            ) from None

    def state_key(self, state: StateBatch) -> Integers:
        """Read the coordinates as digits in base ``height``."""
        return from_digits(state, self.height)

    @with_host_form(lambda self: partial(_added, 1))
    def move(self, state: StateBatch, move: Integers) -> StateBatch:
        """Add one to a coordinate."""
        return state + self._increment.index_select(0, move)

    @with_host_form(lambda self: partial(_added, -1))
    def undo(self, state: StateBatch, move: Integers) -> StateBatch:
        """Subtract one from a coordinate."""
        return state - self._increment.index_select(0, move)


def _coded(
    env: GridEnv, code: Float[np.ndarray, "digits width"], state: Int64[np.ndarray, "n dims"]
) -> Float[np.ndarray, "n encoded"]:
    try:
        return code.take(state + 1, 0).reshape(len(state), -1)
    except IndexError:
        return env.encode(torch.from_numpy(state)).numpy()  # raises


def _added(
    change: int, state: Int64[np.ndarray, "n dims"], move: Int64[np.ndarray, "n"]
) -> Int64[np.ndarray, "n dims"]:
    state = state.copy()
    state[np.arange(len(state)), move] += change
    return state
