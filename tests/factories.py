"""Items, buffers, environments and policies that tests of several folders are made of."""

from __future__ import annotations

import contextlib
import gc
import inspect
import linecache
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from statistics_of_draws import chi_square_p
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from gfn_rb.checkpoint import Journal
from gfn_rb.codec import LazyBuffer
from gfn_rb.containers import Trajectories
from gfn_rb.containers.objects import objects_in
from gfn_rb.envs import EnumerableEnv, GFNEnv, SequenceEnv

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SINK = -1


# TorchRL after 0.14.1 has draws that wait.
TORCHRL_WAITS = "wait" in inspect.signature(ReplayBuffer.sample).parameters


def in_fresh_process(work, *args):
    """What a function returns in a process without other threads, in which it may fork."""
    context = multiprocessing.get_context("forkserver")
    # A thread of OpenMP's would not be in the processes that it forks, which then wait for it.
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as pool:
        return pool.submit(work, *args).result()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Items.


def rows(log_reward, start=0, device=None, **more):
    """Items numbered from ``start`` under ``x``."""
    log_reward = torch.as_tensor(log_reward, dtype=torch.float32)
    n = len(log_reward)
    x = torch.arange(start, start + n)
    return TensorDict({"x": x, "log_reward": log_reward, **more}, [n], device=device)


def objects(values, log_reward=None):
    """Terminating states [v, 0], one for each value, as terminating_state_buffer stores them."""
    values = torch.as_tensor(values, dtype=torch.int64)
    state = torch.stack([values, torch.zeros_like(values)], 1)
    log_reward = values.float() if log_reward is None else torch.as_tensor(log_reward)
    return TensorDict({"state": state, "log_reward": log_reward}, [len(values)])


def trajectories(values, log_reward=None, length=2, n_steps=None):
    """Trajectories 0 -> v -> sink, padded to n_steps; the terminating state is [v]."""
    values = torch.as_tensor(values, dtype=torch.int64)
    n, n_steps = len(values), n_steps or length
    state = torch.full((n, n_steps + 1, 1), -1)
    state[:, : length - 1] = 0
    state[:, length - 1, 0] = values
    action = torch.full((n, n_steps), -1)
    action[:, :length] = 1
    log_reward = values.float() if log_reward is None else torch.as_tensor(log_reward)
    return TensorDict(
        {
            "state": state,
            "action": action,
            "length": torch.full((n,), length),
            "log_reward": log_reward,
        },
        [n],
    )


def transitions(values):
    """Transitions 0 -> v, none of them terminating but the last."""
    values = torch.as_tensor(values, dtype=torch.int64)
    done = torch.zeros(len(values), 1, dtype=torch.bool)
    done[-1] = True
    return TensorDict(
        {
            "state": values[:, None],
            "action": torch.ones_like(values),
            "next": TensorDict({"state": values[:, None] + 1, "done": done}, [len(values)]),
            "log_reward": torch.where(done[:, 0], 1.0, -torch.inf),
        },
        [len(values)],
    )


def object_names(rows, at=None):
    """The bytes of the object of each row, None for rows that are no whole objects."""
    found = objects_in(rows, at)
    names = [None] * found.n
    for row, columns in zip(found.at.tolist(), found.columns, strict=True):
        names[row] = columns.tobytes()
    return names


def two_rows() -> Trajectories:
    """A forward walk 0 -> 3 -> 5 -> sink beside a backward one, sink -> 2 -> 0, padded to T=4."""
    return Trajectories(
        state=torch.tensor([[0, 3, 5, SINK, SINK], [SINK, 2, 0, SINK, SINK]]),
        action=torch.tensor([[3, 2, 9, -1], [9, 2, -1, -1]]),
        length=torch.tensor([3, 2]),
        log_reward=torch.tensor([1.5, -2.0]),
        log_prob=torch.tensor([[-0.1, -0.2, -0.3, 0.0], [0.0, -0.7, 0.0, 0.0]]),
        is_backward=torch.tensor([False, True]),
    )


