"""Gradients of several ranks, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gfn_rb.checkpoint import Secret
from gfn_rb.errors import GfnRbError, WorkerError
from gfn_rb.training.session.joining import RefusedError
from gfn_rb.training.session.rank_hooks import GRADIENT_TAG, GradientAverage
from gfn_rb.transports import LocalTransport
from gfn_rb.transports.deadline import ShutdownBudget


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


def together(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(20) for future in [pool.submit(each) for each in functions]]


@pytest.fixture
def three():
    transports = LocalTransport.group(3, timeout=5.0)
    return [GradientAverage(each, range(3), timeout=5.0) for each in transports], transports


def averaged(averages, modules, values):
    def one(average, found, value):
        average(graded(found, value))
        return found.weight.grad[0, 0].item(), found.bias.grad[0].item()

    rows = zip(averages, modules, values, strict=True)
    return together(*[lambda row=row: one(*row) for row in rows])


def test_all_have_the_mean_and_from_the_first_round_on_the_same_parameters(three):
    averages, _ = three
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
    averages, _ = three
    modules = [graded(module(rank), 3.0) for rank in range(3)]
    modules[1].weight.grad = None
    for each in modules:
        each.bias.requires_grad_(False)
        each.bias.grad = None
    together(*[lambda i=i: averages[i](modules[i]) for i in range(3)])
    assert [each.weight.grad[0, 0].item() for each in modules] == [2.0] * 3
    assert [each.bias[0].item() for each in modules] == [0.0, 10.0, 20.0]
    assert all(each.bias.grad is None for each in modules)


def test_who_is_done_is_left_out_in_silence(three, caplog):
    averages, transports = three
    modules = [module(rank) for rank in range(3)]
    averaged(averages, modules, [1.0, 2.0, 6.0])
    for _ in range(2):
        averages[2].close()
    assert averaged(averages[:2], modules[:2], [1.0, 2.0]) == [(1.5, 1.5)] * 2
    assert averages[0].peers.present == [1]
    assert transports[0].probe(2, GRADIENT_TAG) is None  # it was told once
    assert caplog.messages == []


def raised(averages, modules):
    """What each rank raises: its type and text."""

    def one(average, found):
        try:
            average(graded(found, 1.0))
        except GfnRbError as error:
            return type(error), str(error)

    pairs = zip(averages, modules, strict=True)
    return together(*[lambda pair=pair: one(*pair) for pair in pairs])


def test_all_fail_without_one_that_is_lost_and_the_first_says_so(three):
    averages, transports = three
    averages[0]._advice = "; continue with: gfn-rb resume run"
    modules = [module(rank) for rank in range(3)]
    averaged(averages, modules, [1.0, 2.0, 6.0])
    transports[1].close()
    own, told = raised([averages[0], averages[2]], [modules[0], modules[2]])
    assert own[0] is WorkerError
    assert own[1].startswith("gradients cannot be averaged without rank 1: rank 1 is lost")
    assert own[1].endswith("; continue with: gfn-rb resume run")
    assert told == (RefusedError, own[1])
    assert list(averages[0].peers.lost) == [1]


def test_who_was_silent_is_told_so_when_it_comes_back():
    transports = LocalTransport.group(2, timeout=5.0)
    averages = [GradientAverage(each, range(2), timeout=0.1) for each in transports]
    modules = [module(rank) for rank in range(2)]
    (own,) = raised(averages[:1], modules[:1])
    assert own[1].endswith("without rank 1: it sent no gradients within 0.1 s")
    assert raised(averages[1:], modules[1:]) == [(RefusedError, own[1])]


def test_without_the_first_rank_each_other_fails_and_a_rank_alone_averages(three):
    averages, transports = three
    transports[0].close()
    for kind, text in raised(averages[1:], [module(rank) for rank in (1, 2)]):
        assert kind is WorkerError
        assert text.startswith("gradients cannot be averaged without rank 0: rank 0 is lost")
    average, found = GradientAverage(LocalTransport.group(1)[0], [0]), graded(module(0), 4.0)
    average(found)
    average.close()
    assert found.weight.grad[0, 0] == 4.0


def stopping(which, told, stop=lambda: None):
    """Two ranks with much patience, of which one may be told to stop."""
    transports = LocalTransport.group(2, timeout=60.0)
    stopped = [told.is_set if rank == which else lambda: False for rank in range(2)]
    return [
        GradientAverage(transports[i], range(2), 60.0, ShutdownBudget(stopped[i]), stop)
        for i in range(2)
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_told_to_stop_does_not_wait_for_others_which_stop_too(which, caplog):
    told, other_stops = threading.Event(), threading.Event()
    averages = stopping(which, told, other_stops.set)
    modules = [graded(module(rank), float(rank + 1)) for rank in range(2)]
    start = time.monotonic()
    threading.Timer(0.2, told.set).start()
    averages[which](modules[which])  # the other does not come
    assert 0.2 <= time.monotonic() - start < 30.0
    assert modules[which].weight.grad[0, 0] == which + 1
    assert not other_stops.is_set()
    averages[1 - which](modules[1 - which])  # it ends its step, and need not wait
    # Rank 1 had sent its gradient before it was told.
    assert modules[1 - which].weight.grad[0, 0] == (2.0 if which == 0 else 1.5)
    averages[1 - which](modules[1 - which])
    assert other_stops.is_set()
    assert caplog.messages == []


def test_a_rank_told_to_stop_takes_the_gradients_that_have_come():
    told = threading.Event()
    told.set()
    averages = stopping(0, told)
    modules = [graded(module(rank), float(rank + 1)) for rank in range(2)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(averages[1], modules[1])
        assert averages[0]._transport.probe(1, GRADIENT_TAG, 5.0) is not None
        averages[0](modules[0])
    assert [each.weight.grad[0, 0].item() for each in modules] == [1.5, 1.5]


def test_who_lacks_the_secret_counts_as_lost(three):
    averages, transports = three
    for each in transports[:2]:
        each.secret = Secret(bytes(16))
    (_, text), *_ = raised(averages, [module(rank) for rank in range(3)])
    assert "without rank 2: " in text
    assert "was made without the secret" in text
