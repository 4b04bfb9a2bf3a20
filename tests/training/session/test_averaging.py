"""Gradients of several ranks, in threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gfn_rb.checkpoint import Secret
from gfn_rb.training.session.averaging import GRADIENT_TAG, GradientAverage
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


def test_all_have_the_mean(three):
    averages, _ = three
    modules = [module(rank) for rank in range(3)]
    assert averaged(averages, modules, [1.0, 2.0, 6.0]) == [(3.0, 3.0)] * 3
    assert averaged(averages, modules, [0.0, -3.0, 0.0]) == [(-1.0, -1.0)] * 3
    # Clipping in place changes no message that is still on its way.
    assert all(each.weight.grad.untyped_storage().nbytes() == 4 * 6 for each in modules)


def test_parameters_become_the_same_in_the_first_round_alone(three):
    averages, _ = three
    modules = [module(rank) for rank in range(3)]
    averaged(averages, modules, [1.0, 1.0, 1.0])
    assert all(torch.equal(each.weight, torch.full((2, 3), 1.0)) for each in modules)
    assert all(torch.equal(each.bias, torch.full((2,), 10.0)) for each in modules)
    with torch.no_grad():
        modules[0].weight.fill_(7.0)
    averaged(averages, modules, [1.0, 1.0, 1.0])
    assert [each.weight[0, 0].item() for each in modules] == [7.0, 1.0, 1.0]


def test_equal_numbers_stay_what_they_are(three):
    averages, _ = three
    modules = [nn.Linear(50, 50) for _ in range(3)]
    for each in modules[1:]:
        each.load_state_dict(modules[0].state_dict())
    before = modules[0].weight.clone()
    averaged(averages, modules, [0.1, 0.1, 0.1])
    assert all(torch.equal(each.weight, before) for each in modules)


def test_a_parameter_without_a_gradient_counts_as_zero(three):
    averages, _ = three
    modules = [graded(module(rank), 3.0) for rank in range(3)]
    modules[1].bias.grad = None
    together(*[lambda i=i: averages[i](modules[i]) for i in range(3)])
    assert [each.bias.grad[0].item() for each in modules] == [2.0] * 3


def test_a_frozen_parameter_is_each_ranks_own(three):
    averages, _ = three
    modules = [module(rank) for rank in range(3)]
    for each in modules:
        each.bias.requires_grad_(False)
        each.weight.grad = torch.ones(2, 3)
    together(*[lambda i=i: averages[i](modules[i]) for i in range(3)])
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


def test_who_is_lost_is_left_out_and_named(three, caplog):
    averages, transports = three
    modules = [module(rank) for rank in range(3)]
    averaged(averages, modules, [1.0, 2.0, 6.0])
    transports[1].close()
    others = [averages[0], averages[2]]
    assert averaged(others, [modules[0], modules[2]], [1.0, 2.0]) == [(1.5, 1.5)] * 2
    (message,) = caplog.messages
    assert "rank 0: rank 1 is left out: rank 1 is lost" in message
    assert "the mean of 2 ranks" in message


def test_who_is_silent_is_left_out_and_told_so_when_it_comes_back(caplog):
    transports = LocalTransport.group(2, timeout=5.0)
    averages = [GradientAverage(each, range(2), timeout=0.1) for each in transports]
    modules = [graded(module(rank), float(rank)) for rank in range(2)]
    averages[0](modules[0])
    assert modules[0].weight.grad[0, 0] == 0.0
    assert "rank 1 is left out: it sent no gradients within 0.1 s" in caplog.text
    averages[1](modules[1])
    assert modules[1].weight.grad[0, 0] == 1.0
    assert averages[0].peers.present == []
    assert len(caplog.messages) == 1  # the one that was silent need not wait to find out


def test_others_wait_while_the_first_waits_for_each_in_turn():
    transports = LocalTransport.group(5, timeout=5.0)
    averages = [GradientAverage(each, range(5), timeout=0.3) for each in transports]
    modules = [module(rank) for rank in range(5)]
    ends = [(averages[i], modules[i], value) for i, value in ((0, 1.0), (4, 4.0))]
    assert averaged(*zip(*ends, strict=True)) == [(2.5, 2.5)] * 2  # ranks 1 to 3 are silent
    assert averages[0].peers.present == [4]


def test_when_the_first_is_done_each_goes_on_alone_in_silence(three, caplog):
    averages, _ = three
    modules = [module(rank) for rank in range(3)]
    averaged(averages, modules, [1.0, 2.0, 6.0])
    averages[0].close()
    assert averaged(averages[1:], modules[1:], [2.0, 6.0]) == [(2.0, 2.0), (6.0, 6.0)]
    assert averages[1].peers.present == []
    assert caplog.messages == []


def test_without_the_first_rank_each_goes_on_alone(three, caplog):
    averages, transports = three
    modules = [module(rank) for rank in range(3)]
    transports[0].close()
    assert averaged(averages[1:], modules[1:], [2.0, 6.0]) == [(2.0, 2.0), (6.0, 6.0)]
    assert averaged(averages[1:], modules[1:], [3.0, 5.0]) == [(3.0, 3.0), (5.0, 5.0)]
    assert len(caplog.messages) == 2
    assert all("rank 0 is left out" in each for each in caplog.messages)


def test_a_rank_alone_sends_nothing():
    (transport,) = LocalTransport.group(1)
    average, found = GradientAverage(transport, [0]), graded(module(0), 4.0)
    average(found)
    average.close()
    assert found.weight.grad[0, 0] == 4.0


def stopping(which, told):
    """Two ranks with much patience, of which one may be told to stop."""
    transports = LocalTransport.group(2, timeout=60.0)
    stopped = [told.is_set if rank == which else lambda: False for rank in range(2)]
    return [
        GradientAverage(transports[i], range(2), 60.0, ShutdownBudget(stopped[i])) for i in range(2)
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_told_to_stop_does_not_wait_for_others(which, caplog):
    told = threading.Event()
    averages = stopping(which, told)
    modules = [graded(module(rank), float(rank + 1)) for rank in range(2)]
    start = time.monotonic()
    threading.Timer(0.2, told.set).start()
    averages[which](modules[which])  # the other does not come
    assert 0.2 <= time.monotonic() - start < 30.0
    assert modules[which].weight.grad[0, 0] == which + 1
    averages[1 - which](modules[1 - which])  # it goes on, and need not wait
    # Rank 1 had sent its gradient before it was told.
    assert modules[1 - which].weight.grad[0, 0] == (2.0 if which == 0 else 1.5)
    assert caplog.messages == []


def test_a_rank_told_to_stop_takes_what_is_there():
    told = threading.Event()
    told.set()
    averages = stopping(0, told)
    modules = [graded(module(rank), float(rank + 1)) for rank in range(2)]
    other = threading.Thread(target=averages[1], args=(modules[1],))
    other.start()
    assert averages[0]._transport.probe(1, GRADIENT_TAG, 5.0) is not None
    averages[0](modules[0])
    other.join(5)
    assert [each.weight.grad[0, 0].item() for each in modules] == [1.5, 1.5]


def test_who_lacks_the_secret_is_left_out(three, caplog):
    averages, transports = three
    for each in transports[:2]:
        each.secret = Secret(bytes(16))
    assert averaged(averages, [module(rank) for rank in range(3)], [1.0, 3.0, 8.0])[0][0] == 2.0
    assert "was made without the secret" in caplog.text
