"""Base class of the three containers: one batch-first TensorDict whose fields are checked.

A container holds nothing but that TensorDict. It is not a tensorclass, which refuses the keys
that a replay buffer adds to drawn rows, checks neither shape nor dtype, and concatenates without
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import Parameter, Signature
from itertools import product
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import dataclass_transform

from gfn_rb import keys
from gfn_rb.arguments import as_device, require_kind
from gfn_rb.containers import convert
from gfn_rb.containers.fields import Field, FieldValues, Key, assemble, field
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.shapes import Shaped

C = TypeVar("C", bound="Container")


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Container:
    """Rows of one kind of item, held in a single batch-first TensorDict.

    Indexing by an int, slice, list, index tensor or boolean mask gives a container of the chosen
    rows; slices share memory with the original. No method changes its container.
    """

    __slots__ = ("_td",)
    _td: TensorDictBase
    # What all kinds have; each declares it with its shape.
    state: Tensor
    log_reward: Tensor
    condition: Tensor | None
    _fields: ClassVar[tuple[Field, ...]]
    _keys: ClassVar[tuple[Key, ...]]
    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        named = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        cls._fields = tuple(named.values())
        cls._keys = tuple(f.key for f in cls._fields)
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None if f.optional else Parameter.empty)
            for name, f in named.items()
        ]
        # What help() shows, and what the constructor holds its arguments against.
        cls.__signature__ = Signature(parameters)

    def __init__(self, **values: Tensor | None) -> None:
        """Hold the values of fields by name; None where an optional one is left out."""
        given = self.__signature__.bind(**values)
        given.apply_defaults()
        self._td = self._checked(dict(zip(self._keys, given.kwargs.values(), strict=True)))._td

    @classmethod
    def from_tensordict(cls: type[C], td: TensorDictBase) -> C:
        """Take the container's own fields out of a TensorDict and leave every other key behind.

        Args:
            td: TensorDict of batch size [n]. Its tensors are shared, not copied.

        Raises:
            KeyMismatchError, ShapeError, ArgumentError: a field is missing or does not fit.
        """
        require_kind("td", td, TensorDictBase)
        if td.batch_dims != 1:
            raise ShapeError(
                f"{cls.__name__}: td has batch size {list(td.batch_size)}; expected [n]"
            )
        values: FieldValues = {key: td.get(key, None) for key in cls._keys}
        for name, value in values.items():
            if value is None and isinstance(name, str) and f"{name}s" in td.keys():  # noqa: SIM118
                raise KeyMismatchError(
                    f"{cls.__name__}: '{name}s' is not one of its fields; expected {name!r}"
                )
        return cls._checked(values, td.device)

    def to_tensordict(self) -> TensorDict:
        """Give the fields as a new TensorDict of batch size [n] that shares the tensors."""
        return self._td.select(*self._keys, strict=False)

    @classmethod
    def cat(cls: type[C], containers: Sequence[C]) -> C:
        """Join containers row after row into a new one.

        A container without ``is_backward`` holds forward rows and joins as such.

        Args:
            containers: At least one, of one kind, all with the same optional fields, row shapes,
                dtypes and device, and with a gradient in the same fields.

        Raises:
            ArgumentError, KeyMismatchError, ShapeError: They differ.
        """
        if not containers:
            raise ArgumentError(f"containers is empty; expected at least one {cls.__name__}")
        for i, container in enumerate(containers):
            if type(container) is not cls:
                kind = type(container).__name__
                raise ArgumentError(f"containers[{i}] is a {kind}; expected {cls.__name__}")
        tds = convert.padded_alike([container._td for container in containers])
        entries = [dict(td.items(True, True)) for td in tds]
        convert.require_alike(entries, range(len(tds)), what="containers")
        for i, key in product(range(1, len(tds)), entries[0]):
            if (of_other := entries[i][key].requires_grad) != entries[0][key].requires_grad:
                has, lacks = (i, 0) if of_other else (0, i)  # joined, all would seem to have one
                raise ArgumentError(
                    f"containers[{has}] has {key!r} with a gradient and containers[{lacks}] "
                    f"without; drop({key!r}) it"
                )
        return cls.wrap(torch.cat(tds, 0))

    def drop(self: C, *names: str) -> C:
        """Return the container without some optional fields; one it lacks is passed over."""
        optional = {f.key for f in self._fields if f.optional}
        for name in names:
            if name not in optional:
                raise ArgumentError(
                    f"names has {name!r}; expected optional fields of {type(self).__name__}: "
                    f"{sorted(map(str, optional))}"
                )
        return self.wrap(self._td.exclude(*names))

    def to(self: C, device: torch.device | str) -> C:
        """Return the container with every tensor on a device."""
        return self.wrap(self._td.to(as_device("device", device)))

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._td.get(keys.STATE).device

    def __len__(self) -> int:
        return self._td.batch_size[0]

    def __getitem__(self: C, index: int | slice | list | np.ndarray | Tensor) -> C:
        if not isinstance(index, slice):
            index = _row_index(index, len(self))
        return self.wrap(self._td[index])

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{field.key!r}: {list(self._td.get(field.key).shape)}"
            for field in self._fields
            if self._td.get(field.key, None) is not None
        )
        return f"{type(self).__name__}({shapes})"

    @classmethod
    def wrap(cls: type[C], td: TensorDictBase) -> C:
        """Return a container of just its fields, which are known to fit and not checked."""
        container = cls.__new__(cls)
        container._td = td
        return container

    @classmethod
    def _checked(cls: type[C], values: FieldValues, device: torch.device | None = None) -> C:
        sizes: dict[str, Any] = {"": 0}
        for each in cls._fields:
            if (value := values.get(each.key)) is not None:
                each.check(value, sizes, cls.__name__)
            elif not each.optional:
                held = [key for key, one in values.items() if one is not None]
                raise KeyMismatchError(
                    f"{cls.__name__}: {each.key!r} is missing; of its fields there are {held}"
                )
        return cls.wrap(assemble(values, (sizes["n"],), device))


def _row_index(index: int | list | np.ndarray | Tensor, n_rows: int) -> slice | Shaped[Tensor, "k"]:
    """Turn an index into one that keeps the batch dimension; a mask is looked through once."""
    if isinstance(index, int) and not isinstance(index, bool):
        if not -n_rows <= index < n_rows:
            raise IndexError(f"index must be below the {n_rows} rows, got {index}")
        row = range(n_rows)[index]
        return slice(row, row + 1)
    require_kind("index", index, Tensor, lambda value: isinstance(value, (list, np.ndarray)))
    rows = torch.as_tensor(index)
    if rows.ndim > 1:
        raise ArgumentError(f"index has shape {list(rows.shape)}; expected at most one dimension")
    if rows.dtype == torch.bool:
        if rows.shape != (n_rows,):
            raise ArgumentError(f"index is a mask of shape {list(rows.shape)}; expected [{n_rows}]")
        return rows.nonzero().squeeze(1)
    return rows.reshape(-1) if rows.numel() else rows.reshape(-1).long()
