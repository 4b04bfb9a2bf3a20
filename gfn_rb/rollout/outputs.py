"""Outputs of a policy: logits and parameters of actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution

from gfn_rb import keys
from gfn_rb.envs.base import GFNEnv
from gfn_rb.envs.continuous import ContinuousEnv
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.rollout.categorical import Exploration, draw, explain_no_draw
from gfn_rb.shapes import ActionBatch, Bool, ConditionBatch, Float, Int64, StateBatch


@dataclass(frozen=True)
class Parameters:
    """Distribution of the parameters of moves under a policy, in a batch of states."""

    env: ContinuousEnv
    state: Tensor
    density: Distribution
    is_backward: bool

    def __post_init__(self) -> None:
        expected = (self.state.shape[:1], torch.Size([self.env.action_shape[0] - 1]))
        if (came := (self.density.batch_shape, self.density.event_shape)) != expected:
            raise ShapeError(
                f"policy.get_dist must return a distribution of batch shape {list(expected[0])} "
                f"and event shape {list(expected[1])}, got {list(came[0])} and {list(came[1])}"
            )

    def draw(self, kind: Int64[Tensor, "n"], by: Exploration) -> Float[Tensor, "n k1"]:
        """Return actions of their kinds, with parameters drawn."""
        with _drawn_by(by.generator, self.state.device):
            drawn = self.density.sample()
            if by.epsilon:
                explores = torch.rand(len(drawn), 1, device=drawn.device) < by.epsilon
                reference = self.env.reference(self.state, self.is_backward).sample()
                drawn = reference.where(explores, drawn)
        if self.is_backward:
            is_first, first = self.env.from_source(self.state)
            drawn = first.where(is_first[:, None], drawn)
        return self.env.with_parameters(kind, drawn)

    def log_prob(
        self, action: Float[Tensor, "n k1"], by: Exploration | None = None
    ) -> Float[Tensor, "n"]:
        """Return the log-density of each action's parameters, with gradient; 0 without density."""
        has = self.env.kind(action) != self.env.exit_action
        if self.is_backward:
            has = has & ~self.env.from_source(self.state)[0]
        # Of what has no density, a value that has one: the gradient of infinity times 0 is NaN.
        value = action[:, 1:].where(has[:, None], self.density.mean.detach())
        log_p: Tensor = self.density.log_prob(value)
        if by is not None and by.epsilon:
            reference = self.env.reference(self.state, self.is_backward).log_prob(value)
            own = log_p + math.log1p(-by.epsilon) if by.epsilon < 1 else log_p - torch.inf
            log_p = torch.logaddexp(own, reference + math.log(by.epsilon))
        return log_p.where(has, 0)