def joined(buffers):
    """The bytes of an encoded frame, of which some parts are made late."""
    parts = (each.make() if isinstance(each, LazyBuffer) else each for each in buffers)
    return b"".join(map(bytes, parts))


def assert_equal(one, other, path=""):
    """Assert that nested values are the same, bit for bit; tensors may lie on disk."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
        return
    are_lists = isinstance(one, list) and isinstance(other, list)  # perhaps TensorDict's, of texts
    assert are_lists or type(one) is type(other), path
    if hasattr(one, "items"):
        assert list(one.keys()) == list(other.keys()), path
        for key in one.keys():  # noqa: SIM118
            assert_equal(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{path}/{i}")
    else:
        assert one == other, path


# Buffers.


def buffer_of(sampler, log_reward=(), capacity=None, storage=None, seed=0, **kwargs):
    """A buffer that draws by a sampler, filled with :func:`rows` of these log-rewards."""
    rb = TensorDictReplayBuffer(
        storage=storage or LazyTensorStorage(capacity or max(len(log_reward), 1)),
        sampler=sampler,
        generator=None if seed is None else seeded(seed),
        **kwargs,
    )
    if len(log_reward):
        rb.extend(rows(log_reward))
    return rb


@contextlib.contextmanager
def without_waits():
    """Raise where work within a block waits for CUDA."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_cuda_draws_do_not_wait(sampler, log_reward, p):
    """Draw without waiting for the device, by the law ``p`` of the rows.

    Args:
        sampler: with replacement.
        log_reward: of the rows.
        p: the probability of each.
    """
    n = len(log_reward)
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(n, device="cuda"),
        sampler=sampler,
        generator=torch.Generator("cuda").manual_seed(0),
    )
    rb.extend(rows(log_reward).to("cuda"))
    sampler.sample(rb.storage, 4)
    with without_waits():
        for replacement in (True, "auto"):
            sampler.replacement = replacement
            index, _ = sampler.sample(rb.storage, 4)
    assert index.device.type == "cuda"
    sampler.replacement = True
    counts = np.bincount(rb.sample(20_000)["index"].cpu(), minlength=n)
    assert chi_square_p(counts, p) > 1e-3


# Environments small enough to follow by hand.


class CountOnes(SequenceEnv, EnumerableEnv):
    """Of letters 0 and 1, log R(x) is the number of ones, and the one mode is 11...1."""

    n_modes = 1

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        self.check_terminating(state)
        return self.n_last_letters(state).float()

    def mode_index(self, state: Tensor) -> Tensor:
        return (self.n_last_letters(state) == self.length).long() - 1

    def n_last_letters(self, state: Tensor) -> Tensor:
        return (state == self.n_letters - 1).sum(1)


