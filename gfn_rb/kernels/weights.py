"""A discrete distribution over rows whose log-weights change: a sum tree in the log domain.

The leaves are the masses of rows relative to an origin, exp(log-weight - origin). Each node is the
sum of 8 children, always computed from all of them. The masses are therefore a pure function of
the log-weights, and a restored tree draws what the original would have drawn.

An example of 11 rows, whose masses lie level after level in one array, each level filled up with
zeros to a multiple of 8::

    place    0 1 2 3 4 5 6 7   8 9 10 ...     16 17 ...    24
    mass     1 0 2 1 0 0 3 1   4 0 2          8  6         14
             leaves of node 16  of node 17     inner nodes  root: the total
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import as_count
from gfn_rb.kernels import as_array, compiled
from gfn_rb.shapes import Float, Float64, Int64

# +inf has no log-weight arithmetic; the largest float takes its place.
LARGEST = float(np.finfo(np.float64).max)

_SHIFT = 3
_WIDTH = 1 << _SHIFT  # children of a node: one cache line
# The origin is the log of the total, rounded to a multiple of a power of two, which is exact for
# numbers of any size. It rarely moves, and all masses with it.
_STRIDE = 256.0
_LEAST, _MOST = math.exp(-_STRIDE / 2), math.exp(_STRIDE / 2)
_FAR = 700.0  # the largest number that is exponentiated
# The lowest total that is drawn from: masses below it lose digits, or are zero.
_FINE = 1e-250
_TINY = 1e-300  # in place of an exponential variable of 0, whose logarithm is not finite
_BELOW_1 = 1 - 2.0**-53
_NO_ROWS = np.empty(0, np.int64)
_STALE = -1.0  # sum of a node whose children changed


class Weights:
    r"""A mutable discrete distribution over rows on the CPU, kept in the log domain.

    Row ``i`` is drawn with probability :math:`p_i = \exp(w_i - \log\sum_j \exp w_j)`. Log-weights
    may have any size: only differences are exponentiated. A row of weight ``-inf`` is never drawn.
    Rows of weight ``+inf`` share the whole mass. A change or a draw of a row takes O(log N).

    Args:
        capacity: number of rows, at least 1.

    Attributes:
        log_weight: the log-weight of every row, in nats: float64 [N]. Do not write to it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = as_count("capacity", capacity)
        size, start = capacity, [0]
        while size > 1 or len(start) == 1:
            size = -(-size // _WIDTH)
            start.append(start[-1] + size * _WIDTH)
        self._log_weight: Float64[np.ndarray, "N"] = np.full(start[1], -math.inf)
        # Level after level, from the leaves to the root; a number for each level is its start.
        self._mass: Float64[np.ndarray, "nodes"] = np.zeros(start[-1] + 1)
        # The lowest log-weight below each inner node, inf for none.
        self._lowest: Float64[np.ndarray, "inner"] = np.full(start[-1] + 1 - start[1], math.inf)
        self._start: Int64[np.ndarray, "levels"] = np.array(start)
        self._origin = 0.0
        self.log_weight: Float64[Tensor, "N"] = torch.from_numpy(self._log_weight[:capacity])

    def _total(self) -> float:
        """Return the total mass relative to the origin, which moves if it has to.

        The origin depends on the log-weights alone, not on those before.
        """
        mass = self._mass
        for _ in range(2):  # the second time, what rounded to zero before is in the total
            total = math.nan if math.isnan(self._origin) else float(mass[-1])
            if _LEAST < total < _MOST:
                break
            if _FINE < total < 1 / _FINE:
                origin = math.log(total) + self._origin
            else:  # no mass is left, it is far from the origin, or masses are of none
                origin = max(float(self._log_weight.max()), -LARGEST)
            if (origin := _rounded(origin)) == self._origin:
                break
            self._weigh(origin)
        return float(mass[-1])

    @property
    def log_total(self) -> Float64[Tensor, ""]:
        """Log of the total mass, ``-inf`` when no row can be drawn."""
        return torch.tensor(self._log_mass() + self._origin, dtype=torch.float64)

    def _log_mass(self) -> float:
        total = self._total()
        return math.log(total) if total > 0 else -math.inf

    @property
    def has_mass(self) -> bool:
        """Whether a row can be drawn."""
        return self._total() > 0

    @property
    def n_positive(self) -> int:
        """Number of rows that can be drawn."""
        return int(np.count_nonzero(self._log_weight > -math.inf))

    @property
    def lowest(self) -> float:
        """The lowest log-weight of those that can be drawn, ``+inf`` where none can."""
        return float(self._lowest[-1])

    def update(self, index: Int64[Tensor, "m"], log_weight: Float[Tensor, "m"]) -> bool:
        """Change the log-weight of some rows, in nats. Where one stands twice, the last wins.

        Returns:
            Whether none is NaN, which may not be drawn from.
        """
        row, value = index.numpy(), as_array(log_weight)
        arrays = self._log_weight, self._mass, self._lowest, self._start
        return _change(row, value, *arrays, self._origin)

    def assign(self, log_weight: Float[Tensor, "n"]) -> bool:
        """Set the log-weights of the first n rows, in nats; the others get ``-inf``.

        Returns:
            Whether none is NaN.
        """
        n = log_weight.shape[0]
        self._log_weight[n:] = -math.inf
        np.minimum(as_array(log_weight), LARGEST, out=self._log_weight[:n], dtype=np.float64)
        self._weigh(_rounded(max(float(self._log_weight.max()), -LARGEST)))
        return not math.isnan(self._origin)

    def _weigh(self, origin: float) -> None:
        """Compute all masses relative to an origin, which is NaN if an interrupt ends that."""
        self._origin, row = math.nan, np.arange(self.capacity)
        _weigh(row, self._log_weight, self._mass, self._lowest, self._start, origin)
        self._origin = origin

    def log_probs(self, n: int) -> Float64[Tensor, "n"]:
        """Return log p of the first n rows, ``-inf`` where no row can be drawn."""
        log_mass = self._log_mass()
        return self.log_weight[:n] - self._origin - (0.0 if log_mass == -math.inf else log_mass)

    def draw(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "n"], Float[Tensor, "n"]]:
        """Draw n rows with replacement, and return the log-probability of each as well.

        At least one row must have a finite weight.
        """
        uniform = torch.rand(n, dtype=torch.float64, generator=generator).numpy()
        log_mass = self._log_mass()
        arrays = self._log_weight, self._mass, self._start
        row, log_prob = np.empty(n, np.int64), np.empty(n, np.float32)
        _draw(uniform, *arrays, self._origin, log_mass, row, log_prob)
        return torch.from_numpy(row), torch.from_numpy(log_prob)

    def draw_distinct(
        self, n: int, generator: torch.Generator | None = None
    ) -> tuple[Int64[Tensor, "k"], Float[Tensor, "k"], bool]:
        """Draw n different rows, one after another, each from what the earlier ones left.

        Returns:
            The rows in the order of their draw, fewer than n if fewer have a positive weight; the
            log-probability of each as a single draw; and whether there are n.
        """
        row, _, log_prob = self.perturbed(n, generator, last=None)
        return torch.from_numpy(row), torch.from_numpy(log_prob), len(row) == n

    def perturbed(
        self,
        n: int,
        generator: torch.Generator | None = None,
        without: Int64[np.ndarray, "m"] = _NO_ROWS,
        last: float | None = math.inf,
    ) -> tuple[Int64[np.ndarray, "k"], Float64[np.ndarray, "k"], Float[np.ndarray, "k"]]:
        """Return the at most n rows of largest Gumbel-perturbed log p, largest first.

        They have the law of n draws without replacement, in order. Next to those of another
        distribution, the largest of both have the law of draws from the two together.

        Args:
            n: number of rows, at least 1.
            generator: source of randomness. Default: PyTorch's global generator.
            without: rows that earlier calls returned: the next ones follow.
            last: the lowest score of those. None draws rows alone, whose scores are then zero.

        Returns:
            Rows, their scores, and the log-probability of each as a single draw.
        """
        # Rows arrive, each at a rate equal to its p; minus the log of an arrival is its score.
        n_waits, last = (0, math.inf) if last is None else (3 * n, last)
        log_mass = self._log_mass()
        uniform = torch.rand(3 * n + n_waits, dtype=torch.float64, generator=generator).numpy()
        arrays = self._log_weight, self._mass, self._lowest, self._start
        place, wait = uniform[: 3 * n], uniform[3 * n :]
        row, score, log_prob = np.empty(n, np.int64), np.zeros(n), np.empty(n, np.float32)
        drawn = _distinct(
            place, wait, without, last, *arrays, self._origin, log_mass, row, score, log_prob
        )
        if drawn == n:
            return row, score, log_prob
        row, score, log_prob = row[:drawn], score[:drawn], log_prob[:drawn]
        # The masses that are left are too small to be added up.
        weight = self._log_weight.copy()
        weight[row] = weight[without] = -math.inf
        left = np.flatnonzero(weight > -math.inf)
        others = torch.from_numpy(weight[left])
        late, order = (others + gumbel_like(others, generator)).topk(min(n - len(row), len(left)))
        log_p = others[order] - self._origin - log_mass
        late -= self._origin + log_mass
        # Arrivals have no memory: the others arrive as long after the last one as they would have.
        since = -(score[-1] if len(row) and n_waits else last)
        late_score = -np.logaddexp(since, -late.numpy())
        pairs = (row, left[order.numpy()]), (score, late_score), (log_prob, log_p.float().numpy())
        return tuple(np.concatenate(pair) for pair in pairs)  # type: ignore[return-value]


