"""Sampler of merged buffers: which rows of which buffer a batch contains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import Storage, StorageEnsemble

from gfn_rb import torchrl_compat as compat
from gfn_rb.arguments import as_count, require_kind
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, EmptyBufferError, ShapeError
from gfn_rb.keys import BUFFER_IDS, DRAW_LOG_PROB, INDEX
from gfn_rb.numerics.flat import on_host
from gfn_rb.numerics.weighted_rows import Partition, WeightedUnion, categorical
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.samplers.base import require
from gfn_rb.shapes import Float64, Int64
from gfn_rb.storages.state_folder import StateInFolder

Shares = Literal["mass", "size"] | Sequence[float | int] | Tensor | None
RowsOfMembers = tuple[TensorDictBase, Any]

_P = "p"


class MergedSampler(StateInFolder, SamplerEnsemble):
    r"""Draws rows of several storages as if they were one; ``p`` is that of a merged buffer.

    With ``"mass"``, row j of member i has probability
    :math:`\exp(\log R_{ij} / T) / \sum_{k,l} \exp(\log R_{kl} / T)`. Without replacement, rows are
    drawn one after another, each from what the earlier ones left in all members. With other shares,
    a member is drawn, and its own sampler draws the row. Its ``priority_weight`` is that within its
    member, and ``draw_log_prob`` is that of member and row together.

    Raises:
        ArgumentError: ``p`` breaks these rules, or the samplers do not allow it.
    """

    _p: Any

    def __init__(self, *samplers: Sampler, p: Shares = "mass") -> None:
        for i, sampler in enumerate(samplers):
            require_kind(f"sampler of member {i}", sampler, Sampler)
        super().__init__(*samplers)
        self.p = p

    @property
    def p(self) -> Any:
        """The members' shares; weights sum to one."""
        return self._p

    @p.setter
    def p(self, value: Shares) -> None:
        if isinstance(value, str) and value not in ("mass", "size"):
            raise ArgumentError(f"p must be 'mass', 'size' or one weight per member, got {value!r}")
        if isinstance(value, str) and value == "mass":
            _softmax_of(self._samplers)
        if value is not None and not isinstance(value, str):
            value = _shares(value, len(self._samplers))
        self._p = value

    @compat.outside_graph
    def sample(self, storage: StorageEnsemble, batch_size: int) -> RowsOfMembers:
        """Return ``buffer_ids`` and ``index`` of drawn rows [n], and what is known of the draws."""
        if type(batch_size) is not int or batch_size < 1:
            batch_size = as_count("batch_size", batch_size)
        if not any(len(each) for each in compat.member_storages(storage)):
            raise EmptyBufferError(f"cannot draw {batch_size} items: all members are empty")
        if isinstance(self._p, str) and self._p == "mass":
            return self._by_mass(compat.member_storages(storage), batch_size)
        return self._by_member(compat.member_storages(storage), batch_size)

    @compat.outside_graph
    def log_probs(self, storage: StorageEnsemble) -> Float64[Tensor, "rows"]:
        """Return the log-probability of every row of all members, each taken as a single draw.

        Args:
            storage: storages of the members.

        Returns:
            One log-probability per row, in nats, member after member; ``-inf`` for rows that
            cannot be drawn.

        Raises:
            ArgumentError: the law of a member's sampler is not known.
        """
        storages = compat.member_storages(storage)
        pairs = zip(self._samplers, storages, strict=True)
        if isinstance(self._p, str) and self._p == "mass":
            _softmax_of(self._samplers)
            held = [(s.follow(each).log_weight, len(each)) for s, each in pairs if len(each)]
            weights = [weight[:n] for weight, n in held]
            none = torch.empty(0, dtype=torch.float64)
            return torch.log_softmax(torch.cat(weights), 0) if held else none
        share = self._weights(storages)
        of_member = torch.log(share / share.sum()).tolist()
        within = [log_probs_of(sampler, each) for sampler, each in pairs]
        return torch.cat([part + log_p for part, log_p in zip(within, of_member, strict=True)])

    @compat.outside_graph
    def can_sample(self, storage: StorageEnsemble, batch_size: int) -> bool:
        """Return whether :meth:`sample` returns a batch of this size, of whatever members.

        Each member with a share must be able to serve the whole batch, unless ``p`` is "mass".
        """
        batch_size, storages = as_count("batch_size", batch_size), compat.member_storages(storage)
        if not any(map(len, storages)):
            return False
        if isinstance(self._p, str) and self._p == "mass":
            union, is_strict = self._union(storages), self._samplers[0].replacement is False
            return bool(union.has_mass) and (not is_strict or union.n_positive >= batch_size)
        drawn = [i for i, share in enumerate(self._weights(storages).tolist()) if share > 0]
        ready = (self._samplers[i].can_sample(storages[i], batch_size) for i in drawn)
        return len(drawn) > 0 and all(ready)

    # Drawing.

    def _by_mass(self, storages: Sequence[Storage], n: int) -> RowsOfMembers:
        # Again, for members' temperatures may have been annealed apart since p was set.
        sampler, union = _softmax_of(self._samplers), self._union(storages)
        held = [i for i, each in enumerate(storages) if len(each)]
        require(union.has_mass, EmptyBufferError, sampler.nothing_to_draw, sampler.key)
        replacement = sampler.replacement
        # Too few rows of positive weight show only once they have been tried.
        if replacement is not True and n <= sum(len(each) for each in storages):
            part, row, log_prob, enough = union.draw_distinct(n, self._rng)
            if isinstance(enough, Tensor):  # of a device
                part, enough = on_host(part, enough)
            if enough:
                info = {DRAW_LOG_PROB: log_prob}
                return _rows_of_members(_numbered(held, part), row, info)
        if replacement is False:
            raise ArgumentError(sampler.too_few.format(n))
        part, row, log_prob = union.draw(n, self._rng)
        return _rows_of_members(_numbered(held, part), row, {DRAW_LOG_PROB: log_prob})

    def _union(self, storages: Sequence[Storage]) -> WeightedUnion:
        """Return the rows of all members that hold some as one distribution."""
        pairs = zip(self._samplers, storages, strict=True)
        parts = [sampler.follow(storage) for sampler, storage in pairs if len(storage)]
        if len(devices := {part.log_weight.device for part in parts}) > 1:
            raise ArgumentError(
                f"p='mass' needs members on one device, got {sorted(map(str, devices))}: pass "
                "p='size' or weights"
            )
        return WeightedUnion(parts)

    def _by_member(self, storages: Sequence[Storage], n: int) -> RowsOfMembers:
        share = self._weights(storages)
        if not share.any():
            raise EmptyBufferError(f"cannot draw {n} items: all members of positive p are empty")
        member = categorical(share, n, _host_generator(self._rng))
        groups = Partition(member, len(storages))
        drawn = [
            rows_of(sampler, storage, count) if count else (member.new_empty(0), {})
            for sampler, storage, count in zip(self._samplers, storages, groups.counts, strict=True)
        ]
        info = _shared_info(groups, [each for _, each in drawn])
        if DRAW_LOG_PROB in info:
            within = info[DRAW_LOG_PROB]
            of_member = torch.log(share / share.sum())[member]
            info[DRAW_LOG_PROB] = within + of_member.to(within, non_blocking=True)
        device = next(index.device for index, _ in drawn if index.shape[0])
        row = groups.join([index.to(device, non_blocking=not index.shape[0]) for index, _ in drawn])
        noted = [compat.attached_generations(index) for index, _ in drawn]
        if any(each is not None for each in noted):
            stamps = [
                torch.full_like(index, compat.UNKNOWN_GENERATION) if each is None else each
                for each, (index, _) in zip(noted, drawn, strict=True)
            ]
            compat.set_attached_generations(row, groups.join([each.to(device) for each in stamps]))
        return _rows_of_members(member, row, info)

    def _weights(self, storages: Sequence[Storage]) -> Tensor:
        """Return the members' shares, zero for empty ones."""
        sizes = torch.tensor([len(each) for each in storages], dtype=torch.float64)
        if isinstance(self._p, str):
            return sizes
        weights = torch.ones_like(sizes) if self._p is None else self._p.to(sizes)
        return weights.where(sizes > 0, 0.0)

    # State: the shares, beside that of the members.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the members' samplers, by their number, and ``p``."""
        return {**super().state_dict(), _P: self._p}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, or TorchRL's ensemble, which has no ``p``."""
        shares, k = state_dict.get(_P, self._p), len(self._samplers)
        if isinstance(shares, Tensor) and len(shares) != k:
            raise CheckpointMismatchError(
                f"the p that was saved holds {len(shares)} weights, expected one for each of {k} "
                "members"
            )
        super().load_state_dict(state_dict)  # checked before any member changes
        self._p = shares

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]},\n    p={self._p})"


