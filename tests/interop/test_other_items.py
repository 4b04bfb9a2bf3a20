"""Items with float actions and with graphs, in our buffers and in torchgfn's."""

import pytest
import torch

theirs = pytest.importorskip("gfn.containers")

from gfn.gym import Box  # noqa: E402
from gfn.gym.graph_building import GraphBuilding  # noqa: E402

import gfn_rb.interop.torchgfn as ours  # noqa: E402
from gfn_rb.errors import ArgumentError  # noqa: E402

BOX = Box()
GRAPHS = GraphBuilding(num_node_classes=2, num_edge_classes=2, state_evaluator=None)


def box_trajectories(n, longest):
    length = torch.randint(1, longest + 1, (n,))
    length[0] = longest
    after = torch.arange(longest)[:, None] >= length
    action = torch.rand(longest, n, 2)
    action[length - 1, torch.arange(n)] = BOX.exit_action
    action[after] = BOX.dummy_action
    state = torch.rand(longest + 1, n, 2)
    state[1:][torch.arange(1, longest + 1)[:, None] >= length] = BOX.sf
    return theirs.Trajectories(
        BOX,
        BOX.states_from_tensor(state),
        BOX.actions_from_tensor(action),
        length,
        log_rewards=torch.rand(n),
    )


@pytest.mark.parametrize("prioritized", [False, True])
def test_float_actions_are_padded_as_torchgfns(prioritized) -> None:
    torch.manual_seed(0)
    mine, other = (m.ReplayBuffer(BOX, 12, prioritized) for m in (ours, theirs))
    for longest in (3, 2, 7, 5):
        batch = box_trajectories(5, longest)
        mine.add(batch)
        other.add(batch)
        a, b = mine.training_container, other.training_container
        assert a.states.tensor.equal(b.states.tensor)
        assert a.actions.tensor.equal(b.actions.tensor)
        assert a.log_rewards.equal(b.log_rewards)


def graphs(*shape):
    return GRAPHS.States(GRAPHS.States.make_initial_states(shape).data)


def graph_trajectories(n, n_steps):
    states, width = graphs(n_steps + 1, n), len(GRAPHS.Actions.dummy_action)
    states.data[-1] = [GRAPHS.sf] * n
    return theirs.Trajectories(
        GRAPHS,
        states,
        GRAPHS.actions_from_tensor(torch.randint(0, 2, (n_steps, n, width))),
        torch.full((n,), n_steps),
        log_rewards=torch.rand(n),
    )


def graph_transitions(n, _):
    return theirs.Transitions(
        GRAPHS,
        graphs(n),
        GRAPHS.actions_from_tensor(torch.randint(0, 2, (n, len(GRAPHS.Actions.dummy_action)))),
        torch.ones(n, dtype=torch.bool),
        graphs(n),
        log_rewards=torch.rand(n),
    )


def graph_states(n, _):
    mark = torch.ones(n, dtype=torch.bool)
    return theirs.StatesContainer(GRAPHS, graphs(n), mark, torch.rand(n))


def same_graphs(a, b):
    assert a.shape == b.shape
    return all(x is y or (x is GRAPHS.sf) for x, y in zip(a.flat, b.flat, strict=True))


@pytest.mark.parametrize("make", [graph_trajectories, graph_transitions, graph_states])
@pytest.mark.parametrize("prioritized", [False, True])
def test_graphs_are_kept_as_torchgfn_keeps_them(make, prioritized) -> None:
    torch.manual_seed(0)
    mine, other = (m.ReplayBuffer(GRAPHS, 7, prioritized) for m in (ours, theirs))
    for n_steps in (2, 4, 3, 3, 3, 3, 3, 3):
        batch = make(4, n_steps)
        mine.add(batch)
        other.add(batch)
        a, b = mine.training_container, other.training_container
        assert same_graphs(a.states.data, b.states.data)
        assert a.log_rewards.equal(b.log_rewards)
        if make is not graph_states:
            assert a.actions.tensor.equal(b.actions.tensor)
    drawn = mine.sample(3)
    assert {*map(id, drawn.states.data.flat)} <= {*map(id, a.states.data.flat)}
    n_rows = 7 * (5 if make is graph_trajectories else 2)
    assert len(mine._graphs) <= 2 * n_rows + 4 * 5  # others are let go
    with pytest.raises(ArgumentError, match="to be saved, got graphs"):
        mine.save("nowhere")
    with pytest.raises(ArgumentError, match="got graphs and no table"):
        ours.rows_of(batch)
