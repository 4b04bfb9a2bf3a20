"""Transform that makes trajectories, one per row, of the frames of TorchRL's collectors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from gfn_rb import keys
from gfn_rb.arguments import KeepsArguments, as_count
from gfn_rb.buffers.options import Environment
from gfn_rb.containers import Trajectories
from gfn_rb.containers.convert import padded_to
from gfn_rb.containers.fields import assemble
from gfn_rb.containers.rollouts import READ, require_rollout, trajectories_of
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError

_IDS = (keys.COLLECTOR, keys.TRAJ_IDS)
_MASK = (keys.COLLECTOR, keys.MASK)
_WAITED = "waited"  # for how many batches the frame has been here


class PackTrajectories(KeepsArguments, Transform):
    """Transform that packs the frames of collector batches into whole trajectories, one per row.

    A TorchRL collector returns a number of steps at a time, whatever episodes they belong to. This
    transform groups steps by ``("collector", "traj_ids")``. For terminated episodes it returns the
    fields of :class:`~gfn_rb.Trajectories`, and the ``policy_version`` of their first action if the
    collector tracks it. It keeps the steps of other episodes until later batches complete them. No
    episode is lost or cut.

    As a transform of a buffer it packs when rows are added: ``replay_buffer=rb`` fills ``rb`` with
    trajectories, padded to ``env.max_length`` so that any storage takes every batch. In a
    multi-process collector, each worker's copy of the buffer packs the episodes of that worker.
    Without a buffer, use it as a collector's ``postproc``. It works with
    ``trajs_per_batch`` and ``split_trajs`` too, and does not change trajectories or drawn rows.

    A batch in which no episode ends gives no rows, which the writers of gfn_rb accept. Truncated
    episodes and episodes without a beginning are dropped. No ``state_dict`` contains incomplete
    episodes: a new collector starts new episodes.

    Args:
        env: environment of the frames; whole trajectories start at its source.
        patience: number of successive batches that may leave an episode unchanged before its steps
            are dropped, at least 1. A collector that resets its environments abandons episodes, and
            one of several workers that share a ``postproc`` may be late.

    Raises:
        ArgumentError: ``patience`` is below 1.

    Examples:
        >>> rb = fifo_buffer(1000, max_length=env.max_length, transform=PackTrajectories(env))
        >>> for _ in Collector(env, policy, frames_per_batch=64, replay_buffer=rb):
        ...     batch = Trajectories.from_tensordict(rb.sample(16))
    """

    def __init__(self, env: Environment, patience: int = 100) -> None:
        super().__init__()
        self.patience, self._max_length = as_count("patience", patience), env.max_length
        self.register_buffer("_source", env.source_state.detach().clone(), persistent=False)
        self._open: TensorDictBase | None = None  # frames of episodes that are not over

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Pack frames, batch size [*B, T]; return others, such as drawn rows, unchanged."""
        return self._packed(tensordict, None)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._packed(tensordict, self._max_length)

    def _packed(self, tensordict: TensorDictBase, n_steps: int | None) -> TensorDictBase:
        """Pack frames, and pad trajectories to a number of steps; None for the longest of them."""
        if tensordict.get(keys.NEXT_LOG_REWARD, None) is None:
            return tensordict
        frames = _frames(tensordict)
        if self._open is not None:
            # A policy does not write its log-probabilities while a collector draws random actions.
            common = set(self._open.keys(True, True)) & set(frames.keys(True, True))
            frames = torch.cat([part.select(*common) for part in (self._open, frames)])
        frames = frames[frames.get(_IDS).argsort(stable=True)]  # those of one are in time already
        _check_continuity(frames)
        ids = frames.get(_IDS)
        is_last = torch.ones_like(ids, dtype=torch.bool)
        is_last[:-1] = ids[1:] != ids[:-1]
        number = is_last.cumsum(0) - is_last.long()
        is_over = frames.get(keys.NEXT_DONE).reshape(-1)[is_last][number]
        waited = frames.get(_WAITED)[is_last][number]  # the last frames of an episode came last
        is_open = ~is_over & (waited <= self.patience)
        self._open = frames[is_open].set(_WAITED, waited[is_open] + 1)
        frames, source = frames[is_over], self._source.to(ids.device)
        values, first = trajectories_of(frames, source)
        rows = assemble(values, (len(first),), frames.device)
        packed = Trajectories.from_tensordict(rows).to_tensordict()
        if n_steps is not None:
            packed = padded_to(packed, n_steps)
        if (version := frames.get(keys.NEXT_POLICY_VERSION, None)) is not None:
            packed.set(keys.POLICY_VERSION, version[first])
        return packed

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the episodes under way: a copy serves another collector."""
        return {**super().__getstate__(), "_open": None}


def _frames(batch: TensorDictBase) -> TensorDictBase:
    """Return the frames of a batch that are part of an episode, [m], in copies.

    A collector writes its next batch over the memory of this one.
    """
    require_rollout(batch)
    ids = batch.get(_IDS, None)
    if ids is None:
        raise KeyMismatchError(
            f"frames must have {_IDS!r}, which a collector writes with track_traj_ids=True; got "
            f"{sorted(map(str, batch.keys(True, True)))}; Trajectories.from_rollout reads rollouts"
        )
    if ids.shape != batch.shape:
        raise ShapeError(f"{_IDS!r} has shape {list(ids.shape)}; expected {list(batch.shape)}")
    # An interrupted collector leaves ids below 0 at the steps that it did not reach.
    is_real = (ids >= 0) & batch.get(_MASK, torch.ones_like(ids, dtype=torch.bool))
    frames = batch.select(*READ, keys.NEXT_POLICY_VERSION, _IDS, strict=False)
    frames.set(_WAITED, torch.zeros_like(ids))
    return frames.contiguous().reshape(ids.numel())[is_real.reshape(-1).nonzero().squeeze(1)]


def _check_continuity(frames: TensorDictBase) -> None:
    """Check that each episode goes on from where it was."""
    ids, state, came_to = frames.get(_IDS), frames.get(keys.STATE), frames.get(keys.NEXT_STATE)
    differs = (state[1:] != came_to[:-1]).reshape(-1, state.shape[1:].numel()).any(1)
    broken = differs & (ids[1:] == ids[:-1])
    if broken.any():
        row = int(broken.nonzero()[0])
        raise ArgumentError(
            f"frames of trajectory {int(ids[row])} must go on from state {came_to[row].tolist()}, "
            f"got {state[row + 1].tolist()}: each collector needs a PackTrajectories of its own"
        )
