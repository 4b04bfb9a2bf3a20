"""What happens to trajectories on their way into a buffer and out of it."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from gfn_rb.containers import Trajectories, convert
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.keys import ACTION, CONDITION, IS_TERMINATING, LENGTH, LOG_REWARD, STATE


class InsertionTransform(Transform):
    """A transform of rows on their way into a buffer, which leaves what is sampled as it is."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what is sampled as it is."""
        return tensordict


class PadTrajectories(InsertionTransform):
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
        if not are_trajectories(tensordict):
            return tensordict
        if tensordict.get(ACTION).shape[tensordict.ndim] == self.n_steps:
            return tensordict
        rows = tensordict if tensordict.ndim else tensordict.unsqueeze(0)
        fitted = self._fitted(rows, Trajectories.from_tensordict(rows))
        return fitted if tensordict.ndim else fitted[0]

    def _fitted(self, rows: TensorDictBase, trajectories: Trajectories) -> TensorDictBase:
        if trajectories.n_steps < self.n_steps:
            return convert.padded(rows, self.n_steps)
        longest = int(trajectories.length.max()) if len(rows) else 0
        if longest > self.n_steps:
            raise ShapeError(
                f"a trajectory of {longest} actions does not fit: the buffer holds at most "
                f"max_length={self.n_steps}"
            )
        return convert.cut(rows, self.n_steps)


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
        rows = tensordict if tensordict.ndim else tensordict.unsqueeze(0)
        kept = rows.select(STATE, LOG_REWARD, CONDITION, strict=False)
        if are_trajectories(rows):
            kept.set(STATE, Trajectories.from_tensordict(rows).terminating_states)
        else:
            _require_terminating(rows)
        return kept if tensordict.ndim else kept[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what is sampled, regenerated if so asked."""
        if self.regenerate is None:
            return tensordict
        if tensordict.ndim == 0:  # a single item, as rb[0]
            return self.regenerate(tensordict.unsqueeze(0))[0]
        return self.regenerate(tensordict)


def are_trajectories(rows: TensorDictBase) -> bool:
    """Return whether rows are trajectories, by their keys.

    Args:
        rows: of any batch size.
    """
    return set(rows.keys()) >= {ACTION, LENGTH}


def _require_terminating(rows: TensorDictBase) -> None:
    if ACTION in rows.keys():  # noqa: SIM118
        raise KeyMismatchError(
            f"rows hold {ACTION!r} and no {LENGTH!r}: expected trajectories or terminating states, "
            "not transitions"
        )
    if STATE not in rows.keys():  # noqa: SIM118
        raise KeyMismatchError(f"rows lack {STATE!r}: they hold {sorted(map(str, rows.keys()))}")
    terminating = rows.get(IS_TERMINATING, None)
    if terminating is not None and not bool(terminating.all()):
        raise ArgumentError(
            f"{int((~terminating).sum())} of {len(rows)} states are not terminating: expected "
            "terminating states alone"
        )
