"""What was not made with the secret is refused by name, before anything of it is believed."""

import pickle

import numpy as np
import pytest
import torch
from factories import journaled, objects
from tensordict import TensorDict

from gfn_rb import fifo_buffer, load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import Secret, load_state, save_state
from gfn_rb.checkpoint.api import outline
from gfn_rb.codec import LazyBuffer, decode_frame, encode_frame, layout, primitives
from gfn_rb.codec.layout import Prefix
from gfn_rb.errors import ArgumentError, GfnRbError, SecretError

SECRET, OTHER = Secret(bytes(range(32))), Secret(bytes(32))
META = {"id": 1}


def rows(value):
    """Rows with a tensor in the head of a frame and one in its body."""
    return TensorDict(
        {"small": torch.full((3,), value), "large": torch.full((3, 2000), value)}, [3]
    )


def frame(secret, value=1.0):
    made = encode_frame(7, rows(value), META, secret)
    return b"".join(each.make() if isinstance(each, LazyBuffer) else each for each in made)


def read_frame(content, secret):
    return float(decode_frame(np.frombuffer(content, np.uint8).copy(), secret).rows["large"][0, 0])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.ckpt"


@pytest.fixture(params=["frame", "file"])
def form(request, path):
    """What makes bytes of a number with a secret, and what reads them."""
    if request.param == "frame":
        return frame, read_frame

    def make(secret, value=1.0):
        save_state(path, {"rows": torch.full((9000,), value)}, secret=secret)
        return path.read_bytes()

    def read(content, secret):
        path.write_bytes(content)
        return float(load_state(path, secret=secret)["rows"][0])

    return make, read


def test_those_who_share_a_secret_read_what_each_other_wrote(form):
    make, read = form
    assert read(make(SECRET), Secret(bytes(range(32)))) == 1.0
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


def test_any_flipped_bit_is_refused(form):
    make, read = form
    content = make(SECRET)
    for at in [*range(64), *range(64, len(content), 997), len(content) - 1]:
        if at != 8 and not 24 <= at < 64:
            with pytest.raises((SecretError, GfnRbError)) as caught:
                read(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :], SECRET)
            # What begins otherwise is no frame at all.
            assert at < 8 or isinstance(caught.value, SecretError)


def test_who_makes_sums_without_the_secret_is_refused(form):
    make, read = form
    forged = bytearray(make(None, 2.0))
    forged[12:16] = forged[12:16].upper()  # it says that it was made with a secret
    prefix = Prefix.read(memoryview(forged), "it")
    prefix.seal(memoryview(forged)[: prefix.head_nbytes])
    with pytest.raises(SecretError, match="another secret") as caught:
        read(bytes(forged), SECRET)
    right = make(SECRET, 2.0)[16:24]  # which nobody is told
    for shown in (right.hex(), right[::-1].hex()):
        assert shown not in str(caught.value)


def test_no_part_goes_with_others_than_its_own(form):
    make, read = form
    one, other = make(SECRET, 1.0), make(SECRET, 2.0)
    for end in (10_000, len(one) - 8):
        with pytest.raises(SecretError):
            read(one[:end] + other[end:], SECRET)


def test_no_block_goes_with_others_than_its_own(path, monkeypatch):
    for module in (layout, primitives):
        monkeypatch.setattr(module, "BLOCK", 10_000)
    for cached in ("_planned", "_layout_of"):  # layouts of other blocks
        monkeypatch.setattr(layout, cached, getattr(layout, cached).__wrapped__)
    files = []
    for value in (1.0, 2.0):
        save_state(path, {"rows": torch.full((9000,), value)}, secret=SECRET)
        assert load_state(path, secret=SECRET)["rows"][0] == value
        files.append(path.read_bytes())
    one, other = files
    sums = len(one) - 4 * 8
    for n in (1, 2, 3):  # blocks of the first, the rest of the second
        end, sums_end = sums - 36_000 + n * 10_000, sums + n * 8
        path.write_bytes(one[:end] + other[end:sums] + one[sums:sums_end] + other[sums_end:])
        with pytest.raises(SecretError, match="another secret"):
            load_state(path, secret=SECRET)


def test_a_file_changes_nothing_before_it_is_believed(path):
    rb, target = fifo_buffer(8), fifo_buffer(8)
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
    assert read_frame(frame(Secret.read(path)), OTHER) == 1.0
    path.write_bytes(b"")
    with pytest.raises(ArgumentError, match="16 bytes or more, got 0"):
        Secret.read(path)


def test_a_secret_is_shown_and_pickled_nowhere():
    assert repr(SECRET) == "Secret(...)"
    with pytest.raises(ArgumentError, match="must not be pickled"):
        pickle.dumps(SECRET)