def gumbel_like(
    values: Float64[Tensor, "*s"], generator: torch.Generator | None
) -> Float64[Tensor, "*s"]:
    """Draw standard Gumbel variables, as many as there are values, on their device.

    The rows of the largest sums of log-weight and variable are draws without replacement, in order
    (Gumbel-max trick, Yellott 1977; Vieira 2014).
    """
    exponential = torch.empty_like(values).exponential_(generator=generator)
    return -exponential.clamp_(min=_TINY).log_()


def _rounded(origin: float) -> float:
    return origin if math.isnan(origin) else _STRIDE * round(origin / _STRIDE)


@compiled
def _change(row, value, log_weight, mass, lowest, start, origin):  # type: ignore[no-untyped-def]
    """Change log-weights and masses, and return whether none is NaN."""
    is_nan = False
    for i in range(len(row)):
        is_nan |= math.isnan(value[i])
        log_weight[row[i]] = min(float(value[i]), LARGEST)
    _weigh(row, log_weight, mass, lowest, start, origin)
    return not is_nan


@compiled
def _weigh(row, log_weight, mass, lowest, start, origin):  # type: ignore[no-untyped-def]
    """Compute the masses of rows, and all sums and minima that contain them."""
    for i in row:
        mass[i] = math.exp(min(float(log_weight[i]) - origin, _FAR))
    _add_up(row, log_weight, mass, lowest, start)


