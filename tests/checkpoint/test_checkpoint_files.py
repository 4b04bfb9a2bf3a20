"""The file: whole or not at all, and nothing but what was written."""

from __future__ import annotations

import fcntl
import json
import os
import random
import stat
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gfn_rb.checkpoint import inspect_checkpoint, load_state, reading, save_state, writing
from gfn_rb.checkpoint.layout import PREFIX, SUM
from gfn_rb.checkpoint.reading import CheckpointFile
from gfn_rb.checkpoint.tree import Encoder
from gfn_rb.checkpoint.writing import write_file
from gfn_rb.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

LEFTOVER = ".run.ckpt.0123456789abcdef.tmp"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.ckpt"


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# Killed processes.


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("checkpoint_kill.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("kill")), "24", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_kill_at_any_instant_leaves_the_last_good_one(found: dict[str, Any]) -> None:
    generations, files = found["killed"]["generations"], found["killed"]["files"]
    assert generations == sorted(generations)  # whatever was published stays
    assert len(set(generations)) > 10  # saves did succeed between the kills
    assert max(files[:-1]) == 2  # some kills came in the middle of one, and left their file
    assert files.count(2) >= 3
    assert files[-1] == 1  # which the next save removed


def test_storages_larger_than_memory_pass_through(found: dict[str, Any]) -> None:
    # A copy does not fit, or the limit would not limit.
    assert found["memory"] == {"copy": False, "save": True, "load": True, "rows": True}


# Publishing.


def test_the_file_is_synced_then_renamed_then_the_folder_is_synced(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    save_state(path, {"x": torch.zeros(5)})
    size = path.stat().st_size
    assert events == [f"file of {size} bytes", "rename to run.ckpt", "folder"]


def test_a_failed_save_leaves_the_old_file_and_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(path, {"k": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"run\.ckpt: No space left on device"):
        save_state(path, {"k": 2})
    assert load_state(path) == {"k": 1}
    assert names(path.parent) == {"run.ckpt"}


def test_an_interrupted_save_leaves_the_old_file_and_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(path, {"k": 1})

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_state(path, {"k": 2})
    assert load_state(path) == {"k": 1}
    assert names(path.parent) == {"run.ckpt"}


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(path: Path) -> None:
    others = {
        ".run.ckpt.0123456789abcde.tmp",
        ".run.ckpt.0123456789abcdef.tmp2",
        ".run.ckpt.old.0123456789abcdef.tmp",
        ".other.0123456789abcdef.tmp",
        "run.ckpt.0123456789abcdef.tmp",
        ".runxckpt.0123456789abcdef.tmp",
    }
    for name in {LEFTOVER, *others}:
        (path.parent / name).touch()
    save_state(path, {})
    assert names(path.parent) == {"run.ckpt", *others}


def test_the_file_of_a_save_in_progress_is_left_alone(path: Path) -> None:
    with (path.parent / LEFTOVER).open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        save_state(path, {})
        assert names(path.parent) == {"run.ckpt", LEFTOVER}
    save_state(path, {})
    assert names(path.parent) == {"run.ckpt"}


def test_a_save_in_progress_holds_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def save_another(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        save_state(path, {"k": "the other"})
        replace(source, target)

    monkeypatch.setattr(os, "replace", save_another)
    save_state(path, {"k": "the one"})
    assert load_state(path) == {"k": "the one"}


def test_links_are_followed_and_the_umask_decides_who_may_read(path: Path) -> None:
    link = path.with_name("latest")
    link.symlink_to(path)
    before = os.umask(0o027)
    try:
        save_state(link, {"k": 1})
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_paths_that_cannot_be(path: Path) -> None:
    with pytest.raises(CheckpointError, match="path must name a file, got the folder"):
        save_state(path.parent, {})
    with pytest.raises(CheckpointError, match=r"nowhere/x: No such file or directory"):
        save_state(path.parent / "nowhere" / "x", {})
    for read in (load_state, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*run\.ckpt"):
            read(path)
        with pytest.raises(CheckpointError, match=r"cannot read .*: Is a directory"):
            read(path.parent)


# Damage.


STATE = {"x": torch.arange(9.0), "y": [2.5, "z"]}


@pytest.mark.parametrize("read", [load_state, inspect_checkpoint])
def test_truncation_anywhere_is_noticed(path: Path, read: Any) -> None:
    save_state(path, STATE)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointCorruptError):
            read(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointCorruptError, match=f"has {len(content) + 1} bytes, expected"):
        read(path)


def test_any_changed_byte_is_noticed(path: Path) -> None:
    save_state(path, STATE)
    content = path.read_bytes()
    pick = random.Random(0)
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= pick.randrange(1, 256)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError):
            load_state(path)


def test_inspecting_notices_any_changed_byte_of_the_header(path: Path) -> None:
    save_state(path, STATE)
    content = path.read_bytes()
    end = PREFIX.size + SUM.size + PREFIX.unpack_from(content)[2]
    for i in range(end):
        damaged = bytearray(content)
        damaged[i] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointCorruptError):
            inspect_checkpoint(path)


def test_damage_is_located_by_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_STEP", 1 << 10)
    for module in (writing, reading):
        monkeypatch.setattr(module, "BLOCK", 1 << 12)
    state = {"x": torch.randn(5000), "y": torch.randn(100, 60).T, "z": torch.randn(3000)[::2]}
    save_state(path, state)
    came = load_state(path)
    assert all(torch.equal(came[name], state[name]) for name in state)
    content = bytearray(path.read_bytes())
    content[3 * 4096 + 17] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match="checksum of bytes 12288 to 16384 is"):
        load_state(path)


def test_the_checksums_are_those_of_zlib(path: Path) -> None:
    save_state(path, STATE)
    content = path.read_bytes()
    body, table, last = content[:-8], content[-8:-4], content[-4:]
    assert table == zlib.crc32(body).to_bytes(4, "little")
    assert last == zlib.crc32(table).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"PK\x03\x04" + bytes(100), r"it begins with b'PK\\x03\\x04\\x00\\x00\\x00\\x00'"),
    ],
)
def test_other_files_are_told_apart(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=message):
        load_state(path)