def _numbered(held: list[int], part: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
    """Return the members of parts, which are the members that hold rows."""
    return part if held[-1] < len(held) else torch.tensor(held)[part]


def _rows_of_members(member: Tensor, row: Tensor, info: dict[str, Any]) -> RowsOfMembers:
    return compat.new_tensordict({BUFFER_IDS: member, INDEX: row}, row.shape), info


def rows_of(sampler: Sampler, storage: Storage, n: int) -> tuple[Tensor, dict[str, Any]]:
    """Draw n rows of one member; its sampler may give them in several goes."""
    index, info = sampler.sample(storage, n)
    if not isinstance(index, Tensor) or index.ndim != 1:
        raise ShapeError(f"members must be stored in one dimension, got {storage} with more")
    if index.shape[0] == n:
        return index, info
    if not 0 < index.shape[0] < n:
        raise ShapeError(f"{sampler} drew {index.shape[0]} rows, expected at most {n}")
    rest, _ = rows_of(sampler, storage, n - index.shape[0])
    return torch.cat([index, rest]), {}


def log_probs_of(sampler: Any, storage: Storage) -> Float64[Tensor, "len"]:
    """Return the log-probability of each row in a single draw; raise if the law is not known."""
    if type(sampler) is RandomSampler:
        n = len(storage)
        return torch.full((n,), -math.log(max(n, 1)), dtype=torch.float64)
    if not hasattr(sampler, "log_probs"):
        raise ArgumentError(f"the law of {type(sampler).__name__} is not known")
    return sampler.log_probs(storage)


def _shared_info(groups: Partition, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return, row by row, what the samplers of all members drawn from give."""
    given = [info for info, count in zip(infos, groups.counts, strict=True) if count]
    counts = [count for count in groups.counts if count]
    known = {}
    for key in given[0]:
        values: list[Any] = [info.get(key) for info in given]
        pairs = zip(values, counts, strict=True)
        if all(isinstance(value, Tensor) and value.shape[:1] == (n,) for value, n in pairs):
            known[key] = groups.join(values)
    return known


def _shares(weights: Sequence[float | int] | Tensor, k: int) -> Tensor:
    try:
        share = torch.as_tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"p must hold numbers, got {weights!r:.80}") from None
    if share.shape != (k,):
        raise ArgumentError(f"p must hold one weight for each of {k} members, got {weights!r}")
    if not bool((share >= 0).all() and share.sum() > 0 and share.isfinite().all()):
        raise ArgumentError(f"p must hold weights of at least 0, one above it, got {weights!r}")
    return share / share.sum()


def _softmax_of(samplers: Sequence[Sampler]) -> SoftmaxRewardSampler:
    """Return what all samplers agree on, or raise."""
    for i, sampler in enumerate(samplers):
        if not isinstance(sampler, SoftmaxRewardSampler):
            raise ArgumentError(
                "p='mass' needs a SoftmaxRewardSampler in every member, got "
                f"{type(sampler).__name__} in member {i}: pass p='size' or weights"
            )
        for name in ("key", "temperature", "replacement"):
            one, other = getattr(samplers[0], name), getattr(sampler, name)
            if one != other:
                raise ArgumentError(
                    f"p='mass' needs one {name} in all members, got {one!r} in member 0 and "
                    f"{other!r} in member {i}"
                )
    return samplers[0]


def _host_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return what draws on the host as a generator of a device determines, which then moves on."""
    if generator is None or generator.device.type == "cpu":
        return generator
    seed = blake2b(generator.get_state().numpy().tobytes(), digest_size=7).digest()
    torch.rand(1, device=generator.device, generator=generator)
    return torch.Generator().manual_seed(int.from_bytes(seed, "little"))
