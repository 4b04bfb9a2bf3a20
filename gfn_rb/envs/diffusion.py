"""Random walks that a policy steers to a target density, as diffusion samplers do."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal
from typing_extensions import Unpack

from gfn_rb.arguments import as_count
from gfn_rb.envs.base import EnvOptions
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.envs.core import check_positive, numbers_of
from gfn_rb.errors import ArgumentError
from gfn_rb.numerics.flat import numbers_in_words
from gfn_rb.shapes import Bool, Flags, Float, Floats, Modes, StateBatch

_FREQUENCIES = (1.0, 2.0, 4.0, 8.0)  # half waves over the time of a walk

Positions: TypeAlias = Float[Tensor, "n d"]


class DiffusionOptions(EnvOptions, total=False):
    """Keywords that every diffusion takes."""

    n_steps: int
    sigma: float


class DiffusionEnv(ContinuousEnv):
    r"""Walks of n moves in :math:`R^d`, a discretised diffusion that ends in a target density.

    A state is (x, t): the position after t moves. Every trajectory has n moves and then ends, with
    the reward R(x). The reference is a Brownian motion in unit time: each move is normal with
    variance :math:`\sigma^2 / n`. Backward it is the Brownian bridge to the start,

    .. math:: x_{t-1} \sim N(s + \tfrac{t-1}{t} (x_t - s), \tfrac{t-1}{t} \tfrac{\sigma^2}{n} I),

    which :class:`~gfn_rb.policies.ReferencePolicy` samples (Zhang and Chen 2022, arXiv:2111.15141;
    Lahlou et al. 2023, arXiv:2301.12594; Sendera et al. 2024, arXiv:2402.05098).

    A subclass defines ``log_density``, and ``true_log_z`` and ``sample_target`` if they are
    known. Its ``score`` is log R.

    Args:
        start: position s at the source, [d].
        n_steps: number n of moves, at least 1. Default: 100.
        sigma: standard deviation of the end of the reference in each coordinate, above 0. Default:
            1.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    n_components = 1
    true_log_z: float | None = None
    _start: Tensor

    def __init__(
        self,
        start: Float[Tensor, "d"],
        *,
        n_steps: int = 100,
        sigma: float = 1.0,
        **options: Unpack[EnvOptions],
    ) -> None:
        as_count("n_steps", n_steps)
        check_positive(sigma=sigma)
        self.n_steps, self.sigma, self._n_dims = n_steps, float(sigma), len(start)
        source = torch.cat([start, start.new_zeros(1)])
        super().__init__(
            source,
            torch.cat([start, start.new_full((1,), -1)]),
            n_parameters=len(start),
            max_length=n_steps + 1,
            encoded_size=self.encode(source[None]).shape[1],
            **options,
        )
        self._register(_start=start)

    @abstractmethod
    def log_density(self, x: Positions) -> Floats:
        """Return log R of positions, in nats, with gradient."""

    def sample_target(self, n: int, generator: torch.Generator | None = None) -> Positions:
        """Draw exact samples of the target, to compare a policy with.

        Args:
            n: number of positions.
            generator: ``torch.Generator``. Default: PyTorch's global generator.
        """
        raise NotImplementedError

    def at_end(self, x: Positions) -> StateBatch:
        """Return the terminating states of positions."""
        return torch.cat([x, x.new_full((len(x), 1), self.n_steps)], 1)

    def is_source(self, state: StateBatch) -> Flags:
        """Return which rows have made no move."""
        return state[:, -1] == 0

    def is_sink(self, state: StateBatch) -> Flags:
        """Return which rows have ended."""
        return state[:, -1] < 0

    def forward_mask(self, state: StateBatch) -> Bool[Tensor, "n 2"]:
        """Return where a move is legal, and where the exit: after n moves."""
        t = state[:, -1]
        return torch.stack([(t >= 0) & (t < self.n_steps), t >= self.n_steps], 1)

    def backward_mask(self, state: StateBatch) -> Bool[Tensor, "n 1"]:
        """Return where a move led."""
        return state[:, -1:] > 0

    def from_source(self, state: StateBatch) -> tuple[Flags, Float[Tensor, "n d"]]:
        """Return which states are those after the first move."""
        return state[:, -1] == 1, state[:, :-1] - self._start

    def reference(self, state: StateBatch, is_backward: bool = False) -> Distribution:
        """Return a normal step of the Brownian motion, or of its bridge back to the start."""
        x, t = state[:, :-1], state[:, -1:]
        mean, variance = torch.zeros_like(x), torch.full_like(x, self.sigma**2 / self.n_steps)
        if is_backward:
            t = t.clamp(min=2)  # nothing is drawn before
            mean, variance = (x - self._start) / t, variance * (t - 1) / t
        normal = Normal(mean, variance.sqrt(), validate_args=False)
        return Independent(normal, 1, validate_args=False)

    def log_reward(self, state: StateBatch, condition: Tensor | None = None) -> Floats:
        """Return log R(x) in nats, by ``log_density``."""
        self.check_terminating(state)
        return self.log_density(state[:, :-1])

    def score(self, state: StateBatch, log_reward: Floats | None = None) -> Floats:
        """Return log R(x) in nats: densities themselves overflow."""
        return self.log_reward(state) if log_reward is None else log_reward

    def describe(self, state: StateBatch) -> list[str]:
        """Return the positions, with four digits."""
        return numbers_in_words(state[:, :-1])

    def parse(self, words: Sequence[str]) -> StateBatch:
        """Return the terminating states at positions, as :meth:`describe` writes them."""
        return self.at_end(numbers_of(words, len(self._start), self.state_dtype).to(self._start))

    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the position in units of sigma, the time, and sines and cosines of the time."""
        time = state[:, -1:] / self.n_steps
        phase = math.pi * time * state.new_tensor(_FREQUENCIES)
        return torch.cat([state[:, :-1] / self.sigma, time, phase.sin(), phase.cos()], 1)

    def move(self, state: StateBatch, move: Float[Tensor, "n d1"]) -> StateBatch:
        """Add the move to x, and count it."""
        return torch.cat([state[:, :-1] + move[:, 1:], state[:, -1:] + 1], 1)

    def undo(self, state: StateBatch, move: Float[Tensor, "n d1"]) -> StateBatch:
        """Subtract the move from x and from the count."""
        undone = torch.cat([state[:, :-1] - move[:, 1:], state[:, -1:] - 1], 1)
        # Rounding must not keep a walk from its source.
        return self.source_state.where(undone[:, -1:] == 0, undone)


class Line(DiffusionEnv):
    r"""The line task of Lahlou et al. 2023 (arXiv:2301.12594): n moves on the real line.

    .. math:: R(x) = \sum_i N(x; \mu_i, \sigma_i^2),

    so that log Z is the log of the number of modes, and the target is their mixture. The end of the
    reference has the second moment of the target about the start.

    Args:
        means: means of the modes.
        scales: standard deviations of the modes, above 0.
        start: x at the source.
        n_steps: number n of moves, at least 1.
        **options: ``batch_size`` of the TorchRL interface, by default any; ``device``, "cpu".
    """

    n_components = 4
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
        self.start, self.n_modes = start, len(means)
        self.true_log_z = math.log(len(means))  # each has a mass of one
        moments = [(m - start) ** 2 + s**2 for m, s in zip(means, scales, strict=True)]
        super().__init__(
            torch.tensor([start], dtype=torch.float32),
            n_steps=n_steps,
            sigma=math.sqrt(sum(moments) / len(moments)),
            **options,
        )
        self._register(
            _means=torch.tensor(means, dtype=torch.float32),
            _scales=torch.tensor(scales, dtype=torch.float32),
        )

    def log_density(self, x: Positions) -> Floats:
        """Return the log of the summed densities of the modes."""
        return Normal(self._means, self._scales).log_prob(x).logsumexp(1)

    def encode(self, state: StateBatch) -> Float[Tensor, "n encoded"]:
        """Return the distance from the start and the number of moves, both scaled to about one."""
        x = (state[:, :1] - self.start) / self.sigma
        return torch.cat([x, state[:, 1:] / self.n_steps], 1)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the modes within one standard deviation of which some state lies."""
        near = (state[:, :1] - self._means).abs() <= self._scales
        return near.nonzero()[:, 1]


