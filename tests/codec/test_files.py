"""Files: nothing but what was written is believed, whoever wrote it."""

import json
import random
import struct

import pytest
import torch
import xxhash
from tensordict import TensorDict

from gfn_rb.checkpoint import load_state, save_state
from gfn_rb.checkpoint.api import outline
from gfn_rb.codec import files, layout, primitives
from gfn_rb.codec.files import ValueFile
from gfn_rb.codec.layout import FILE, FRAME, VERSION, Prefix
from gfn_rb.errors import CheckpointCorruptError, CheckpointMismatchError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ckpt"


# Damage.


STATE = {"x": torch.arange(9.0), "y": [2.5, "z"]}


@pytest.mark.parametrize("read", [load_state, outline])
def test_truncation_and_changed_bytes_are_noticed_anywhere(path, read):
    save_state(path, STATE)
    content, pick = path.read_bytes(), random.Random(0)
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointCorruptError):
            read(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointCorruptError, match=f"has {len(content) + 1} bytes; expected"):
        read(path)
    header = Prefix.read(memoryview(content), "it").texts_end
    for i in range(len(content) if read is load_state else header):
        damaged = bytearray(content)
        damaged[i] ^= pick.randrange(1, 256)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError):
            read(path)


def test_damage_is_located_by_block(path, monkeypatch):
    monkeypatch.setattr(files, "_STEP", 1 << 10)
    for module in (layout, primitives):
        monkeypatch.setattr(module, "BLOCK", 1 << 12)
    for cached in ("_planned", "_layout_of"):  # layouts of other blocks
        monkeypatch.setattr(layout, cached, getattr(layout, cached).__wrapped__)
    state = {"x": torch.randn(5000), "y": torch.randn(100, 60).T, "z": torch.randn(3000)[::2]}
    save_state(path, state)
    came = load_state(path)
    assert all(torch.equal(came[name], state[name]) for name in state)
    content = bytearray(path.read_bytes())
    start = Prefix.read(memoryview(content), "it").head_nbytes + 3 * 4096
    content[start + 17] ^= 1
    path.write_bytes(content)
    words = f"checksum of bytes {start} to {start + 4096} is .*; expected"
    with pytest.raises(CheckpointCorruptError, match=words):
        load_state(path)


def test_every_byte_has_its_place(path):
    large = {"z": torch.ones(5000, 4, dtype=torch.uint8), "w": torch.arange(4000)}
    save_state(path, {**STATE, **large})
    structure = b'[["cpu","float32",[9]],["cpu","uint8",[5000,4]],["cpu","int64",[4000]]]'
    y = b'{"list":[{"float":"4004000000000000"},"z"]}'
    meta = b'{"values":{"dict":[["x",{"tensor":0}],["y",' + y
    meta += b'],["z",{"tensor":1}],["w",{"tensor":2}]]}}'
    texts = (structure + meta).ljust(256, b"\0")
    small = struct.pack("<9f", *range(9)).ljust(64, b"\0")
    body = struct.pack("<4000q", *range(4000)) + b"\1" * 20_000  # wide dtypes first
    head = 64 + 256 + 64
    sizes = struct.pack("<QQQQ8x", head + len(body) + 8, head, len(structure), len(meta))
    seed = int.from_bytes(b"\4\0\0\0file", "little")
    summed = xxhash.xxh3_64_intdigest(sizes + texts + small, seed).to_bytes(8, "little")
    prefix = b"gfn_rb\r\n\4\0\0\0file" + summed + sizes
    assert path.read_bytes() == prefix + texts + small + body + xxhash.xxh3_64_digest(body)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes; expected 64 or more"),
        (b"PK\x03\x04" + bytes(100), r"it begins with b'PK\\x03\\x04\\x00\\x00\\x00\\x00'"),
    ],
)
def test_other_files_are_told_apart(path, content, message):
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=message):
        load_state(path)


def sealed(prefix, content):
    """Return a file with another prefix, and checksums that fit."""
    head = bytearray(content[: prefix.head_nbytes])
    prefix.seal(memoryview(head))
    return bytes(head) + content[prefix.head_nbytes :]


