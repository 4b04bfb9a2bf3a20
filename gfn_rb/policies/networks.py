"""The networks that losses train: policies, state flows and log Z."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.functional import linear

from gfn_rb import keys
from gfn_rb.arguments import as_count, require_kind, require_number
from gfn_rb.envs.base import GFNEnv, require_env
from gfn_rb.envs.core import host_form
from gfn_rb.errors import ArgumentError, ShapeError
from gfn_rb.rollout.outputs import Evaluator, StateModule, rows_for
from gfn_rb.shapes import ConditionBatch, Float, Floats, StateBatch
from gfn_rb.torchrl_compat import has_hooks


class Trunk(nn.Module):
    """Linear layers, each followed by a ReLU, that networks can share; the identity without any."""

    def __init__(self, in_features: int, hidden: Sequence[int]) -> None:
        super().__init__()
        require_kind("hidden", hidden, list, lambda value: isinstance(value, Sequence))
        widths = [in_features, *(as_count("hidden", width) for width in hidden)]
        self.in_features, self.out_features = in_features, widths[-1]
        self.layers = nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:]))

    def forward(self, x: Float[Tensor, "n in"]) -> Float[Tensor, "n out"]:
        """Return the features of each row."""
        for layer in self.layers:
            x = layer(x).relu_()  # in place: a linear layer needs its input, not its output, again
        return x


class StateNetwork(StateModule):
    """A multilayer perceptron on states: a trunk, which others may share, then a linear head.

    It reads "state" through ``env.encode`` and, where the environment has conditions, "condition".
    """

    def __init__(
        self,
        env: GFNEnv,
        out_key: str,
        out_features: int,
        hidden: Sequence[int],
        trunk: Trunk | None,
    ) -> None:
        super().__init__()
        require_env(env)
        self.in_keys, self.out_keys = [keys.STATE], [out_key]
        in_features = env.encoded_size
        if env.condition_shape is not None:
            self.in_keys.append(keys.CONDITION)
            in_features += env.condition_shape.numel()
        self.trunk = Trunk(in_features, hidden) if trunk is None else trunk
        if self.trunk.in_features != in_features:
            raise ShapeError(
                f"trunk must take {in_features} features, got one of {self.trunk.in_features}"
            )
        self.head = nn.Linear(self.trunk.out_features, out_features)
        self._encode, self._encode_condition = env.encode, env.encode_condition
        self._in_features = in_features

    def evaluate(
        self, state: StateBatch, condition: ConditionBatch | None = None
    ) -> Float[Tensor, "n ..."]:
        """Return what the network says of each row. See the base class."""
        return self.head(self.features(state, condition))

    def features(
        self, state: StateBatch, condition: ConditionBatch | None = None
    ) -> Float[Tensor, "n out"]:
        """Return the trunk's output for each row, the input of ``head``."""
        x = self._encode(state)
        if condition is not None or x.shape[1] != self._in_features:
            x = self._input(x, condition)
        return self.trunk(x.to(self.head.weight.dtype))

    def plain_trunk(self) -> nn.Module | None:
        """Return the trunk, unless a subclass computes something else. See the base class."""
        kinds = type(self).evaluate, type(self).forward
        return self.trunk if kinds == (StateNetwork.evaluate, StateModule.forward) else None

    def evaluator(self) -> Evaluator:
        """Return ``evaluate`` without calls of modules, unless something is hooked onto one."""
        layers = [*self.trunk.layers, self.head]
        kinds = type(self).evaluate, type(self.trunk).forward, {type(layer) for layer in layers}
        is_plain = kinds == (StateNetwork.evaluate, Trunk.forward, {nn.Linear})
        if not is_plain or any(map(has_hooks, [self.trunk, *layers])):
            return super().evaluator()
        # Read once: to look a parameter up in a module takes as long as to add a small tensor.
        *hidden, (weight, bias) = [(layer.weight, layer.bias) for layer in layers]
        encode = host_form(self._encode)

        def evaluate(state: np.ndarray, condition: Tensor | None) -> Tensor:
            x = torch.from_numpy(encode(state))
            if condition is not None or x.shape[1] != self._in_features:
                x = self._input(x, condition)
            if x.dtype != weight.dtype:
                x = x.to(weight.dtype)
            for w, b in hidden:
                x = linear(x, w, b).relu_()
            return linear(x, weight, bias)

        return evaluate

    def _input(
        self, x: Float[Tensor, "n encoded"], condition: ConditionBatch | None
    ) -> Float[Tensor, "n in"]:
        if len(self.in_keys) > 1:
            assert condition is not None
            x = torch.cat([x, self._encode_condition(condition)], 1)
        if x.shape[1] != self._in_features:
            raise ShapeError(
                f"states must be of the environment of this {type(self).__name__}, which encodes "
                f"them to {self._in_features} numbers, got {x.shape[1]}"
            )
        return x


