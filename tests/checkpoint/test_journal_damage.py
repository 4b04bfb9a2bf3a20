"""A damaged journal is an exact earlier state, or is refused; what is sound can be recovered."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from checkpoint.journals import (  # noqa: F401
    FILES,
    MAKES,
    assert_comes_back,
    closed,
    copied,
    items,
    state_of,
)
from factories import (
    assert_equal,
)
from xxhash import xxh3_64_digest

from gfn_rb.checkpoint import database, recover
from gfn_rb.checkpoint.slots import counts_of, slot_states
from gfn_rb.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rb.journal"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A journal as a kill leaves it, of whose transactions some are in its log; all its states."""
    path = tmp_path_factory.mktemp("damaged") / "rb.journal"
    rb = MAKES["unique"](journal=path, sync="always")
    states = [state_of(rb)]
    for seed in range(12):
        rb.extend(items(6, seed))
        states.append(state_of(rb))
        if seed == 5:
            rb.journal._database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    left = copied(path)
    rb.journal.close()
    return left, states


def changed(source, target, change):
    """Copy the files of a journal, of which a function changed the content by suffix."""
    files = {suffix: bytearray(Path(f"{source}{suffix}").read_bytes()) for suffix in FILES}
    change(files)
    for suffix in FILES:
        Path(f"{target}{suffix}").unlink(missing_ok=True)
        if suffix in files:
            Path(f"{target}{suffix}").write_bytes(files[suffix])
    return target


def opened(source, folder, change):
    """Open a changed copy of a journal, and return its state."""
    rb = MAKES["unique"](journal=changed(source, folder / "changed", change))
    try:
        return state_of(rb)
    finally:
        rb.journal.close()


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("kind", ["flipped", "torn", "zeros"])
def test_damage_at_any_page_is_an_exact_earlier_state_or_refused(
    damaged, kind, has_mark, tmp_path, request
):
    step = 1031 if request.config.getoption("--all") else 2063
    source, states = damaged
    refused = n_opened = n = 0
    for suffix in FILES[:2]:
        size = Path(f"{source}{suffix}").stat().st_size
        assert size > 2 * 4096
        for at in range(37, size, step):
            n += 1

            def change(files, suffix=suffix, at=at):
                if kind == "flipped":
                    files[suffix][at] ^= 1 << at % 8
                elif kind == "torn":
                    del files[suffix][at:]
                else:
                    files[suffix][at : at + 512] = bytes(len(files[suffix][at : at + 512]))
                if not has_mark:  # as of a time when nothing was synced
                    name = database._MARK.unpack(files["-mark"])[1]
                    checksum = xxh3_64_digest(b"1 " + name)
                    files["-mark"] = database._MARK.pack(1, name, checksum)

            try:
                came = opened(source, tmp_path, change)
            except CheckpointError:
                refused += 1
                continue
            # The last one, such as of a page that is not used, where everything was synced.
            assert str(came) in [*map(str, states[-1:] if has_mark else states)]
            n_opened += 1
    assert refused >= 5 * has_mark
    assert refused + n_opened == n


def test_the_three_files_belong_together(damaged, tmp_path):
    source, states = damaged
    assert_equal(opened(source, tmp_path, lambda files: None), states[-1])
    early = MAKES["unique"](journal=tmp_path / "other")
    early.journal.close()
    others = {suffix: f"{tmp_path / 'other'}{suffix}" for suffix in ("", "-mark")}
    for change, match in (
        (lambda files: files.pop("-mark"), "it has no mark .*-mark, so it is a part of"),
        (lambda files: files.pop("-wal"), "transaction 13 was on disk, and 7 is the last"),
        (lambda files: (files.pop("-wal"), files.pop("")), "has no transaction, and a mark of one"),
        (lambda files: files.update({"": b""}), "is no sound journal"),
        (
            lambda files: files.update({"-mark": Path(others["-mark"]).read_bytes()}),
            "is damaged, missing or another's",
        ),
    ):
        with pytest.raises(CheckpointCorruptError, match=match):
            opened(source, tmp_path, change)


