"""The replay buffer of alexhernandezgarcia/gflownet in gfn_rb: same rows, without a pass over all.

Use it in a subclass of that project's buffer::

    class Buffer(BaseBuffer):
        def _add_greater(self, samples, trajectories, values, do_update, it):
            self.rows = getattr(self, "rows", None) or Rows(self.replay_capacity)
            return self.rows.add(samples, trajectories, values, it)
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd
import torch

from gfn_rb import RaggedStorage, reward_prioritized_buffer


class Rows:
    """The best samples with their trajectories, as a DataFrame whenever one is asked for.

    Args:
        capacity: number of samples to keep.
        on_duplicate: what a sample does that is stored already: ``"keep"`` the stored one, as
            ``check_diversity`` does where ``env.isclose`` is equality, or ``"refresh"`` it, as
            with losses. None stores it once more. Samples of one call are
            compared with those stored before it.
        longest: highest length of a sample or a trajectory, as text in bytes.
    """

    def __init__(
        self,
        capacity: int,
        on_duplicate: Literal["keep", "refresh"] | None = None,
        longest: int = 65_536,
    ) -> None:
        names = ["state", "trajectory"]
        self.rb = reward_prioritized_buffer(
            capacity,
            key="log_reward",
            tie="oldest",
            unique="state" if on_duplicate else None,
            on_duplicate=on_duplicate or "refresh",
            storage=RaggedStorage(capacity, ragged=dict.fromkeys(names, longest), text=names),
        )

    def add(
        self, samples: Sequence[Any], trajectories: Sequence[Any], values: Sequence[float], it: int
    ) -> pd.DataFrame:
        """Add samples whose values (rewards or losses) are among the highest."""
        rows = {
            "state": [as_text(each) for each in samples],
            "trajectory": [as_text(each) for each in trajectories],
            "log_reward": torch.as_tensor(values, dtype=torch.float64),
            "policy_version": torch.full((len(samples),), it),
        }
        self.rb.extend(rows)
        return self.frame()

    def frame(self) -> pd.DataFrame:
        """Return all rows with the columns of that project."""
        rows = self.rb[:]
        return pd.DataFrame(
            {
                "samples": [ast.literal_eval(each) for each in rows["state"]],
                "trajectories": [ast.literal_eval(each) for each in rows["trajectory"]],
                "values": rows["log_reward"].tolist(),
                "iter": rows["policy_version"].tolist(),
            }
        )


def as_text(value: Any) -> str:
    """Return a sample or a trajectory as Python writes it."""
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
