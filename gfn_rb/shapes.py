"""Shaped tensor types: jaxtyping's where it is installed, plain tensors where it is not.

The core needs only torch, torchrl, tensordict and numpy. The test run installs jaxtyping and
beartype and checks every annotation below at each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Float64 = Int = Int64 = Shaped = _Unchecked

StateBatch: TypeAlias = Shaped[Tensor, "n *state"]
ActionBatch: TypeAlias = Shaped[Tensor, "n *action"]
ConditionBatch: TypeAlias = Shaped[Tensor, "n *condition"]
Flags: TypeAlias = Bool[Tensor, "n"]  # one per row, as the following ones
Integers: TypeAlias = Int64[Tensor, "n"]
Floats: TypeAlias = Float[Tensor, "n"]
Modes: TypeAlias = Int64[Tensor, "modes"]  # identities of modes

Rows: TypeAlias = Any
"""A TensorDict or an instance of a tensorclass, which have no base class in common."""
