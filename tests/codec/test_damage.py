"""Files and frames that were damaged, forged or made with another secret are refused by name."""

import contextlib
import json
import pickle
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from factories import joined, journaled, objects
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb import fifo_buffer, load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import Secret, load_state
from gfn_rb.checkpoint.api import outline
from gfn_rb.codec import decode_frame, encode_frame, files, layout, primitives
from gfn_rb.codec.files import ValueFile, write_file
from gfn_rb.codec.frames import MAX_TEXT_NBYTES
from gfn_rb.codec.layout import FILE, FRAME, VERSION, Prefix
from gfn_rb.errors import (
    ArgumentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    SecretError,
    WireCorruptError,
    WireError,
    WireSchemaError,
    WireVersionError,
)

SECRET, OTHER = Secret(bytes(range(32))), Secret(bytes(32))
CORRUPT = (CheckpointCorruptError, WireCorruptError)


def rows(value, n=3, width=2000):
    """Rows with a tensor in the head and, by default, one in the body."""
    return TensorDict({"a": torch.full((n,), value), "b": torch.full((n, width), value)}, [n])


def frame(secret=None, value=1.0, **sizes):
    return joined(encode_frame(7, rows(value, **sizes), {"id": 1}, secret))


def read_frame(content, secret=None):
    return decode_frame(np.frombuffer(content, np.uint8).copy(), secret)


def file(secret=None, value=1.0, **sizes):
    stream = BytesIO()
    write_file(stream, {"values": {"rows": rows(value, **sizes)}}, secret)
    return stream.getvalue()


def read_file(content, secret=None):
    found = ValueFile(Path("run.ckpt"), secret, content)
    found.verify()
    return found.value("values")


FORMS = {"frame": (frame, read_frame), "file": (file, read_file)}


