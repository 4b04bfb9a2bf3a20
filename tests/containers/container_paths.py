"""Trajectories in plain Python: the slow oracle the containers are compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import TensorDictBase

from gfn_rb.containers import States, Trajectories, Transitions

SHAPES = ((), (2,), (1, 2))


@dataclass(frozen=True)
class Walked:
    """One trajectory in the order it was walked, without padding; values are nested lists."""

    states: tuple[Any, ...]
    actions: tuple[Any, ...]
    log_probs: tuple[float, ...]
    outputs: tuple[Any, ...]
    log_reward: float
    condition: Any
    is_backward: bool

    @property
    def sink(self) -> Any:
        return self.states[0] if self.is_backward else self.states[-1]

    @property
    def terminating_state(self) -> Any:
        return self.states[1] if self.is_backward else self.states[-2]

    def reversed(self) -> Walked:
        return replace(
            self,
            states=self.states[::-1],
            actions=self.actions[::-1],
            log_probs=self.log_probs[::-1],
            outputs=self.outputs[::-1],
            is_backward=not self.is_backward,
        )

    def forward(self) -> Walked:
        return self.reversed() if self.is_backward else self

    def transitions(self) -> list[tuple[Any, ...]]:
        exit_step = 0 if self.is_backward else len(self.actions) - 1
        return [
            (
                self.states[i],
                self.actions[i],
                self.states[i + 1],
                i == exit_step,
                self.log_reward if i == exit_step else -math.inf,
                self.log_probs[i],
                self.condition,
                self.is_backward,
            )
            for i in range(len(self.actions))
        ]

    def visits(self) -> list[tuple[Any, ...]]:
        rows = []
        for i, state in enumerate(self.states):
            is_sink = i == (0 if self.is_backward else len(self.actions))
            is_x = i == (1 if self.is_backward else len(self.actions) - 1)
            if not is_sink:
                rows.append((state, is_x, self.log_reward if is_x else -math.inf, self.condition))
        return rows


@dataclass(frozen=True)
class Kind:
    """Shapes and dtype that all paths of a container share."""

    state_shape: tuple[int, ...] = (2,)
    action_shape: tuple[int, ...] = ()
    state_dtype: torch.dtype = torch.int64


def full(shape: tuple[int, ...], value: float) -> Any:
    return torch.full(shape, value).tolist()


def stack(kind: Kind, paths: list[Walked], n_steps: int | None = None) -> Trajectories:
    """Pad paths by hand and stack them into a container."""
    longest = max((len(p.actions) for p in paths), default=0)
    n_steps, n = longest if n_steps is None else n_steps, len(paths)
    dummy, no_output = full(kind.action_shape, -1), [0.0, 0.0]

    def pad(values: tuple[Any, ...], size: int, fill: Any) -> list[Any]:
        return [*values, *[fill] * (size - len(values))]

    def tensor(rows: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(rows, dtype=dtype).reshape(n, *shape)

    return Trajectories(
        state=tensor(
            [pad(p.states, n_steps + 1, p.sink) for p in paths],
            (n_steps + 1, *kind.state_shape),
            kind.state_dtype,
        ),
        action=tensor(
            [pad(p.actions, n_steps, dummy) for p in paths],
            (n_steps, *kind.action_shape),
            torch.int64,
        ),
        length=tensor([len(p.actions) for p in paths], (), torch.int64),
        log_reward=tensor([p.log_reward for p in paths], (), torch.float32),
        log_prob=tensor([pad(p.log_probs, n_steps, 0.0) for p in paths], (n_steps,), torch.float32),
        estimator_output=tensor(
            [pad(p.outputs, n_steps, no_output) for p in paths], (n_steps, 2), torch.float32
        ),
        condition=tensor([p.condition for p in paths], (3,), torch.float32),
        is_backward=tensor([p.is_backward for p in paths], (), torch.bool),
    )


def unstack(kind: Kind, trajectories: Trajectories) -> list[Walked]:
    """Read a container row by row, and check that its padding is what it must be."""
    paths = []
    columns = trajectories.to_tensordict()
    for i in range(len(trajectories)):
        row = {key: columns[key][i].tolist() for key in columns.keys()}  # noqa: SIM118
        n = row["length"]
        path = Walked(
            states=tuple(row["state"][: n + 1]),
            actions=tuple(row["action"][:n]),
            log_probs=tuple(row["log_prob"][:n]),
            outputs=tuple(row["estimator_output"][:n]),
            log_reward=row["log_reward"],
            condition=row["condition"],
            is_backward=row["is_backward"],
        )
        assert all(state == path.sink for state in row["state"][n + 1 :])
        assert all(action == full(kind.action_shape, -1) for action in row["action"][n:])
        assert all(value == 0 for value in row["log_prob"][n:])
        assert all(value == [0.0, 0.0] for value in row["estimator_output"][n:])
        paths.append(path)
    return paths


def transition_rows(transitions: Transitions) -> list[tuple[Any, ...]]:
    columns = (
        transitions.state,
        transitions.action,
        transitions.next_state,
        transitions.is_terminating,
        transitions.log_reward,
        transitions.log_prob,
        transitions.condition,
        transitions.is_backward,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def state_rows(states: States) -> list[tuple[Any, ...]]:
    columns = (states.state, states.is_terminating, states.log_reward, states.condition)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def same(a: TensorDictBase, b: TensorDictBase) -> bool:
    """Tell whether two TensorDicts have the same keys, values and dtypes."""
    leaves_a, leaves_b = set(a.keys(True, True)), set(b.keys(True, True))
    return (
        a.batch_size == b.batch_size
        and leaves_a == leaves_b
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in leaves_a)
    )


kinds = st.builds(
    Kind,
    st.sampled_from(SHAPES),
    st.sampled_from(SHAPES),
    st.sampled_from((torch.int64, torch.float32)),
)


@st.composite
def paths_of(
    draw: st.DrawFn, kind: Kind, min_size: int = 0, source: int | None = None
) -> list[Walked]:
    """Draw paths of a kind; all values are small integers, exact in every dtype used."""

    def nested(shape: tuple[int, ...], number: Any) -> Any:
        values = draw(st.lists(number, min_size=math.prod(shape), max_size=math.prod(shape)))
        return torch.tensor(values).reshape(shape).tolist()

    whole, small = st.integers(-3, 5), st.integers(-8, 8).map(float)
    state = whole.map(float) if kind.state_dtype.is_floating_point else whole
    paths = []
    for _ in range(draw(st.integers(min_size, 4))):
        length = draw(st.integers(1, 4))
        states = [nested(kind.state_shape, state) for _ in range(length + 1)]
        if source is not None:
            dtype = kind.state_dtype
            states[0] = torch.full(kind.state_shape, source, dtype=dtype).tolist()
        path = Walked(
            states=tuple(states),
            actions=tuple(nested(kind.action_shape, st.integers(0, 5)) for _ in range(length)),
            log_probs=tuple(draw(small) for _ in range(length)),
            outputs=tuple(nested((2,), small) for _ in range(length)),
            log_reward=draw(small),
            condition=nested((3,), small),
            is_backward=False,
        )
        paths.append(path.reversed() if draw(st.booleans()) else path)
    return paths


@st.composite
def kind_and_paths(
    draw: st.DrawFn, min_size: int = 0, source: int | None = None
) -> tuple[Kind, list[Walked]]:
    kind = draw(kinds)
    return kind, draw(paths_of(kind, min_size, source))
