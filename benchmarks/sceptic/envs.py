"""Environments of six tasks: tables over sequences, conditions, graphs and expressions.

All objects can be listed, so that fits are exact. The definitions were committed before the first
run, and no option was chosen on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from benchmarks.published.landscapes import neighbours
from gfn_rb.envs import EnumerableEnv
from gfn_rb.envs.core import states_of_writes, to_digits
from gfn_rb.envs.scored_sequences import ScoredSequenceEnv
from gfn_rb.envs.sequence import SequenceEnv

Kind = Literal["nk", "knapsack", "ising"]
Table = tuple[Tensor, Tensor]
"""The log-reward of each sequence, in order of its letters, and the modes."""


class Sequences(ScoredSequenceEnv):
    """Write a sequence from left to right whose log-reward is one of three functions.

    - "nk": 9 of 3 letters. The fitness f is the mean over the places of a random number given the
      letter there and the 3 after it, in a circle; log R = 30 log(f / max f). Modes are the 30 best
      local optima (Kauffman and Levin 1987).
    - "knapsack": 16 bits, each of which takes an item or leaves it. Weights and values are random
      in [0.1, 1), the capacity is half of all weights. log R = 12 (value / max value), and -20 if
      the items are too heavy. Modes are the 100 best sets.
    - "ising": 14 spins s in {-1, 1} with log R = sum over i < j of J_ij s_i s_j, J normal of
      standard deviation 0.35. Modes are its local optima.

    Args:
        kind: which of them.
        seed: of its random numbers.
    """

    def __init__(self, kind: Kind, seed: int, device: str = "cpu") -> None:
        n_letters, length, make = _TABLES[kind]
        super().__init__(n_letters, length, "append", device=device)
        letter = to_digits(torch.arange(n_letters**length), n_letters, length)
        log_reward, modes = make(letter, torch.Generator().manual_seed(seed))
        self._register_scores(log_reward.exp(), log_reward, modes)


def _nk(letter: Tensor, generator: torch.Generator) -> Table:
    length = letter.shape[1]
    table = torch.rand(length, 3**4, generator=generator, dtype=torch.float64)
    place = (torch.arange(length)[:, None] + torch.arange(4)) % length
    seen = letter[:, place] @ (3 ** torch.arange(4))  # [N, length]
    fitness = table[torch.arange(length), seen].mean(1)
    log_reward = 30 * (fitness / fitness.max()).log()
    return log_reward, _optima(log_reward, letter, 3)[:30]


def _knapsack(letter: Tensor, generator: torch.Generator) -> Table:
    draw = torch.rand(2, letter.shape[1], generator=generator, dtype=torch.float64)
    weight, value = 0.1 + 0.9 * draw
    is_feasible = letter.double() @ weight <= weight.sum() / 2
    worth = (letter.double() @ value).where(is_feasible, -torch.inf)
    log_reward = (12 * worth / worth.max()).where(is_feasible, -20.0)
    return log_reward, log_reward.topk(100).indices


def _ising(letter: Tensor, generator: torch.Generator) -> Table:
    length = letter.shape[1]
    coupling = 0.35 * torch.randn(length, length, generator=generator, dtype=torch.float64).triu(1)
    spin = 2.0 * letter.double() - 1
    log_reward = ((spin @ coupling) * spin).sum(1)
    return log_reward, _optima(log_reward, letter, 2)


def _optima(log_reward: Tensor, letter: Tensor, n_letters: int) -> Tensor:
    """Return the sequences that are better than all with one other letter, the best first."""
    best = log_reward[neighbours(letter, n_letters)].amax(1)
    optima = (log_reward > best).nonzero()[:, 0]
    return optima[log_reward[optima].argsort(descending=True)]


_TABLES: dict[Kind, tuple[int, int, Callable[[Tensor, torch.Generator], Table]]] = {
    "nk": (3, 9, _nk),
    "knapsack": (2, 16, _knapsack),
    "ising": (2, 14, _ising),
}


class ConditionalWords(SequenceEnv, EnumerableEnv):
    """Write 12 bits that are near a word of the condition, one of 8 with 4 random words each.

    log R(x | c) = -2 d(x, c), where d is the number of bits in which x differs from the nearest
    word of condition c. A condition is a one-hot vector, [8]. No modes are counted.

    Args:
        seed: of the words.
    """

    condition_shape = torch.Size([8])

    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__(2, 12, "append", device=device)
        word = torch.randperm(2**12, generator=torch.Generator().manual_seed(seed))[:32]
        self._register(_word=to_digits(word, 2, 12).view(8, 4, 12).to(device))

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R(x | c)."""
        self.check_terminating(state)
        word = self._word[self.checked_condition(condition, len(state)).argmax(1)]
        return -2.0 * (word != state[:, None]).sum(2).amin(1).float()

    def sample_condition(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ``n`` conditions."""
        return self._one_hot(torch.randint(8, (n,), generator=generator))

    def fixed_conditions(self, n: int) -> Tensor:
        """Return ``n`` conditions, evenly chosen."""
        return self._one_hot(torch.arange(n) * 8 // n)

    def _one_hot(self, number: Tensor) -> Tensor:
        return torch.eye(8, device=self.source_state.device, dtype=torch.float32)[number]


class Graphs(EnumerableEnv):
    """Add edges between 6 nodes, in any order; every graph terminates.

    log R(G) = -1.5 sum_v |degree(v) - 3|. Modes are the 70 graphs whose degrees are all 3. A state
    has a 1 for each edge, [15], in the order of ``torch.triu_indices``.
    """

    n_modes = 70

    def __init__(self, device: str = "cpu") -> None:
        empty = torch.zeros(15, dtype=torch.int64)
        super().__init__(
            empty, empty - 1, n_actions=16, max_length=16, encoded_size=15, device=device
        )
        self.state_range = (-1, 1)
        end = torch.triu_indices(6, 6, 1)
        ends = torch.zeros(15, 6).scatter(1, end.T, 1.0)  # the nodes of each edge
        self._register(_ends=ends, _power=2 ** torch.arange(15))

    @property
    def n_states(self) -> int:
        """Number of graphs."""
        return 2**15

    def forward_mask(self, state: Tensor) -> Tensor:
        """Allow each absent edge, and the exit action everywhere."""
        return torch.cat([state == 0, state[:, :1] >= 0], 1)

    def backward_mask(self, state: Tensor) -> Tensor:
        """Return which edges there are."""
        return state == 1

    def move(self, state: Tensor, move: Tensor) -> Tensor:
        """Add an edge."""
        return state.scatter(1, move[:, None], 1)

    def undo(self, state: Tensor, move: Tensor) -> Tensor:
        """Remove an edge."""
        return state.scatter(1, move[:, None], 0)

    def states_of(self, action: Tensor, length: Tensor) -> Tensor:
        """Write a 1 for each edge that is added."""
        return states_of_writes(action, torch.ones_like(action), length, 15, empty=0, sink=-1)

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R(G)."""
        self.check_terminating(state)
        return -1.5 * (state.float() @ self._ends - 3).abs().sum(1)

    def encode(self, state: Tensor) -> Tensor:
        """Return the edges; zeros for the sink."""
        return (state == 1).float()

    def state_key(self, state: Tensor) -> Tensor:
        """Read the edges as bits."""
        return (state * self._power).sum(1)

    def mode_index(self, state: Tensor) -> Tensor:
        """Return the rank of each graph whose degrees are all 3, -1 for others."""
        self.check_terminating(state)
        keys = self.state_key(self.terminating_states()[self._is_mode(self.terminating_states())])
        rank = torch.searchsorted(keys, self.state_key(state))
        return rank.where(self._is_mode(state), -1)

    def _is_mode(self, state: Tensor) -> Tensor:
        return (state.float() @ self._ends == 3).all(1)


class Expressions(EnumerableEnv):
    """Write an expression of up to 3 levels that is near x^2 + x + 2 at 8 points.

    Symbols are x, 1, 2 and the operators +, -, *. A state is the tree in order of its levels, [7]:
    children of place i are 2i + 1 and 2i + 2, and -1 is empty. Symbols are written in that order,
    and the bottom level has no operator. log R = -4 log(1 + e), with the root of the mean squared
    error e at 8 even points of [-2, 2]. Modes are the expressions with e < 0.001.
    """

    symbols = ("x", "1", "2", "+", "-", "*")

    def __init__(self, device: str = "cpu") -> None:
        empty = torch.full((7,), -1)
        super().__init__(
            empty, empty - 1, n_actions=7, max_length=8, encoded_size=42, device=device
        )
        self.state_range = (-2, 5)
        self._n_states = 0
        code = torch.cat([torch.zeros(2, 6), torch.eye(6)])  # of the sink, empty, and the symbols
        self._register(_code=code, _power=7 ** torch.arange(7), _mode=torch.full((7**7,), -1))
        self._n_states = sum(len(layer) for layer in self.layers())
        object_ = self.terminating_states()
        is_mode = self._error(object_) < 1e-3
        self.n_modes = int(is_mode.sum())
        self._mode[self.state_key(object_[is_mode])] = torch.arange(self.n_modes, device=device)

    @property
    def n_states(self) -> int:
        """Number of expressions, unfinished ones included."""
        return self._n_states

    def forward_mask(self, state: Tensor) -> Tensor:
        """Allow symbols while a place must be filled, then the exit action."""
        place, is_open = self._next(state)
        is_open = is_open & (state[:, 0] >= -1)
        leaf = is_open[:, None].expand(-1, 3)
        operator = (is_open & (place < 3))[:, None].expand(-1, 3)
        ends = (~is_open & (state[:, 0] >= 0))[:, None]
        return torch.cat([leaf, operator, ends], 1)

    def backward_mask(self, state: Tensor) -> Tensor:
        """Return which symbol is the last."""
        last = state.gather(1, self._last(state)[:, None])
        return last == torch.arange(6, device=state.device)

    def move(self, state: Tensor, move: Tensor) -> Tensor:
        """Write a symbol at the next place."""
        return state.scatter(1, self._next(state)[0][:, None], move[:, None])

    def undo(self, state: Tensor, move: Tensor) -> Tensor:
        """Empty the last place."""
        return state.scatter(1, self._last(state)[:, None], -1)

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        """Return log R of each expression."""
        self.check_terminating(state)
        return -4 * self._error(state).log1p()

    def encode(self, state: Tensor) -> Tensor:
        """Return the symbol in each place, one-hot."""
        return self._code[state + 2].flatten(1)

    def state_key(self, state: Tensor) -> Tensor:
        """Read the places as digits in base 7, empty being 0."""
        return ((state + 1) * self._power).sum(1)

    def mode_index(self, state: Tensor) -> Tensor:
        """Return the number of each expression that is a mode, -1 for others."""
        self.check_terminating(state)
        return self._mode[self.state_key(state)]

    def describe(self, state: Tensor) -> list[str]:
        """Return each expression with brackets."""
        return [self._text(row, 0) for row in state.tolist()]

    def _text(self, row: Sequence[int], place: int) -> str:
        symbol = self.symbols[row[place]] if row[place] >= 0 else "?"
        if row[place] < 3:
            return symbol
        return f"({self._text(row, 2 * place + 1)} {symbol} {self._text(row, 2 * place + 2)})"

    def _next(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first place that must be filled, and whether there is one."""
        parent = (torch.arange(7, device=state.device) - 1) // 2
        is_needed = state[:, parent.clamp(min=0)] >= 3
        is_needed[:, 0] = True
        is_open = is_needed & (state < 0)
        return is_open.int().argmax(1), is_open.any(1)

    def _last(self, state: Tensor) -> Tensor:
        """Return the last place that is filled, 0 if none is."""
        return ((state >= 0) * torch.arange(7, device=state.device)).amax(1)

    def _error(self, state: Tensor) -> Tensor:
        """Return the root of the mean squared error of each finished expression."""
        x = torch.linspace(-2, 2, 8, device=state.device)
        leaf = torch.stack([x, torch.ones_like(x), torch.full_like(x, 2.0)])
        value = leaf[state.clamp(0, 2)]  # [n, 7, 8]
        for place in (2, 1, 0):
            a, b = value[:, 2 * place + 1], value[:, 2 * place + 2]
            results = torch.stack([value[:, place], a + b, a - b, a * b], 1)
            which = (state[:, place] - 2).clamp(min=0)
            value[:, place] = results[torch.arange(len(state), device=state.device), which]
        return (value[:, 0] - (x * x + x + 2)).square().mean(1).sqrt()
