"""Exchanges between the ranks of a run, how they join it and train together, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gfn_rb.checkpoint import Secret
from gfn_rb.errors import ArgumentError, GfnRbError, WorkerError
from gfn_rb.training.session import RefusedError, rank_hooks
from gfn_rb.training.session.joining import TAG, Star, find_launch, join
from gfn_rb.training.session.rank_hooks import GradientAverage, Meetings
from gfn_rb.training.session.run import StopSignals
from gfn_rb.training.trainer import Trainer
from gfn_rb.transports import LocalTransport
from gfn_rb.transports.base import ShutdownBudget


def together(function, *arguments):
    """What a function returns, or the error that it raises, for each of several arguments."""

    def one(argument):
        try:
            return function(argument)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(arguments)) as pool:
        return [*pool.map(one, arguments)]


def stars(size, timeout=5.0, **options):
    transports = LocalTransport.group(size, timeout=5.0)
    return [Star(each, range(size), timeout, **options) for each in transports], transports


def test_the_first_rank_gathers_and_shares_rows_and_values():
    ranks, _ = stars(3)

    def one(rank):
        row = TensorDict({"mode": torch.tensor([rank])}, [1])
        found = ranks[rank].gather({"calls": 10 * rank}, row)
        told = [(each.source, each.meta["calls"], each.rows["mode"].item()) for each in found]
        meta, rows = ranks[rank].share({"next": 5}, row)
        return told, meta["next"], rows["mode"].item()

    assert together(one, 2, 1, 0) == [([], 5, 0), ([], 5, 0), ([(1, 10, 1), (2, 20, 2)], 5, 0)]
    (alone,), _ = stars(1)
    assert alone.gather() == []
    assert alone.share({"next": 1}) == ({"next": 1}, None)


def met(star, work=lambda star: (star.gather(), star.share())):
    """What ranks do at each step; a rank that fails tells the others."""
    try:
        work(star)
    except GfnRbError as error:
        star.fail(str(error))
        raise


summed = partial(met, work=lambda star: star.summed(torch.ones(3, dtype=torch.float64)))


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_lost_rank_ends_all_others_and_one_says_so(lost, is_silent):
    ranks, transports = stars(3, timeout=0.2)
    if not is_silent:
        transports[lost].close()
    first, second = together(met, *(ranks[rank] for rank in range(3) if rank != lost))
    assert (type(first), type(second)) == (WorkerError, RefusedError)
    why = "it sent nothing within 0" if is_silent else "it closed its endpoint"
    assert str(first).startswith(f"rank {lost} is lost: {why}")
    assert second.code == 1


def test_the_ranks_share_one_deadline_however_many_they_are():
    ranks, _ = stars(6, timeout=0.5)
    timers = [threading.Timer(0.3 * rank, ranks[rank].gather) for rank in range(1, 6)]
    for timer in timers:
        timer.start()
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 2 is lost: it sent nothing within 0\.5 s"):
        ranks[0].gather()
    assert time.monotonic() - start < 20.0
    for timer in timers:
        timer.join()


@pytest.mark.parametrize(
    ("exchange", "size", "failing"),
    [(met, 3, 0), (met, 3, 1), (met, 3, 2), (summed, 7, 0), (summed, 7, 2), (summed, 7, 5)],
)
def test_a_rank_that_fails_ends_the_others_which_say_nothing(exchange, size, failing):
    ranks, _ = stars(size)
    ranks[failing].fail("loss is NaN")
    found = together(exchange, *(ranks[rank] for rank in range(size) if rank != failing))
    assert [(type(each), str(each), each.code) for each in found] == [
        (RefusedError, "loss is NaN", 1)
    ] * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
def test_a_sum_along_a_tree_is_the_same_on_all_ranks(size):
    ranks, transports = stars(size)
    values = torch.randn(size, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    taken = [0] * size
    for rank, transport in enumerate(transports):
        take = transport.take

        def counted(envelope, rank=rank, take=take):
            taken[rank] += 1
            return take(envelope)

        transport.take = counted
    for scale in (1.0, 3.0):  # one after another
        sums = together(lambda r, s=scale: ranks[r].summed(s * values[r]), *range(size))
        assert all(torch.equal(each, sums[0]) for each in sums)
        torch.testing.assert_close(sums[0], scale * values.sum(0))
    assert max(taken) <= 2 * 3  # of each sum, from two below and one above
    equal = together(
        lambda r: ranks[r].summed(torch.full((2,), 0.1, dtype=torch.float64)), *range(size)
    )
    assert torch.allclose(equal[0], torch.full((2,), 0.1 * size, dtype=torch.float64))


@pytest.mark.parametrize("lost", [0, 1, 3, 6])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_rank_lost_in_a_sum_along_a_tree_ends_all_others_and_one_says_so(lost, is_silent):
    ranks, transports = stars(7, timeout=0.2)
    if not is_silent:
        transports[lost].close()
    errors = together(summed, *(ranks[rank] for rank in range(7) if rank != lost))
    told = [str(each) for each in errors if isinstance(each, WorkerError)]
    assert len(told) == 1
    assert " is lost: " in told[0]
    assert is_silent or told[0].startswith(f"rank {lost} is lost: it closed its endpoint")
    assert sum(isinstance(each, RefusedError) for each in errors) == 5


def test_what_cannot_be_understood_counts_as_lost():
    ranks, transports = stars(2)
    transports[1].isend([b"nonsense"], 0, TAG)
    with pytest.raises(WorkerError, match="rank 1 is lost: it cannot be understood: "):
        ranks[0].gather()
    ranks, transports = stars(2)
    transports[0].secret = Secret(bytes(16))
    first, _ = together(met, *ranks)
    assert "rank 1 is lost: it cannot be understood: " in str(first)
    assert "was made without the secret" in str(first)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_told_to_stop_waits_no_longer(rank):
    stop = threading.Event()
    ranks, _ = stars(2, timeout=60.0, shutdown=ShutdownBudget(stop.is_set, seconds=0.2))
    threading.Timer(0.2, stop.set).start()
    start = time.monotonic()
    (error,) = together(met, ranks[rank])
    assert time.monotonic() - start < 20.0
    assert str(error) == f"rank {1 - rank} is lost: it sent nothing before this rank was to stop"


PLAN = {"gfn_rb": "0.1.0", "env": "tfbind8", "steps": 100, "hidden": [16], "log_z": None}


def unprepared(nodes):
    raise AssertionError("rank 0 alone prepares, and only what all agree on")


def joined(plans, prepare=unprepared, faults=None):
    """The folder that each rank is told, or the error that it raises."""
    transports = LocalTransport.group(len(plans), timeout=10.0)

    def one(rank):
        fault, made = (faults or {}).get(rank), unprepared if rank else prepare
        return join(Star(transports[rank], range(len(plans)), 10.0), plans[rank], fault, made)

    return together(one, *range(len(plans)))


def assert_refused(found, kind, why, code=2):
    first, *others = found
    assert type(first) is kind
    assert str(first) == why
    assert [type(each) for each in others] == [RefusedError] * len(others)
    assert [(str(each), each.code) for each in others] == [(why, code)] * len(others)


def test_rank_0_prepares_and_all_know_the_folder_and_the_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GFN_RB_NODE", "a")
    for path in (tmp_path, Path("run")):
        made = lambda nodes, path=path: path.joinpath(*nodes)  # noqa: E731
        assert joined([PLAN] * 3, made) == [((path / "a/a/a").resolve(), ["a"] * 3)] * 3


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 200}, "100 on rank 0 and 200"),
        ({"gfn_rb": "0.2.0"}, "'0.1.0' on rank 0 and '0.2.0'"),
        ({"height": 8}, "None on rank 0 and 8"),
    ],
)
def test_ranks_that_do_not_agree_are_refused_by_name(change, why):
    (name,) = change
    why = f"{name} must be the same on all ranks, got {why} on rank 2"
    assert_refused(joined([PLAN, PLAN, {**PLAN, **change}]), ArgumentError, why)


@pytest.mark.parametrize(("ranks", "why"), [([1], "rank 1: no cuda"), ([0, 1, 2], "no cuda")])
def test_what_a_rank_cannot_do_is_refused_to_all(ranks, why):
    """Rank 0 alone reports a fault that all find."""
    faults = dict.fromkeys(ranks, ArgumentError("no cuda"))
    assert_refused(joined([PLAN] * 3, faults=faults), ArgumentError, why)


@pytest.mark.parametrize(("kind", "code"), [(ArgumentError, 2), (OSError, 1)])
def test_all_are_told_why_there_is_no_folder(kind, code):
    def prepare(nodes):
        raise kind("out must be a new folder")

    assert_refused(joined([PLAN] * 3, prepare), kind, "out must be a new folder", code)


def test_all_are_told_when_rank_0_is_interrupted():
    def interrupted(nodes):
        raise KeyboardInterrupt

    (first, second), _ = stars(2, 10.0)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, second, PLAN, None, unprepared)
        with pytest.raises(KeyboardInterrupt):
            join(first, PLAN, None, interrupted)
        with pytest.raises(RefusedError):
            other.result(20)


def test_a_rank_that_does_not_join_is_named_to_all():
    (first, second, _), _ = stars(3, 0.5)
    names = together(lambda star: join(star, PLAN, None, unprepared), first, second)
    assert [type(each) for each in names] == [WorkerError, RefusedError]
    assert {*map(str, names)} == {"rank 2 is lost: it sent nothing within 0.5 s"}
    assert names[1].code == 1


@pytest.fixture
def environment(monkeypatch):
    """Have a launcher set variables, and no other one."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(*each) for each in values.items()]