class Policy(StateNetwork):
    """A multilayer perceptron that writes one logit per action, illegal ones too."""

    is_backward: bool

    def __init__(
        self, env: GFNEnv, hidden: Sequence[int] = (128, 128), trunk: Trunk | None = None
    ) -> None:
        require_env(env)
        super().__init__(env, keys.LOGITS, env.n_actions - self.is_backward, hidden, trunk)


class ForwardPolicy(Policy):
    """P_F(s' | s): a multilayer perceptron with a logit for each action, the exit action last.

    It reads "state" through ``env.encode``, and "condition" if the environment has conditions.

    Args:
        env: environment whose encoding the network reads; not a submodule.
        hidden: widths of the hidden layers, each above 0.
        trunk: trunk of another network, to share; ``hidden`` is then ignored.
    """

    is_backward = False


class BackwardPolicy(Policy):
    """P_B(s | s'): a multilayer perceptron with a logit for each move that may have led to s'.

    Inputs and arguments are those of :class:`ForwardPolicy`.
    """

    is_backward = True


class UniformBackwardPolicy(StateModule):
    """P_B(s | s') = 1 / (number of moves that lead to s'): equal logits, no parameters.

    Args:
        env: environment that defines the number of actions.
    """

    is_backward = True

    def __init__(self, env: GFNEnv) -> None:
        super().__init__()
        require_env(env)
        self.in_keys, self.out_keys = [keys.STATE], [keys.LOGITS]
        self.n_moves = env.n_actions - 1

    def evaluate(
        self, state: StateBatch, condition: ConditionBatch | None = None
    ) -> Float[Tensor, "n moves"]:
        """Return zeros."""
        return torch.zeros(len(state), self.n_moves, device=state.device)


class StateFlow(StateNetwork):
    """log F(s): a multilayer perceptron that writes the log flow through a state, "log_flow".

    Args:
        env: environment whose encoding the network reads; not a submodule.
        hidden: widths of the hidden layers, each above 0.
        trunk: trunk of another network, to share; ``hidden`` is then ignored.
        initial: initial bias of the output, in nats.
    """

    def __init__(
        self,
        env: GFNEnv,
        hidden: Sequence[int] = (128, 128),
        trunk: Trunk | None = None,
        initial: float = 0.0,
    ) -> None:
        super().__init__(env, keys.LOG_FLOW, 1, hidden, trunk)
        nn.init.constant_(self.head.bias, initial)

    def evaluate(self, state: StateBatch, condition: ConditionBatch | None = None) -> Floats:
        """Return log F(s) of each row."""
        return super().evaluate(state, condition).squeeze(1)


class Networks(NamedTuple):
    """Your own modules, returned by ``make_networks`` of a configuration; None for the defaults.

    A module receives ``env.encode(state)``, float32 [n, encoded_size], with encoded conditions
    appended if there are any, and returns [n, k]. A TensorDictModule reads "state" and "condition"
    itself and writes "logits" or "log_flow".

    Args:
        forward: module with k = ``env.n_actions`` outputs, the logits of P_F, exit action last.
        backward: module with k = ``env.n_actions - 1`` outputs, the logits of P_B.
        flow: module with k = 1 output, log F(s) in nats. A learned constant is added to it.
    """

    forward: nn.Module | None = None
    backward: nn.Module | None = None
    flow: nn.Module | None = None


