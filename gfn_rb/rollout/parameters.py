"""The parameters of actions that have some: drawn from a policy, and how probable it makes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Distribution

from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.errors import ShapeError
from gfn_rb.rollout.categorical import Exploration
from gfn_rb.shapes import Float, Int64


@dataclass(frozen=True)
class Parameters:
    """Distribution of the parameters of moves under a policy, in a batch of states.

    With exploration, parameters are those of the environment's reference in the share ``epsilon``.
    """

    env: ContinuousEnv
    state: Tensor
    density: Distribution
    is_backward: bool

    def __post_init__(self) -> None:
        expected = (self.state.shape[:1], torch.Size([self.env.action_shape[0] - 1]))
        if (came := (self.density.batch_shape, self.density.event_shape)) != expected:
            raise ShapeError(
                f"policy.get_dist must return a distribution of batch shape {list(expected[0])} "
                f"and event shape {list(expected[1])}, got {list(came[0])} and {list(came[1])}"
            )

    def draw(self, kind: Int64[Tensor, "n"], by: Exploration) -> Float[Tensor, "n k1"]:
        """Return actions of their kinds, with parameters drawn."""
        with _drawn_by(by.generator, self.state.device):
            drawn = self.density.sample()
            if by.epsilon:
                explores = torch.rand(len(drawn), 1, device=drawn.device) < by.epsilon
                reference = self.env.reference(self.state, self.is_backward).sample()
                drawn = reference.where(explores, drawn)
        if self.is_backward:
            is_first, first = self.env.from_source(self.state)
            drawn = first.where(is_first[:, None], drawn)
        return self.env.with_parameters(kind, drawn)

    def mean(self, kind: Int64[Tensor, "n"]) -> Float[Tensor, "n k1"]:
        """Return actions of their kinds, with the means of the policy's parameters."""
        return self.env.with_parameters(kind, self.density.mean)

    def log_prob(
        self, action: Float[Tensor, "n k1"], by: Exploration | None = None
    ) -> Float[Tensor, "n"]:
        """Return the log-density of each action's parameters, with gradient; 0 without density."""
        has = self.env.kind(action) != self.env.exit_action
        if self.is_backward:
            has = has & ~self.env.from_source(self.state)[0]
        # Of what has no density, a value that has one: the gradient of infinity times 0 is NaN.
        value = action[:, 1:].where(has[:, None], self.density.mean.detach())
        log_p: Tensor = self.density.log_prob(value)
        if by is not None and by.epsilon:
            reference = self.env.reference(self.state, self.is_backward).log_prob(value)
            own = log_p + math.log1p(-by.epsilon) if by.epsilon < 1 else log_p - torch.inf
            log_p = torch.logaddexp(own, reference + math.log(by.epsilon))
        return log_p.where(has, 0)


@contextmanager
def _drawn_by(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Have torch's distributions, which take no generator, draw from one."""
    if generator is None:
        yield
        return
    get, put = torch.get_rng_state, torch.set_rng_state
    if device.type == "cuda":
        get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    before = get()
    put(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(get())
        put(before)