@pytest.fixture(params=FORMS)
def form(request):
    """What makes bytes of a number, and what reads them."""
    return FORMS[request.param]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4,096 bytes."""
    monkeypatch.setattr(files, "_STEP", 1 << 10)
    for module in (layout, primitives):
        monkeypatch.setattr(module, "BLOCK", 1 << 12)
    for cached in ("_planned", "_layout_of"):  # layouts of other blocks
        monkeypatch.setattr(layout, cached, getattr(layout, cached).__wrapped__)


def number(came):
    return float((came["rows"] if isinstance(came, dict) else came.rows)["b"][0, 0])


def test_those_who_share_a_secret_read_what_each_other_wrote(form):
    make, read = form
    assert number(read(make(SECRET), Secret(bytes(range(32))))) == 1.0
    assert make(None) != make(SECRET) != make(OTHER)
    assert len(make(None)) == len(make(SECRET))


@pytest.mark.parametrize(
    ("made", "read_with", "why"),
    [
        (SECRET, None, "was made with a secret, and none is given"),
        (None, SECRET, "was made without the secret"),
        (OTHER, SECRET, "was made with another secret, or changed since"),
    ],
)
def test_what_was_made_otherwise_is_refused(form, made, read_with, why):
    make, read = form
    with pytest.raises(SecretError, match=why) as caught:
        read(make(made), read_with)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("width", [4, 2000])
def test_every_changed_byte_and_truncation_is_noticed(form, secret, width):
    make, read = form
    content = bytearray(make(secret, width=width))
    is_small = width == 4
    for at in [*range(0, len(content), 1 if is_small else 331), *range(len(content) - 9, -1, -99)]:
        for flip in (1, 0x80, 0xFF):
            content[at] ^= flip
            with pytest.raises((*CORRUPT, SecretError)) as caught:
                read(bytes(content), secret)
            # What begins otherwise, or is of another size, is no file or frame at all.
            if secret is None or 8 <= at < 24 or at >= 64:
                assert isinstance(caught.value, SecretError) == (secret is not None)
            content[at] ^= flip
    for end in range(0, len(content), 1 if is_small else 97):
        with pytest.raises(CORRUPT):
            read(bytes(content[:end]), secret)
    with pytest.raises(CORRUPT, match=f"has {len(content) + 64} bytes; expected {len(content)}"):
        read(bytes(content) + bytes(64), secret)


def test_a_head_is_checked_without_the_body():
    content = bytearray(file())
    for at in range(Prefix.read(memoryview(content), "it").head_nbytes):
        content[at] ^= 1
        with pytest.raises(CheckpointError):
            ValueFile(Path("run.ckpt"), None, bytes(content))
        content[at] ^= 1
    content[-100] ^= 1
    assert [*ValueFile(Path("run.ckpt"), None, bytes(content)).nodes] == ["values"]


def test_who_makes_sums_without_the_secret_is_refused(form):
    make, read = form
    content = bytearray(make(None, 2.0))
    content[12:16] = content[12:16].upper()  # it says that it was made with a secret
    prefix = Prefix.read(memoryview(content), "it")
    prefix.seal(memoryview(content)[: prefix.head_nbytes])
    with pytest.raises(SecretError, match="another secret") as caught:
        read(bytes(content), SECRET)
    right = make(SECRET, 2.0)[16:24]  # which nobody is told
    for shown in (right.hex(), right[::-1].hex()):
        assert shown not in str(caught.value)


@pytest.mark.usefixtures("small_blocks")
def test_no_part_and_no_block_goes_with_others_than_its_own(form):
    make, read = form
    one, other = make(SECRET, 1.0), make(SECRET, 2.0)
    assert [number(read(each, SECRET)) for each in (one, other)] == [1.0, 2.0]
    n_blocks = -(-24_000 // 4096)
    sums = len(one) - n_blocks * 8
    for n in range(n_blocks):  # blocks of the first, the rest of the second
        end, sums_end = sums - 24_000 + n * 4096, sums + n * 8
        with pytest.raises(SecretError, match="another secret"):
            read(one[:end] + other[end:sums] + one[sums:sums_end] + other[sums_end:], SECRET)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("made", FORMS)
def test_no_block_goes_in_the_place_of_another(made):
    content = {"b": torch.arange(6000.0).view(3, 2000)}
    if made == "frame":
        whole = joined(encode_frame(7, TensorDict(content, [3]), None, SECRET))
    else:
        stream = BytesIO()
        write_file(stream, content, SECRET)
        whole = stream.getvalue()
    sums = len(whole) - -(-24_000 // 4096) * 8
    start = sums - 24_000

    def exchanged(first, width):
        one, other = (whole[at : at + width] for at in (first, first + width))
        return whole[:first] + other + one + whole[first + 2 * width :]

    swapped = exchanged(start, 4096)[:sums] + exchanged(sums, 8)[sums:]
    with pytest.raises(SecretError, match="another secret"):
        FORMS[made][1](swapped, SECRET)


@pytest.mark.usefixtures("small_blocks")
def test_damage_is_located_by_block(form):
    make, read = form
    content = bytearray(make())
    assert number(read(bytes(content))) == 1.0
    start = Prefix.read(memoryview(content), "it").head_nbytes + 3 * 4096
    content[start + 17] ^= 1
    words = f"checksum of bytes {start} to {start + 4096} is .*; expected"
    with pytest.raises(CORRUPT, match=words):
        read(bytes(content))


# Others than damage.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes; expected 64 or more"),
        (b"PK\x03\x04" + bytes(100), r"begins with b'PK\\x03\\x04\\x00\\x00\\x00\\x00'"),
    ],
)
def test_other_content_is_told_apart(form, content, message):
    with pytest.raises(CORRUPT, match=message):
        form[1](content)


def forged(form, structure, meta, small=b"", **changes):
    """Return a file or frame with given texts and valid checksums, as an attacker makes it."""
    structure, meta = structure.encode("utf8", "surrogatepass"), meta.encode()
    head = bytearray(-(-(64 + len(structure + meta)) // 64) * 64) + small
    head[64 : 64 + len(structure + meta)] = structure + meta
    fields = {
        "version": VERSION, "kind": 9, "form": form, "sum": 0, "nbytes": len(head),
        "head_nbytes": len(head), "structure_nbytes": len(structure), "meta_nbytes": len(meta),
    }  # fmt: skip
    prefix = Prefix(**{**fields, **changes})
    prefix.seal(memoryview(head)[: max(64, min(len(head), prefix.head_nbytes))])
    return bytes(head)


READ = {FRAME: read_frame, FILE: read_file}


@pytest.mark.parametrize("form", READ)
def test_another_version_and_form_are_told_apart_from_damage(form):
    for version in (2, 3, 9):
        content = forged(form, "[]", "{}", version=version)
        with pytest.raises(
            (WireVersionError, CheckpointMismatchError), match=f"of version {version}; expected 4"
        ):
            READ[form](content)
    other = FILE if form == FRAME else FRAME
    with pytest.raises(CORRUPT, match=f"is of form {other!r}; expected {form!r}"):
        READ[form](forged(other, "[]", "{}"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nbytes": 127}, "has 128 bytes; expected 127"),
        ({"head_nbytes": 67}, "a head of 67 bytes with texts up to 68"),
        ({"head_nbytes": 129}, "a head of 129 bytes"),
        ({"meta_nbytes": 97}, "texts up to 163"),
        ({"structure_nbytes": (1 << 64) - 1}, "expected it to hold the texts"),
    ],
)
@pytest.mark.parametrize("form", READ)
def test_sizes_beyond_the_bytes_are_refused(form, changes, words):
    with pytest.raises(CORRUPT, match=words):
        READ[form](forged(form, "[]", "{}", **changes))


@pytest.mark.parametrize(
    ("structure", "meta", "words"),
    [
        ("[]", "{", "JSONDecodeError"),
        ("[]", "[1]", "TypeError"),
        ("[]", "", "JSONDecodeError"),
        ("[]", '{"rows":{"tensordict":{"batch_size":[1],"entries":[["a",{"tensor":0}]]}}}',
         "IndexError"),
        ('[["cpu","int8",[3]]]', '{"rows":{"tensor":-1}}', "a tensor is -1, expected a position"),
        ('[["cpu","int8",[3]]]', '{"rows":{"tensor":true}}', "a tensor is True, expected a pos"),
        ('[["cpu","int8",[-3]]]', "{}", "a shape is \\[-3\\], expected sizes"),
        ('[["cpu","int8",[-3,-1]]]', "{}", "expected sizes"),
        ('[["cpu","int8",[65]]]', "{}", r"has \d+ bytes, \d+ of them head; expected \d+ and"),
        ('[["cpu","int64",[2,2000]]]', "{}", "of them head; expected 32136 and 128"),
        ('[["cpu","int64",[4611686018427387904]]]', "{}", r"expected \d{20} and"),
        ('[["cpu","int64",[4611686018427387904,0,8]]]', "{}", "expected at most .* elements"),
        ('[["cpu","int8",[0,1180591620717411303424]]]', "{}", "expected at most .* elements"),
        ('[["int8",[3]]]', "{}", "TypeError: .*missing 1 required"),
        ('[["cpu","int8",[3]]]', "[" * 600, "nested 600 deep; expected at most 512"),
        ('[["cpu","int8",[3]]]', '{"[[[":' * 600, "nested 600 deep; expected at most 512"),
        ("[" * 600, "{}", "nested 600 deep; expected at most 512"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", READ)
def test_texts_that_make_no_sense_are_refused(form, structure, meta, words):
    content = forged(form, structure, meta, bytes(64) if "cpu" in structure else b"")

    def read():
        if form == FRAME:
            read_frame(content)
        ValueFile(Path("it"), None, content).value("rows")

    with pytest.raises((CheckpointCorruptError, WireError), match=words):
        read()


@pytest.mark.parametrize(
    "text",
    ['["a",1]', "{'a':1}", '{"meta":[1]}', '{"other":1}', '{"rows":{"list":[]}}', '{"rows":3}'],
)
def test_frames_hold_metadata_and_rows(text):
    with pytest.raises(WireSchemaError, match="a frame of kind 9"):
        read_frame(forged(FRAME, '[["cpu","int8",[1]]]', text, bytes(64)))
    with pytest.raises(WireError, match="bytes of text; expected at most 16 MiB"):
        read_frame(forged(FRAME, " " * (MAX_TEXT_NBYTES + 1), ""))


@pytest.mark.parametrize(("node", "name"), [({"new": 1}, "new"), ({"dtype": "f7"}, "f7")])
def test_what_a_later_version_might_write_is_named(node, name):
    with pytest.raises(CheckpointMismatchError, match=f"holds '{name}', which this version"):
        read_file(forged(FILE, "[]", json.dumps({"values": node})))


def test_a_state_is_a_dict(tmp_path):
    (tmp_path / "state").write_bytes(forged(FILE, "[]", '{"values":3}'))
    for read in (load_state, outline):
        with pytest.raises(CheckpointCorruptError, match="holds int, expected a dict"):
            read(tmp_path / "state")


TOKENS = st.lists(
    st.sampled_from(
        ["[", "]", "{", "}", ",", ":", '"a"', '"', "\\", '"int64"', '"bool"', "2", "-1", "1e999",
         "null", "9" * 5000, "NaN", '["cpu","int64",[2]]', '"rows"', '{"tensor":0}', "meta"],
    ), max_size=9,
).map("".join)  # fmt: skip
CHANGES = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=12)


@given(st.none() | TOKENS | st.text("\0\x80[{", max_size=30), TOKENS, CHANGES, st.booleans())
def test_forged_texts_and_heads_raise_the_named_errors_alone(structure, meta, changes, mends):
    for (form, read), make in zip(READ.items(), (frame, file), strict=True):
        whole = make(width=4) if structure is None else forged(form, structure, meta)
        content = bytearray(whole)
        for at, value in changes:
            content[at] = value
        if mends:  # as a sender who means harm would
            seed, _, _, head = struct.unpack_from("<QQQQ", content, 8)
            end = max(64, min(head, len(content)))
            struct.pack_into("<Q", content, 16, xxhash.xxh3_64_intdigest(content[24:end], seed))
        with contextlib.suppress(WireError if form == FRAME else CheckpointError):
            read(bytes(content))


@pytest.mark.parametrize("n", [5, 40_000])
def test_truth_values_other_than_0_and_1_are_refused(n):
    truth = torch.zeros(n, dtype=torch.bool)
    td = TensorDict({"a": {"b": truth}, "c": torch.full((n,), 255, dtype=torch.uint8)}, [n])

    assert read_frame(joined(encode_frame(0, td))).rows["a", "b"].equal(truth)
    for wrong in (2, 255):
        truth.view(torch.uint8)[n - 1] = wrong
        words = "a frame of kind 0 makes no sense: .* truth values of bytes above 1, expected"
        with pytest.raises(WireSchemaError, match=words):
            read_frame(joined(encode_frame(0, td)))


# Secrets of buffers, and themselves.


def test_a_file_changes_nothing_before_it_is_believed(tmp_path):
    path, rb, target = tmp_path / "rb.ckpt", fifo_buffer(8), fifo_buffer(8)
    rb.extend(objects([1, 2, 3]))
    save_checkpoint(path, rb, secret=SECRET, step=3)
    for secret in (None, OTHER):
        for read, *to in ((load_checkpoint, target), (outline,)):
            with pytest.raises(SecretError, match=str(path)):
                read(path, *to, secret=secret)
    assert len(target) == 0
    assert load_checkpoint(path, target, secret=SECRET) == {"step": 3}
    assert len(target) == 3


def test_a_journal_is_of_one_secret(tmp_path):
    options = {"journal": tmp_path / "rb.journal", "sync": "always"}
    rb = journaled(fifo_buffer(8), secret=SECRET, **options)
    rb.extend(objects([1, 2, 3]))
    rb.journal.close()
    for secret in (None, OTHER):
        with pytest.raises(SecretError):
            journaled(fifo_buffer(8), secret=secret, **options)
    assert len(journaled(fifo_buffer(8), secret=SECRET, **options)) == 3


def test_a_secret_is_its_owners_alone_and_long_enough(tmp_path):
    path = tmp_path / "secret"
    with pytest.raises(ArgumentError, match=r"cannot be read from .*No such file"):
        Secret.read(path)
    path.write_bytes(bytes(32))
    path.chmod(0o640)
    with pytest.raises(ArgumentError, match="of mode 0640: chmod 600"):
        Secret.read(path)
    path.chmod(0o600)
    assert number(read_frame(frame(Secret.read(path)), OTHER)) == 1.0
    path.write_bytes(b"")
    with pytest.raises(ArgumentError, match="16 bytes or more, got 0"):
        Secret.read(path)


def test_a_secret_is_shown_and_pickled_nowhere():
    assert repr(SECRET) == "Secret(...)"
    with pytest.raises(ArgumentError, match="must not be pickled"):
        pickle.dumps(SECRET)
