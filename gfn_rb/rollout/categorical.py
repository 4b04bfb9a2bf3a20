"""Categorical distributions over the legal actions of a batch of states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gfn_rb.arguments import require_optional
from gfn_rb.errors import ArgumentError, GfnRbError, NaNError
from gfn_rb.shapes import Bool, Float, Float64, Int64, StateBatch


def masked_log_softmax(
    logits: Float[Tensor, "n actions"], mask: Bool[Tensor, "n actions"]
) -> Float[Tensor, "n actions"]:
    """Normalise logits over legal actions: log p(a) = l_a - log sum_{b legal} exp(l_b).

    Args:
        logits: output of a policy's network.
        mask: legal actions, at least one in every row.

    Returns:
        Log-probabilities in nats with gradient, -inf at illegal actions, NaN in a row without any.
    """
    return logits.where(mask, -torch.inf).log_softmax(1)


@dataclass(frozen=True)
class Exploration:
    """Changes of a policy's action distribution during a rollout.

    With logits l and legal actions A,

        p(a) = (1 - epsilon) softmax_A((l - exit_bias 1[a = exit]) / temperature)
               + epsilon / |A|

    The defaults leave the policy unchanged.

    Args:
        epsilon: share of uniformly random legal actions, 0 to 1.
        temperature: divisor of the logits, above 0; above 1 flattens.
        exit_bias: number subtracted from the logit of the exit action; forward policies only.
        generator: ``torch.Generator`` of all random numbers; None for PyTorch's global generator.

    Raises:
        ArgumentError: a number is out of range; the message names it.
    """

    epsilon: float = 0.0
    temperature: float = 1.0
    exit_bias: float = 0.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        require_optional("generator", self.generator, torch.Generator)
        for name in ("epsilon", "temperature", "exit_bias"):
            if isinstance(getattr(self, name), str):
                raise ArgumentError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not 0 <= self.epsilon <= 1:
            raise ArgumentError(f"epsilon must be in [0, 1], got {self.epsilon}")
        if not 0 < self.temperature < float("inf"):
            raise ArgumentError(f"temperature must be positive and finite, got {self.temperature}")

    def probabilities(
        self, logits: Float[Tensor, "n actions"], mask: Bool[Tensor, "n actions"]
    ) -> Float[Tensor, "n actions"]:
        """Return p(a) of the class's equation; NaN in rows without a legal action."""
        if self.exit_bias:
            logits = torch.cat([logits[:, :-1], logits[:, -1:] - self.exit_bias], 1)
        if self.temperature != 1:
            logits = logits / self.temperature
        p = logits.where(mask, -torch.inf).softmax(1)
        if not self.epsilon:
            return p
        uniform = mask / mask.sum(1, keepdim=True)
        return (1 - self.epsilon) * p + self.epsilon * uniform


def exploration_from(policy_kwargs: Mapping[str, Any], is_backward: bool) -> Exploration:
    """Build an Exploration from a caller's keywords."""
    known = [field.name for field in fields(Exploration)]
    if unknown := sorted(policy_kwargs.keys() - set(known)):
        raise ArgumentError(f"policy_kwargs must be among {known}, got {unknown}")
    exploration = Exploration(**policy_kwargs)
    if is_backward and exploration.exit_bias:
        raise ArgumentError(
            f"exit_bias must be 0 for a backward policy, which has no exit, "
            f"got {exploration.exit_bias}"
        )
    return exploration


def draw(
    p: Float[Tensor, "n actions"], generator: torch.Generator | None = None
) -> tuple[Int64[Tensor, "n"], Bool[Tensor, "n"]]:
    """Draw one action per row, without waiting; also tell which rows have a distribution."""
    # By the inverse of the cumulative distribution: one uniform number per row. Sums of float32
    # terms are as good as exact in float64: an action of probability 0 is never drawn.
    cumulative = p.cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1:]
    u = torch.rand(total.shape, dtype=torch.float64, device=p.device, generator=generator)
    action = torch.searchsorted(cumulative, u * total, right=True).squeeze(1)
    return action.clamp_(max=p.shape[1] - 1), (total > 0).squeeze(1)


def draw_on_host(
    p: Float64[np.ndarray, "n actions"], u: Float64[np.ndarray, "n 1"]
) -> Int64[np.ndarray, "n"] | None:
    """Do as :func:`draw` does with given uniform numbers; None if a row has no distribution."""
    cumulative = p.cumsum(1)
    total = cumulative[:, -1:]
    if not np.minimum.reduce(total, None) > 0:  # NaN is not
        return None
    return (cumulative > u * total).argmax(1)


def explain_no_draw(
    logits: Float[Tensor, "n actions"], mask: Bool[Tensor, "n actions"], state: StateBatch
) -> GfnRbError:
    """Return the error that says why ``draw`` found nothing to draw from."""
    stuck = ~mask.any(1)
    if stuck.any():
        row = int(stuck.nonzero()[0])
        return ArgumentError(
            f"states must have a legal action, got none for {state[row].tolist()} in row {row}"
        )
    row = int(masked_log_softmax(logits, mask).isnan().any(1).long().argmax())
    return NaNError(
        f"logits of legal actions must be numbers with a finite maximum, got "
        f"{logits[row][mask[row]].tolist()} for state {state[row].tolist()} in row {row}"
    )
