"""Checksums of blocks are those of XXH3, however the bytes come."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.codec import primitives as module
from gfn_rb.codec.primitives import BlockSums, find_damage, sums_nbytes


def content(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=9), st.integers(1, 600))
def test_blocks_do_not_depend_on_how_bytes_come(sizes: list[int], block: int) -> None:
    data, sums = content(sum(sizes)).numpy().data, BlockSums()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        for start, size in zip(accumulate([0, *sizes]), sizes, strict=False):
            sums.update(data[start : start + size])
        blocks = [data[i : i + block] for i in range(0, len(data), block)]
        assert sums.digest() == b"".join(xxhash.xxh3_64_digest(each) for each in blocks)
        assert sums_nbytes(len(data)) == len(sums.digest())
        assert find_damage(data, memoryview(sums.digest()), 0) == ""


def test_damage_is_described_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 100)
    data, sums = content(250), BlockSums()
    sums.update(data.numpy().data)
    data[249] ^= 1
    words = find_damage(data.numpy().data, memoryview(sums.digest()), 64)
    assert words.startswith("the checksum of bytes 264 to 314 is ")
