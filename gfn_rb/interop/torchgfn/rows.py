"""Rows of a TensorDict that hold the items of torchgfn's containers, and their storage."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gfn.containers import StatesContainer, Trajectories, Transitions
from gfn.env import Env
from gfn.states import GraphStates, States
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import Writer

from gfn_rb import keys
from gfn_rb.buffers.presets import build
from gfn_rb.errors import ArgumentError, NaNError
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.shapes import Float, Int64, Rows, Shaped
from gfn_rb.torchrl_compat import all_slots, given_log_rewards, new_tensordict, write_cursor
from gfn_rb.writers import RewardPrioritizedWriter


class GraphTable(dict[int, Any]):
    """Graphs by number: rows hold the numbers. Unknown numbers, and -1, mean the sink graph."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self._sink, self._next = env.sf, 0

    def numbers(self, graphs: np.ndarray) -> Int64[Tensor, "..."]:
        """Return new numbers for an array of graphs, in its shape."""
        number = np.arange(self._next, self._next + graphs.size)
        self.update(zip(number.tolist(), graphs.flat, strict=True))
        self._next += graphs.size
        return torch.from_numpy(number.reshape(graphs.shape))

    def graphs(self, numbers: Int64[Tensor, "..."]) -> np.ndarray:
        """Return the graphs of an array of numbers, in its shape."""
        found = np.empty(numbers.numel(), dtype=object)
        for place, number in enumerate(numbers.flatten().tolist()):
            found[place] = self.get(number, self._sink)  # NumPy would look into a list
        return found.reshape(tuple(numbers.shape))


def rows_of(container: Any, graphs: GraphTable | None = None) -> TensorDict:
    """Return the items of a torchgfn container as rows, laid out as our containers are.

    Forward items are rows of our ``Trajectories``, ``Transitions`` and ``States``, with which they
    share all they can: states batch-first, discrete actions without their last dimension, one
    condition per item. Log-probabilities and estimator outputs are left out, gradients cut.

    Args:
        container: torchgfn's ``Trajectories``, ``Transitions`` or ``StatesContainer``.
        graphs: where graphs are filed, in whose place rows hold numbers.

    Returns:
        Rows of batch size [n]; ``log_reward`` is NaN where the container has none yet.

    Raises:
        ArgumentError: its states are graphs, and there is no table for them.
    """
    rows = _columns(container, graphs)
    n, given = len(container), given_log_rewards(container)
    if given is None:
        given = torch.full((n,), torch.nan, device=container.device)
    rows[keys.LOG_REWARD] = given
    if (condition := container.states.conditions) is not None:
        rows[keys.CONDITION] = condition[0] if condition.ndim == 3 else condition
    if getattr(container, "is_backward", False):
        rows[keys.IS_BACKWARD] = torch.ones(n, dtype=torch.bool, device=container.device)
    return new_tensordict({key: value.detach() for key, value in rows.items()}, torch.Size([n]))


def container_of(rows: Rows, env: Env, graphs: GraphTable | None = None) -> Any:
    """Return rows as the torchgfn container they came from, trimmed to its longest trajectory.

    Args:
        rows: what :func:`rows_of` returned, other rows joined or taken away; or its entries by
            name. Its tensors are shared where they are laid out alike.
        env: the environment of torchgfn's that they are of.
        graphs: what :func:`rows_of` filed graphs in.
    """
    log_reward, length = rows.get(keys.LOG_REWARD), rows.get(keys.LENGTH, None)
    state, action, condition = (
        rows.get(key, None) for key in (keys.STATE, keys.ACTION, keys.CONDITION)
    )
    common: dict[str, Any] = {
        "env": env,
        "log_rewards": None if bool(log_reward.isnan().any()) else log_reward,
    }
    if length is not None:
        n_steps = int(length.max()) if len(length) else 0
        state = state[:, : n_steps + 1].transpose(0, 1).contiguous()
        action = action[:, :n_steps].transpose(0, 1).contiguous()
        if condition is not None:
            condition = condition.expand(n_steps + 1, *condition.shape).contiguous()
    common["states"] = _states(env, state, condition, graphs)
    if action is None:
        return StatesContainer(is_terminating=rows.get(keys.IS_TERMINATING), **common)
    common["actions"] = env.actions_from_tensor(action[..., None] if env.is_discrete else action)
    common["is_backward"] = rows.get(keys.IS_BACKWARD, None) is not None
    if length is not None:
        return Trajectories(terminating_idx=length, **common)
    after = _states(env, rows.get(keys.NEXT_STATE), condition, graphs)
    is_done = rows.get(keys.NEXT_DONE).squeeze(1)
    return Transitions(next_states=after, is_terminating=is_done, **common)