def test_without_a_launcher_this_process_is_alone_and_with_one_the_user_may_insist(environment):
    assert find_launch() is find_launch("local") is None
    for transport in ("mpi", "tcp", "gloo"):
        with pytest.raises(ArgumentError, match=f"no launcher started .* got '{transport}'"):
            find_launch(transport)
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")
    assert find_launch().transport == find_launch("gloo").transport == "tcp"
    assert find_launch("mpi").transport == "mpi"
    assert find_launch("local") is None


@pytest.mark.parametrize(
    ("values", "transport", "why"),
    [
        ({"PMIX_RANK": "0"}, "auto", "PMIX_RANK is set, and nothing tells how many ranks there"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "auto", "2 processes were started, and nothing tells"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}, "tcp", "3 processes were st"),
    ],
)
def test_what_cannot_be_joined_is_refused_once(values, transport, why, environment):
    environment(**values)
    with pytest.raises(ArgumentError, match=f"{why}.*--transport local"):
        find_launch(transport)
    environment(**{name: "1" for name in values if "RANK" in name})
    with pytest.raises(RefusedError, match=why):
        find_launch(transport)


# Averaged gradients, and the steps at which ranks that train meet.


def module(rank):
    found = nn.Linear(3, 2).requires_grad_(True)
    with torch.no_grad():
        found.weight.fill_(rank)
        found.bias.fill_(10.0 * rank)
    return found


