"""Rows reach a storage by their addresses: whatever their layout in memory, what comes is stored.

An address that is wrong would write elsewhere, where an index would raise. The check of layouts is
the only gate, so that rows of all layouts are tried, and all other slots are compared too.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer

from gfn_rb import (
    DiversityWriter,
    FIFOWriter,
    RewardPrioritizedWriter,
    RowMemmapStorage,
    RowTensorStorage,
)
from gfn_rb.errors import GfnRbError, ShapeError
from tests.factories import seeded

CAPACITY = 12
DTYPES = (
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)
SHAPES = (), (1,), (3,), (2, 5), (0,), (65,), (1, 1, 7)
WRITERS = {
    "top": RewardPrioritizedWriter,
    "unique": lambda: RewardPrioritizedWriter(unique="x"),
    "diverse": lambda: DiversityWriter(features="key", cutoff_distance=0.01),
    "newest": FIFOWriter,
}


def random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 200, shape, generator=generator)
    return (bits > 100) if dtype is torch.bool else bits.to(dtype)


def strided(value: Tensor) -> Tensor:
    """Every second row of a tensor of twice as many."""
    return torch.stack([value, torch.zeros_like(value)], 1).flatten(0, 1)[::2]


def turned(value: Tensor) -> Tensor:
    """The same with its dimensions in the other order in memory."""
    order = [*range(value.ndim)][::-1]
    return value.permute(order).contiguous().permute(order)


def expanded(value: Tensor) -> Tensor:
    """The first row again and again, at one address."""
    return value[:1].expand(value.shape)


def misaligned(value: Tensor) -> Tensor:
    """The same at an odd address, as a file read into memory may have it."""
    n = value.numel() * value.element_size()
    memory = bytearray(n + 1)
    if n:
        memory[1:] = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(memory, dtype=value.dtype, offset=1).reshape(value.shape)
    return value


def negated(value: Tensor) -> Tensor:
    """The same as a lazy negative, of which the memory has the opposite."""
    if value.dtype is torch.bool or not value.is_floating_point():
        return value
    return torch.complex(value.float(), -value.float()).conj().imag.to(value.dtype)


def conjugated(value: Tensor) -> Tensor:
    """The same as a lazy conjugate."""
    return value.conj().resolve_conj().conj() if value.is_complex() else value


LAYOUTS = torch.Tensor.clone, strided, turned, expanded, misaligned, negated, conjugated


def batch(n: int, entries: dict, generator: torch.Generator, how) -> TensorDict:
    rows = {"log_reward": torch.randn(n, generator=generator)}
    rows["key"] = torch.randn(n, 2, generator=generator)
    for name, (shape, dtype) in entries.items():
        rows[name] = random((n, *shape), dtype, generator)
    return TensorDict({name: how(value) for name, value in rows.items()}, [n])


@pytest.mark.parametrize("storage", [RowTensorStorage, RowMemmapStorage])
@pytest.mark.parametrize("writer", [*WRITERS])
@pytest.mark.parametrize("seed", range(12))
def test_rows_of_any_layout_are_stored_as_they_are(writer, storage, seed) -> None:
    generator = seeded(seed)

    def pick(values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    is_mapped = storage is RowMemmapStorage  # files hold neither complex numbers nor nothing
    dtypes = [dtype for dtype in DTYPES if not (is_mapped and dtype.is_complex)]
    shapes = [shape for shape in SHAPES if not (is_mapped and shape == (0,))]
    entries = {name: (pick(shapes), pick(dtypes)) for name in "abc"[: 1 + seed % 3]}
    entries["x"] = (3,), torch.int64
    made, held = WRITERS[writer](), storage(CAPACITY)
    made.register_storage(held)
    expected: dict[int, dict[str, Tensor]] = {}
    for _ in range(12):
        rows = batch(pick([1, 2, 5, 30]), entries, generator, pick(LAYOUTS))
        meant = {name: value.clone() for name, value in rows.items()}
        slots = made.extend(rows).tolist()
        for i, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = {name: value[i] for name, value in meant.items()}
        assert len(held) == len(expected)
        for slot, row in expected.items():
            for name, value in row.items():
                assert torch.equal(held[slot][name], value), (name, slot)


@pytest.mark.parametrize("writer", [*WRITERS])
def test_rows_of_another_layout_are_refused_and_nothing_changes(writer) -> None:
    made, held = WRITERS[writer](), RowTensorStorage(CAPACITY)
    made.register_storage(held)
    entries = {"a": ((3,), torch.float32), "x": ((3,), torch.int64)}
    made.extend(batch(8, entries, seeded(), torch.clone))
    before = held[:].clone()
    good = batch(4, entries, seeded(1), torch.clone)
    wrong = [
        good.clone().set("a", good["a"].double()),
        good.clone().set("a", good["a"][:, :2]),
        good.clone().set("a", good["a"][..., None]),
        good.clone().set("b", good["a"]),
        good.exclude("a"),
        good.clone().set("x", good["x"].int()),
    ]
    for rows in wrong:
        with pytest.raises(GfnRbError):
            made.extend(rows)
    assert (held[:] == before).all()


@pytest.mark.parametrize("writer", [*WRITERS])
def test_rows_of_the_storage_itself_are_written_as_they_were(writer) -> None:
    """They lie in the memory that is written to."""
    made, held = WRITERS[writer](), RowTensorStorage(CAPACITY)
    made.register_storage(held)
    entries = {"a": ((3,), torch.float32), "x": ((3,), torch.int64)}
    made.extend(batch(CAPACITY, entries, seeded(), torch.clone))
    rows = held[:].flip(0) if writer == "unique" else held[:]
    rows = TensorDict(dict(rows.items()), rows.batch_size)
    rows["log_reward"] = rows["log_reward"] + 1
    meant = rows.clone()
    for i, slot in enumerate(made.extend(rows).tolist()):
        if slot >= 0:
            for name, value in meant[i].items():
                assert torch.equal(held[slot][name], value)


def test_entries_without_numbers_are_refused_by_files() -> None:
    made, held = FIFOWriter(), RowMemmapStorage(CAPACITY)
    made.register_storage(held)
    with pytest.raises(ShapeError, match=r"key 'a' must have numbers .* got shape \[0\]: leave it"):
        made.extend(batch(4, {"a": ((0,), torch.float32)}, seeded(), torch.clone))
    assert len(held) == 0


@pytest.mark.parametrize("kind", ["top", "unique"])
def test_rows_follow_columns_that_were_moved_to_other_memory(kind):
    # As the columns are when a storage is passed to another process: the tensors stay the same.
    storage = RowTensorStorage(CAPACITY)
    rb = TensorDictReplayBuffer(storage=storage, writer=WRITERS[kind](), batch_size=2)
    for start in (0, 4):
        x = torch.arange(start, start + 4)
        rb.extend(TensorDict({"x": x, "log_reward": x.float()}, [4]))
        for column in storage[:].values():
            column.share_memory_()
    assert storage[:8]["x"].tolist() == storage[:8]["log_reward"].tolist() == [*range(8)]
