"""Places of stored items: checking them, and running through them in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.shapes import Int64

Indices = Sequence[int] | Tensor
Order = Callable[[int, torch.Generator | None], Tensor]


def checked(indices: Indices, size: int) -> Int64[Tensor, "k"]:
    """Return indices as a tensor.

    Args:
        indices: a list, range or tensor of k numbers in [0, size).
        size: how many items there are.

    Raises:
        ArgumentError: they are something else.
    """
    places = indices if isinstance(indices, Tensor) else torch.tensor([*indices])
    if places.numel() == 0:
        places = places.long()
    if places.ndim != 1 or places.is_floating_point() or places.dtype == torch.bool:
        raise ArgumentError(f"indices must be a list of whole numbers, got {indices!r}")
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < size:
        raise ArgumentError(
            f"indices must lie in [0, {size}), got {int(places.min())} to {int(places.max())}"
        )
    return places.long()


def in_order(n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
    """Return 0 to n - 1.

    Args:
        n: how many.
        generator: not needed.
    """
    return torch.arange(n)


def shuffled(n: int, generator: torch.Generator | None = None) -> Int64[Tensor, "n"]:
    """Return 0 to n - 1 in a random order.

    Args:
        n: how many.
        generator: source of randomness.
    """
    device = None if generator is None else generator.device
    return torch.randperm(n, generator=generator, device=device)


def batches_of(
    order: Order, n: int, batch_size: int, n_epochs: int, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Yield 0 to n - 1 in batches, the last of an epoch perhaps smaller, again and again.

    Args:
        order: :func:`in_order` or :func:`shuffled`, called once per epoch.
        n: how many places.
        batch_size: of each batch.
        n_epochs: how often to run through all.
        generator: source of randomness.
    """
    for _ in range(n_epochs):
        yield from order(n, generator).split(batch_size)
