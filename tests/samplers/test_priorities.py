import torch
from factories import Fault
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage

from gfn_rb.samplers.priorities import HeldPriorities


def stored(n, slots=6):
    storage = LazyTensorStorage(slots)
    write(storage, range(n))
    return storage


def write(storage, index):
    index = torch.tensor([*index])
    storage.set(index, TensorDict({"p": torch.full(index.shape, 5.0)}, index.shape))
    return index


def test_a_state_is_a_copy_and_needs_no_storage():
    held, storage = HeldPriorities(), stored(2)
    held.write(storage, torch.arange(2), torch.tensor([0.25, 7.0]))
    state, fresh = held.state(), HeldPriorities()
    held.write(storage, torch.tensor([0]), torch.tensor([9.0]))
    fresh.restore(state)
    fresh.announce(storage, write(storage, [2]))
    assert fresh.values(storage).tolist() == [0.25, 7, 7]


def test_a_restored_state_outlasts_an_interrupt_while_it_is_laid_out():
    held, storage, n, is_over = HeldPriorities(), stored(2), 1, False
    held.write(storage, torch.arange(2), torch.tensor([0.25, 7.0]))
    while not is_over:
        fresh = HeldPriorities()
        fresh.restore(held.state())
        with Fault(KeyboardInterrupt, n, lambda code: "/gfn_rb/" in code.co_filename) as fault:
            fresh.values(storage)
        assert fresh.values(storage).tolist() == [0.25, 7]
        is_over, n = not fault.was_raised, n + 1
    assert n > 10