def padded(rows: TensorDict, n_steps: int, env: Env) -> TensorDict:
    """Return trajectories of at most ``n_steps`` steps padded to it, by sink and dummy actions."""
    state, action = rows.get(keys.STATE), rows.get(keys.ACTION)
    missing = n_steps - action.shape[1]
    dummy = env.Actions.make_dummy_actions((1,)).tensor.reshape(action.shape[2:])
    sink = env.sf if isinstance(env.sf, Tensor) else state.new_tensor(-1)

    def filled(steps: Tensor, padding: Tensor) -> Tensor:
        more = padding.to(steps.dtype).expand(len(steps), missing, *steps.shape[2:])
        return torch.cat([steps, more], 1)

    return rows.clone(recurse=False).update(
        {keys.STATE: filled(state, sink), keys.ACTION: filled(action, dummy)}
    )


def _columns(container: Any, graphs: GraphTable | None) -> dict[str, Any]:
    """Return the entries that differ between kinds of containers."""
    state = _tensor(container.states, graphs)
    if isinstance(container, Trajectories):
        return {
            keys.STATE: state.transpose(0, 1),
            keys.ACTION: _plain(container).transpose(0, 1),
            keys.LENGTH: container.terminating_idx.long(),
        }
    if isinstance(container, Transitions):
        done = container.is_terminating[:, None]
        entries = {keys.STATE: _tensor(container.next_states, graphs), keys.DONE: done}
        after = TensorDict(entries, [len(container)])
        return {keys.STATE: state, keys.ACTION: _plain(container), keys.NEXT: after}
    return {keys.STATE: state, keys.IS_TERMINATING: container.is_terminating}


def _tensor(states: States, graphs: GraphTable | None) -> Tensor:
    if not isinstance(states, GraphStates):
        return states.tensor
    if graphs is None:
        raise ArgumentError("states must be tensors, got graphs and no table for them")
    return graphs.numbers(states.data)


def _plain(container: Any) -> Tensor:
    """Return actions, discrete ones without a last dimension of one."""
    action = container.actions.tensor
    return action.squeeze(-1) if container.env.is_discrete else action


def _states(env: Env, state: Tensor, condition: Tensor | None, graphs: GraphTable | None) -> Any:
    states = env.states_from_tensor(state) if graphs is None else env.States(graphs.graphs(state))
    if condition is not None:
        states.conditions = condition
    return states


def end_features(rows: TensorDictBase) -> Shaped[Tensor, "n d"]:
    """Return flat terminating states, between which torchgfn measures distances."""
    state = rows.get(keys.STATE)
    if (length := rows.get(keys.LENGTH, None)) is not None:
        state = state[torch.arange(len(state), device=state.device), length - 1]
    return state.flatten(1)


def near_better(rows: TensorDictBase, cutoff: float, p: float) -> Shaped[Tensor, "n"]:
    """Return which rows are within ``cutoff`` of a row of higher reward, in the p-norm.

    Of equal rewards the first counts as the higher. torchgfn thins a batch out in this way before
    it looks at what is stored: the row of higher reward may itself be dropped.
    """
    features = end_features(rows)
    if (condition := rows.get(keys.CONDITION, None)) is not None:
        features = torch.cat([features, condition], 1)
    order = rows.get(keys.LOG_REWARD).argsort(descending=True, stable=True)
    features = features[order].to(torch.get_default_dtype())
    distance = torch.cdist(features, features, p=p).tril(-1)
    above = torch.ones_like(distance).triu().bool()
    near = (distance.masked_fill(above, torch.inf) <= cutoff).any(1)
    return torch.empty_like(near).index_copy_(0, order, near)


