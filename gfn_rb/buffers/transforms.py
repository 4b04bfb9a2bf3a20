"""What happens to trajectories on their way into a buffer and out of it."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from gfn_rb.containers import Trajectories
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.keys import ACTION, CONDITION, LENGTH, LOG_REWARD, STATE


class PadTrajectories(Transform):
    """Pads trajectories to one number of steps on their way into a buffer.

    A storage holds rows of one shape, and a batch of trajectories is only as wide as its longest.

    Args:
        n_steps: T, the longest trajectory in actions, exit included: ``env.max_length``.

    Raises:
        ArgumentError: ``n_steps`` below 1.
    """

    def __init__(self, n_steps: int) -> None:
        if n_steps < 1:
            raise ArgumentError(f"max_length must be at least 1, got {n_steps}")
        super().__init__()
        self.n_steps = n_steps

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if ACTION not in tensordict.keys():  # noqa: SIM118
            return tensordict
        if tensordict.get(ACTION).shape[tensordict.ndim] == self.n_steps:
            return tensordict
        rows = tensordict if tensordict.ndim else tensordict.unsqueeze(0)
        longest = int(rows.get(LENGTH).max())
        if longest > self.n_steps:
            raise ShapeError(
                f"a trajectory of {longest} actions does not fit: the buffer holds at most "
                f"max_length={self.n_steps}"
            )
        trajectories = Trajectories.from_tensordict(rows).trim().pad_to(self.n_steps)
        padded = trajectories.to_tensordict()
        return padded if tensordict.ndim else padded[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what is sampled as it is."""
        return tensordict


class KeepTerminatingStates(Transform):
    """Reduces trajectories to their terminating state, log-reward and condition.

    Rows that hold no actions are taken for terminating states already. On the way out, rows pass
    through ``regenerate`` if there is one, for instance a backward rollout that turns terminating
    states into trajectories.

    Args:
        regenerate: [n] rows of ``state`` [n, *S] and ``log_reward`` [n] to whatever ``sample``
            shall return, batch size [n].
    """

    def __init__(
        self, regenerate: Callable[[TensorDictBase], TensorDictBase] | None = None
    ) -> None:
        super().__init__()
        self.regenerate = regenerate

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if ACTION not in tensordict.keys():  # noqa: SIM118
            return tensordict
        rows = tensordict.select(LOG_REWARD, CONDITION, strict=False)
        rows.set(STATE, Trajectories.from_tensordict(tensordict).terminating_states)
        return rows

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what is sampled, regenerated if so asked."""
        return tensordict if self.regenerate is None else self.regenerate(tensordict)
