"""Ranks that join one run, or are refused one, in threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gfn_rb.errors import ArgumentError, PeerLostError, TransportError
from gfn_rb.training.session.joining import JOINING_TAG, RefusedError, find_launch, join
from gfn_rb.transports import LocalTransport

PLAN = {"gfn_rb": "0.1.0", "env": "tfbind8", "steps": 100, "hidden": [16], "log_z": None}


def unprepared():
    raise AssertionError("rank 0 alone prepares, and only what all agree on")


def joined(plans, prepare=unprepared, faults=None, patience=10.0):
    """The folder that each rank is told, or the error that it raises."""
    transports = LocalTransport.group(len(plans), timeout=patience)

    def one(rank):
        fault = (faults or {}).get(rank)
        try:
            return join(
                transports[rank], plans[rank], fault, unprepared if rank else prepare, patience
            )
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(plans)) as pool:
        return [*pool.map(one, range(len(plans)))]


def assert_refused(found, kind, why, code=2):
    first, *others = found
    assert type(first) is kind
    assert str(first) == why
    assert [type(each) for each in others] == [RefusedError] * len(others)
    assert [(str(each), each.code) for each in others] == [(why, code)] * len(others)


def test_rank_0_prepares_and_all_know_the_folder(tmp_path):
    assert joined([PLAN] * 3, lambda: tmp_path) == [tmp_path.resolve()] * 3


def test_a_relative_folder_is_the_same_for_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert joined([PLAN] * 2, lambda: Path("run")) == [tmp_path.resolve() / "run"] * 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"steps": 200},
            "steps must be the same on all ranks, got 100 on rank 0 and 200 on rank 2",
        ),
        (
            {"gfn_rb": "0.2.0"},
            "gfn_rb must be the same on all ranks, got '0.1.0' on rank 0 and '0.2.0' on rank 2",
        ),
        (
            {"height": 8},
            "height must be the same on all ranks, got None on rank 0 and 8 on rank 2",
        ),
    ],
)
def test_ranks_that_do_not_agree_are_refused_by_name(change, why):
    assert_refused(joined([PLAN, PLAN, {**PLAN, **change}]), ArgumentError, why)


def test_what_one_rank_cannot_do_is_refused_to_all():
    faults = {1: ArgumentError("device must be cpu, got 'cuda'")}
    why = "rank 1: device must be cpu, got 'cuda'"
    assert_refused(joined([PLAN] * 3, faults=faults), ArgumentError, why)


def test_of_a_fault_that_all_find_rank_0_speaks():
    faults = dict.fromkeys(range(3), ArgumentError("steps must be at least 1, got 0"))
    assert_refused(joined([PLAN] * 3, faults=faults), ArgumentError, str(faults[0]))


@pytest.mark.parametrize(("kind", "code"), [(ArgumentError, 2), (OSError, 1)])
def test_all_are_told_why_there_is_no_folder(kind, code):
    def prepare():
        raise kind("out must be a new folder")

    assert_refused(joined([PLAN] * 3, prepare), kind, "out must be a new folder", code)


def test_all_are_told_when_rank_0_is_interrupted():
    def interrupted():
        raise KeyboardInterrupt

    first, second = LocalTransport.group(2, timeout=10.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, second, PLAN, None, unprepared, 10.0)
        with pytest.raises(KeyboardInterrupt):
            join(first, PLAN, None, interrupted, 10.0)
        with pytest.raises(RefusedError):
            other.result(20)


def test_rank_0_that_says_nothing_is_named():
    _, second = LocalTransport.group(2)
    with pytest.raises(TransportError, match=r"rank 0 named no run folder within 0\.1 s"):
        join(second, PLAN, None, unprepared, 0.05)


def test_a_rank_that_says_nothing_is_named_to_all():
    first, second, _ = LocalTransport.group(3)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, second, PLAN, None, unprepared, 10.0)
        with pytest.raises(TransportError, match=r"rank 2 did not join within 0\.5 s"):
            join(first, PLAN, None, unprepared, 0.5)
        with pytest.raises(RefusedError, match="rank 2 did not join") as caught:
            other.result(20)
    assert caught.value.code == 1


def test_a_rank_that_is_gone_is_named():
    first, second = LocalTransport.group(2)
    second.close()
    with pytest.raises(PeerLostError, match="rank 1"):
        join(first, PLAN, None, unprepared, 10.0)


def test_what_cannot_be_read_is_named():
    first, second = LocalTransport.group(2)
    second.send([b"of another version"], 0, JOINING_TAG)
    with pytest.raises(ArgumentError, match="rank 1 cannot be understood: "):
        join(first, PLAN, None, unprepared, 10.0)


# Who started this process.


@pytest.fixture
def environment(monkeypatch):
    """Have a launcher set variables, and no other one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)

    def set_all(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_without_a_launcher_this_process_is_alone(environment):
    assert find_launch() is find_launch("local") is None
    for transport in ("mpi", "gloo"):
        with pytest.raises(ArgumentError, match=f"no launcher started .* got '{transport}'"):
            find_launch(transport)


def test_the_user_may_insist(environment):
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    assert find_launch().transport == "gloo"
    assert find_launch("mpi").transport == "mpi"
    assert find_launch("local") is None


@pytest.mark.parametrize(
    ("values", "transport", "why"),
    [
        ({"PMIX_RANK": "0"}, "auto", "PMIX_RANK is set, and nothing tells how many ranks there"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "auto", "2 processes were started, and nothing tells"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},
            "gloo",
            "3 processes were started, and nothing tells where rank 0 is, got no MASTER_ADDR",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused_once(values, transport, why, environment):
    environment(**values)
    with pytest.raises(ArgumentError, match=f"{why}.*--transport local"):
        find_launch(transport)
    environment(**{name: "1" for name in values if "RANK" in name})
    with pytest.raises(RefusedError, match=why):
        find_launch(transport)
