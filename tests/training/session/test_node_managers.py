"""Runs in which each node has a manager of its own; nodes are names that a variable gives."""

import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from training.session.distributed_runs import TRAIN, assert_same_account, read_json, said
from training.training_runs import grid
from transports.ranks import SECONDS, abort, environment, mpiexec

from gfn_rb.errors import ArgumentError
from gfn_rb.remote.ranks import RankRoles
from gfn_rb.training import FeedOptions, ManagersOptions
from gfn_rb.training.cli import main
from gfn_rb.training.session.distributed import check_kept_roles, roles_of
from gfn_rb.training.session.folder import RunFolder

NODE = ["--managers", "node", "--managers.exchange-every", "0.05", "--feed", "newest"]
HERE = [sys.executable, "-m", "gfn_rb"]


def under_mpiexec(nodes, words):
    """Run ranks of several nodes under mpiexec; return its code and lines."""
    command = [mpiexec(), "--oversubscribe"]
    for i, node in enumerate(nodes):
        colon = [":"] * bool(i)
        command += [*colon, "-n", "1", "-x", f"GFN_RB_NODE={node}", *HERE, *words]
    return finished([(command, {})])


def as_processes(nodes, words):
    """Run ranks of several nodes as plain processes; return the first code and all lines."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    each = [{**common, "RANK": str(i), "GFN_RB_NODE": node} for i, node in enumerate(nodes)]
    return finished([([*HERE, *words], variables) for variables in each])


def finished(commands):
    kept = {k: v for k, v in environment().items() if not k.startswith(("OMPI_COMM", "PMIX"))}
    started = [
        subprocess.Popen(
            command, env={**kept, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for command, variables in commands
    ]  # fmt: skip
    try:
        errors = [each.communicate(timeout=SECONDS)[1] for each in started]
    finally:
        for each in started:
            abort(each)
    codes = [each.returncode for each in started]
    return codes, "".join(errors).replace("\r", "\n").splitlines()


LAUNCHERS = pytest.mark.parametrize("launch", [under_mpiexec, as_processes])


@pytest.mark.slow
@LAUNCHERS
def test_each_node_has_a_manager_and_its_objects_reach_the_other(launch, tmp_path):
    words = [*TRAIN, *NODE, "--out", str(tmp_path / "run")]
    codes, lines = launch(["a", "b", "a", "b"], words)  # ranks of the nodes alternate
    assert {*codes} == {0}, lines
    report = read_json(tmp_path / "run" / "report.json")
    assert (report["managers"], sorted(report["ranks"])) == ([2, 3], ["0", "1"])
    for manager, worker, other in ((2, 0, 3), (3, 1, 2)):
        senders = read_json(tmp_path / "run" / f"manager-rank{manager}.json")["senders"]
        assert senders.keys() == {str(worker), str(other)}
        counters = report["ranks"][str(worker)]["counters"]
        assert counters["managers"] == [manager]
        assert_same_account(counters, senders[str(worker)])
        assert senders[str(other)]["stored"] > 0
        assert senders[str(other)]["state"] == "gone"
        assert counters["fed"] > 0  # of a node with one worker, all are of the other node
    codes, lines = launch(["a", "a", "b", "b"], ["resume", str(tmp_path / "run"), "--steps", "13"])
    assert 0 not in codes
    (why,) = said(lines)
    assert "managers node needs nodes with the same ranks when a run is resumed" in why
    codes, lines = launch(["c", "d"] * 2, ["resume", str(tmp_path / "run"), "--steps", "14"])
    assert {*codes} == {0}, lines


@pytest.mark.slow
@LAUNCHERS
def test_a_node_with_one_rank_is_refused_in_one_line(launch, tmp_path):
    codes, lines = launch(["a", "a", "b"], [*TRAIN, *NODE, "--out", str(tmp_path / "run")])
    assert 0 not in codes
    (why,) = said(lines)
    assert "each node has at least 2 ranks" in why
    assert "got no other rank beside rank 2 on b" in why
    assert not (tmp_path / "run").exists()


def test_without_a_launcher_the_manager_of_the_node_is_a_thread(tmp_path):
    words = [*TRAIN, *NODE[:2], "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert read_json(tmp_path / "run" / "manager-rank1.json")["stored"] > 0


def test_roles_of_a_run():
    config = grid(managers=ManagersOptions(1))
    assert roles_of(config, ["a", "b", "c"]) == RankRoles(3, (2,))
    config = replace(config, managers=ManagersOptions("node"))
    assert roles_of(config, ["a", "b", "b", "a"]) == RankRoles(4, (2, 3), ((0, 3), (1, 2)))


def test_roles_may_not_change_when_a_run_is_resumed(tmp_path):
    roles = RankRoles.by_node(["a", "b", "b", "a"])
    check_kept_roles(tmp_path, roles)  # nothing was saved
    for rank in range(4):
        RunFolder(tmp_path, rank).checkpoint.touch()
    for rank in roles.managers:
        RunFolder(tmp_path, rank).journal.touch()
    check_kept_roles(tmp_path, roles)
    with pytest.raises(ArgumentError, match="got others: rank 1 did train before"):
        check_kept_roles(tmp_path, RankRoles.by_node(["a", "a", "b", "b"]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"n": "nodes"}, "managers must be at least 0, or node, got 'nodes'"),
        ({"n": -1}, "managers must be at least 0, or node, got -1"),
        ({"n": 1, "exchange_every": 2.0}, "exchange_every has no effect unless managers is node"),
        ({"n": "node", "exchange_every": 99.0}, "exchange_every must be at most patience, 9, got"),
        ({"n": "node", "exchange_quota": 5000}, "exchange_quota must be at most 4096, got 5000"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, why, unchecked):
    config = grid(managers=ManagersOptions(**options), feed=FeedOptions("top"), patience=9.0)
    with pytest.raises(ArgumentError, match=why):
        config.validate()
