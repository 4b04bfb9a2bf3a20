"""Base class of samplers that draw rows by a number stored with them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage

from gfn_rb.arguments import as_count, require_device_of, require_key
from gfn_rb.errors import (
    ArgumentError,
    CheckpointMismatchError,
    EmptyBufferError,
    GfnRbError,
    NaNError,
)
from gfn_rb.kernels.weights import Weights
from gfn_rb.keys import DRAW_LOG_PROB, LOG_REWARD
from gfn_rb.numerics.weighted_rows import WeightedRows, weighted_rows
from gfn_rb.shapes import Float, Float64, Int64
from gfn_rb.storages.column import KeyColumn
from gfn_rb.storages.forks import note_storage, warn_of_old_rows
from gfn_rb.storages.sharing import settle
from gfn_rb.storages.state_folder import StateInFolder
from gfn_rb.torchrl_compat import assert_on_device, length_of, outside_graph

Replacement = Literal["auto", True, False]
if TYPE_CHECKING:
    from gfn_rb.numerics.rank_laws import RankedDistribution

    Distribution = Weights | WeightedRows | RankedDistribution
else:  # draws by weights alone import no ranks
    Distribution = Any


class DrawInfo(dict[str, Any]):
    """What is known of a draw, on the storage's device already.

    ``ReplayBuffer.sample`` moves a plain dict to that device by ``tree_map``, which takes as long
    as a draw; of another class it is a leaf, and stays as it is. Copies are plain dicts.
    """

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _KeepReplacement(type(Sampler)):  # type: ignore[misc]
    """TorchRL's metaclass takes ``replacement=`` away before the constructor sees it."""

    # There it chooses among TorchRL's own classes. A class cannot leave the metaclass of its base,
    # and samplers have to be TorchRL's: only a metaclass derived from it passes the argument on.

    if not TYPE_CHECKING:  # which reads the arguments of the constructors

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return type.__call__(cls, *args, **kwargs)


class Parameter:
    """A number of a sampler that may be annealed; assignment checks that it ``fits`` the rule."""

    def __init__(self, rule: str, fits: Callable[[float], bool], of_draws: bool = True) -> None:
        self.rule, self.fits = rule, fits
        self.of_draws = of_draws  # whether the probabilities depend on it

    def __set_name__(self, owner: type[KeySampler], name: str) -> None:
        self.name = name
        owner._parameters = (*owner._parameters, name)

    if TYPE_CHECKING:  # without it, Python reads the sampler's own dictionary, with no call

        def __get__(self, sampler: Any, owner: Any = None) -> float: ...

    def __set__(self, sampler: KeySampler, value: Any) -> None:
        sampler.__dict__[self.name] = number(self.name, value, self.rule, self.fits)
        if self.of_draws:
            sampler._parameter_changed()