class Gaussians25(DiffusionEnv):
    r"""A mixture of 25 normal distributions on a grid in the plane (25GMM of arXiv:2402.05098).

    .. math:: R(x) = \tfrac{1}{25} \sum_{\mu \in \{-10, -5, 0, 5, 10\}^2} N(x; \mu, 0.3 I),

    so that log Z is 0. A mode counts as reached within two standard deviations of its mean.
    """

    n_modes, true_log_z = 25, 0.0
    _scale = math.sqrt(0.3)
    _means: Tensor

    def __init__(
        self, n_steps: int = 100, sigma: float = 5**0.5, **options: Unpack[EnvOptions]
    ) -> None:
        start = torch.zeros(2, dtype=torch.float32)
        super().__init__(start, n_steps=n_steps, sigma=sigma, **options)
        axis = torch.arange(-10.0, 11.0, 5.0, dtype=torch.float32)
        self._register(_means=torch.cartesian_prod(axis, axis))

    def log_density(self, x: Positions) -> Floats:
        """Return log R of positions, in nats, with gradient."""
        log_p = Normal(self._means, self._scale).log_prob(x[:, None]).sum(2)
        return log_p.logsumexp(1) - math.log(self.n_modes)

    def sample_target(self, n: int, generator: torch.Generator | None = None) -> Positions:
        """Draw exact samples of the target. See the base class."""
        center = torch.ones(self.n_modes, device=self._means.device)
        drawn = torch.multinomial(center, n, replacement=True, generator=generator)
        return torch.normal(self._means[drawn], self._scale, generator=generator)

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the modes within two standard deviations of which some state lies."""
        distance = torch.cdist(state[:, :-1], self._means)
        return (distance <= 2 * self._scale).nonzero()[:, 1]


class Funnel(DiffusionEnv):
    r"""Neal's funnel (Neal 2003, "Slice sampling"), the hard one of arXiv:2402.05098.

    .. math:: R(x) = N(x_0; 0, 9) \prod_{i=1}^{d-1} N(x_i; 0, e^{x_0}),

    so that log Z is 0.

    Args:
        ndim: number d of coordinates, at least 2.
        **options: number ``n_steps`` of moves, by default 100, and ``sigma``, by default 1, both
            as published; ``batch_size`` of the TorchRL interface, by default any; ``device``.
    """

    true_log_z = 0.0

    def __init__(self, ndim: int = 10, **options: Unpack[DiffusionOptions]) -> None:
        as_count("ndim", ndim, 2)
        super().__init__(torch.zeros(ndim, dtype=torch.float32), **options)

    def log_density(self, x: Positions) -> Floats:
        """Return log R of positions, in nats, with gradient."""
        first, rest = x[:, :1], x[:, 1:]
        constant = math.log(3) + x.shape[1] * math.log(2 * math.pi) / 2
        log_p = -(first + rest.square() * (-first).exp()).sum(1) / 2
        return log_p - x[:, 0].square() / 18 - constant

    def sample_target(self, n: int, generator: torch.Generator | None = None) -> Positions:
        """Draw exact samples of the target. See the base class."""
        x = torch.randn(
            n, self._n_dims, generator=generator, dtype=self._start.dtype, device=self._start.device
        )
        first = 3 * x[:, :1]
        return torch.cat([first, (first / 2).exp() * x[:, 1:]], 1)


class Manywell(DiffusionEnv):
    r"""A product of two-dimensional double wells (Noé et al. 2019; Midgley et al. 2023).

    .. math:: \log R(x) = \sum_i -u_i^4 + 6 u_i^2 + u_i / 2 - v_i^2 / 2

    over the d / 2 pairs of coordinates :math:`(u_i, v_i)`. One well of each pair has most of the
    mass. Its :math:`2^{d/2}` modes are the combinations of wells; a position with all
    :math:`|u_i| > 1` reaches one. log Z is known by quadrature: 164.7 in 32 dimensions.

    Args:
        ndim: number d of coordinates, even, from 2 to 64.
        **options: number ``n_steps`` of moves, by default 100, and ``sigma``, by default 1, both
            as published; ``batch_size`` of the TorchRL interface, by default any; ``device``.
    """

    _u: Tensor
    _mass: Tensor

    def __init__(self, ndim: int = 32, **options: Unpack[DiffusionOptions]) -> None:
        if as_count("ndim", ndim, 2) % 2 or ndim > 64:
            raise ArgumentError(f"ndim must be even and from 2 to 64, got {ndim}")
        super().__init__(torch.zeros(ndim, dtype=torch.float32), **options)
        self.n_modes = 2 ** (ndim // 2)
        u = torch.linspace(-4, 4, 8001, dtype=torch.float64)  # beyond, there is next to nothing
        log_mass = _log_well(u) + (u[1] - u[0]).log()
        self.true_log_z = ndim // 2 * (float(log_mass.logsumexp(0)) + math.log(2 * math.pi) / 2)
        self._register(_u=u, _mass=log_mass.softmax(0))

    def log_density(self, x: Positions) -> Floats:
        """Return log R of positions, in nats, with gradient."""
        u, v = x[:, 0::2], x[:, 1::2]
        return (_log_well(u) - v.square() / 2).sum(1)

    def sample_target(self, n: int, generator: torch.Generator | None = None) -> Positions:
        """Draw samples of the target, with u from 8,001 points of its density."""
        dtype, device = self._start.dtype, self._start.device
        x = torch.randn(n, self._n_dims, generator=generator, dtype=dtype, device=device)
        n_wells = self._n_dims // 2
        drawn = torch.multinomial(self._mass, n * n_wells, replacement=True, generator=generator)
        x[:, 0::2] = self._u[drawn].view(n, n_wells).to(dtype)
        return x

    def modes_reached(self, state: StateBatch, log_reward: Floats | None = None) -> Modes:
        """Return the number of each combination of wells, the first pair most significant."""
        u = state[:, :-1:2]
        u = u[(u.abs() > 1).all(1)]
        power = torch.arange(u.shape[1] - 1, -1, -1, device=u.device)
        return ((u > 0).long() << power).sum(1)


def _log_well(u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    return u.square() * (6 - u.square()) + u / 2
