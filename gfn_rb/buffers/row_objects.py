"""The objects in stored rows: which entry they are, and what tells them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tensordict import NestedKey, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from gfn_rb import keys
from gfn_rb.arguments import kind_of
from gfn_rb.containers.objects import hashes_of, state_columns, terminating_states
from gfn_rb.errors import ArgumentError, KeyMismatchError
from gfn_rb.numerics.flat import equal_bits

# Objects; which of them are whole, bool [n], None for all; what tells them apart, int64 [n, d].
ObjectsOfRows: TypeAlias = tuple[Any, Tensor | None, Tensor]

# Entries that measure a row or count its steps.
_NO_OBJECT = {
    *(keys.LOG_REWARD, keys.EPISODE_LOG_REWARD, keys.INDEX, keys.POLICY_VERSION, keys.LOG_PROB),
    *(keys.BUFFER_ID, keys.ACTION, keys.LENGTH, keys.CONDITION, keys.IS_BACKWARD),
    *(keys.IS_TERMINATING, keys.ESTIMATOR_OUTPUT, keys.DRAW_LOG_PROB, keys.PRIORITY_WEIGHT),
    *("reward", "done", "terminated", "truncated", "is_init", "step_count", "episode"),
}
_OF_STEPS = {keys.NEXT, keys.COLLECTOR}  # entries of what follows, and of how rows were collected


def objects_of(
    rows: TensorDictBase, key: NestedKey, name: NestedKey | None = None
) -> ObjectsOfRows | None:
    """Return the objects of rows, None if rows do not tell which entry they are.

    They are the entry ``name``, else the terminating states, else the :func:`object_entries` if
    there is but one. ``key`` is what rows are ranked by.
    """
    if name is None and isinstance(rows.get(keys.STATE, None), Tensor):
        return _states(rows)
    if name is None:
        names = object_entries(rows, key)
        if len(names) != 1:
            return None
        name = names[0]
    elif rows.get(name, None) is None:
        raise KeyMismatchError(
            f"objects must name an entry of the rows, {sorted(map(str, _leaves(rows)))}, got "
            f"{name!r}"
        )
    value = _entry(rows, name)
    found = _cut(value, rows.get(keys.mask_key(name), None))
    is_dense = isinstance(found, Tensor)
    return found, None, equal_bits(found) if is_dense else hashes_of(map(_content, found))


def object_entries(rows: TensorDictBase, key: NestedKey) -> list[NestedKey]:
    """Return the entries of rows that may be their objects, by their kind.

    Those are texts, if there are any, else entries that differ in length, else all that neither
    measure a row nor count its steps.
    """
    names = [name for name in _leaves(rows) if _may_be_object(rows, name, key)]
    texts = [name for name in names if not isinstance(_entry(rows, name), Tensor)]
    ragged = [name for name in names if rows.get(keys.mask_key(name), None) is not None]
    return texts or ragged or names


def _leaves(rows: TensorDictBase) -> Sequence[NestedKey]:
    return [*rows.keys(True, True, is_leaf=is_leaf_nontensor)]


def _may_be_object(rows: TensorDictBase, name: NestedKey, key: NestedKey) -> bool:
    path = (name,) if isinstance(name, str) else name
    if name == key or keys.is_mask_key(name) or path[-1] in _NO_OBJECT or path[0] in _OF_STEPS:
        return False
    value = _entry(rows, name)
    # One real number of a row measures it, as an advantage does.
    return not (isinstance(value, Tensor) and value.is_floating_point() and value[:1].numel() <= 1)


def _states(rows: TensorDictBase) -> ObjectsOfRows:
    held = {*rows.keys()}
    if keys.ACTION in held and keys.LENGTH not in held:  # transitions
        done = rows.get(keys.NEXT_DONE, None)
        rows = rows.select(keys.STATE, keys.CONDITION, strict=False)
        if done is not None:
            rows.set(keys.IS_TERMINATING, done)
    found, columns = terminating_states(rows), state_columns(rows)
    assert found is not None
    assert columns is not None
    return _cut(found[0], rows.get(keys.mask_key(keys.STATE), None)), found[1], columns


def _content(each: Any) -> bytes:
    """Return what tells a text or a tensor apart from others."""
    if isinstance(each, str):
        return each.encode()
    if isinstance(each, Tensor):
        return repr([*each.shape]).encode() + equal_bits(each[None]).cpu().numpy().tobytes()
    raise ArgumentError(f"objects must be tensors or strings, got {kind_of(each)}")


def _entry(rows: TensorDictBase, name: NestedKey) -> Any:
    """Return an entry as a tensor, or as a list where rows hold text or differ in shape."""
    value = rows.get(name)
    return value if isinstance(value, Tensor) else [getattr(each, "data", each) for each in value]


def _cut(value: Any, mask: Tensor | None) -> Any:
    """Return padded rows as a list of what is in front of the padding; other rows as they are."""
    if mask is None or mask.shape != value.shape[:2]:
        return value
    return [row[:n] for row, n in zip(value, mask.sum(1).tolist(), strict=True)]
