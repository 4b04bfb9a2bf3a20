"""Adam on parameters joined in one vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam(torch.optim.Adam):
    """Adam whose groups are one vector each, so that a step is one operation per group.

    The parameters become parts of the vector: what is written to them in place, as by
    ``load_state_dict``, is written to it. The results are those of ``torch.optim.Adam``, except
    that a parameter without a gradient has one of 0. ``state_dict`` holds moments of whole vectors.

    Args:
        groups: groups of parameters as for ``torch.optim.Adam``, each on one device and of one
            floating point type. Parameters that need no gradient are left alone.
        **options: options of ``torch.optim.Adam``.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **options: Any) -> None:
        parts = [[p for p in group["params"] if p.requires_grad] for group in groups]
        self.parts = [each for each in parts if each]
        joined = [
            {**group, "params": [_joined(each)]}
            for group, each in zip(groups, parts, strict=True)
            if each
        ]
        super().__init__(joined, fused=True, **options)
        self.register_step_pre_hook(_join_gradients)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parts."""
        for each in self.parts:
            for part in each:
                part.grad = None


def _join_gradients(optimizer: FlatAdam, args: Any, kwargs: Any) -> None:
    for group, parts in zip(optimizer.param_groups, optimizer.parts, strict=True):
        group["params"][0].grad = torch.cat([_gradient(part) for part in parts])


def _joined(parts: Sequence[nn.Parameter]) -> nn.Parameter:
    vector = torch.cat([part.detach().reshape(-1) for part in parts])
    for part, piece in zip(parts, vector.split([part.numel() for part in parts]), strict=True):
        part.data = piece.view_as(part)
    return nn.Parameter(vector)


def _gradient(part: nn.Parameter) -> Tensor:
    return torch.zeros_like(part).reshape(-1) if part.grad is None else part.grad.reshape(-1)
