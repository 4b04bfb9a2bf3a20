"""How a buffer was made, as values that a checkpoint holds, and the buffer made of them again."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torchrl.data import ReplayBuffer, ReplayBufferEnsemble, TensorDictReplayBuffer
from torchrl.data.replay_buffers.storages import TensorStorage
from torchrl.envs.transforms import Compose

from gfn_rb.arguments import KeepsArguments, is_listed, kind_of
from gfn_rb.buffers.compact import CompactRows
from gfn_rb.buffers.options import Environment
from gfn_rb.buffers.statistics import ReplayStatistics
from gfn_rb.checkpoint.allowed import ALLOWED, ELSEWHERE
from gfn_rb.codec.primitives import is_out_of_memory, one_line
from gfn_rb.errors import ArgumentError, CheckpointError, CheckpointMismatchError
from gfn_rb.storages.tensors import EncodedStorage, RowTensorStorage

_PLAIN = (type(None), bool, int, float, str, Tensor)


def description_of(rb: ReplayBuffer) -> dict[str, Any]:
    """Return the class of a buffer and its options, without members; or why they are not known."""
    try:
        transforms = [*rb.transform] if len(rb.transform) else []
        parts: dict[str, Any] = {"batch_size": rb.batch_size, "transform": transforms}
        if not isinstance(rb, ReplayBufferEnsemble):
            parts |= {"storage": rb.storage, "writer": rb.writer, "sampler": rb.sampler}
            parts["transform"] = [each for each in transforms if type(each) is not ReplayStatistics]
        if type(rb) is TensorDictReplayBuffer:
            parts["priority_key"] = rb.priority_key
        if not isinstance(rb, KeepsArguments) and _path_of(type(rb)) not in ALLOWED:
            raise ArgumentError(f"no file can hold {kind_of(rb)}")
        given = _arguments_of(rb, parts) if isinstance(rb, KeepsArguments) else {}
        named = {name: _named(rb, name, value) for name, value in parts.items()}
        return {"class": _path_of(type(rb)), "arguments": {**given, **named}}
    except ArgumentError as error:
        return {"unknown": str(error)}


def buffer_of(states: Sequence[Any], env: Environment | None, trust: bool) -> ReplayBuffer:
    """Return an empty buffer like the one whose states were saved, or raise CheckpointError.

    Without an environment the described one is made; code outside gfn_rb runs only if trusted.
    """
    made: list[ReplayBuffer] = []
    try:
        # A list of members followed by their ensemble, as ``with_members`` returns it::
        #
        #     states  a  b  (ab, 2 members)     made  [a]  [a b]  [ab]
        for state in states:
            split = len(made) - state["members"]  # which come before it
            members = made[split:]
            del made[split:]
            description = state.get("description")
            if not isinstance(description, dict) or "class" not in description:
                why = description["unknown"] if description else "it is of gfn_rb 0.3 or older"
                raise CheckpointMismatchError(
                    f"the options of the buffer are not recorded: {why}; make the buffer and call "
                    "load_checkpoint"
                )
            made.append(_Maker(env, trust).buffer(description, members))
        return made[-1]
    except CheckpointError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointMismatchError(
            f"the recorded options make no buffer: {one_line(error)}"
        ) from error


# From objects to values.


def _described(value: Any) -> Any:
    """Return a value in types that a checkpoint holds, or raise ArgumentError."""
    if type(value) in _PLAIN:
        return value
    if type(value) is tuple:
        return tuple(map(_described, value))
    if is_listed(value):
        return [*map(_described, value)]
    if isinstance(value, Mapping):
        return {"pairs": [[_described(key), _described(each)] for key, each in value.items()]}
    if isinstance(value, Environment):
        made: dict[str, Any] = {"environment": _path_of(type(value)), "arguments": None}
        with suppress(ArgumentError):
            made["arguments"] = _arguments_of(value) if isinstance(value, KeepsArguments) else None
        return made
    if isinstance(value, TensorStorage) and not isinstance(value, EncodedStorage):
        # On disk or in memory, rows are the same.
        return {"class": _path_of(RowTensorStorage), "arguments": {"max_size": value.max_size}}
    if isinstance(value, KeepsArguments):
        return {"class": _path_of(type(value)), "arguments": _arguments_of(value)}
    if ALLOWED.get(path := _path_of(type(value))) == ():
        return {"class": path, "arguments": {}}
    if inspect.isfunction(value) or isinstance(value, type):
        path = _path_of(value)
        if "<" not in path and not path.startswith("__main__"):
            return {"callable": path}
    raise ArgumentError(f"no file can hold {kind_of(value)}")


def _named(owner: Any, name: str, value: Any) -> Any:
    try:
        return _described(value)
    except ArgumentError as error:
        raise ArgumentError(f"{name} of {type(owner).__name__}: {error}") from None


def _arguments_of(part: Any, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a constructor by name, some left out."""
    positional, named = part.constructor_arguments
    signature = inspect.signature(type(part).__init__)
    given = dict(signature.bind(part, *positional, **named).arguments)
    del given["self"]
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    kept = {name: value for name, value in given.items() if name not in {*ELSEWHERE, *but}}
    _require_allowed(_path_of(type(part)), kept)
    return {name: _named(part, name, value) for name, value in kept.items()}


