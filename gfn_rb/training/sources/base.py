"""Sources of the fresh trajectories of a training run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from gfn_rb.containers import Trajectories
from gfn_rb.containers.base import Container
from gfn_rb.envs import GFNEnv
from gfn_rb.rollout import LocalSearchSampler, Sampler
from gfn_rb.shapes import Float


class Source(ABC):
    """Gives trajectories of the policy as it is now, each with its reward, paid for.

    A source that holds nothing of its own beside its parts need only define ``sample``.

    Attributes:
        parts: the sources that this one draws from, by name.
    """

    parts: Mapping[str, Source] = MappingProxyType({})

    @abstractmethod
    def sample(self, n: int) -> Trajectories:
        """Return fresh forward trajectories, a multiple of ``n`` of them."""

    def learn(self, batch: Container, residual: Float[Tensor, "m"]) -> None:
        """Take note of what the policy has just learnt from, if that matters to it.

        Args:
            batch: fresh items, or replayed ones.
            residual: of the loss before that; one of each item, or of each of its steps.
        """
        for part in self.parts.values():
            part.learn(batch, residual)

    def close(self) -> None:
        """Release what the source holds; it gives nothing afterwards."""
        for part in self.parts.values():
            part.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next trajectories depend on, beside the policy and its generator."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from an earlier state."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])


class PolicySource(Source):
    """Samples in this process, from the environment's source state."""

    def __init__(
        self,
        env: GFNEnv,
        policy: TensorDictModuleBase,
        generator: torch.Generator,
        epsilon: Callable[[], float],
    ) -> None:
        self._env, self._sampler = env, Sampler(policy)
        self._generator, self._epsilon = generator, epsilon

    def sample(self, n: int) -> Trajectories:
        """Return ``n`` trajectories."""
        return self._sampler.sample_trajectories(
            self._env, n=n, generator=self._generator, epsilon=self._epsilon()
        )


class LocalSearchSource(Source):
    """Follows each trajectory of another source by those that local search makes of it.

    Each loop searches once around what the loops before accepted in each row, a proposal of
    strictly higher reward (Kim et al. 2023, arXiv:2310.02710). Every proposal is returned, accepted
    or not, and has cost a reward call.
    """

    def __init__(
        self,
        source: Source,
        search: LocalSearchSampler,
        env: GFNEnv,
        loops: int,
        back_ratio: float,
        generator: torch.Generator,
    ) -> None:
        self.parts = {"source": source}
        self._search, self._env, self._loops = search, env, loops
        self._back_ratio, self._generator = back_ratio, generator

    def sample(self, n: int) -> Trajectories:
        """Return n * (1 + loops) trajectories: the source's, then each loop's proposals."""
        current = self.parts["source"].sample(n)
        batches = [current]
        for _ in range(self._loops):
            proposed, accepted = self._search.local_search(
                self._env, current, back_ratio=self._back_ratio, generator=self._generator
            )
            row = torch.arange(n, device=accepted.device)
            batches.append(proposed)
            current = Trajectories.cat([current, proposed])[row + n * accepted]
        return Trajectories.cat(batches)
