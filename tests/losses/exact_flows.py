"""The flow that a backward policy determines, child by child, and losses that know it."""

from __future__ import annotations

import math

import torch
from factories import policy_of
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from gfn_rb.containers import Trajectories
from gfn_rb.losses import LOSSES
from gfn_rb.policies import BackwardPolicy, LogZ
from gfn_rb.rollout import Sampler, action_log_probs


def uneven_backward_policy(env, seed=0):
    """A backward policy with parameters, far from uniform."""
    torch.manual_seed(seed)
    backward = BackwardPolicy(env, hidden=(8,))
    with torch.no_grad():
        backward.head.weight.mul_(20)
    return backward


def exact_networks(env, backward):
    """Every network a loss may ask for, at the optimum that belongs to a backward policy.

    The flow has F(x -> sink) = R(x) and F(s) = R(s) [exit legal] + sum over children s' of
    F(s') P_B(s | s'), child by child from the last layer, in double precision. It is looked up by
    ``state_key``.
    """
    flow, edges_of = {}, {}
    for states in reversed(list(env.layers())):
        for state in states:
            one, key = state[None], int(env.state_key(state[None]))
            edges = torch.zeros(env.n_actions, dtype=torch.float64)
            for action in env.forward_mask(one)[0].nonzero()[:, 0].tolist():
                if action == env.exit_action:
                    edges[action] = env.log_reward(one).double().exp()[0]
                    continue
                child = env.forward_step(one, torch.tensor([action]))
                log_pb = action_log_probs(backward, env, child).detach().double()
                edges[action] = flow[int(env.state_key(child))] * log_pb[0, action].exp()
            flow[key], edges_of[key] = edges.sum(), edges.log().float()
    log_flow = {key: value.log().float() for key, value in flow.items()}

    def looked_up(table):
        return lambda state: torch.stack([table[key] for key in env.state_key(state).tolist()])

    return {
        "forward_policy": policy_of(looked_up(edges_of), False),
        "backward_policy": backward,
        "state_flow": TensorDictModule(looked_up(log_flow), ["state"], ["log_flow"]),
        "log_z": LogZ(float(log_flow[int(env.state_key(env.source(1)))])),
    }


class Table(TensorDictModuleBase):
    """Random numbers in double precision, one row of them for each ``env.state_key``."""

    def __init__(self, env, out_key, *shape, is_backward=None):
        super().__init__()
        self.in_keys, self.out_keys, self.key = ["state"], [out_key], env.state_key
        n_keys = 1 + max(int(env.state_key(states).max()) for states in env.layers())
        generator = torch.Generator().manual_seed(len(shape) + bool(is_backward))
        values = torch.randn(n_keys, *shape, generator=generator, dtype=torch.float64)
        self.values, self.is_backward = torch.nn.Parameter(values), is_backward

    def forward(self, tensordict):
        return tensordict.set(self.out_keys[0], self.values[self.key(tensordict["state"])])


def tabular_networks(env):
    return {
        "forward_policy": Table(env, "logits", env.n_actions, is_backward=False),
        "backward_policy": Table(env, "logits", env.n_actions - 1, is_backward=True),
        "state_flow": Table(env, "log_flow"),
        "log_z": LogZ(1.0).double(),
    }


def make_loss(name, env, networks, **options):
    kind = LOSSES[name]
    return kind(env=env, **{part: networks[part] for part in kind.networks}, **options)


def as_read(loss, trajectories):
    """The container a loss reads, made of trajectories."""
    kind = loss.reads.__name__
    if kind == "Trajectories":
        return trajectories
    return trajectories.to_transitions() if kind == "Transitions" else trajectories.to_states()


def both_ways(env, forward, backward, n=16, seed=0, conditions=None):
    """Random forward trajectories, and backward ones to the same states, padded by one."""
    generator = torch.Generator().manual_seed(seed)
    rows = Sampler(forward).sample_trajectories(
        env, n if conditions is None else None, epsilon=0.7, generator=generator,
        **({} if conditions is None else {"states": env.source(n), "conditions": conditions}),
    )  # fmt: skip
    back = Sampler(backward).sample_trajectories(
        env, states=rows.terminating_states, conditions=conditions, epsilon=0.7,
        generator=generator,
    )  # fmt: skip
    both = Trajectories.cat([rows, back])
    return both.pad_to(both.n_steps + 1)


class Plain:
    """Tabular networks read one state at a time, with Python's own arithmetic.

    States are tuples; numbers are logs.
    """

    def __init__(self, env, networks):
        self.env, self.networks = env, networks

    def _row(self, part, state):
        network = self.networks[part]
        return network.values[int(self.env.state_key(torch.tensor([state])))].tolist()

    def _legal(self, state, is_backward):
        env, one = self.env, torch.tensor([state])
        mask = env.backward_mask(one) if is_backward else env.forward_mask(one)
        return mask[0].nonzero()[:, 0].tolist()

    def edges(self, state):
        """log F(s, a) of every legal action."""
        row = self._row("forward_policy", state)
        return {action: row[action] for action in self._legal(state, False)}

    def pf(self, state, action):
        edges = self.edges(state)
        return edges[action] - log_sum(edges.values())

    def pb(self, state, move):
        row = self._row("backward_policy", state)
        moves = [row[each] for each in self._legal(state, True)]
        return row[move] - log_sum(moves)

    def flow(self, state):
        return self._row("state_flow", state)

    def log_reward(self, state):
        return float(self.env.log_reward(torch.tensor([state]))[0])

    def parents(self, state):
        """Each move into a state, and where it comes from."""
        one = torch.tensor([state])
        undone = {m: self.env.undo(one, torch.tensor([m])) for m in self._legal(state, True)}
        return {move: tuple(parent[0].tolist()) for move, parent in undone.items()}


def log_sum(values):
    return math.log(sum(map(math.exp, values)))


def walks(trajectories):
    """Each row as its states, from the source to the terminating one, and its actions."""
    found = []
    for i, length in enumerate(trajectories.length.tolist()):
        states = trajectories.state[i, : length + 1].tolist()
        actions = trajectories.action[i, :length].tolist()
        if trajectories.is_backward is not None and trajectories.is_backward[i]:
            states, actions = states[::-1], actions[::-1]
        found.append(([tuple(state) for state in states[:-1]], actions))
    return found