class OwnNetwork(StateModule):
    """A module of the user's in the place of a policy or of state flows. See :class:`Networks`."""

    def __init__(self, env: GFNEnv, module: nn.Module, role: str, initial: float = 0.0) -> None:
        super().__init__()
        self.is_backward = role == "backward"
        self.in_keys = [keys.STATE] + [keys.CONDITION] * (env.condition_shape is not None)
        self.out_keys = [keys.LOG_FLOW if role == "flow" else keys.LOGITS]
        self.module, self._role = module, role
        self._size = 1 if role == "flow" else env.n_actions - self.is_backward
        self.offset = nn.Parameter(torch.tensor(float(initial))) if role == "flow" else None
        self._encode, self._encode_condition = env.encode, env.encode_condition

    def evaluate(
        self, state: StateBatch, condition: ConditionBatch | None = None
    ) -> Float[Tensor, "n ..."]:
        """Return the module's output for each row, with a learned constant added to flows."""
        out = self._output(state, condition)
        return out if self.offset is None else out.reshape(len(out)) + self.offset

    @torch.no_grad()
    def check(self, env: GFNEnv) -> None:
        """Call the module on two states; raise unless it returns what it should."""
        was_training = self.training
        try:
            out = self.eval()._output(env.source(2), env.sample_condition(2))
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            beside = "" if len(self.in_keys) == 1 else ", encoded conditions beside them"
            takes = f"encoded states, float32 [n, {env.encoded_size}]{beside}"
            if isinstance(self.module, TensorDictModuleBase):
                takes = f"{' and '.join(map(repr, self.in_keys))}, and write {self.out_keys[0]!r}"
            raise ArgumentError(
                f"networks.{self._role} must take {takes}, got {type(error).__name__}: {first_line}"
            ) from error
        finally:
            self.train(was_training)
        fitting = [(2, self._size)] + [(2,)] * (self._role == "flow")
        if tuple(out.shape) not in fitting or not out.is_floating_point():
            raise ArgumentError(
                f"networks.{self._role} must return floats of shape {[2, self._size]} for 2 states "
                f"of {type(env).__name__}, got {out.dtype} of shape {list(out.shape)}"
            )

    def _output(self, state: StateBatch, condition: ConditionBatch | None) -> Tensor:
        if isinstance(self.module, TensorDictModuleBase):
            return self.module(rows_for(state, condition))[self.out_keys[0]]
        x = self._encode(state)
        if condition is not None:
            x = torch.cat([x, self._encode_condition(condition)], 1)
        first = next((p for p in self.module.parameters() if p.is_floating_point()), x)
        return self.module(x.to(first.dtype))


class LogZ(nn.Module):
    """The learned log partition function log Z_theta, one number in nats.

    Args:
        initial: initial value, in nats.
    """

    def __init__(self, initial: float = 0.0) -> None:
        super().__init__()
        require_number("initial", initial)
        self.value = nn.Parameter(torch.tensor(float(initial)))

    def forward(self, condition: ConditionBatch | None = None) -> Float[Tensor, ""]:
        """Return log Z_theta, whatever ``condition`` is; :class:`ConditionalLogZ` uses it."""
        return self.value


class ConditionalLogZ(nn.Module):
    """The log partition function of rewards that depend on a condition: log Z_theta(condition).

    Args:
        env: environment with conditions; not a submodule.
        hidden: widths of the hidden layers, each above 0.
        initial: initial bias of the output, in nats.

    Raises:
        ArgumentError: the environment has no conditions, or a width is not positive.
    """

    def __init__(
        self, env: GFNEnv, hidden: Sequence[int] = (128, 128), initial: float = 0.0
    ) -> None:
        super().__init__()
        require_env(env)
        if env.condition_shape is None:
            raise ArgumentError("env must have conditions for ConditionalLogZ, got one without")
        self._encode_condition = env.encode_condition
        self.trunk = Trunk(env.condition_shape.numel(), hidden)
        self.head = nn.Linear(self.trunk.out_features, 1)
        nn.init.constant_(self.head.bias, initial)

    def forward(self, condition: ConditionBatch | None) -> Floats:
        """Return log Z_theta for each condition, in nats; raise if there are none."""
        if condition is None:
            raise ArgumentError("condition must be given to ConditionalLogZ, got rows without")
        x = self._encode_condition(condition).to(self.head.weight.dtype)
        return self.head(self.trunk(x)).squeeze(1)