def test_what_is_sound_of_a_damaged_journal_is_recovered(damaged, tmp_path):
    source, states = damaged
    target = tmp_path / "recovered"

    def recovered(change):
        broken = tmp_path / "broken"
        broken.mkdir(exist_ok=True)
        changed(source, broken / "rb", change)
        before = {each.name: each.read_bytes() for each in broken.iterdir()}
        found = recover(broken / "rb", target)
        assert before == {each.name: each.read_bytes() for each in broken.iterdir()}
        rb = MAKES["unique"](journal=target, sync="always")
        rb.extend(items(9, 50))
        assert_comes_back(rb, MAKES["unique"], target)
        rb.journal.close()
        return found

    assert recovered(lambda files: None) == {"number": 13, "left_out": 0, "damage": None}
    found = recovered(lambda files: files.pop("-wal"))
    assert (found["number"], found["left_out"]) == (7, 0)
    assert "transaction 13 was on disk" in found["damage"]
    assert recovered(lambda files: files.pop("-mark"))["number"] == 13

    def flip(files):
        del files["-wal"]
        at = files[""].rindex(states[6]["rows"]["state"][3].numpy().tobytes())
        files[""][at] ^= 1

    found = recovered(flip)
    assert (found["number"], found["left_out"]) == (7, 1)
    for wrong in (tmp_path / "none", target):
        with pytest.raises(CheckpointError, match="path must name an existing journal"):
            recover(wrong, target)


def test_what_is_recovered_replaces_what_a_kill_left(path):
    rb = MAKES["unique"](journal=path, sync="always")
    rb.extend(items(9, 1))
    target = copied(path)
    assert Path(f"{target}-wal").exists()
    rb.extend(items(9, 2))
    rb.journal.close()
    assert recover(path, target)["left_out"] == 0
    assert_comes_back(rb, MAKES["unique"], target)


@pytest.mark.parametrize(
    "values",
    [
        {"length": 2**62}, {"length": -1}, {"cursor": 2**62}, {"counters": []},
        {"counters": [[2**70, 1]]}, {"transform": {}}, {"columns": None}, {"columns": {}},
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused_quickly(path, values):
    def make(**more):
        return MAKES["best"](statistics=True, **more)

    rb = make(journal=path, sync="never")
    rb.extend(items(5, 1))
    counts = {**counts_of(rb, slot_states(rb)), "columns": [], **values}
    rb.journal._database.write([], [], 5, counts, {}, sync=True)
    begun = time.monotonic()
    with pytest.raises(CheckpointError, match="does not fit the buffer"):
        make(journal=copied(path))
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE row SET row = NULL",
        "UPDATE row SET row = 7 WHERE slot = 2",
        "UPDATE row SET slot = -1 WHERE slot = 2",
        "UPDATE row SET slot = 900 WHERE slot = 2",
        "DELETE FROM row WHERE slot = 2",
        "UPDATE state SET name = 5 WHERE name = 'counts'",
        "UPDATE state SET value = 'text'",
        "DELETE FROM state WHERE name = 'base'",
        "DROP TABLE row",
        "PRAGMA user_version=7",
    ],
)
def test_changed_tables_are_refused(path, change):
    rb = MAKES["best"](journal=path, sync="always")
    rb.extend(items(5, 1))
    rb.journal.close()
    with closing(sqlite3.connect(path)) as other:
        other.execute(change)
        other.commit()
    with pytest.raises(CheckpointError, match=r"\A[^\n]*\Z"):
        MAKES["best"](journal=path)


def test_journals_of_other_buffers_are_refused(path):
    rb = MAKES["unique"](journal=path, sync="never")
    rb.extend(items(9, 1))
    rb.journal.close()
    before = path.read_bytes()
    for other in ("best", "newest", "diverse"):
        with pytest.raises(CheckpointMismatchError):
            MAKES[other](journal=path)
    assert path.read_bytes() == before
    assert len(MAKES["unique"](journal=path)) == len(rb)


def test_other_formats_and_other_files_are_refused(path):
    for content, match in (
        (b"gfn_rb\r\n" + bytes(120), "is a checkpoint, or a journal of format 4 or older"),
        (b"x", "is no sound journal: it begins with b'x'"),
        (b"notes\n" * 100, "is no sound journal: it begins with b'notes"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=match):
            MAKES["best"](journal=path)
        assert path.read_bytes() == content
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE state (name, value)")
    with pytest.raises(CheckpointCorruptError, match="of another application"):
        MAKES["best"](journal=path)