@compiled
def _add_up(row, log_weight, mass, lowest, start):  # type: ignore[no-untyped-def]
    """Compute the sums and minima that contain rows, level by level, each node once."""
    # Before each level: the first ``n_nodes`` of ``node`` are the nodes below it that changed. Each
    # parent is marked as stale when it is first met, so that none is summed up twice, and computed
    # from all its children: a sum that is corrected by differences would drift.
    node, n_nodes, leaves = row.copy(), len(row), start[1]
    for level in range(len(start) - 1):
        below, here = start[level], start[level + 1]
        n_stale = 0
        for i in range(n_nodes):
            parent = node[i] >> _SHIFT
            if mass[here + parent] != _STALE:
                mass[here + parent] = _STALE
                node[n_stale] = parent
                n_stale += 1
        n_nodes = n_stale
        for i in range(n_nodes):
            first = below + (node[i] << _SHIFT)
            total, low = 0.0, np.inf
            for j in range(first, first + _WIDTH):
                total += abs(mass[j])  # negative in drawn rows, see ``_distinct``
                value = log_weight[j] if level == 0 else lowest[j - leaves]
                if -np.inf < value < low:
                    low = value
            mass[here + node[i]], lowest[here + node[i] - leaves] = total, low


@compiled
def _find(uniform, node, mass, start):  # type: ignore[no-untyped-def]
    """Write the rows at places among the cumulative masses, never one of mass zero.

    All draws go down one level before any goes further, in a loop without branches. The processor
    then reads the nodes of many draws at once.
    """
    # Before each level: place[i] lies within the mass of node[i]. An example with a place of 9.5 in
    # the tree at the top of this file::
    #
    #     root 14        9.5   passes node 16 (8): child 17, place 1.5
    #     node 17 of 6   1.5   is below row 8 (4): row 8
    n, place = len(uniform), uniform * mass[-1]
    for i in range(n):
        node[i] = 0
    for level in range(len(start) - 2, -1, -1):
        for i in range(n):
            first, child = start[level] + (node[i] << _SHIFT), 0
            until, before = 0.0, 0.0
            for j in range(first, first + _WIDTH - 1):
                until += abs(mass[j])
                is_beyond = until <= place[i]
                child += is_beyond
                before = until if is_beyond else before
            # Below the mass of the child, however the difference was rounded.
            place[i] = min(place[i] - before, abs(mass[first + child]) * _BELOW_1)
            node[i] = (node[i] << _SHIFT) + child


@compiled
def _draw(  # type: ignore[no-untyped-def]
    uniform, log_weight, mass, start, origin, log_mass, row, log_prob
):
    """Write rows drawn with replacement, and the log-probability of each, into arrays."""
    _find(uniform, row, mass, start)
    for i in range(len(row)):
        log_prob[i] = float(log_weight[row[i]]) - origin - log_mass