class KeySampler(StateInFolder, Sampler, metaclass=_KeepReplacement):
    """Draws rows by a number that the storage holds for each of them.

    A subclass has its parameters as class attributes, and turns the stored numbers into
    log-weights in one method. After a write through any buffer attached to the storage, only
    the written rows are read. The whole column is read after any other change (another process, an
    in-place write), and after every change on CUDA. On CUDA, impossible draws stop on the device,
    as ``torch.multinomial``'s do.
    """

    _parameters: ClassVar[tuple[str, ...]] = ()
    # TorchRL after 0.14.1 copies such a sampler into the workers of a DataLoader: draws depend on
    # parameters and rows alone, and a copy notices what other processes write.
    requires_shared_state = False

    def __init__(
        self,
        key: NestedKey | None = LOG_REWARD,
        replacement: Replacement = "auto",
        column: Any = None,
    ) -> None:
        if replacement not in ("auto", True, False):
            raise ArgumentError(f"replacement must be 'auto', True or False, got {replacement!r}")
        if key is not None or column is None:
            require_key("key", key)
        self.key = key
        self.replacement = replacement
        self._column: Any = KeyColumn(key) if column is None else column
        self._distribution: Distribution | None = None
        self._slots = 0  # of the storage that the distribution is of

    def _make_distribution(self, capacity: int, like: Tensor) -> Distribution:
        """Return an empty distribution over that many rows, for numbers such as those."""
        return weighted_rows(capacity, like.device)

    def load_loops(self) -> None:
        """Compile the loops of draws on the host, or read them from disk, before the first draw."""
        distribution, generator = self._make_distribution(2, torch.zeros(0)), torch.Generator()
        for dtype in (torch.float32, torch.float64):
            distribution.assign(torch.zeros(2, dtype=dtype))
            distribution.update(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=dtype))
        if distribution.has_mass:
            distribution.draw(1, generator)
            distribution.draw_distinct(1, generator)

    @abstractmethod
    def _log_weight(self, value: Tensor) -> Tensor:
        """Turn stored numbers into what the distribution takes, floats of the same shape."""

    # What TorchRL calls.

    @outside_graph
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor, dict[str, Any]]:
        """Draw the indices of a batch, and the ``draw_log_prob`` of each.

        It is the log-probability of the row as a single draw, also where rows are drawn without
        replacement.
        """
        stored = length_of(storage)
        if type(batch_size) is not int or batch_size < 1:
            batch_size = as_count("batch_size", batch_size)
        if stored == 0:
            raise EmptyBufferError(f"cannot draw {batch_size} items: the buffer is empty")
        if self.replacement is False and batch_size > stored:
            raise ArgumentError(
                f"batch_size={batch_size} exceeds the {stored} stored items, and replacement "
                "is False"
            )
        distribution = self.follow(storage)
        if (has_mass := distribution.has_mass) is not True:
            require(has_mass, EmptyBufferError, self.nothing_to_draw, self.key)
        enough: Tensor | bool = False
        if self.replacement is not True and batch_size <= stored:
            index, log_prob, enough = distribution.draw_distinct(batch_size, self._rng)
            if self.replacement is False:
                require(enough, ArgumentError, self.too_few, batch_size)
        if enough is False:
            index, log_prob = distribution.draw(batch_size, self._rng)
        elif isinstance(enough, Tensor) and self.replacement == "auto":
            pair = distribution.draw(batch_size, self._rng)
            index, log_prob = torch.where(enough, index, pair[0]), log_prob.where(enough, pair[1])
        return index, self.info_of(storage, index, log_prob)

    def info_of(
        self, storage: Storage, index: Int64[Tensor, "n"], log_prob: Float[Tensor, "n"]
    ) -> dict[str, Any]:
        """Return what is known of rows that are drawn, by their log-probabilities in float32."""
        return DrawInfo({DRAW_LOG_PROB: log_prob})

    @outside_graph
    def log_probs(self, storage: Storage) -> Float64[Tensor, "len"]:
        """Return the log-probability of every stored row, each taken as a single draw.

        Args:
            storage: storage to draw from.

        Returns:
            One log-probability per row, in nats, on the device of the rows; ``-inf`` for rows that
            cannot be drawn.

        Raises:
            KeyMismatchError: the storage lacks the key.
            NaNError: a stored number is NaN.
        """
        if not len(storage):
            return torch.empty(0, dtype=torch.float64)
        return self.follow(storage).log_probs(len(storage))

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Record that rows were written."""
        if storage is not None:
            note_storage(storage)
            slot = index if isinstance(index, Tensor) else torch.as_tensor(index)
            self._column.announce(storage, slot)

    @outside_graph
    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        """Return whether :meth:`sample` returns a batch of this size. It draws nothing.

        On a device it waits for the device.

        Raises:
            GfnRbError: ``batch_size`` or a stored number is wrong, and :meth:`sample` says so, too.
        """
        batch_size = as_count("batch_size", batch_size)
        if len(storage) < (batch_size if self.replacement is False else 1):
            return False
        distribution = self.follow(storage)
        if not distribution.has_mass:
            return False
        return self.replacement is not False or distribution.n_positive >= batch_size

    def _empty(self) -> None:
        self._column.forget()

    # Drawing.

    nothing_to_draw = "no item can be drawn: every stored {!r} has weight zero (all -inf?)"
    too_few = "batch_size={} exceeds the items of positive weight, and replacement is False"

    def follow(self, storage: Storage) -> Distribution:
        """Bring the distribution up to date with the storage, and return it."""
        warn_of_old_rows(storage)
        settle(storage)
        try:
            return self._follow(storage)
        except BaseException:  # nobody knows which changes it has taken over
            self._column.forget()
            raise

    def _follow(self, storage: Storage) -> Distribution:
        if self._distribution is None:
            self._column.forget()
        rows, distribution = self._column.changed(storage), self._distribution
        if distribution is not None and rows is not None and not rows.shape[0]:
            return distribution
        values = self._column.values(storage)
        if self._rng is not None and (distribution is None or not values.is_cpu):
            require_device_of(self._rng, values.device)
        if not values.is_floating_point():
            values = values.to(torch.float64)
        if distribution is None or storage.max_size > self._slots:
            self._slots, rows = storage.max_size, None
            distribution = self._distribution = self._make_distribution(self._slots, values)
        if rows is None or not values.is_cpu:
            is_sound = distribution.assign(self._log_weights(storage, values, None))
        else:
            values = values.index_select(0, rows)
            is_sound = distribution.update(rows, self._log_weights(storage, values, rows))
        if not is_sound:
            self._refuse(values)
        return distribution

    def _log_weights(self, storage: Storage, value: Tensor, rows: Tensor | None) -> Tensor:
        """Turn the numbers of some rows, all for None, into what the distribution takes."""
        return self._log_weight(value)

    def _refuse(self, values: Tensor) -> NoReturn:
        """Raise because of stored numbers, of which one has a log-weight of NaN."""
        raise NaNError(f"the storage holds NaN under {self.key!r}: expected numbers or -inf")

    # State: the storage holds all but the parameters.

    def _parameter_changed(self) -> None:
        """Have the distribution made anew."""
        self._column.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what it draws by, and the parameters that may be annealed."""
        key = None if self.key is None else str(self.key)
        return {"key": key, **{name: getattr(self, name) for name in self._parameters}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._check_state(state_dict)
        for name in self._parameters:
            try:
                setattr(self, name, state_dict[name])
            except ArgumentError as error:
                raise CheckpointMismatchError(f"sampler state: {error}") from error
        self._column.forget()

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        own = self.state_dict()
        if set(state_dict) != set(own):
            raise CheckpointMismatchError(
                f"sampler state holds {sorted(state_dict)}, this {type(self).__name__} expects "
                f"{sorted(own)}"
            )
        for name, expected in own.items():
            is_name = expected is None or isinstance(expected, str)  # of what it draws by
            if is_name and (came := state_dict[name]) != expected:
                raise CheckpointMismatchError(
                    f"sampler state is of {name}={came!r}, expected {name}={expected!r}"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is read from the storage again."""
        return {**super().__getstate__(), "_distribution": None}

    def __repr__(self) -> str:
        names = ("key", *self._parameters, "replacement")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__name__}({values})"


def number(name: str, value: Any, rule: str, fits: Callable[[float], bool]) -> float:
    """Return a parameter as a float."""
    try:
        converted = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} must be {rule}, got {value!r}") from None
    if not fits(converted):
        got = value if isinstance(value, float) else repr(value)  # NumPy's float tells its type
        raise ArgumentError(f"{name} must be {rule}, got {got}")
    return converted


def is_positive(value: float) -> bool:
    """Return whether a number is above 0 and finite."""
    return 0 < value < math.inf


def require(condition: Tensor | bool, error: type[GfnRbError], message: str, *args: Any) -> None:
    """Raise unless a condition is true; a 0-d tensor on its device, so as not to wait for it."""
    if isinstance(condition, Tensor):
        assert_on_device(condition, message.format(*args))
    elif not condition:
        raise error(message.format(*args))
