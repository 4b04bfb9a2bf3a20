"""The buffers and batches that the comparisons share.

An item is a row of 16 int64 under "state" and a float32 under "log_reward". Full buffers hold
log-rewards drawn from N(0, scale^2); what is offered to them later comes from the same normal,
cut where the comparison needs it, so that the distribution of what is stored stays what it was.

A point is an item whose state is 64 float32 about one of a thousand centres, as embeddings of
molecules or images would be: 0.57 from others of its centre, 11 from those of others, give or take.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb.storages.tensors import RowTensorStorage
from gfn_rb.writers import RewardPrioritizedWriter

BATCH = 128
WIDTH = 16
HEIGHT = 8
FEATURES = 64
SCATTER, JITTER = 0.05, 0.01

# TorchRL logs each storage it allocates, which would stand in the table and in the timed fills.
logging.getLogger("torchrl").setLevel(logging.WARNING)


def items(log_reward: Tensor) -> TensorDict:
    """Return one item per log-reward, with a random state.

    Args:
        log_reward: shape [n].
    """
    n = log_reward.shape[0]
    state = torch.randint(0, HEIGHT, (n, WIDTH))
    return TensorDict({"state": state, "log_reward": log_reward.to(torch.float32)}, [n])


def random_items(n: int, scale: float = 1.0) -> TensorDict:
    """Return n items whose log-rewards are N(0, scale^2).

    Args:
        n: how many.
        scale: standard deviation, in nats.
    """
    return items(scale * torch.randn(n))


def centres() -> Tensor:
    """Return a thousand places, standard normal in 64 dimensions."""
    return torch.randn(1000, FEATURES)


def points(centre: Tensor, log_reward: Tensor) -> TensorDict:
    """Return one point per log-reward, each about a centre of its own.

    Args:
        centre: places to choose from, shape [c, 64].
        log_reward: shape [n].
    """
    n = log_reward.shape[0]
    state = centre[torch.randint(len(centre), (n,))] + SCATTER * torch.randn(n, FEATURES)
    return TensorDict({"state": state, "log_reward": log_reward.to(torch.float32)}, [n])


def nearby(batch: TensorDict, state: Tensor, share: float = 1 / 8) -> TensorDict:
    """Return a batch of which some points all but repeat stored ones, at a distance of 0.08.

    Args:
        batch: points.
        state: what is stored, shape [capacity, 64].
        share: which part of the batch.
    """
    n = round(len(batch) * share)
    twin = state[torch.randint(len(state), (n,))]
    batch["state"][torch.randperm(len(batch))[:n]] = twin + JITTER * torch.randn(n, FEATURES)
    return batch


def buffer(
    capacity: int, writer: Any = None, sampler: Any = None, storage: Any = None
) -> TensorDictReplayBuffer:
    """Return an empty buffer in memory.

    Args:
        capacity: rows.
        writer: TorchRL's round-robin writer if None.
        sampler: TorchRL's uniform sampler if None.
        storage: class of the storage. None: TorchRL's ``LazyTensorStorage`` for a buffer of
            TorchRL's parts, and ``RowTensorStorage``, as in presets, for others.
    """
    if storage is None:
        is_torchrl = writer is None and sampler is None
        storage = LazyTensorStorage if is_torchrl else RowTensorStorage
    return TensorDictReplayBuffer(
        storage=storage(capacity),
        writer=TensorDictRoundRobinWriter() if writer is None else writer,
        sampler=RandomSampler() if sampler is None else sampler,
    )


def fill(rb: TensorDictReplayBuffer, capacity: int, scale: float = 1.0) -> TensorDictReplayBuffer:
    """Fill a buffer with random items, and return it.

    Args:
        rb: an empty buffer.
        capacity: rows to write.
        scale: standard deviation of their log-rewards, in nats.
    """
    rb.extend(random_items(capacity, scale))
    return rb


def challenge(log_reward: Tensor, accepted: int, scale: float = 1.0, n: int = BATCH) -> Tensor:
    """Return the log-rewards of a batch of which a full buffer accepts exactly so many rows.

    The rows to be accepted beat the ``accepted`` lowest rewards stored, and are drawn from the
    normal above these; the others lie below all that is stored. Their order is random.

    Args:
        log_reward: what is stored, shape [capacity].
        accepted: how many rows to have accepted, at most n.
        scale: standard deviation of the normal, in nats.
        n: rows of the batch.

    Returns:
        Shape [n], float32.
    """
    lowest = log_reward.min()
    # kthvalue takes time quadratic in the rows of some buffers.
    cut = log_reward.topk(max(accepted, 1), largest=False).values.max()
    below = lowest - 0.1 - torch.rand(n - accepted)
    batch = torch.cat([below, _normal_above(cut / scale, accepted) * scale])
    return batch[torch.randperm(n)]


def _normal_above(cut: Tensor, n: int) -> Tensor:
    """Draw from the standard normal above a cut, by inverting its upper tail."""
    tail = torch.special.ndtr(-cut.double()) * torch.rand(n, dtype=torch.float64)
    return (-torch.special.ndtri(tail.clamp(min=1e-300))).clamp(min=cut.double())


def challenge_to(
    rb: TensorDictReplayBuffer, accepted: int, scale: float = 1.0, n: int = BATCH
) -> TensorDict:
    """Return a batch of which a full buffer accepts exactly so many rows.

    Args:
        rb: the buffer. A batch for a round-robin buffer is made from the content of that buffer.
        accepted: see :func:`challenge`.
        scale: see :func:`challenge`.
        n: see :func:`challenge`.
    """
    return items(challenge(rb[:].get("log_reward"), accepted, scale, n))


def with_known(batch: TensorDict, stored: TensorDict, share: float = 1 / 4) -> TensorDict:
    """Return a batch of which some rows are stored objects: half better than stored, half worse.

    Args:
        batch: items, which are changed.
        stored: what the buffer holds.
        share: which part of the batch.
    """
    n = max(1, round(len(batch) * share))
    slot = torch.randint(len(stored), (n,))
    at = torch.randperm(len(batch))[:n]
    batch["state"][at] = stored["state"][slot]
    sign = torch.tensor([1.0, -1.0]).repeat(n // 2 + 1)[:n]
    batch["log_reward"][at] = stored["log_reward"][slot] + sign * torch.rand(n)
    return batch


def check_challenge() -> None:
    """Raise unless batches are accepted as announced, for a benchmark must do what it says."""
    rb = fill(buffer(1000, RewardPrioritizedWriter()), 1000)
    for accepted in (0, BATCH // 2, BATCH):
        for _ in range(20):
            got = int((rb.extend(challenge_to(rb, accepted)) >= 0).sum())
            if got != accepted:
                raise RuntimeError(f"{got} of {BATCH} rows were accepted, {accepted} expected")


def tensors(part: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """Yield every tensor reachable from a writer or sampler through this library's own objects.

    Args:
        part: the object to walk.
        seen: objects walked before, by id; holding them keeps an id from being used twice.
    """
    seen = {} if seen is None else seen
    if id(part) in seen:
        return
    seen[id(part)] = part
    entries: list[Any] = []
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, (list, tuple, set)):
        entries = list(part)
    elif isinstance(part, dict):
        entries = list(part.values())
    elif type(part).__module__.startswith("gfn_rb."):
        entries = list(vars(part).values())
    for entry in entries:
        yield from tensors(entry, seen)


def bytes_beyond_storage(rb: TensorDictReplayBuffer) -> int:
    """Return the bytes that writer and sampler hold, views on the storage not counted.

    Args:
        rb: a filled buffer.
    """
    stored = {leaf.untyped_storage().data_ptr() for leaf in rb[:].values(True, True)}
    held = {}
    for tensor in tensors([rb.writer, rb.sampler]):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in stored:
            held[memory.data_ptr()] = memory.nbytes()
    return sum(held.values())


class _Stateless:
    """What a part of a buffer has to have beside its one task."""

    def _empty(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def dumps(self, path: Any) -> None:
        pass

    def loads(self, path: Any) -> None:
        pass


class WritesNothing(_Stateless, Writer):
    """A writer that returns slots and writes nothing: what is left is TorchRL's buffer."""

    def extend(self, data: TensorDict) -> Tensor:
        """Return the first slots."""
        return torch.arange(len(data))

    def add(self, data: TensorDict) -> int:
        """Return the first slot."""
        return 0


class DrawsTheFirst(_Stateless, Sampler):
    """A sampler that draws the first rows: what is left is TorchRL's buffer and the gather."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Return the first slots."""
        return torch.arange(batch_size), {}
