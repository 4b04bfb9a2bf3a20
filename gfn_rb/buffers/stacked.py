"""TorchRL's ensemble of buffers, over members whose samplers tell different things of a draw."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import ReplayBufferEnsemble
from torchrl.data.replay_buffers.samplers import SamplerEnsemble
from torchrl.data.replay_buffers.storages import StorageEnsemble

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import as_count, require_kind
from gfn_rb.buffers.merged_sampler import rows_of
from gfn_rb.buffers.replay_buffer import require_unlimited
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import BUFFER_IDS, INDEX
from gfn_rb.shapes import Int64


class StackedReplayBuffer(ReplayBufferEnsemble):
    """TorchRL's ``ReplayBufferEnsemble``: batches [k, n / k], stacked by member.

    Members may have different samplers. Entries of a draw, such as ``draw_log_prob`` and
    ``priority_weight``, are in the batch if all drawn members give them; TorchRL's own ensemble
    refuses other members. :class:`MergedReplayBuffer` returns flat batches instead.

    Args:
        *members: buffers without ``max_uses``.
        **options: those of ``ReplayBufferEnsemble``: ``sample_from_all``, ``num_buffer_sampled``,
            ``p``, ``batch_size`` and others.

    Examples:
        >>> rb = StackedReplayBuffer(prioritized, uniform, sample_from_all=True, batch_size=64)
        >>> batch = rb.sample()  # [2, 32]
    """

    def __init__(self, *members: Any, **options: Any) -> None:
        for member in members:
            require_unlimited(member)
        super().__init__(*members, **options)

    def set_sampler(self, sampler: SamplerEnsemble) -> SamplerEnsemble:
        """Replace the sampler of all members, and return the former one.

        Args:
            sampler: ensemble of one sampler for each member.

        Raises:
            ArgumentError: it is no ensemble, or of another number of samplers.
        """
        require_kind("sampler", sampler, SamplerEnsemble)
        n, k = (len(compat.member_samplers(each)) for each in (sampler, self.sampler))
        if n != k:
            raise ArgumentError(f"sampler must be an ensemble of {k} samplers, got one of {n}")
        return super().set_sampler(_stacking(sampler))

    def _maybe_make_sampler(self, sampler: Any) -> SamplerEnsemble:
        return _stacking(super()._maybe_make_sampler(sampler))

    def __repr__(self) -> str:
        return super().__repr__().replace(ReplayBufferEnsemble.__name__, type(self).__name__, 1)


class StackedSampler(SamplerEnsemble):
    """TorchRL's ``SamplerEnsemble`` that keeps the entries which all drawn members give."""

    @compat.outside_graph
    def sample(self, storage: StorageEnsemble, batch_size: int) -> tuple[TensorDict, TensorDict]:
        """Return ``buffer_ids`` [k] and ``index`` [k, n / k], and what all members tell of it."""
        storages = compat.member_storages(storage)
        k = len(storages) if self.sample_from_all else self.num_buffer_sampled
        if as_count("batch_size", batch_size) % k:
            raise ArgumentError(
                f"batch_size must be a multiple of the {k} members in a batch, got {batch_size}"
            )
        member, n = self._members([len(each) for each in storages], k), batch_size // k
        samplers = compat.member_samplers(self)
        drawn = [rows_of(samplers[i], storages[i], n) for i in member.tolist()]
        infos = [info for _, info in drawn]
        shared = [
            key
            for key in infos[0]
            if all(isinstance(each.get(key), Tensor) and len(each[key]) == n for each in infos)
        ]
        known = {key: torch.stack([info[key] for info in infos]) for key in shared}
        index = torch.stack([index for index, _ in drawn])
        rows = TensorDict({INDEX: index, BUFFER_IDS: member}, [k])
        return rows, TensorDict(known, [k])

    def _members(self, sizes: list[int], k: int) -> Int64[Tensor, "k"]:
        """Return which members a batch consists of."""
        if self.sample_from_all:
            return torch.arange(k)
        shares = torch.ones(len(sizes)) if self.p is None else self.p
        if isinstance(shares, str):  # "sampleable"
            shares = torch.tensor(sizes).float()
        return torch.multinomial(shares, k, True, generator=self._rng)


def _stacking(sampler: SamplerEnsemble) -> SamplerEnsemble:
    """Return an ensemble of the same samplers and shares that stacks what all members give."""
    return StackedSampler(
        *compat.member_samplers(sampler),
        p=sampler.p,
        sample_from_all=sampler.sample_from_all,
        num_buffer_sampled=sampler.num_buffer_sampled,
    )
