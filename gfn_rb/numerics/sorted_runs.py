"""Sorted sequences of integers under small edits: which stands at a position, how many lie below.

A sequence is stored sorted once. What changes afterwards is kept beside it, as a sorted list of
edits: codes put in (+1) and codes taken out (-1). Between two edits, positions in the edited
sequence and in the one below differ by a constant, the sum of the signs so far. Looking up a
position is thus one binary search among the edits and one read below, and an edited sequence can
itself be edited: a small list over a larger one over the sequence, as in a log-structured merge
tree (O'Neil et al. 1996), whose merges are sorts of nearly sorted integers.

Positions count from 1: position 0 and edit 0 are stand-ins, for lookups whose result is not used.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gfn_rb.shapes import Int64

# The code of the stand-ins. No other code may equal it.
_FIRST = torch.iinfo(torch.int64).min


@runtime_checkable
class Sequence(Protocol):
    """Different integers in ascending order."""

    def at(self, position: Int64[Tensor, "k"], /) -> Int64[Tensor, "k"]:
        """Return the codes at positions."""
        ...

    def below(self, code: Int64[Tensor, "k"], /) -> Int64[Tensor, "k"]:
        """Return how many codes are smaller than each."""
        ...


class Run:
    """A sequence stored as it is.

    Args:
        code: n different integers in ascending order, after a stand-in.
    """

    def __init__(self, code: Int64[Tensor, "n+1"]) -> None:
        self._padded, self._code = code, code[1:]

    @classmethod
    def of(cls, code: Int64[Tensor, "n"]) -> Run:
        """Return a sequence of integers.

        Args:
            code: different ones in ascending order, above the smallest int64.
        """
        return cls(torch.cat([code.new_full((1,), _FIRST), code]))

    def __len__(self) -> int:
        return self._code.shape[0]

    def at(self, position: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the codes at positions.

        Args:
            position: in [0, n].
        """
        return self._padded.index_select(0, position)

    def below(self, code: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return how many codes are smaller than each.

        Args:
            code: any integers.
        """
        return torch.searchsorted(self._code, code)


class Edited:
    """A sequence of which some codes were taken out, and others put in. Immutable.

    Args:
        base: what is edited.
        code: the codes of the edits in ascending order, after a stand-in.
        sign: +1 for a code that is put in, -1 for one taken out, 0 for the stand-in.
        below: how many codes of the base are smaller than each, -1 for the stand-in.
    """

    def __init__(
        self,
        base: Sequence,
        code: Int64[Tensor, "e"],
        sign: Int64[Tensor, "e"],
        below: Int64[Tensor, "e"],
    ) -> None:
        self.base = base
        self._code, self._sign, self._below = code, sign, below
        # Sum of the signs up to each edit, and the position from which on it acts: that of the
        # code that is put in, or of the one that follows the code taken out.
        self._through = sign.cumsum(0)
        self._start = torch.add(below, self._through).sub_(sign).add_(1)
        self._put_at = torch.where(sign > 0, self._start, -1)

    @classmethod
    def none(cls, base: Sequence) -> Edited:
        """Return a sequence without edits.

        Args:
            base: the sequence.
        """
        zero = torch.zeros(1, dtype=torch.int64)
        return cls(base, torch.full_like(zero, _FIRST), zero, zero - 1)

    @property
    def edits(self) -> tuple[Int64[Tensor, "e-1"], Int64[Tensor, "e-1"]]:
        """The codes put in or taken out, and their signs."""
        return self._code[1:], self._sign[1:]

    def __len__(self) -> int:
        return self._code.shape[0] - 1

    def at(self, position: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return the codes at positions.

        Args:
            position: from 0 to the number of codes.
        """
        if not len(self):
            return self.base.at(position)
        edit = torch.searchsorted(self._start[1:], position, right=True)
        beneath = self.base.at(position - self._through.index_select(0, edit))
        put_here = self._put_at.index_select(0, edit) == position
        return torch.where(put_here, self._code.index_select(0, edit), beneath)

    def below(self, code: Int64[Tensor, "k"]) -> Int64[Tensor, "k"]:
        """Return how many codes are smaller than each.

        Args:
            code: any integers.
        """
        below = self.base.below(code)
        if not len(self):
            return below
        edit = torch.searchsorted(self._code[1:], code)
        return below.add_(self._through.index_select(0, edit))

    def edited(self, put: Int64[Tensor, "a"], out: Int64[Tensor, "b"]) -> Edited:
        """Return the sequence with further edits. What is both put in and taken out stays as is.

        Args:
            put: different codes to put in, absent unless taken out as well.
            out: different codes to take out, all present.
        """
        sign = torch.ones(put.shape[0] + out.shape[0], dtype=torch.int64)
        sign[put.shape[0] :] = -1
        return self._merged(torch.cat([put, out]), sign)

    def absorbing(self, above: Edited) -> Edited:
        """Return the sequence with the edits that another makes to it.

        Args:
            above: an edited sequence whose base this is.
        """
        return self._merged(*above.edits)

    def _merged(self, code: Tensor, sign: Tensor) -> Edited:
        below = torch.cat([self._below, self.base.below(code)])
        sign = torch.cat([self._sign, sign])
        code, order = torch.cat([self._code, code]).sort(stable=True)
        again = code[1:] == code[:-1]
        if bool(again.any()):
            kept = _net(again)
            code, order = code.index_select(0, kept), order.index_select(0, kept)
        return Edited(self.base, code, sign.index_select(0, order), below.index_select(0, order))

    def written_out(self, base: Run) -> Run:
        """Return the sequence stored as it is.

        Args:
            base: the base.
        """
        n = len(base) + int(self._through[-1])
        shift = torch.zeros(n + 2, dtype=torch.int64).index_add_(0, self._start, self._sign)
        code = base.at(torch.arange(n + 1).sub_(shift[: n + 1].cumsum_(0)))
        put = self._sign > 0
        code[self._start[put]] = self._code[put]
        return Run(code)


def _net(again: Int64[Tensor, "e-1"]) -> Int64[Tensor, "k"]:
    """Return the edits that remain where some are of one code, given which equal the next.

    Of an earlier and a later edit, none: they undo each other, as a code put in and taken out
    does. Of an earlier one, a code put in and taken out, the second: all but one were undone.
    """
    flags = torch.zeros(2, again.shape[0] + 1, dtype=torch.bool)
    flags[0, :-1] = flags[1, 1:] = again
    return (flags[0] == flags[1]).nonzero().squeeze(1)
