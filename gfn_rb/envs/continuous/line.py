"""A walk on the line that ends where a mixture of normal distributions is dense."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.continuous.base import ContinuousEnv
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.mixtures import normal_mixture
from gfn_rb.shapes import Bool, Flags, Float, Floats, Modes, StateBatch


class Line(ContinuousEnv):
    r"""The line task of Lahlou et al. 2023 (arXiv:2301.12594): n moves on the real line.

    A state is (x, t): the position after t moves. After n moves the trajectory ends, with the
    reward

    .. math:: R(x) = \sum_i N(x; \mu_i, \sigma_i^2),

    so that log Z is the log of the number of modes, and the target is their mixture.

    The reference is a random walk whose end has the second moment of the target about the start.
    Backward it is the bridge to the start. With it, the forward policy that samples the target is
    known: ``exact_forward``.

    Args:
        means: means of the modes.
        scales: standard deviations of the modes, above 0.
        start: x at the source.
        n_steps: number n of moves, at least 1.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".

    Raises:
        ArgumentError: an argument is out of range; the message names it.
    """

    _means: Tensor
    _scales: Tensor

    def __init__(
        self,
        means: Sequence[float] = (-1.5, 1.5),
        scales: Sequence[float] = (0.5, 0.5),
        start: float = 0.0,
        n_steps: int = 5,
        **options: Unpack[EnvOptions],
    ) -> None:
        if not means or len(means) != len(scales):
            n, m = len(means), len(scales)
            raise ArgumentError(f"means and scales must be as many, at least one, got {n} and {m}")
        if not all(0 < scale < math.inf for scale in scales):
            raise ArgumentError(f"scales must be positive and finite, got {list(scales)}")
        if not all(map(math.isfinite, (*means, start))):
            raise ArgumentError(f"means and start must be finite, got {list(means)} and {start}")
        as_count("n_steps", n_steps)
        self.start, self.n_steps, self.n_modes = start, n_steps, len(means)
        moments = [(m - start) ** 2 + s**2 for m, s in zip(means, scales, strict=True)]
        self.spread = math.sqrt(sum(moments) / len(moments))
        super().__init__(
            torch.tensor([start, 0.0]),
            torch.tensor([start, -1.0]),
            n_parameters=1,
            max_length=n_steps + 1,
            encoded_size=2,
            **options,
        )
        self._register(_means=torch.tensor(means).float(), _scales=torch.tensor(scales).float())

    @property
    def true_log_z(self) -> float:
        """The log of the number of modes: each has a mass of one."""
        return math.log(len(self._means))

    def is_source(self, state: StateBatch) -> Flags:
        """Return which rows have made no move."""
        return state[:, 1] == 0

    def is_sink(self, state: StateBatch) -> Flags:
        """Return which rows have ended."""
        return state[:, 1] < 0

    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n 2"]:
        """Return where a move is legal, and where the exit: after n moves."""
        t = state[:, 1]
        return torch.stack([(t >= 0) & (t < self.n_steps), t >= self.n_steps], 1)

    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n 1"]:
        """Return where a move led."""
        return state[:, 1:] > 0

    def from_source(self, state: StateBatch) -> tuple[Flags, Float[Tensor, "n 1"]]:
        """Return which states are those after the first move."""
        return state[:, 1] == 1, state[:, :1] - self.start

    def reference(self, state: StateBatch, is_backward: bool = False) -> Distribution:
        """Return a normal step of the random walk, or of its bridge back to the start."""
        variance = self.spread**2 / self.n_steps
        x, t = state[:, :1], state[:, 1:]
        if not is_backward:
            mean, scale = torch.zeros_like(x), torch.full_like(x, math.sqrt(variance))
        else:
            t = t.clamp(min=2)  # nothing is drawn before
            mean, scale = (x - self.start) / t, (variance * (t - 1) / t).sqrt()
        return Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)

    def exact_forward(self, state: StateBatch) -> Distribution:
        r"""Return the forward policy whose flow balances the bridge: a mixture at each state.

        Given its end, the bridge is at :math:`x_t \sim N(m_t, v_t)` for mode i, with

        .. math:: m_t = x_0 + (\mu_i - x_0) t / n, \quad
                  v_t = \sigma_i^2 t^2 / n^2 + \sigma^2 t (n - t) / n,

        and :math:`x_t, x_{t+1}` have the covariance :math:`v_{t+1} t / (t + 1)`: the next position
        is normal given this one and the mode, and the mode has a posterior given this one.
        """
        x, t = state[:, :1], state[:, 1:].clamp(0, self.n_steps - 1)
        mean, variance = self._marginal(t)
        next_mean, next_variance = self._marginal(t + 1)
        gain = next_variance * t / (t + 1) / variance.clamp(min=1e-12)
        off = (x - mean).where(t > 0, 0)
        log_weight = (-(off**2) / variance.clamp(min=1e-12) - variance.clamp(min=1e-12).log()) / 2
        return normal_mixture(
            log_weight.where(t > 0, 0),
            (next_mean + gain * off - x)[..., None],
            (next_variance - gain**2 * variance).sqrt()[..., None],
        )

    def log_marginal(self, state: StateBatch) -> Floats:
        """Return log p_t(x) of states after t moves: their flow is Z p_t(x); 0 at the source."""
        mean, variance = self._marginal(state[:, 1:].clamp(min=1))
        log_p = Normal(mean, variance.sqrt()).log_prob(state[:, :1]).logsumexp(1)
        return (log_p - math.log(len(self._means))).where(state[:, 1] > 0, 0)

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return the log of the summed densities of the modes."""
        self.check_terminating(state)
        return Normal(self._means, self._scales).log_prob(state[:, :1]).logsumexp(1)

    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the distance from the start and the number of moves, both scaled to about one."""
        x = (state[:, :1] - self.start) / self.spread
        return torch.cat([x, state[:, 1:] / self.n_steps], 1)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the modes within one standard deviation of which some state lies."""
        near = (state[:, :1] - self._means).abs() <= self._scales
        return near.nonzero()[:, 1]

    def _marginal(self, t: Float[Tensor, "n 1"]) -> tuple[Tensor, Tensor]:
        """Return mean and variance, [n, modes], of the bridges to each mode after t moves."""
        part, walk = t / self.n_steps, self.spread**2 / self.n_steps
        mean = self.start + (self._means - self.start) * part
        return mean, (self._scales * part) ** 2 + walk * t * (1 - part)

    def move(self, state: StateBatch, move: Float[Tensor, "n 2"]) -> StateBatch:
        """Add the move to x, and count it."""
        return torch.cat([state[:, :1] + move[:, 1:], state[:, 1:] + 1], 1)

    def undo(self, state: StateBatch, move: Float[Tensor, "n 2"]) -> StateBatch:
        """Subtract the move from x and from the count."""
        undone = torch.cat([state[:, :1] - move[:, 1:], state[:, 1:] - 1], 1)
        # Rounding must not keep a walk from its source.
        return self.source_state.where(undone[:, 1:] == 0, undone)
