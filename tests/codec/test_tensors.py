"""Tensors as bytes: by hand, in place where they can be, whatever their kind."""

from __future__ import annotations

import pytest
import torch
from tensordict import MemoryMappedTensor

from gfn_rb.codec.primitives import ROW_DTYPES, dtype_name, viewed
from gfn_rb.numerics.flat import plain_bytes


def address(content: memoryview) -> int:
    return torch.frombuffer(content, dtype=torch.uint8).data_ptr()


def test_bytes_are_little_endian_and_in_c_order() -> None:
    assert bytes(plain_bytes(torch.tensor([1, -2], dtype=torch.int16))) == b"\x01\x00\xfe\xff"
    assert bytes(plain_bytes(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t())) == b"\1\3\2\4"
    assert bytes(plain_bytes(torch.tensor([True, False]))) == b"\x01\x00"
    assert bytes(plain_bytes(torch.tensor([1.0], dtype=torch.bfloat16))) == b"\x80\x3f"


@pytest.mark.parametrize("name", sorted(ROW_DTYPES))
def test_any_dtype_goes_and_comes_back_without_a_copy(name: str) -> None:
    dtype = ROW_DTYPES[name]
    raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype).view(2, 3)
    content = plain_bytes(value)
    assert address(content) == value.data_ptr()
    assert bytes(content) == bytes(raw.numpy())
    data = torch.cat([torch.zeros(64, dtype=torch.uint8), raw])
    back = viewed(data.numpy(), 64, dtype, (2, 3))
    assert (back.dtype, back.shape, back.data_ptr()) == (dtype, (2, 3), data.data_ptr() + 64)
    assert back.reshape(-1).view(torch.uint8).equal(raw)


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.arange(3.0)),
        torch.arange(3.0).requires_grad_() * 1,
        torch.tensor([0j, 1 - 2j, 2 + 1j]).conj(),
        torch.tensor([0j, 1 - 2j]).conj().imag,
        torch.tensor([1 - 2j]).conj().imag,  # contiguous
        torch.ones(1).expand(4, 3),
        torch.arange(6.0).view(1, 6).as_strided((1, 6), (1, 1)),
        torch.arange(20.0)[::3],
        torch.tensor(3.0),
        MemoryMappedTensor.from_tensor(torch.arange(6.0).view(2, 3)).t(),
    ],
)
def test_tensors_that_are_not_what_their_memory_says(value: torch.Tensor) -> None:
    plain = torch.tensor(value.tolist(), dtype=value.dtype)
    assert bytes(plain_bytes(value)) == plain.numpy().tobytes()


@pytest.mark.cuda
def test_tensors_on_a_device() -> None:
    assert bytes(plain_bytes(torch.tensor([1, 2], dtype=torch.int8, device="cuda"))) == b"\1\2"


def test_dtypes_of_rows_are_those_of_whole_bytes() -> None:
    known = {"bool", "int8", "int64", "uint8", "uint16", "bfloat16", "complex64"}
    assert known <= set(ROW_DTYPES)
    assert not {"qint8", "int4", "uint1", "bits8", "float4_e2m1fn_x2"} & set(ROW_DTYPES)
    assert all(dtype_name(dtype) == name for name, dtype in ROW_DTYPES.items())
    assert len(ROW_DTYPES) == len(set(ROW_DTYPES.values()))