def test_another_format_version_is_told_apart_from_damage(path: Path) -> None:
    save_state(path, STATE)
    content = bytearray(path.read_bytes())
    fields = list(PREFIX.unpack_from(content))
    fields[1] += 1
    PREFIX.pack_into(content, 0, *fields)
    SUM.pack_into(content, PREFIX.size, zlib.crc32(content[: PREFIX.size]))
    path.write_bytes(content)
    with pytest.raises(CheckpointMismatchError, match="is of format version 2, expected 1"):
        load_state(path)


@pytest.mark.parametrize(
    "node", [{"novelty": 1}, {"dtype": "float7"}], ids=["unknown kind", "unknown dtype"]
)
def test_what_a_later_version_might_write_is_named(path: Path, node: Any) -> None:
    with path.open("wb") as stream:
        write_file(stream, {"state": node}, [])
    (name,) = node.values() if "dtype" in node else node
    with pytest.raises(CheckpointMismatchError, match=f"holds '{name}', which this version"):
        load_state(path)


# Writing straight from memory.


def address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])


def test_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.zeros(3 * writing.BLOCK, dtype=torch.uint8)
    (piece,) = writing._pieces(tensor[5:])
    assert (address(piece), len(piece)) == (tensor.data_ptr() + 5, 3 * writing.BLOCK - 5)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60000).reshape(300, 200).T,
        torch.arange(60000).reshape(2, 30000).T.reshape(1, 30000, 2),
        torch.arange(60000)[::2],
        torch.arange(40000).reshape(2, 20000)[:, ::2],
    ],
    ids=["transposed", "one row", "strided", "rows above a block"],
)
def test_other_tensors_are_copied_block_by_block(
    tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BLOCK", 1 << 12)
    pieces = [bytes(piece) for piece in writing._pieces(tensor)]
    assert max(map(len, pieces)) <= 1 << 12
    assert b"".join(pieces) == tensor.contiguous().numpy().tobytes()


def test_what_lived_on_an_accelerator_goes_to_the_one_asked_for(path: Path) -> None:
    # The meta device stands for an accelerator, on which there is no content to compare.
    on_cpu, elsewhere = torch.arange(3), TensorDict({"x": torch.ones(2)}, [2], device="cpu")
    encoder = Encoder()
    node = encoder.encode({"a": on_cpu, "b": elsewhere}, "state")
    with path.open("wb") as stream:
        write_file(stream, {"state": node}, encoder.tensors)
    file = CheckpointFile(path)
    file._header["tensors"][1]["device"] = "cuda"
    file.sections["state"]["dict"][1][1]["tensordict"]["device"] = "cuda"
    for device in (torch.device("cpu"), torch.device("meta")):
        state = file.load("state", device)
        assert torch.equal(state["a"], on_cpu)
        assert state["b"].device == device
        assert state["b"]["x"].device == device
        assert (state["b"]["x"].dtype, state["b"]["x"].shape) == (torch.float32, (2,))
