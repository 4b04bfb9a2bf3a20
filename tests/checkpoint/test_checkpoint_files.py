"""The file: whole or not at all, and nothing but what was written."""

import fcntl
import os
import resource
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoint.checkpoint_kill import kill_loop, memory
from factories import in_fresh_process

from gfn_rb import fifo_buffer
from gfn_rb.checkpoint import (
    Journal,
    atomic,
    load_state,
    save_state,
)
from gfn_rb.checkpoint.api import outline
from gfn_rb.errors import CheckpointError
from gfn_rb.interop.torch_files import write_torch_file

LEFTOVER = ".run.ckpt.0123456789abcdef.tmp"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ckpt"


def names(folder):
    return {entry.name for entry in folder.iterdir()}


# Killed processes.


@pytest.mark.slow
def test_a_kill_at_any_instant_leaves_the_last_good_one(path):
    found = in_fresh_process(kill_loop, path, 12, 3)
    generations, files = found["generations"], found["files"]
    assert generations == sorted(generations)  # whatever was published stays
    assert len(set(generations)) > 5  # saves did succeed between the kills
    assert max(files[:-1]) == 2  # some kills came in the middle of one, and left their file
    assert files.count(2) >= 3
    assert files[-1] == 1  # which the next save removed


def test_storages_larger_than_memory_pass_through(tmp_path):
    # A copy does not fit, or the limit would not limit.
    found = in_fresh_process(memory, tmp_path)
    assert found == {"copy": False, "save": True, "load": True, "rows": True}


# Publishing.


def test_the_file_is_synced_then_renamed_then_the_folder_is_synced(path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def record_fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append("folder" if is_folder else f"file of {os.fstat(descriptor).st_size} bytes")
        fsync(descriptor)

    def record_replace(source, target):
        events.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    save_state(path, {"x": torch.zeros(5)})
    atomic.link(path, path.with_name("copy"))
    saved = [f"file of {path.stat().st_size} bytes", "rename to run.ckpt", "folder"]
    assert events == [*saved, "rename to copy", "folder"]


def test_an_interrupted_save_leaves_the_old_file_and_no_other(path, monkeypatch):
    save_state(path, {"k": 1})

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_state(path, {"k": 2})
    assert load_state(path) == {"k": 1}
    assert names(path.parent) == {"run.ckpt"}


def test_leftovers_of_killed_saves_are_removed_and_nothing_else(path):
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
    with (path.parent / LEFTOVER).open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # of a save in progress
        save_state(path, {})
        assert names(path.parent) == {"run.ckpt", LEFTOVER, *others}
    save_state(path, {})
    assert names(path.parent) == {"run.ckpt", *others}


def test_a_save_in_progress_holds_its_lock(path, monkeypatch):
    replace = os.replace

    def save_another(source, target):
        monkeypatch.setattr(os, "replace", replace)
        save_state(path, {"k": "the other"})
        replace(source, target)

    monkeypatch.setattr(os, "replace", save_another)
    save_state(path, {"k": "the one"})
    assert load_state(path) == {"k": "the one"}


def test_links_are_followed_and_the_umask_decides_who_may_read(path):
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
    path.chmod(0o600)
    save_state(path, {"k": 2})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # it keeps its mode


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "x" * 201])
def test_names_may_be_as_long_as_the_system_takes(path, name):
    path = path.with_name(name)
    save_state(path, {"k": 1})
    leftover = path.with_name(f".{atomic._stem(path)}.0123456789abcdef.tmp")
    leftover.touch()
    save_state(path, {"k": 2})
    assert load_state(path) == {"k": 2}
    assert names(path.parent) == {name}


def test_only_files_are_replaced_and_read(path):
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="path must name a file, got the folder"):
        save_state(path.parent, {})
    for device, word in ((path, "pipe"), (Path("/dev/null"), "device")):
        with pytest.raises(CheckpointError, match=f"path must name a file, got the {word}"):
            save_state(device, {})
        for read in (load_state, outline):
            with pytest.raises(CheckpointError, match="Is no regular file"):  # and does not wait
                read(device)
    assert names(path.parent) == {"run.ckpt"}


def test_tensors_that_change_meanwhile_make_a_sound_file(path):
    state, done = {"x": torch.zeros(1 << 22)}, threading.Event()

    def change():
        while not done.is_set():
            state["x"].add_(1.0)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            save_state(path, state)
            load_state(path)
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_nobody_waits_for_one_that_was_stopped_or_loses_a_file_to_one_that_tidies_up(path):
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    done = threading.Event()

    def tidy_up():
        while not done.is_set():
            atomic.remove_abandoned(path.parent)

    with ThreadPoolExecutor(2) as pool:
        tidying = [pool.submit(tidy_up) for _ in range(2)]
        try:
            for k in range(200):
                save_state(path, {"k": k})
                assert load_state(path) == {"k": k}
        finally:
            done.set()
    os.close(folder)
    assert [each.result() for each in tidying] == [None, None]
    assert names(path.parent) == {"run.ckpt"}


def test_a_full_disk_is_named_and_leaves_the_old_file(path):
    save_state(path, {"k": 1})
    for save, state in (
        (save_state, {"x": torch.zeros(1 << 20)}),
        (save_state, {"x": torch.zeros(1 << 15)}),
        (write_torch_file, {"x": torch.zeros(1 << 15)}),
    ):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        try:
            with pytest.raises(CheckpointError, match=r"cannot write .*: File too large"):
                save(path, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert load_state(path) == {"k": 1}
        assert names(path.parent) == {"run.ckpt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a link of another user")
def test_a_strangers_link_in_a_folder_of_everybody_is_not_followed(tmp_path):
    shared, target = tmp_path / "shared", tmp_path / "precious"
    shared.mkdir()
    shared.chmod(0o1777)
    target.write_text("kept")
    (link := shared / "run.ckpt").symlink_to(target)
    os.lchown(link, 65534, 65534)
    for use in (
        lambda: save_state(link, {"step": 1}),
        lambda: load_state(link),
        lambda: Journal(fifo_buffer(3), link),
    ):
        with pytest.raises(CheckpointError, match="is a link of user 65534"):
            use()
    assert target.read_text() == "kept"
    os.lchown(link, 0, 0)
    save_state(link, {"step": 1})
    assert load_state(target) == {"step": 1}
