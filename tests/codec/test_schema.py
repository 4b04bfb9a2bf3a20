"""Schemas: what rows look like, by hand, and what has none."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict
from torch import Tensor

from gfn_rb.codec.frames import (
    MAX_FIELDS,
    Layout,
    parsed_fields,
    schema_of,
    signature_of,
    tensordict_of,
)
from gfn_rb.codec.layout import TensorInfo
from gfn_rb.errors import ShapeError, WireSchemaError


def rows() -> TensorDict:
    return TensorDict(
        {
            "state": torch.zeros(3, 4, 2, dtype=torch.int16),
            "log_reward": torch.zeros(3),
            "next": {"done": torch.zeros(3, 1, dtype=torch.bool)},
        },
        [3],
    )


def text_of(td: TensorDict) -> bytes:
    return schema_of(signature_of(td)[0], len(td))[0]


def described(td: TensorDict) -> tuple[tuple[TensorInfo, ...], list[Tensor]]:
    signature, values = signature_of(td)
    _, layout, order = schema_of(signature, len(td))
    return layout.fields, [values[i] for i in order]


def test_fields_are_in_the_order_of_their_keys() -> None:
    fields, values = described(rows())
    assert fields == (
        TensorInfo(("log_reward",), torch.float32, ()),
        TensorInfo(("next", "done"), torch.bool, (1,)),
        TensorInfo(("state",), torch.int16, (4, 2)),
    )
    assert [value.dtype for value in values] == [field.dtype for field in fields]


def test_text_says_keys_dtypes_and_row_shapes() -> None:
    expected = (
        b'[[["log_reward"],"float32",[]],[["next","done"],"bool",[1]],[["state"],"int16",[4,2]]]'
    )
    assert text_of(rows()) == expected
    assert parsed_fields(expected) == described(rows())[0]


def test_assembled_undoes_described() -> None:
    fields, values = described(rows())
    td = tensordict_of(Layout(fields, 3), values)
    assert td.batch_size == torch.Size([3])
    assert td["next"].batch_size == torch.Size([3])
    assert set(td.keys(True, True)) == set(rows().keys(True, True))
    assert all(
        td[key] is value for key, value in zip([f.label for f in fields], values, strict=True)
    )


def test_no_rows_of_nothing() -> None:
    assert described(TensorDict({"empty": {}}, [4])) == ((), [])
    assert tensordict_of(Layout((), 4), []).batch_size == torch.Size([4])


@pytest.mark.parametrize(
    ("td", "words"),
    [
        (TensorDict({}, []), r"batch size \[\]; expected \[n\]"),
        (TensorDict({"a": torch.zeros(2, 3)}, [2, 3]), r"batch size \[2, 3\]; expected \[n\]"),
        (TensorDict({"a": torch.eye(2).to_sparse()}, [2]), r"sparse_coo .* at \('a',\)"),
        (TensorDict({"a": {"b": "text"}}, [2]), r"NonTensorData at \('a', 'b'\)"),
        (
            TensorDict({"a": LazyStackedTensorDict(TensorDict({}), TensorDict({}))}, [2]),
            "LazyStacked",
        ),
        (
            TensorDict({"a": torch.zeros(2, dtype=torch.uint8).view(torch.bits8)}, [2]),
            "torch.bits8",
        ),
    ],
)
def test_what_has_no_schema_is_refused(td: TensorDict, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        described(td)


def test_many_fields_are_refused_before_they_are_made() -> None:
    listed = [[[f"{i:05d}"], "bool", []] for i in range(MAX_FIELDS)]
    assert len(parsed_fields(json.dumps(listed).encode())) == MAX_FIELDS
    listed.append([["99999"], "bool", []])
    with pytest.raises(WireSchemaError, match="at most 1024 entries"):
        parsed_fields(json.dumps(listed).encode())


@given(st.one_of(st.binary(max_size=60), st.text(max_size=40).map(str.encode)))
def test_fuzzed_schemas_raise_the_named_error_alone(text: bytes) -> None:
    try:
        parsed_fields(text)
    except WireSchemaError:
        return
    assert text.strip() == b"[]"


@pytest.mark.parametrize(
    "text",
    [
        "{}", "[1]", '[["a","int64",[]]]', '[[["a"],"qint8",[]]]', '[[["a"],"int64",[-1]]]',
        '[[["a"],"int64",[1.0]]]', '[[["a"],"int64",[4294967296]]]', '[[["a"],[],[]]]',
        '[[[],"int64",[]]]', '[[["a"],"int64",[]],[["a"],"int64",[]]]',
        '[[["b"],"int64",[]],[["a"],"int64",[]]]', '[[["a"],"int64",[]],[["a","b"],"int64",[]]]',
        "[" * 100_000, "[" * 500, json.dumps([[["a"] * 33, "int64", []]]),
    ],
)  # fmt: skip
def test_schemas_beyond_reason_are_refused(text: str) -> None:
    with pytest.raises(WireSchemaError):
        parsed_fields(text.encode())
