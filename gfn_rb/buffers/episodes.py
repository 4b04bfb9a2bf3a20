"""Trajectories stored row by row: transitions or states that know which episode they are of."""

from __future__ import annotations

from abc import abstractmethod

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.buffers.transforms import InsertionTransform, are_trajectories
from gfn_rb.containers import States, Trajectories, Transitions
from gfn_rb.errors import ArgumentError
from gfn_rb.keys import EPISODE, EPISODE_LOG_REWARD, LOG_PROB, NEXT
from gfn_rb.shapes import Bool, Int64

Rows = Transitions | States


class KeepRows(InsertionTransform):
    """Splits trajectories on their way into a buffer, and stamps rows with their episode.

    Each row gets ``episode_log_reward``, log R(x) of the trajectory it is of, and ``episode``, a
    number that the rows of no other trajectory have. ``log_reward`` stays -inf in all rows but the
    terminating one, as losses expect: what keeps and draws rows goes by the other key.

    What is no trajectory must be rows, episode after episode. Rows that have both stamps, such as
    drawn ones, keep them and may come in any order.

    Attributes:
        n_episodes: the number of the next episode, int64.
    """

    n_episodes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n_episodes", torch.zeros((), dtype=torch.int64))

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.ndim:
            return self._stored(tensordict)
        if are_trajectories(tensordict):
            raise ArgumentError("add takes a single row, got a trajectory: use extend")
        return self._stored(tensordict.unsqueeze(0))[0]

    def _stored(self, data: TensorDictBase) -> TensorDict:
        if are_trajectories(data):
            trajectories = Trajectories.from_tensordict(data)
            rows, length = self._split(trajectories), trajectories.length
            episode = torch.arange(len(length), device=length.device).repeat_interleave(length)
            return self._stamped(rows, episode, trajectories.log_reward)
        rows, is_backward = self._read(data)
        if {EPISODE, EPISODE_LOG_REWARD} <= set(data.keys()):
            return rows.to_tensordict().update(data.select(EPISODE, EPISODE_LOG_REWARD))
        episode = _episodes(rows.is_terminating, is_backward)
        return self._stamped(rows, episode, rows.log_reward[rows.is_terminating])

    def _stamped(self, rows: Rows, episode: Int64[Tensor, "m"], log_reward: Tensor) -> TensorDict:
        td = rows.to_tensordict()
        td.set(EPISODE, episode + self.n_episodes.to(episode.device))
        td.set(EPISODE_LOG_REWARD, log_reward[episode])
        self.n_episodes += len(log_reward)
        return td

    @abstractmethod
    def _split(self, trajectories: Trajectories) -> Rows:
        """Return what is stored of trajectories."""

    @abstractmethod
    def _read(self, data: TensorDictBase) -> tuple[Rows, Tensor | None]:
        """Return what is stored of given rows, and which way they run."""


class KeepTransitions(KeepRows):
    """Stores a row per action. See ``KeepRows``.

    Args:
        dropped: optional fields of transitions to leave out.
    """

    def __init__(self, dropped: tuple[str, ...] = (LOG_PROB,)) -> None:
        super().__init__()
        self.dropped = dropped

    def _split(self, trajectories: Trajectories) -> Transitions:
        return trajectories.drop(*self.dropped).to_transitions()

    def _read(self, data: TensorDictBase) -> tuple[Transitions, Tensor | None]:
        rows = Transitions.from_tensordict(data).drop(*self.dropped)
        return rows, rows.is_backward


class KeepStates(KeepRows):
    """Stores a row per visited state, of trajectories, transitions or states. See ``KeepRows``.

    States say nothing of their direction: given as such, they must be of forward episodes.
    """

    def _split(self, trajectories: Trajectories) -> States:
        return trajectories.to_states()

    def _read(self, data: TensorDictBase) -> tuple[States, Tensor | None]:
        if NEXT not in data.keys():  # noqa: SIM118
            return States.from_tensordict(data), None
        rows = Transitions.from_tensordict(data)
        return rows.to_states(), rows.is_backward


def _episodes(
    is_terminating: Bool[Tensor, "m"], is_backward: Bool[Tensor, "m"] | None
) -> Int64[Tensor, "m"]:
    """Return the number of the episode that each row belongs to, from 0.

    A forward episode ends with its terminating row, a backward one begins with it.

    Raises:
        ArgumentError: an episode does not have just one.
    """
    if is_backward is None:
        is_backward = torch.zeros_like(is_terminating)
    begins = is_terminating & is_backward
    begins[1:] |= is_terminating[:-1] & ~is_backward[:-1]
    begins[1:] |= is_backward[1:] != is_backward[:-1]
    begins[:1] = True
    episode = begins.cumsum(0) - 1
    n_episodes = int(episode[-1]) + 1 if len(episode) else 0
    n_ends = torch.bincount(episode[is_terminating], minlength=n_episodes)
    if not (n_ends == 1).all():
        raise ArgumentError(
            "rows must be whole episodes, one after another, with one terminating row each, got "
            f"{int((n_ends != 1).sum())} of {n_episodes} episodes without"
        )
    return episode
