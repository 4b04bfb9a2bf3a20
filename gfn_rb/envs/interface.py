"""The interface of TorchRL to the functions of a state graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from gfn_rb import keys
from gfn_rb.arguments import KeepsArguments, as_device
from gfn_rb.errors import ArgumentError, KeyMismatchError, ShapeError
from gfn_rb.shapes import ActionBatch, Flags, Floats, StateBatch

E = TypeVar("E", bound="TorchRLInterface")


class TorchRLInterface(KeepsArguments, EnvBase):
    """TorchRL's methods, by the functions that ``GFNEnv`` declares."""

    _tensor_names: Sequence[str] = ()

    def __new__(cls: type[E], *args: Any, **kwargs: Any) -> E:
        """Check the device before subclasses make tensors on it."""
        if kwargs.get("device") is not None:
            as_device("device", kwargs["device"])
        return super().__new__(cls, *args, **kwargs)

    def to(self: E, device: torch.device | str) -> E:
        """Move the environment's tensors to ``device``; raise if this machine does not have it."""
        return super().to(as_device("device", device))

    @property
    def batch_locked(self) -> bool:
        """Whether TensorDicts must have the environment's batch size: only where it has one."""
        return len(self.batch_size) > 0

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write a uniform draw among the legal actions of each state.

        Args:
            tensordict: TensorDict with "state", of any batch size. Default: a fresh ``reset()``.

        Returns:
            ``tensordict`` with "action"; rows in the sink get the exit action.
        """
        tensordict = self.reset() if tensordict is None else tensordict
        state = self._rows(tensordict, keys.STATE, self.state_shape)
        mask = self.forward_mask(state)
        mask[:, self.exit_action] |= ~mask.any(1)
        kind = torch.multinomial(mask.float(), 1) if len(mask) else mask.nonzero()[:, :1]
        action = self.random_action(state, kind.squeeze(1))
        return tensordict.set(
            keys.ACTION, action.reshape(tensordict.batch_size + self.action_shape)
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDict:
        batch = self.batch_size if tensordict is None else tensordict.batch_size
        state = self.source(batch.numel())
        log_reward = state.new_full((len(state),), -torch.inf, dtype=torch.float32)
        return self._observe(state, log_reward, self.sample_condition(len(state)), batch)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        state = self._rows(tensordict, keys.STATE, self.state_shape)
        action = self._rows(tensordict, keys.ACTION, self.action_shape)
        condition = None
        if self.condition_shape is not None:
            condition = self._rows(tensordict, keys.CONDITION, self.condition_shape)
        # TorchRL marks the rows that an environment with a batch size shall advance.
        marked = tensordict.get(keys.STEPPING, None)
        steps = torch.ones_like(self.is_sink(state)) if marked is None else marked.reshape(-1)
        self._check_legal(state, action, steps)
        next_state = self.forward_step(state, action).where(self._per_row(steps), state)
        exits = steps & (self.kind(action) == self.exit_action)
        log_reward = exits.new_full(exits.shape, -torch.inf, dtype=torch.float32)
        at_exit = None if condition is None else condition[exits]
        log_reward[exits] = self.log_reward(state[exits], at_exit)
        out = self._observe(next_state, log_reward, condition, tensordict.batch_size)
        done = self.is_sink(next_state).reshape(*tensordict.batch_size, 1)
        out.update({keys.DONE: done, keys.TERMINATED: done.clone()})
        return out.set(keys.REWARD, out[keys.LOG_REWARD].exp().unsqueeze(-1))

    def _register(self, **tensors: Tensor) -> None:
        """Set tensors that move with the environment and are not in its ``state_dict``.

        They are plain attributes: a buffer costs two calls of ``__getattr__`` whenever it is read.
        """
        for name, tensor in tensors.items():
            setattr(self, name, tensor.to(self.device))
        self._tensor_names = [*self._tensor_names, *tensors]

    def _apply(self: E, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> E:
        for name in self._tensor_names:
            setattr(self, name, fn(getattr(self, name)))
        return super()._apply(fn, recurse)

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: transitions are deterministic, and random actions use torch's generator."""

    def _rows(self, tensordict: TensorDictBase, key: str, shape: torch.Size) -> Tensor:
        """Return an entry with one batch dimension."""
        value: Tensor | None = tensordict.get(key, None)
        if value is None:  # a policy may write logits alone
            raise KeyMismatchError(
                f"a step needs {key!r}, got {sorted(map(str, tensordict.keys()))}: "
                "gfn_rb.ActionSampler makes a policy draw actions"
            )
        expected = tensordict.batch_size + shape
        if value.numel() != expected.numel():
            raise ShapeError(f"{key} must have shape {list(expected)}, got {list(value.shape)}")
        return value.reshape(tensordict.batch_size.numel(), *shape)

    def _check_legal(self, state: Tensor, action: ActionBatch, steps: Flags) -> None:
        mask, kind = self.forward_mask(state), self.kind(action)
        inside = (kind >= 0) & (kind < self.n_actions)
        legal = inside & mask.gather(1, kind.where(inside, 0)[:, None])[:, 0]
        legal &= action.isfinite().reshape(len(action), self.action_shape.numel()).all(1)
        bad = steps & ~legal
        if bad.any():
            row = int(bad.nonzero()[0])
            raise ArgumentError(
                f"action must be legal in its state, got {action[row].tolist()} in row {row} with "
                f"state {state[row].tolist()}, expected one of {mask[row].nonzero()[:, 0].tolist()}"
            )

    def _observe(
        self, state: StateBatch, log_reward: Floats, condition: Tensor | None, batch: torch.Size
    ) -> TensorDict:
        rows = {
            keys.STATE: state,
            keys.FORWARD_MASK: self.forward_mask(state),
            keys.BACKWARD_MASK: self.backward_mask(state),
            keys.LOG_REWARD: log_reward,
        }
        if condition is not None:
            rows[keys.CONDITION] = condition
        shaped = {key: value.reshape(batch + value.shape[1:]) for key, value in rows.items()}
        return TensorDict(shaped, batch_size=batch, device=self.device)

    def _set_specs(self) -> None:
        read = {keys.STATE: self._spec(Unbounded, *self.state_shape, dtype=self.state_dtype)}
        if self.condition_shape is not None:
            read[keys.CONDITION] = self._spec(Unbounded, *self.condition_shape)
        written = {
            keys.FORWARD_MASK: self._spec(Binary, self.n_actions, dtype=torch.bool),
            keys.BACKWARD_MASK: self._spec(Binary, self.n_actions - 1, dtype=torch.bool),
            keys.LOG_REWARD: self._spec(Unbounded),
        }
        flag = self._spec(Binary, 1, dtype=torch.bool)
        flags = {keys.DONE: flag, keys.TERMINATED: flag.clone()}
        one = {"shape": self.batch_size, "device": self.device}
        self.state_spec = Composite(read, **one).clone()
        self.observation_spec = Composite({**read, **written}, **one)
        self.action_spec = Categorical(self.n_actions, dtype=torch.int64, **one)
        self.reward_spec = self._spec(Unbounded, 1)
        self.done_spec = Composite(flags, **one)

    def _spec(self, kind: type, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        return kind(shape=(*self.batch_size, *shape), device=self.device, dtype=dtype)