class Ladder(GFNEnv):
    """Scalar states 0..top, climbed one at a time; log R(x) = condition * x."""

    def __init__(self, top: int, batch_size: tuple[int, ...] = ()) -> None:
        super().__init__(
            torch.tensor(0),
            torch.tensor(-1),
            n_actions=2,
            max_length=top + 1,
            encoded_size=1,
            condition_shape=torch.Size([1]),
            batch_size=batch_size,
        )
        self.top = top

    def forward_mask(self, state: Tensor) -> Tensor:
        return torch.stack([(state >= 0) & (state < self.top), state >= 0], 1)

    def backward_mask(self, state: Tensor) -> Tensor:
        return state[:, None] > 0

    def log_reward(self, state: Tensor, condition: Tensor | None = None) -> Tensor:
        self.check_terminating(state)
        assert condition is not None
        return condition[:, 0] * state

    def encode(self, state: Tensor) -> Tensor:
        return state[:, None].float()

    def sample_condition(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.rand(n, 1, device=self.source_state.device, generator=generator)

    def fixed_conditions(self, n: int) -> Tensor:
        return torch.linspace(0.1, 1, n, device=self.source_state.device)[:, None]

    def score(self, state: Tensor, log_reward: Tensor | None = None) -> Tensor:
        return state.float()

    def move(self, state: Tensor, move: Tensor) -> Tensor:
        return state + 1

    def undo(self, state: Tensor, move: Tensor) -> Tensor:
        return state - 1


def assert_sound(env, trajectories, start=None):
    """Every row is a legal forward trajectory in the layout of ``Trajectories``."""
    state, action, length = trajectories.state, trajectories.action, trajectories.length
    n, n_steps = action.shape
    step = torch.arange(n_steps)
    real = step < length[:, None]
    assert n_steps == length.max()
    assert torch.equal(state[:, 0], env.source(n) if start is None else start)
    assert torch.equal(action == env.exit_action, step == length[:, None] - 1)
    assert torch.equal(action == -1, ~real)
    row, at = real.nonzero(as_tuple=True)
    assert env.forward_mask(state[row, at])[torch.arange(len(row)), action[row, at]].all()
    assert torch.equal(env.forward_step(state[row, at], action[row, at]), state[row, at + 1])
    beyond = torch.arange(n_steps + 1) >= length[:, None]
    assert env.is_sink(state[beyond]).all()
    x = state[torch.arange(n), length - 1]
    assert torch.equal(trajectories.log_reward, env.log_reward(x))


# Policies.


def policy_of(logits, is_backward, *in_keys):
    policy = TensorDictModule(logits, in_keys=["state", *in_keys], out_keys=["logits"])
    policy.is_backward = is_backward
    return policy


def linear_policy(env, is_backward, seed=1):
    """Random logits, linear in what a network sees; ``weight`` takes gradients."""
    weight = torch.randn(env.encoded_size, env.n_actions - is_backward, generator=seeded(seed))
    weight.requires_grad_()
    policy = policy_of(lambda state: env.encode(state) @ weight, is_backward)
    policy.weight = weight
    return policy


def run_in_process(work, *args):
    """Run a function in another process, and return how that ended."""
    child = multiprocessing.get_context("forkserver").Process(target=work, args=args)
    child.start()
    child.join(60)
    return child.exitcode


class Fault:
    """A block in which the n-th line that is executed of some code raises an error.

    The error ends the block alone. A signal is handled after a call or at the beginning of a
    function, not as a ``with`` block ends, just before it releases a lock. To the tracer, that end
    is the line of ``with`` once more, which is therefore spared then.

    Args:
        error: class of the error.
        at: n, from 1 on.
        may_strike: tells whether lines of a code object count.
    """

    def __init__(self, error, at, may_strike):
        self.error, self.left, self.may_strike, self._blocks = error, at, may_strike, set()

    @property
    def was_raised(self):
        return self.left <= 0

    def _call(self, frame, event, _):
        return self._line if self.may_strike(frame.f_code) else None

    def _line(self, frame, event, _):
        place = frame, frame.f_lineno
        if event == "line" and place not in self._blocks and not self.was_raised:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if line.lstrip().startswith("with "):
                self._blocks.add(place)
            self.left -= 1
            if self.was_raised:
                raise self.error("injected")
        return self._line

    def __enter__(self):
        gc.disable()  # or the lines of finalizers would count
        self._outer = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, kind, *_):
        sys.settrace(self._outer)
        self._blocks.clear()  # frames, whose locals may be files
        gc.enable()
        return kind is not None and issubclass(kind, self.error)


def journaled(rb, journal=None, sync="interval", secret=None):
    """The buffer, with a journal attached where a path is given."""
    if journal is not None:
        Journal(rb, journal, sync, secret)
    return rb


def with_journal(make):
    """A preset that takes ``journal``, ``sync`` and ``secret`` as well."""

    def made(*args, journal=None, sync="interval", secret=None, **options):
        return journaled(make(*args, **options), journal, sync, secret)

    return made


def until(happened, seconds=120):
    """Wait for what must happen within some seconds."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)