class RowStore:
    """Items of one kind, as rows that only this class writes to and reads from a buffer ``rb``."""

    def __init__(
        self,
        env: Env,
        capacity: int,
        writer: Callable[[], Writer],
        graphs: GraphTable | None,
    ) -> None:
        self._env, self._graphs = env, graphs
        self._make = lambda: build(capacity, writer(), SoftmaxRewardSampler(), device=env.device)
        self.rb: TensorDictReplayBuffer = self._make()

    def __len__(self) -> int:
        return len(self.rb.storage)

    def extend(self, rows: TensorDict) -> None:
        """Offer rows to the writer."""
        if keys.LENGTH in rows and len(self):  # all rows have one width
            width, n_steps = self._stored(keys.ACTION).shape[1], rows.get(keys.ACTION).shape[1]
            if n_steps > width:  # by half as much again, so that few batches move what is stored
                width = max(n_steps, width + width // 2)
                stored = TensorDict(self._rows_at(self.in_order(by_age=True)), [len(self)])
                self.rb = self._make()
                self.rb.writer.extend(padded(stored, width, self._env))
            rows = rows if n_steps == width else padded(rows, width, self._env)
        self.rb.writer.extend(rows)
        if self._graphs is not None:
            entries = (self._stored(keys.STATE), self._stored(keys.NEXT_STATE))
            held = torch.cat([n[: len(self)].flatten() for n in entries if n is not None])
            if len(self._graphs) > 2 * len(held):  # most are of rows that have gone
                for forgotten in self._graphs.keys() - {*held.tolist()}:
                    del self._graphs[forgotten]

    def at(self, slot: Int64[Tensor, "n"]) -> Any:
        """Return the items in some slots as a torchgfn container."""
        return container_of(self._rows_at(slot), self._env, self._graphs)

    def log_rewards(self) -> Float[Tensor, "n"]:
        """Return the log-rewards of all items, by slot."""
        return self._stored(keys.LOG_REWARD)[: len(self)]

    def in_order(self, by_age: bool = False) -> Int64[Tensor, "n"]:
        """Return all slots: by reward where the best are kept, unless ``by_age``, else by age."""
        writer, n = self.rb.writer, len(self)
        if not isinstance(writer, RewardPrioritizedWriter):
            return (torch.arange(n, device=self._env.device) + write_cursor(writer)) % n
        slot: Tensor = writer.state_dict()["rank"].argsort()
        return slot if by_age else slot[self.log_rewards()[slot].argsort(stable=True)]

    def draw_by_reward(self, n: int) -> Int64[Tensor, "n"]:
        """Draw slots in proportion to the reward, with replacement if there are fewer than n."""
        try:
            return self.rb.sampler.sample(self.rb.storage, n)[0]
        except NaNError as error:
            raise ValueError("log_rewards must be defined for prioritized sampling.") from error

    def draw_distinct(self, n: int) -> Int64[Tensor, "k"]:
        """Draw n different slots, or all, from torch's random numbers."""
        generator = random.Random(int(torch.randint(2**62, ())))
        return torch.tensor(generator.sample(range(len(self)), min(n, len(self))))

    def _rows_at(self, slot: Int64[Tensor, "n"]) -> dict[Any, Tensor]:
        """Return what ``rb[slot]`` does, in a fraction of the time."""
        stored, slot = all_slots(self.rb.storage), slot.to(self.rb.storage.device)
        return {name: leaf.index_select(0, slot) for name, leaf in stored.items(True, True)}

    def _stored(self, name: Any) -> Any:
        return all_slots(self.rb.storage).get(name, None)