@contextmanager
def _drawn_by(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """Have torch's distributions, which take no generator, draw from one."""
    if generator is None:
        yield
        return
    own = torch.cuda if device.type == "cuda" else torch
    before = own.get_rng_state()
    own.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(own.get_rng_state())
        own.set_rng_state(before)


Evaluator = Callable[[np.ndarray, Tensor | None], Tensor]
"""Maps an array of states, and their conditions if there are any, to an entry about each."""


class StateModule(TensorDictModuleBase):
    """Module that writes one entry about states, computed from plain tensors by ``evaluate``.

    Rollouts and losses call ``evaluate`` itself: a TensorDict costs more than a small network.
    Hooks on this module are then not called, those on its layers are. A subclass that overrides
    ``forward`` is called with a TensorDict, as any other module.
    """

    def evaluate(
        self, state: StateBatch, condition: ConditionBatch | None = None
    ) -> Float[Tensor, "n ..."]:
        """Return the entry for each state."""
        raise NotImplementedError

    def evaluator(self) -> Evaluator:
        """Return ``evaluate`` for many calls between two changes of the module."""
        return lambda state, condition: self.evaluate(torch.from_numpy(state), condition)

    def plain_trunk(self) -> nn.Module | None:
        """Return the trunk if the entry is ``head(features(state, condition))``; else None."""
        return None

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the entry."""
        condition = tensordict.get(keys.CONDITION) if keys.CONDITION in self.in_keys else None
        value = self.evaluate(tensordict.get(keys.STATE), condition)
        return tensordict.set(self.out_keys[0], value)


def require_direction(policy: TensorDictModuleBase, name: str = "policy") -> bool:
    """Return ``policy.is_backward``."""
    if not isinstance(policy, TensorDictModuleBase):
        raise ArgumentError(
            f"{name} must be a TensorDictModule that reads {keys.STATE!r} and writes "
            f"{keys.LOGITS!r}, got a {type(policy).__name__}"
        )
    is_backward = getattr(policy, "is_backward", None)
    if not isinstance(is_backward, bool):
        raise ArgumentError(
            f"{name} must have an attribute is_backward, True or False, got {is_backward!r} "
            f"from {type(policy).__name__}"
        )
    return is_backward


def policy_outputs(
    policy: TensorDictModuleBase,
    env: GFNEnv | None,
    state: StateBatch,
    condition: ConditionBatch | None,
    mask: Bool[Tensor, "n actions"] | None = None,
    active: Bool[Tensor, "n"] | None = None,
) -> tuple[Bool[Tensor, "n actions"], Float[Tensor, "n actions"], Parameters | None]:
    """Return each state's legal actions, logits and any parameters of moves.

    Rows that are not active have one legal action, the first.
    """
    if mask is None:
        assert env is not None
        mask = env.backward_mask(state) if policy.is_backward else env.forward_mask(state)
    if active is not None:
        first = torch.arange(mask.shape[1], device=mask.device) == 0
        mask = torch.where(active[:, None], mask, first)
    if env is None or not env.action_shape:
        return mask, entry_of(policy, keys.LOGITS, state, condition, mask.shape), None
    assert isinstance(env, ContinuousEnv)
    if not hasattr(policy, "get_dist"):
        raise ArgumentError(
            f"policy must have a method get_dist, as a ProbabilisticTensorDictSequential has, "
            f"for {type(env).__name__}, whose moves have parameters, got a {type(policy).__name__}"
        )
    td = rows_for(state, condition)
    parameters = Parameters(env, state, policy.get_dist(td), policy.is_backward)
    logits = require_entry(policy, keys.LOGITS, td.get(keys.LOGITS, None), mask.shape)
    return mask, logits, parameters


def rows_for(state: StateBatch, condition: ConditionBatch | None) -> TensorDict:
    """Return what a network reads: states, and conditions where there are some."""
    source = {keys.STATE: state}
    if condition is not None:
        source[keys.CONDITION] = condition
    return TensorDict(source, batch_size=state.shape[:1])


def entry_of(
    module: TensorDictModuleBase,
    key: str,
    state: StateBatch,
    condition: ConditionBatch | None,
    shape: tuple[int, ...],
    name: str = "policy",
) -> Float[Tensor, "n ..."]:
    """Return what a module writes about each state; call a StateModule without a TensorDict."""
    if type(module).forward is StateModule.forward:
        value = module.evaluate(state, condition)
    else:
        value = module(rows_for(state, condition)).get(key, None)
    return require_entry(module, key, value, shape, name)


def require_entry(
    module: TensorDictModuleBase,
    key: str,
    value: Tensor | None,
    shape: tuple[int, ...],
    name: str = "policy",
) -> Tensor:
    """Return an entry; raise unless the module ``name`` wrote it in the expected shape."""
    if value is not None and value.shape == shape:
        return value
    kind = type(module).__name__
    if value is None:
        raise KeyMismatchError(f"{name} must write {key!r}, {kind} did not")
    raise ShapeError(
        f"{name} must write {key!r} of shape {list(shape)}, got {list(value.shape)} from {kind}"
    )


def drawn_log_probs(
    p: Float[Tensor, "n actions"],
    kind: Int64[Tensor, "n"],
    parameters: Parameters | None,
    action: ActionBatch,
    by: Exploration,
) -> Float[Tensor, "n"]:
    """Return the log-probabilities with which actions were drawn."""
    log_p = p.gather(1, kind[:, None]).squeeze(1).log()
    return log_p if parameters is None else log_p + parameters.log_prob(action, by)


class ActionDraw(NamedTuple):
    """Actions [n, *A], and where kept log-probabilities [n] and the policy's logits [n, A]."""

    action: Tensor
    log_prob: Tensor | None
    estimator_output: Tensor | None


def draw_actions(
    by: Exploration,
    state: StateBatch,
    mask: Bool[Tensor, "n actions"],
    logits: Float[Tensor, "n actions"],
    parameters: Parameters | None,
    is_random: bool = True,
) -> ActionDraw:
    """Draw one action per state from a policy's outputs, or take the most likely ones."""
    p = by.probabilities(logits, mask)
    kind, is_drawn = draw(p, by.generator) if is_random else (p.argmax(1), p.sum(1) > 0)
    if not is_drawn.all():
        raise explain_no_draw(logits, mask, state)
    action = kind
    if parameters is not None and is_random:
        action = parameters.draw(kind, by)
    elif parameters is not None:
        action = parameters.env.with_parameters(kind, parameters.density.mean)
    return ActionDraw(action, drawn_log_probs(p, kind, parameters, action, by), logits)