def _require_allowed(path: str, names: Collection[str]) -> None:
    """Raise unless a file may name arguments of a class; of one not in the list, most of them."""
    wrong = {*names} & ELSEWHERE if path not in ALLOWED else {*names} - {*ALLOWED[path]}
    if wrong:
        raise ArgumentError(f"{path} takes no {min(wrong)} from a file")


def _path_of(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


# From values to objects.


class _Maker:
    """Makes objects of values, with one environment."""

    def __init__(self, env: Environment | None, trust: bool) -> None:
        self._env, self._trust = env, trust

    def buffer(self, description: Any, members: Sequence[ReplayBuffer]) -> ReplayBuffer:
        """Return a buffer."""
        kind, options = self._part(description["class"], description["arguments"])
        transforms = options.pop("transform", None)
        if transforms:
            options["transform"] = Compose(*transforms)
            for each in transforms:
                if isinstance(each, CompactRows):
                    each.measure(options["writer"])
        made = kind(*members, **options)
        if not isinstance(made, ReplayBuffer):
            raise CheckpointMismatchError(f"{description['class']} is no buffer")
        return made

    def value(self, node: Any) -> Any:
        """Return what a description stands for."""
        if isinstance(node, (list, tuple)):
            return type(node)(map(self.value, node))
        if not isinstance(node, dict):
            return node
        if "pairs" in node:
            return {self.value(key): self.value(value) for key, value in node["pairs"]}
        if "callable" in node:
            return self._resolved(node["callable"], self._trust)
        path, arguments = node.get("environment"), node["arguments"]
        if path is not None and self._env is not None:
            return self._env
        if path is not None and (arguments is None or not (self._trust or _is_own(path))):
            raise CheckpointError(
                f"rows are stored as {path} needs them: pass env=, or trust=True to import and run "
                "it"
            )
        kind, options = self._part(path := path or node["class"], arguments)
        data = options.get("data") if path in ALLOWED else None
        if not isinstance(data, (type(None), Tensor)):  # BayesianDAG would read a file
            raise CheckpointMismatchError(f"data of {kind.__name__} is no tensor: pass env=")
        return kind(**options)

    def _part(self, path: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a class that a file may name, or that is trusted, and arguments for it."""
        if _is_own(path) and path not in ALLOWED:
            raise CheckpointMismatchError(f"{path} is no part of a buffer")
        kind = self._resolved(path, self._trust or path in ALLOWED)
        if not isinstance(kind, type):
            raise CheckpointMismatchError(f"{path} is no part of a buffer")
        _require_allowed(path, arguments)
        return kind, {name: self.value(value) for name, value in arguments.items()}

    def _resolved(self, path: Any, may: bool) -> Any:
        if not may:
            raise CheckpointError(
                f"the buffer was made with {path}, which is not of gfn_rb: trust=True imports and "
                "runs it"
            )
        return pkgutil.resolve_name(path)


def _is_own(path: Any) -> bool:
    return isinstance(path, str) and path.startswith("gfn_rb.")
