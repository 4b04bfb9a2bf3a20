"""Checksums notice whatever happens to bytes on their way."""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gfn_rb.codec import primitives as module
from gfn_rb.codec.primitives import BlockSums, find_damage, sums_nbytes

SIZES = (0, 1, 7, 8, 9, 4087, 4088, 4096, 4097, 20_000, (1 << 20) - 8, (1 << 20) + 4099)


def checksum(data: torch.Tensor) -> int:
    return digest(data.numpy().data)


def digest(data: memoryview) -> int:
    sums = BlockSums()
    sums.update(data)
    return int.from_bytes(sums.digest(), "big")


@cache
def drawn(seed: int, below: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, (SIZES[-1],), dtype=torch.uint8, generator=generator)


def content(nbytes: int, seed: int = 0, below: int = 256) -> torch.Tensor:
    return drawn(seed, below)[:nbytes].clone()


@pytest.mark.parametrize("nbytes", SIZES)
def test_any_flipped_byte_is_noticed(nbytes: int) -> None:
    data = content(nbytes)
    expected = checksum(data)
    for at in {0, 7, nbytes // 3, nbytes // 2, nbytes - 8, nbytes - 1}:
        if 0 <= at < nbytes:
            for flip in (1, 0x80, 0xFF):
                data[at] ^= flip
                assert checksum(data) != expected
                data[at] ^= flip
    assert checksum(data) == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_exchanged_blocks_are_noticed(data: st.DataObject) -> None:
    nbytes = data.draw(st.integers(16, 60_000))
    length = data.draw(st.integers(1, nbytes // 2))
    first = data.draw(st.integers(0, nbytes - 2 * length))
    second = data.draw(st.integers(first + length, nbytes - length))
    original = content(nbytes, below=data.draw(st.sampled_from([2, 256])))
    changed = original.clone()
    changed[first : first + length] = original[second : second + length]
    changed[second : second + length] = original[first : first + length]
    assert (checksum(changed) == checksum(original)) == changed.equal(original)


def test_exchanged_words_at_the_strides_are_noticed() -> None:
    words = content(8 * 131_072).view(torch.int64)
    expected = checksum(words.view(torch.uint8))
    for distance in (511, 512, 1022, 1024, 511 * 200, 512 * 200):
        changed = words.clone()
        changed[3], changed[3 + distance] = words[3 + distance], words[3]
        assert checksum(changed.view(torch.uint8)) != expected


def test_signs_exchanged_within_a_row_are_noticed() -> None:
    ones = torch.ones(4096, dtype=torch.float64)
    a, b = ones.clone(), ones.clone()
    a[5], b[6] = -1.0, -1.0
    assert checksum(a.view(torch.uint8)) != checksum(b.view(torch.uint8))


def test_exchanged_pages_of_equal_sums_are_noticed() -> None:
    pages = torch.arange(512).repeat(8, 1)
    changed = pages.clone()
    changed[2], changed[5] = pages[2].flip(0), pages[5]
    swapped = changed[[0, 1, 5, 3, 4, 2, 6, 7]]
    sums = [checksum(each.reshape(-1).view(torch.uint8)) for each in (pages, changed, swapped)]
    assert len(set(sums)) == 3


def test_length_is_noticed() -> None:
    sums = {checksum(torch.zeros(n, dtype=torch.uint8)) for n in range(1, 300)}
    assert len(sums) == 299


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    words = content(data.draw(st.sampled_from(SIZES[1:])))
    expected = checksum(words)
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(words) != expected


def test_zeros_cut_off_or_added_are_noticed() -> None:
    data = torch.cat([content(1000), torch.zeros(5000, dtype=torch.uint8)])
    assert len({checksum(data[:n]) for n in range(1000, 6001, 8)}) == 626


def test_values_are_those_of_xxh3() -> None:
    assert checksum(content(5)) == xxhash.xxh3_64_intdigest(bytes(content(5).numpy()))


def test_bytes_need_no_alignment() -> None:
    data = content(30_001)
    assert checksum(data[1:]) == checksum(data[1:].clone())


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