@compiled
def _distinct(  # type: ignore[no-untyped-def]
    uniform, wait, without, last, log_weight, mass, lowest, start, origin, log_mass, row, score,
    log_prob,
):  # fmt: skip
    """Draw different rows until arrays are full or the mass that is left is too small.

    The arrays take the rows, their scores, which are zero without ``wait``, and log p. The result
    is the number of rows.

    A trial that finds a row drawn before is void. Trials come in rounds; after each round, the rows
    that were found again are taken out of the tree, so that they cost no further trials. A drawn
    row has the negative of its mass until the batch is complete, one that was taken out has zero.
    """
    n, n_without = len(row), len(without)
    # Rows that are taken out, at first those to leave out, and the masses to restore.
    out, kept_out = np.empty(n + n_without, np.int64), np.empty(n_without)
    for i in range(n_without):
        out[i], kept_out[i] = without[i], mass[without[i]]
        mass[without[i]] = 0.0
    kept, found = np.empty(n), np.empty(n, np.int64)
    n_drawn, n_out, n_added, n_tried = 0, n_without, 0, 0
    now = math.exp(min(-last - log_mass, _FAR))
    while n_drawn < n:
        _add_up(out[n_added:n_out], log_weight, mass, lowest, start)
        n_added, total = n_out, mass[-1]
        if total < _FINE:
            break
        # Trials one by one would need at most one for each row to draw or to take out. Those that
        # can be spared make rounds longer.
        spare = len(uniform) - n_tried - (2 * n - n_drawn - n_out + n_without)
        n_trials = max(1, min(n - n_drawn, spare))
        _find(uniform[n_tried : n_tried + n_trials], found, mass, start)
        for trial in range(n_trials):
            i = found[trial]
            if len(wait) > 0:
                now += max(-math.log(1 - wait[n_tried + trial]), _TINY) / total
            if mass[i] > 0:
                row[n_drawn], kept[n_drawn] = i, mass[i]
                log_prob[n_drawn] = float(log_weight[i]) - origin - log_mass
                if len(wait) > 0:
                    score[n_drawn] = -math.log(now) - log_mass
                mass[i] = -mass[i]
                n_drawn += 1
            elif mass[i] < 0:
                mass[i] = 0.0
                out[n_out] = i
                n_out += 1
        n_tried += n_trials
    for i in range(n_drawn):
        mass[row[i]] = kept[i]
    for i in range(n_without):
        mass[without[i]] = kept_out[i]
    _add_up(out[:n_out], log_weight, mass, lowest, start)
    return n_drawn


@compiled
def merged_draws(  # type: ignore[no-untyped-def]
    row, score, log_prob, size, log_share, part, drawn, joint, is_open
):
    """Write part, row and log p of the largest scores of several parts, largest first.

    Rows come part after part, each in descending order. Scores and log p become those of all parts
    together. As many are drawn as the arrays take, or as there are.

    Args:
        row: rows of all parts, int64 [m].
        score: their scores, [m].
        log_prob: their log p within their part, [m].
        size: number of rows of each part, [k].
        log_share: log of the mass of each part, of that of all, [k].
        part: for the part of each draw, int64 [n].
        drawn: for its row, int64 [n].
        joint: for its log p, float32 [n].
        is_open: whether further rows of a part might be among the largest, bool [k].

    Returns:
        The number of draws.
    """
    # Before each draw: all rows of part j before ``at[j]`` are drawn, none of those behind is. A
    # score is minus the log of a first arrival, so a part whose rows arrive at ``share`` of the
    # whole rate is moved by the log of that share; the largest of the heads comes next.
    end, n = size.cumsum(), len(part)
    at, n_drawn = end - size, min(n, len(row))
    for i in range(n_drawn):
        best, highest = -1, -np.inf
        for j in range(len(size)):
            if at[j] < end[j] and (best < 0 or score[at[j]] + log_share[j] > highest):
                best, highest = j, score[at[j]] + log_share[j]
        part[i], drawn[i], joint[i] = best, row[at[best]], log_prob[at[best]] + log_share[best]
        at[best] += 1
    is_open[:] = at == end
    if n_drawn == n:
        is_open[part[n - 1]] = False  # it has the lowest of those scores
    return n_drawn


@compiled
def first_occurrences(values):  # type: ignore[no-untyped-def]
    """Return where each value, at least 0, occurs first, in ascending order."""
    bits = 4
    while 1 << bits < 2 * len(values):
        bits += 1
    mask, held = (1 << bits) - 1, np.full(1 << bits, -1, np.int64)
    first, n = np.empty(len(values), np.int64), 0
    for i in range(len(values)):
        place = values[i] & mask
        while held[place] >= 0 and held[place] != values[i]:
            place = (place + 1) & mask
        if held[place] < 0:
            held[place], first[n] = values[i], i
            n += 1
    return first[:n]
