"""torchgfn's containers as rows of a TensorDict, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gfn.containers import StatesContainer, Trajectories, Transitions
from gfn.env import Env
from gfn.states import GraphStates, States
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gfn_rb.errors import ArgumentError
from gfn_rb.keys import (
    ACTION,
    CONDITION,
    DONE,
    IS_BACKWARD,
    IS_TERMINATING,
    LENGTH,
    LOG_REWARD,
    NEXT,
    NEXT_DONE,
    NEXT_STATE,
    STATE,
)
from gfn_rb.shapes import Int64, Rows, Shaped
from gfn_rb.torchrl_compat import given_log_rewards, new_tensordict


class GraphTable:
    """Numbers that stand for graphs in rows, and the graphs they stand for.

    Args:
        env: whose sink graph stands for all numbers unknown, -1 among them.
    """

    def __init__(self, env: Env) -> None:
        self._sink, self._graphs, self._next = env.sf, dict[int, Any](), 0

    def __len__(self) -> int:
        return len(self._graphs)

    def numbers(self, graphs: np.ndarray) -> Int64[Tensor, "..."]:
        """Return new numbers for graphs, in the shape of these.

        Args:
            graphs: an array of torchgfn's graphs.
        """
        number = np.arange(self._next, self._next + graphs.size)
        self._graphs.update(zip(number.tolist(), graphs.flat, strict=True))
        self._next += graphs.size
        return torch.from_numpy(number.reshape(graphs.shape))

    def graphs(self, numbers: Int64[Tensor, "..."]) -> np.ndarray:
        """Return the graphs that numbers stand for.

        Args:
            numbers: what :meth:`numbers` returned, or -1.
        """
        found = np.empty(numbers.numel(), dtype=object)
        for place, number in enumerate(numbers.flatten().tolist()):
            found[place] = self._graphs.get(number, self._sink)  # NumPy would look into a list
        return found.reshape(tuple(numbers.shape))

    def keep(self, numbers: Int64[Tensor, "m"]) -> None:
        """Forget all graphs but some.

        Args:
            numbers: those of the graphs to keep.
        """
        self._graphs = {i: self._graphs[i] for i in numbers.tolist() if i in self._graphs}


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
    rows[LOG_REWARD] = given
    if (condition := container.states.conditions) is not None:
        rows[CONDITION] = condition[0] if condition.ndim == 3 else condition
    if getattr(container, "is_backward", False):
        rows[IS_BACKWARD] = torch.ones(n, dtype=torch.bool, device=container.device)
    return new_tensordict({key: value.detach() for key, value in rows.items()}, torch.Size([n]))


def container_of(rows: Rows, env: Env, graphs: GraphTable | None = None) -> Any:
    """Return rows as the torchgfn container they came from, trimmed to its longest trajectory.

    Args:
        rows: what :func:`rows_of` returned, other rows joined or taken away; or its entries by
            name. Its tensors are shared where they are laid out alike.
        env: the environment of torchgfn's that they are of.
        graphs: what :func:`rows_of` filed graphs in.
    """
    log_reward = rows.get(LOG_REWARD)
    common: dict[str, Any] = {"env": env}
    common["log_rewards"] = None if bool(log_reward.isnan().any()) else log_reward
    held = set(rows.keys())
    if LENGTH in held:
        return _trajectories(rows, common, graphs)
    common["states"] = _states(env, rows.get(STATE), rows.get(CONDITION, None), graphs)
    if ACTION not in held:
        return StatesContainer(is_terminating=rows.get(IS_TERMINATING), **common)
    return Transitions(
        actions=_actions(env, rows.get(ACTION)),
        next_states=_states(env, rows.get(NEXT_STATE), rows.get(CONDITION, None), graphs),
        is_terminating=rows.get(NEXT_DONE).squeeze(1),
        is_backward=IS_BACKWARD in held,
        **common,
    )


def padded(rows: TensorDict, n_steps: int, env: Env) -> TensorDict:
    """Return trajectories with ``n_steps`` steps, padded by the sink and by dummy actions.

    Args:
        rows: trajectories of that many steps at most.
        n_steps: number of steps.
        env: the environment of torchgfn's that they are of.
    """
    state, action = rows.get(STATE), rows.get(ACTION)
    missing = n_steps - action.shape[1]
    dummy = env.Actions.make_dummy_actions((1,)).tensor.reshape(action.shape[2:])
    sink = env.sf if isinstance(env.sf, Tensor) else state.new_tensor(-1)

    def filled(steps: Tensor, padding: Tensor) -> Tensor:
        more = padding.to(steps.dtype).expand(len(steps), missing, *steps.shape[2:])
        return torch.cat([steps, more], 1)

    return rows.clone(recurse=False).update(
        {STATE: filled(state, sink), ACTION: filled(action, dummy)}
    )


def _columns(container: Any, graphs: GraphTable | None) -> dict[str, Any]:
    """Return what each kind of container has of its own."""
    state = _tensor(container.states, graphs)
    if isinstance(container, Trajectories):
        return {
            STATE: state.transpose(0, 1),
            ACTION: _plain(container).transpose(0, 1),
            LENGTH: container.terminating_idx.long(),
        }
    if isinstance(container, Transitions):
        return {
            STATE: state,
            ACTION: _plain(container),
            NEXT: TensorDict(
                {
                    STATE: _tensor(container.next_states, graphs),
                    DONE: container.is_terminating[:, None],
                },
                [len(container)],
            ),
        }
    return {STATE: state, IS_TERMINATING: container.is_terminating}


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


def _trajectories(rows: Rows, common: dict[str, Any], graphs: GraphTable | None) -> Trajectories:
    env, length, condition = common["env"], rows.get(LENGTH), rows.get(CONDITION, None)
    n_steps = int(length.max()) if len(length) else 0
    state = rows.get(STATE)[:, : n_steps + 1].transpose(0, 1).contiguous()
    action = rows.get(ACTION)[:, :n_steps].transpose(0, 1).contiguous()
    if condition is not None:
        condition = condition.expand(n_steps + 1, *condition.shape).contiguous()
    return Trajectories(
        states=_states(env, state, condition, graphs),
        actions=_actions(env, action),
        terminating_idx=length,
        is_backward=rows.get(IS_BACKWARD, None) is not None,
        **common,
    )


def _actions(env: Env, action: Tensor) -> Any:
    return env.actions_from_tensor(action[..., None] if env.is_discrete else action)


def _states(env: Env, state: Tensor, condition: Tensor | None, graphs: GraphTable | None) -> Any:
    states = env.states_from_tensor(state) if graphs is None else env.States(graphs.graphs(state))
    if condition is not None:
        states.conditions = condition
    return states


def end_features(rows: TensorDictBase) -> Shaped[Tensor, "n d"]:
    """Return what torchgfn measures distances between: flat terminating states.

    Args:
        rows: as of :func:`rows_of`; transitions and states all terminating.
    """
    state = rows.get(STATE)
    if (length := rows.get(LENGTH, None)) is not None:
        state = state[torch.arange(len(state), device=state.device), length - 1]
    return state.flatten(1)


def near_better(rows: TensorDictBase, cutoff: float, p: float) -> Shaped[Tensor, "n"]:
    """Tell which rows lie near one of higher reward, be that one kept or not.

    So torchgfn thins a batch out before it looks at what is stored.

    Args:
        rows: as of :func:`rows_of`; of equal rewards the first counts as the higher.
        cutoff: a distance this large or smaller is near.
        p: of the norm.
    """
    features = end_features(rows)
    if (condition := rows.get(CONDITION, None)) is not None:
        features = torch.cat([features, condition], 1)
    order = rows.get(LOG_REWARD).argsort(descending=True, stable=True)
    features = features[order].to(torch.get_default_dtype())
    distance = torch.cdist(features, features, p=p).tril(-1)
    above = torch.ones_like(distance).triu().bool()
    near = (distance.masked_fill(above, torch.inf) <= cutoff).any(1)
    return torch.empty_like(near).index_copy_(0, order, near)
