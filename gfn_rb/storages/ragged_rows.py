"""Forms in which rows of different lengths come in, and the padded form that writers handle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    NonTensorStack,
    is_leaf_nontensor,
    is_non_tensor,
    unravel_key,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gfn_rb.arguments import as_count, kind_of, require_key, shown
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.keys import is_mask_key, length_key, mask_key
from gfn_rb.shapes import Bool, Int, Int64, Rows, Shaped
from gfn_rb.torchrl_compat import entry_of


def groups_of(
    ragged: Mapping[NestedKey, int | NestedKey],
) -> tuple[dict[NestedKey, int], dict[NestedKey, list[NestedKey]]]:
    """Return the highest length of each group of entries of one length, and its entries."""
    for key in ragged:
        require_key("ragged", key)
    limit = {
        unravel_key(key): as_count(f"ragged[{key!r}]", value)
        for key, value in ragged.items()
        if not isinstance(value, (str, tuple))
    }
    groups = {key: [key] for key in limit}
    for key, value in ragged.items():
        if isinstance(value, (str, tuple)):
            if unravel_key(value) not in groups:
                raise ArgumentError(
                    f"ragged[{key!r}] must be a length or an entry with a length, got {value!r}"
                )
            groups[unravel_key(value)].append(unravel_key(key))
    if not groups:
        raise ArgumentError(f"ragged must name an entry, got {dict(ragged)}")
    return limit, groups


def columns_of(data: Rows) -> dict[NestedKey, Any]:
    """Return entries of rows by name: tensors, or of a lazy stack lists of tensors."""
    if not isinstance(data, LazyStackedTensorDict):
        return dict(data.items(True, True, is_leaf=is_leaf_nontensor))
    if data.stack_dim:
        raise ShapeError(f"data must be stacked along dimension 0, got {data.stack_dim}")
    rows = data.tensordicts
    names = data.keys(True, True, is_leaf=is_leaf_nontensor)
    return {name: [entry_of(row, name) for row in rows] for name in names}


def masks_of(
    mask: NestedKey | Mapping[NestedKey, NestedKey] | None, ragged: Sequence[NestedKey]
) -> dict[NestedKey, NestedKey]:
    """Return the mask of each entry that has one of another name than ``mask_key``."""
    if mask is None:
        return {}
    if not isinstance(mask, Mapping):
        require_key("mask", mask)
        if len(ragged) > 1:
            raise ArgumentError(
                f"mask must be a dict from entries to their masks, got {mask!r} for {[*ragged]}"
            )
        mask = dict.fromkeys(ragged, mask)
    for name, of in mask.items():
        require_key(f"mask[{name!r}]", of)
        if unravel_key(name) not in ragged:
            raise ArgumentError(f"mask must name entries with a length, {[*ragged]}, got {name!r}")
    return {unravel_key(name): unravel_key(of) for name, of in mask.items()}


def with_masks(
    columns: dict[NestedKey, Any], masks: Mapping[NestedKey, NestedKey]
) -> dict[NestedKey, Any]:
    """Return entries in which masks have the name that ``mask_key`` gives, if none has it yet."""
    named = {name: each for name, each in columns.items() if name not in {*masks.values()}}
    for key, mask in masks.items():
        if mask in columns and not {mask_key(key), length_key(key)} & named.keys():
            value = columns[mask]
            is_list = isinstance(value, list)
            named[mask_key(key)] = pad_sequence(value, batch_first=True) if is_list else value
    return named


def require_named_mask(
    name: NestedKey, value: Tensor, key: NestedKey, columns: Mapping[NestedKey, Any]
) -> None:
    """Raise if an entry of one shape looks like the mask of rows whose padding is not known."""
    rows = columns.get(key)
    if (
        is_mask_key(name)
        and isinstance(rows, Tensor)
        and not {mask_key(key), length_key(key)} & columns.keys()
        and value.shape == rows.shape[:2]
    ):
        raise ShapeError(
            f"key {name!r} looks like the mask of {key!r}, whose padding would be stored: pass "
            f"RaggedStorage(..., mask={{{key!r}: {name!r}}}), or name {name!r} in ragged"
        )


def stacked(name: NestedKey, column: Any) -> Tensor:
    """Return an entry of one shape in all rows."""
    if isinstance(column, list):
        if len({each.shape for each in column}) > 1:
            raise ShapeError(
                f"key {name!r} must have one shape in all rows, or be named in ragged, got "
                f"{tuple(column[0].shape)} and others"
            )
        column = torch.stack(column)
    if not isinstance(column, Tensor) or column.is_nested:
        raise ShapeError(
            f"key {name!r} must hold tensors of one shape, or be named in ragged, and in text if "
            "it holds strings (dialogs as JSON: json.dumps(messages)), got "
            f"{kind_of(column)}"
        )
    return column


def padded_entry(
    name: NestedKey, key: NestedKey, columns: Mapping[NestedKey, Any]
) -> tuple[Shaped[Tensor, "n T *E"], Int64[Tensor, "n"]]:
    """Return an entry padded to one length, and the length of each row, on the host.

    ``key`` names the entry whose mask or lengths count unless the entry has its own.
    """
    value: Any = columns[name]
    if getattr(value, "is_nested", False):
        value = [*value.unbind(0)]
    if isinstance(value, list):
        kinds = {(each.dtype, each.shape[1:]) if each.ndim else None for each in value}
        if len(kinds) > 1 or None in kinds:
            raise ShapeError(
                f"key {name!r} must have one dtype and differ in the first dimension alone, got "
                f"{sorted(map(str, kinds))[:2]}"
            )
        length = torch.tensor([each.shape[0] for each in value])
        return pad_sequence(value, batch_first=True), length
    if not isinstance(value, Tensor) or value.ndim < 2:
        raise ShapeError(f"key {name!r} must have shape [n, T, ...], got {kind_of(value)}")
    beside = name if {mask_key(name), length_key(name)} & columns.keys() else key
    n, width = value.shape[:2]
    if (came := columns.get(length_key(beside))) is not None:
        length = stacked(length_key(beside), came).reshape(-1).to("cpu", torch.int64)
        if not bool(((length >= 0) & (length <= width)).all()):
            raise ShapeError(
                f"key {length_key(beside)!r} must be 0 to {width}, got {shown(length)}"
            )
        return value, length
    if (came := columns.get(mask_key(beside))) is None:
        return value, torch.full((n,), width)
    mask = stacked(mask_key(beside), came).cpu()
    is_mask = mask.dtype == torch.bool or bool(((mask == 0) | (mask == 1)).all())
    if mask.shape != (n, width) or not is_mask:
        raise ShapeError(
            f"key {mask_key(beside)!r} must be a mask [n, {width}] of 0 and 1, got {shown(mask)} "
            f"of shape {tuple(mask.shape)}"
        )
    length = lengths_of(mask := mask.bool())
    if int(length.sum()) == np.count_nonzero(mask.numpy()):
        return value, length
    return _from_start(mask_key(beside), value, mask)


def _from_start(
    name: NestedKey, value: Shaped[Tensor, "n T *E"], mask: Bool[Tensor, "n T"]
) -> tuple[Shaped[Tensor, "n T *E"], Int64[Tensor, "n"]]:
    """Move rows that are padded at their start, as prompts are, to the start; return lengths."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    if int(begins.sum(1).max()) > 1:
        raise ShapeError(
            f"key {name!r} must be true for one run of elements in each row, got gaps in "
            f"{shown(mask.int()[begins.sum(1).argmax()].tolist())}"
        )
    place = (torch.arange(mask.shape[1]) + mask.int().argmax(1)[:, None]) % mask.shape[1]
    place = place.to(value.device)[(..., *[None] * (value.ndim - 2))].expand_as(value)
    return value.gather(1, place), mask.sum(1)