def graded(found, value):
    for parameter in found.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return found


@pytest.fixture(params=["ranks", "tree"])
def three(request):
    return [GradientAverage(star, request.param) for star in stars(3)[0]]


def averaged(averages, modules, values):
    def one(average, found, value):
        average(graded(found, value))
        return found.weight.grad[0, 0].item(), found.bias.grad[0].item()

    return together(lambda row: one(*row), *zip(averages, modules, values, strict=True))


def test_all_have_the_mean_and_from_the_first_round_on_the_same_parameters(three):
    averages = three
    modules = [module(rank) for rank in range(3)]
    assert averaged(averages, modules, [1.0, 2.0, 6.0]) == [(3.0, 3.0)] * 3
    assert all((each.weight == 1.0).all() and (each.bias == 10.0).all() for each in modules)
    with torch.no_grad():
        modules[0].weight.fill_(7.0)
    assert averaged(averages, modules, [0.0, -3.0, 0.0]) == [(-1.0, -1.0)] * 3
    assert [each.weight[0, 0].item() for each in modules] == [7.0, 1.0, 1.0]
    # Clipping in place changes no message that is still on its way.
    assert all(each.weight.grad.untyped_storage().nbytes() == 4 * 6 for each in modules)


def test_without_a_gradient_a_parameter_counts_as_zero_and_a_frozen_one_is_each_ranks_own(three):
    averages = three
    modules = [graded(module(rank), 3.0) for rank in range(3)]
    modules[1].weight.grad = None
    for each in modules:
        each.bias.requires_grad_(False)
        each.bias.grad = None
    together(lambda i: averages[i](modules[i]), *range(3))
    assert [each.weight.grad[0, 0].item() for each in modules] == [2.0] * 3
    assert [each.bias[0].item() for each in modules] == [0.0, 10.0, 20.0]
    assert all(each.bias.grad is None for each in modules)


