"""Mixtures of normal distributions."""

from __future__ import annotations

from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from gfn_rb.shapes import Float


def normal_mixture(
    log_weight: Float[Tensor, "n m"],
    mean: Float[Tensor, "n m k"],
    scale: Float[Tensor, "n m k"],
) -> MixtureSameFamily:
    """Return a mixture of m normal distributions of k independent numbers for each of n rows.

    Its arguments are not checked, for which a GPU would be waited for.

    Args:
        log_weight: of the components; they need not sum to one.
        mean: of each number.
        scale: standard deviations, positive.
    """
    normal = Independent(Normal(mean, scale, validate_args=False), 1, validate_args=False)
    choice = Categorical(logits=log_weight, validate_args=False)
    return MixtureSameFamily(choice, normal, validate_args=False)