def in_bytes(name: NestedKey, column: Any, n: int) -> Any:
    """Return the UTF-8 of strings, one tensor for each; what is in bytes already as it is."""
    if isinstance(column, Tensor) or (isinstance(column, list) and isinstance(column[0], Tensor)):
        return column
    if not isinstance(column, list):  # rows of one text may share it
        listed = column.tolist() if column.ndim else column.data
        column = listed if isinstance(listed, list) else [listed] * n
    texts = [each.data if is_non_tensor(each) else each for each in column]
    if not all(isinstance(each, str) for each in texts):
        raise ShapeError(f"key {name!r} must hold strings, got {shown(texts)}")
    return [torch.from_numpy(np.frombuffer(bytearray(each.encode()), np.uint8)) for each in texts]


class Texts(NonTensorStack):
    """The texts of rows, which are read as a plain list."""

    def tolist(self, **options: Any) -> list[str]:
        """Return the texts, not as tensordict's list that writes back to the rows."""
        return super().tolist(**{**options, "as_linked_list": False})


def in_words(value: Tensor, length: Int[Tensor, "*n"]) -> Any:
    """Return the text of padded bytes."""
    if not length.ndim:
        return NonTensorData(bytes(value[: int(length)].tolist()).decode())
    rows = zip(value.cpu().numpy(), length.tolist(), strict=True)
    return Texts.from_list([row[:end].tobytes().decode() for row, end in rows])


def lengths_of(mask: Bool[Tensor, "n T"]) -> Int64[Tensor, "n"]:
    """Return where masks end that are true up to the end of each row, on the host."""
    host = mask.cpu().numpy()  # NumPy stops at the first gap
    n, width = host.shape
    is_full = host[:, -1] if width else np.ones(n, dtype=bool)
    return torch.from_numpy(np.where(is_full, width, host.argmin(1) if width else 0))


def mask_of(length: Int[Tensor, "*n"], width: int) -> Bool[Tensor, "*n {width}"]:
    """Return a mask that is true up to the end of each row."""
    return torch.arange(width, dtype=torch.int32, device=length.device) < length[..., None].int()
