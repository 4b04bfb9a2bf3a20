"""Local search with estimators that only torchgfn's code samples: continuous and recurrent ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gfn.containers import Trajectories as TheirTrajectories
from gfn.env import Env
from gfn.utils.prob_calculations import get_trajectory_pbs, get_trajectory_pfs
from tensordict import TensorDict
from torch import Tensor

from gfn_rb import keys
from gfn_rb.containers import Trajectories  # by which the annotations of Proposal are read
from gfn_rb.interop.torchgfn.rows import container_of, padded, rows_of
from gfn_rb.rollout.metropolis_hastings import Proposal
from gfn_rb.shapes import Float64, Int64


@dataclass(frozen=True)
class EstimatorProposal(Proposal):
    """A proposal of torchgfn's estimators ``pf`` and ``pb``, whose densities torchgfn computes.

    A recurrent estimator starts anew at the state s, so that what leads to s has no influence.
    """

    pf: Any
    pb: Any
    undone: TheirTrajectories
    found: TheirTrajectories
    options: dict[str, Any]

    def log_there(self) -> Float64[Tensor, "n"]:
        """Return log P_B(b | x) + log P_F(f | s), as drawn."""
        return self._log_pb(self.undone) + self._log_pf(self.found)

    def log_return(self) -> Float64[Tensor, "n"]:
        """Return log P_B(f | x') + log P_F(b | s), of the reverse proposal."""
        return self._log_pb(self.found) + self._log_pf(self.undone)

    def _log_pf(self, path: TheirTrajectories) -> Float64[Tensor, "n"]:
        return get_trajectory_pfs(self.pf, path, **self.options).sum(0, dtype=torch.float64)

    def _log_pb(self, path: TheirTrajectories) -> Float64[Tensor, "n"]:
        return get_trajectory_pbs(self.pb, path, **self.options).sum(0, dtype=torch.float64)


def our_rows(path: TheirTrajectories, env: Env) -> TensorDict:
    """Return forward trajectories of torchgfn as rows that end with a column of padding."""
    rows = rows_of(path).set(keys.LOG_REWARD, path.log_rewards)  # which are computed when read
    return padded(rows, rows.get(keys.ACTION).shape[1] + 1, env)


def ours(rows: TensorDict) -> Trajectories:
    """Return rows as our trajectories."""
    return Trajectories.from_tensordict(rows)


def after(rows: TensorDict, step: Int64[Tensor, "n"], env: Env) -> TheirTrajectories:
    """Return what follows a step of each row, as torchgfn's trajectories from its state."""
    row = torch.arange(len(rows), device=step.device)[:, None]

    def shifted(steps: Tensor) -> Tensor:
        column = torch.arange(steps.shape[1], device=step.device) + step[:, None]
        return steps[row, column.clamp(max=steps.shape[1] - 1)]

    entries = dict(rows.items())
    for name in (keys.STATE, keys.ACTION):
        entries[name] = shifted(entries[name])
    entries[keys.LENGTH] = rows.get(keys.LENGTH) - step
    return container_of(entries, env)
