"""Nested values come back exactly, type by type, or are refused by name."""

import math
import struct
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, NonTensorData, TensorDict
from torch import Tensor

from gfn_rb.checkpoint import load_state, save_state
from gfn_rb.errors import CheckpointError


def round_trip(value, folder):
    save_state(folder / "state", {"value": value})
    return load_state(folder / "state")["value"]


def assert_same(came, expected):
    """Same type, same content, to the bit."""
    assert type(came) is type(expected)
    if isinstance(expected, (TensorDict, LazyStackedTensorDict)):
        assert came.batch_size == expected.batch_size
        assert came.device == expected.device
        assert came.names == expected.names
        assert list(came.keys()) == list(expected.keys())
        for key in expected.keys():  # noqa: SIM118
            assert_same(came.get(key), expected.get(key))
    elif isinstance(expected, Tensor):
        assert (came.dtype, came.shape) == (expected.dtype, expected.shape)
        assert raw(came) == raw(expected)
        assert not any((came.is_conj(), came.is_neg(), came.requires_grad))
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (came.dtype, came.shape) == (expected.dtype, expected.shape)
        assert came.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert [(type(key), key) for key in came] == [(type(key), key) for key in expected]
        for key in expected:
            assert_same(came[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(came) == len(expected)
        for one, other in zip(came, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert struct.pack("<d", came) == struct.pack("<d", expected)
    else:
        assert came == expected


def raw(tensor):
    dense = torch.cat([tensor.detach().resolve_conj().resolve_neg().reshape(-1)])
    return dense.view(torch.uint8).numpy().tobytes()


VALUES = {
    "integers": [0, -1, 2**63, -(2**200)],
    "floats": [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, -math.nan],
    "torch things": [torch.Size([2, 0]), torch.device("cuda:1"), torch.bfloat16, torch.Size([])],
    "NumPy scalars": [np.float32(0.1), np.int8(-3), np.bool_(True), np.float64(1.0)],
    "arrays": [np.arange(6).reshape(2, 3).T, np.zeros((0, 2), np.uint16), np.array(3.0)],
    "read-only array": np.broadcast_to(np.arange(3), (2, 3)),
    "reversed array": np.arange(5)[::-1],
    "empty array": np.zeros(0),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6).reshape(2, 3).T,
    "strided": torch.arange(20.0)[3::4],
    # Large ones, which are not copied if they can be written as they are.
    "large, transposed": torch.arange(60_000).reshape(300, 200).T,
    "large, in another order": torch.arange(60_000).reshape(2, 30_000).T.reshape(1, 30_000, 2),
    "large, strided": torch.arange(60_000)[::2],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "truth values": torch.tensor([True, False, True]),
    "conjugated": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "negated, contiguous": torch.tensor([1 - 2j]).conj().imag,
    "one row, strided": torch.arange(6.0).view(1, 6).as_strided((1, 6), (1, 1)),
    "with a gradient": torch.arange(3.0).requires_grad_() * 1,
    "part of a storage": torch.arange(10)[4:6],
    "one element, expanded": torch.tensor(3.0).expand(1, 1),
    "one element, strided": torch.arange(4.0)[1::2][:1],
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_come_back_exactly(value, tmp_path):
    assert_same(round_trip(value, tmp_path), value)


def test_parameters_and_mapped_tensors_become_plain_tensors(tmp_path):
    plain = torch.arange(3.0)
    mapped = MemoryMappedTensor.from_tensor(plain)
    for came in round_trip([torch.nn.Parameter(plain), mapped, mapped[:3]], tmp_path):
        assert_same(came, plain)


def test_tensordicts_come_back_exactly(tmp_path):
    nested = TensorDict({"d": torch.zeros(2, 3, 1), "e": TensorDict({}, [2])}, [2, 3])
    outer = TensorDict({"b": torch.arange(2), "a": nested}, [2], device="cpu")
    named = TensorDict({"b": torch.arange(2)}, [2], names=["time"])
    lazy = LazyStackedTensorDict(
        TensorDict({"x": torch.zeros(1)}, []), TensorDict({"y": torch.ones(2)}, []), stack_dim=0
    )
    for value in (outer, named, TensorDict({}, [4]), lazy):
        assert_same(round_trip(value, tmp_path), value)


def test_what_is_loaded_is_a_copy_that_may_be_written_to(tmp_path):
    path = tmp_path / "state"
    save_state(path, {"x": torch.zeros(3), "y": np.zeros(3), 3: "z"})
    state = load_state(path)
    assert list(state) == ["x", "y", 3]
    state["x"].fill_(1.0)
    state["y"][:] = 1.0
    assert torch.equal(load_state(path)["x"], torch.zeros(3))


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.Size([1])]),
    st.lists(st.floats(width=32)).map(torch.tensor),
    st.lists(st.integers(0, 255)).map(lambda entries: torch.tensor(entries, dtype=torch.uint8)),
    st.lists(st.floats()).map(np.array),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(value=nested)
def test_any_nesting_comes_back(tmp_path_factory, value):
    assert_same(round_trip(value, tmp_path_factory.getbasetemp()), value)


@pytest.mark.parametrize("wrap", [list, tuple, dict, TensorDict], ids=lambda kind: kind.__name__)
def test_what_is_nested_deeply_comes_back(wrap, tmp_path):
    value = wrap()
    for _ in range(40 if wrap is TensorDict else 99):  # TensorDicts recurse deeply themselves
        value = wrap({"a": value}) if wrap in (dict, TensorDict) else wrap([value])
    assert_same(round_trip(value, tmp_path), value)


# What is refused.


Point = namedtuple("Point", "x y")
circle = []
circle.append(circle)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"f": len}]}, r"state\['a'\]\[1\]\['f'\]: got builtins.builtin_function"),
        ({"s": {1, 2}}, r"state\['s'\]: got builtins.set"),
        ({"p": Point(1, 2)}, r"state\['p'\]: got .*Point"),
        ({"c": Counter("ab")}, r"state\['c'\]: got collections.Counter"),
        ({"k": {(1, 2): 3}}, r"state\['k'\]: its key \(1, 2\) is of type tuple, expected str or"),
        ({"k": {True: 3}}, r"state\['k'\]: its key True is of type bool"),
        ({"x": torch.zeros(2, 2).to_sparse()}, r"state\['x'\]: got a tensor of layout torch.spars"),
        ({"x": torch.zeros(2, device="meta")}, r"state\['x'\]: got a tensor of .* on meta"),
        ({"x": np.array([None])}, r"state\['x'\]: got a NumPy array of object"),
        ({"x": np.array(["a"])}, r"state\['x'\]: got a NumPy array of <U1"),
        (
            {"t": TensorDict({"f": NonTensorData({1})}, [])},
            r"state\['t'\]\['f'\]: got .*NonTensorData",
        ),
        ({"c": circle}, r"state\['c'\]\[0\]\[0\].*: nested over 100 deep"),
        ({"k": {10**5000: 1}}, r"state\['k'\]: an integer of over 14000 bits"),
        ({"i": 10**5000}, r"state\['i'\]: an integer of over 14000 bits"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(value, message, tmp_path):
    path = tmp_path / "state"
    save_state(path, {"old": 1})
    with pytest.raises(CheckpointError, match=message) as caught:
        save_state(path, value)
    assert "\n" not in str(caught.value)
    assert load_state(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