@pytest.mark.parametrize("by", ["ranks", "tree"])
def test_a_rank_alone_keeps_its_gradients(by):
    average, found = GradientAverage(stars(1)[0][0], by), module(0)
    average(graded(found, 4.0))
    assert found.weight.grad[0, 0] == 4.0


def found(step, n_modes):
    return SimpleNamespace(calls=8 * step, modes_found=n_modes)


def trainer_of(**attributes):
    trainer = object.__new__(Trainer)
    vars(trainer).update(attributes)
    return trainer


class Ranks:
    """Ranks that take steps and meet, as many as asked for, each in a thread."""

    def __init__(self, size, steps=20, save_every=6):
        self.steps, self.stop = steps, [StopSignals() for _ in range(size)]
        pairs = zip(stars(size)[0], self.stop, strict=True)
        self.meetings = [Meetings(*each, save_every) for each in pairs]

    def taken(self, rank, told=()):
        """How many steps a rank takes; it is told to stop after some."""
        meetings, config = self.meetings[rank], SimpleNamespace(steps=self.steps)
        for step in range(1, self.steps + 1):
            if (rank, step) in told:
                self.stop[rank].request()
            meetings.stepped(
                trainer_of(config=config, steps_done=step, discovery=found(step, rank))
            )
            if meetings.stops:
                return step
        return self.steps


def test_all_ranks_stop_after_the_same_step_though_one_alone_was_told():
    ranks = Ranks(3)
    found = together(lambda rank: ranks.taken(rank, {(1, 7)}), *range(3))
    assert len({*found}) == 1
    assert 7 <= found[0] <= 12  # at the latest when the next checkpoint is due
    assert all(each.received is not None for each in ranks.stop)
    assert Ranks(1).taken(0, {(0, 7)}) == 7  # alone, at once


def test_ranks_meet_when_a_checkpoint_is_due_and_know_the_progress_of_all(monkeypatch):
    monkeypatch.setattr(rank_hooks, "_EVERY", 1e9)
    ranks, steps = Ranks(2), []
    share = ranks.meetings[0]._star.share
    ranks.meetings[0]._star.share = lambda meta: (steps.append(meta["next"]), share(meta))[1]
    assert together(ranks.taken, 0, 1) == [20, 20]
    assert steps == [6, 12, 18, 24, 24]  # after the first step, and then at each checkpoint
    trainer = trainer_of(discovery=found(125, 3), env=SimpleNamespace(n_modes=4))
    assert ranks.meetings[0].describe(trainer, 1.25) == (
        "loss 1.250, modes 3|1 of 4, 1,160 reward calls"
    )
