"""Schemas: what rows look like, by hand, and what has none."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from gfn_rb.errors import ShapeError, WireSchemaError
from gfn_rb.remote import Schema
from gfn_rb.remote.schema import DTYPES, MAX_FIELDS, Field, assembled, described, dtype_name


def rows() -> TensorDict:
    return TensorDict(
        {
            "state": torch.zeros(3, 4, 2, dtype=torch.int16),
            "log_reward": torch.zeros(3),
            "next": {"done": torch.zeros(3, 1, dtype=torch.bool)},
        },
        [3],
    )


def test_fields_are_in_the_order_of_their_keys() -> None:
    schema = Schema.of(rows())
    assert schema.fields == (
        Field(("log_reward",), torch.float32, ()),
        Field(("next", "done"), torch.bool, (1,)),
        Field(("state",), torch.int16, (4, 2)),
    )
    assert [field.row_nbytes for field in schema.fields] == [4, 1, 16]


def test_json_says_keys_dtypes_and_row_shapes() -> None:
    schema = Schema.of(rows())
    expected = (
        b'[[["log_reward"],"float32",[]],[["next","done"],"bool",[1]],[["state"],"int16",[4,2]]]'
    )
    assert schema.json == expected
    assert repr(schema) == f"Schema({expected.decode()})"
    assert schema.id == int.from_bytes(hashlib.sha256(expected).digest()[:8], "little") | 1
    assert Schema.from_json(expected) == schema
    assert hash(Schema.from_json(expected)) == hash(schema)


def test_schemas_differ_by_key_dtype_and_shape_but_not_by_rows() -> None:
    one = Schema.of(rows())
    assert one == Schema.of(rows()[:1])
    for key, value in (
        ("log_reward", torch.zeros(3, dtype=torch.float64)),
        ("log_reward", torch.zeros(3, 1)),
        ("log_prob", torch.zeros(3)),
    ):
        other = Schema.of(rows().set(key, value))
        assert other != one
        assert other.id != one.id
    assert one != one.json


def test_assembled_undoes_described() -> None:
    fields, values = described(rows())
    td = assembled(fields, values, 3)
    assert td.batch_size == torch.Size([3])
    assert td["next"].batch_size == torch.Size([3])
    assert set(td.keys(True, True)) == set(rows().keys(True, True))
    assert all(td[key] is value for key, value in zip([f.key for f in fields], values, strict=True))


def test_tensors_nested_deeply_are_assembled_where_they_were() -> None:
    td = TensorDict(
        {"a": {"b": {"c": torch.arange(2)}, "d": torch.ones(2)}, "a!": torch.ones(2), "e": {}}, [2]
    )
    fields, values = described(td)
    assert [field.key for field in fields] == [("a", "b", "c"), ("a", "d"), ("a!",)]
    back = assembled(fields, values, 2)
    assert back["a", "b", "c"].equal(torch.arange(2))
    assert set(back.keys(True, True)) == {("a", "b", "c"), ("a", "d"), "a!"}


def test_no_rows_of_nothing() -> None:
    schema = Schema.of(TensorDict({"empty": {}}, [4]))
    assert schema.fields == ()
    assert assembled((), [], 4).batch_size == torch.Size([4])


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
        (TensorDict({"a": torch.empty(2, dtype=torch.bits8)}, [2]), "torch.bits8"),
    ],
)
def test_what_has_no_schema_is_refused(td: TensorDict, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        Schema.of(td)


def test_dtypes_are_those_with_rows_of_whole_bytes() -> None:
    assert {"bool", "int8", "int64", "uint8", "uint16", "bfloat16", "complex64"} <= set(DTYPES)
    assert not {"qint8", "int4", "uint1", "bits8", "float4_e2m1fn_x2"} & set(DTYPES)
    assert all(dtype_name(dtype) == name for name, dtype in DTYPES.items())
    assert len(DTYPES) == len(set(DTYPES.values()))


def test_many_fields_are_refused_before_they_are_made() -> None:
    listed = [[[f"{i:05d}"], "bool", []] for i in range(MAX_FIELDS)]
    assert len(Schema.from_json(json.dumps(listed).encode()).fields) == MAX_FIELDS
    listed.append([["99999"], "bool", []])
    with pytest.raises(WireSchemaError, match="at most 1024 entries"):
        Schema.from_json(json.dumps(listed).encode())


def test_hidden_bytes_of_text_are_refused() -> None:
    with pytest.raises(WireSchemaError):
        Schema.from_json(b"\xff\xfe[[")