def test_another_format_is_told_apart_from_damage(path):
    save_state(path, STATE)
    content = path.read_bytes()
    prefix = Prefix.read(memoryview(content), "it")
    for version in (2, 3):
        path.write_bytes(sealed(prefix._replace(version=version), content))
        with pytest.raises(CheckpointMismatchError, match=f"is of version {version}; expected 4"):
            load_state(path)
    path.write_bytes(sealed(prefix._replace(form=FRAME), content))
    with pytest.raises(CheckpointCorruptError, match="it is of form b'rows'; expected b'file'"):
        load_state(path)
    path.write_bytes(content[:8] + b"\2" + content[9:])
    with pytest.raises(CheckpointCorruptError):
        load_state(path)


@pytest.mark.parametrize(("node", "name"), [({"new": 1}, "new"), ({"dtype": "f7"}, "f7")])
def test_what_a_later_version_might_write_is_named(path, node, name):
    path.write_bytes(forged("[]", json.dumps({"values": node})))
    with pytest.raises(CheckpointMismatchError, match=f"holds '{name}', which this version"):
        load_state(path)


# Harm.


def forged(structure, meta, small=b""):
    """Return a file without a body, its texts and small tensors as given."""
    texts = (structure + meta).encode("utf8", "surrogatepass")
    head = bytearray(-(-(64 + len(texts)) // 64) * 64) + small
    head[64 : 64 + len(texts)] = texts
    sizes = (len(head), len(head), len(structure.encode()), len(meta))
    Prefix(VERSION, 0, FILE, 0, *sizes).seal(memoryview(head))
    return bytes(head)


@pytest.mark.parametrize(
    ("structure", "meta", "words"),
    [
        ("[]", "{", "its values make no sense: JSONDecodeError"),
        ("[]", "[1]", "its values make no sense: TypeError"),
        ("[]", '{"values":3}', "holds int, expected a dict"),
        ("[]", '{"values":{"dict":[["a",{"tensor":0}]]}}', "IndexError"),
        ('[["cpu","int8",[3]]]', '{"values":{"tensor":-1}}', "a tensor is -1, expected a position"),
        ('[["cpu","int8",[3]]]', '{"values":{"tensor":true}}', "a tensor is True, expected a pos"),
        ('[["cpu","int8",[-3]]]', "{}", "a shape is \\[-3\\], expected sizes"),
        ('[["cpu","int8",[-3,-1]]]', "{}", "expected sizes"),
        ('[["cpu","int8",[65]]]', "{}", r"it has \d+ bytes, \d+ of them head; expected \d+ and"),
        ('[["cpu","int64",[4611686018427387904]]]', "{}", r"expected \d{20} and"),
        ('[["int8",[3]]]', "{}", "TypeError: .*missing 1 required"),
        ('[["cpu","int8",[3]]]', "[" * 600, "nested 600 deep; expected at most 512"),
        ("[" * 600, "{}", "nested 600 deep; expected at most 512"),
        ('[["cpu","int8",[0,1180591620717411303424]],["cpu","int8",[3]]]',
         '{"values":{"dict":[["a",{"tensor":0}]]}}', "its values make no sense: "),
    ],
)  # fmt: skip
def test_texts_that_make_no_sense_are_refused(path, structure, meta, words):
    path.write_bytes(forged(structure, meta, bytes(64) if "cpu" in structure else b""))
    with pytest.raises(CheckpointCorruptError, match=words):
        load_state(path)


# Writing straight from memory.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60000).reshape(300, 200).T,
        torch.arange(60000).reshape(2, 30000).T.reshape(1, 30000, 2),
        torch.arange(60000)[::2],
    ],
)
def test_tensors_with_gaps_are_written_in_c_order(tensor, path):
    save_state(path, {"x": tensor})
    assert torch.equal(load_state(path)["x"], tensor)


def test_what_lived_on_an_accelerator_goes_to_the_one_asked_for(path):
    # The meta device stands for an accelerator, on which there is no content to compare.
    on_cpu, elsewhere = torch.arange(3), TensorDict({"x": torch.ones(2)}, [2], device="cpu")
    save_state(path, {"a": on_cpu, "b": elsewhere})
    file = ValueFile(path)
    fields = file.layout.fields
    file.layout.fields = (fields[0], fields[1]._replace(device="cuda"))
    file.nodes["values"]["dict"][1][1]["tensordict"]["device"] = "cuda"
    for device in (torch.device("cpu"), torch.device("meta")):
        state = file.value("values", device)
        assert torch.equal(state["a"], on_cpu)
        assert state["b"].device == device
        assert state["b"]["x"].device == device
        assert (state["b"]["x"].dtype, state["b"]["x"].shape) == (torch.float32, (2,))
