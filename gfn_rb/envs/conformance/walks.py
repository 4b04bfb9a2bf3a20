"""The states that a conformance suite tries an environment on."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gfn_rb.envs.base import GFNEnv


class RandomWalks(ABC):
    """Uniform random walks through the environment under test, the same at each call."""

    n_walks = 64

    @abstractmethod
    def make_env(self) -> GFNEnv:
        """Return a new environment without a batch size, on the CPU."""

    def walk(self, env: GFNEnv) -> list[Tensor]:
        """Return the states of uniform random walks: ``max_length + 1`` tensors [n_walks, *S]."""
        return self.states_and_actions(env)[0]

    def states_and_actions(self, env: GFNEnv) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states of the walks, and their ``max_length`` actions [n_walks]."""
        generator = torch.Generator().manual_seed(0)
        states, actions = [env.source(self.n_walks)], []
        for _ in range(env.max_length):
            mask = env.forward_mask(states[-1])
            moving = mask.any(1)
            action = torch.full((self.n_walks,), env.dummy_action)
            if moving.any():
                draw = torch.multinomial(mask[moving].float(), 1, generator=generator)
                action[moving] = draw[:, 0]
            actions.append(action)
            states.append(env.forward_step(states[-1], action))
        return states, actions

    def visited(self, env: GFNEnv) -> Tensor:
        """Return the distinct states that random walks meet, without the sink."""
        state = torch.cat(self.walk(env)).unique(dim=0)
        return state[~env.is_sink(state)]

    def terminating(self, env: GFNEnv) -> Tensor:
        """Return the terminating states among the visited ones."""
        state = self.visited(env)
        return state[env.forward_mask(state)[:, env.exit_action]]

    def moves(self, env: GFNEnv, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return every legal move as a row of ``state`` and an action."""
        row, move = env.forward_mask(state)[:, :-1].nonzero(as_tuple=True)
        return row, move

    def call_everything(self, env: GFNEnv, state: Tensor, move: Tensor) -> list[Tensor]:
        """Return what each function of states says about rows where ``move`` is legal."""
        child = env.forward_step(state, move)
        return [
            child,
            env.backward_step(child, move),
            env.states_of(move[:, None], torch.full_like(move, 2)),
            env.forward_mask(state),
            env.backward_mask(state),
            env.encode(state),
            env.is_source(state),
            env.is_sink(state),
        ]
