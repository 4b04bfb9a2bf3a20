"""A power loss at any instant loses nothing of a journal or a checkpoint that was acknowledged."""

import os
import random
import shutil
import sys

import pytest
from checkpoint.lossy_disk import SECTOR, Disk, Event, recorder
from checkpoint.power_loss import lose

# The whole check is of 500 losses: GFN_RB_LOSSES=500 pytest tests/checkpoint/test_power_loss.py
LOSSES = int(os.environ.get("GFN_RB_LOSSES", "50"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    return recorder(tmp_path_factory.mktemp("recorder"))


def write(name, at, content):
    return Event("w", name, at, content, 0)


def sync(name):
    return Event("s", name, 0, b"", 0)


def left_by(disk, seed=0):
    """Everything that losses leave, in many tries."""
    pick = random.Random(seed)
    return {tuple(sorted(disk.lost(pick).items())) for _ in range(500)}


def test_a_disk_keeps_what_was_synced_and_tears_the_rest():
    a, b, c = (bytes([letter]) * SECTOR for letter in b"abc")
    disk = Disk({"old": a + a})
    disk.feed(write("old", 0, b + b))
    assert left_by(disk) == {(("old", one + other),) for one in (a, b) for other in (a, b)}
    disk.feed(sync("old"))
    assert left_by(disk) == {(("old", b + b),)}
    disk.feed(write("old", 2 * SECTOR, c))
    zero = bytes(SECTOR)
    assert left_by(disk) == {(("old", b + b + end),) for end in (b"", zero, c)}
    disk.feed(Event("t", "old", SECTOR, b"", 0))
    disk.feed(sync("old"))
    assert left_by(disk) == {(("old", b),)}


def test_a_disk_may_lose_names_until_the_folder_is_synced():
    disk = Disk({"old": b"x"})
    disk.feed(Event("c", "new", 0, b"", 0))
    disk.feed(write("new", 0, b"y"))
    disk.feed(sync("new"))
    assert left_by(disk) == {(("old", b"x"),), (("new", b"y"), ("old", b"x"))}
    disk.feed(sync(""))
    disk.feed(Event("r", "new", 0, b"old", 0))
    assert left_by(disk) == {(("new", b"y"), ("old", b"x")), (("old", b"y"),)}
    disk.feed(sync(""))
    disk.feed(Event("u", "old", 0, b"", 0))
    assert left_by(disk) == {(), (("old", b"y"),)}


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["always", "never"])
def test_a_power_loss_loses_nothing_that_was_on_disk(sync, library, tmp_path):
    found = lose(library, tmp_path, sync, LOSSES, 1)
    assert found["wrong"] == []
    assert found["n"] == LOSSES
    assert {"open", "extend", "priorities"} <= {*found["during"]}
