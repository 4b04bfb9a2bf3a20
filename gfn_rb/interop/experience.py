"""ObjectRL's replay buffer, on the parts of this library."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer

from gfn_rb.arguments import as_count, as_device, require_kind
from gfn_rb.buffers.presets import fifo_buffer
from gfn_rb.checkpoint import load_checkpoint, load_state, save_checkpoint
from gfn_rb.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointMismatchError,
    EmptyBufferError,
    KeyMismatchError,
    ShapeError,
)
from gfn_rb.interop.torch_files import read_torch_file, write_torch_file
from gfn_rb.keys import ESTIMATOR_OUTPUT, LOG_PROB
from gfn_rb.shapes import Int64
from gfn_rb.storages.tensors import staged
from gfn_rb.torchrl_compat import generator_of, write_cursor

Indices = Sequence[int] | Tensor


class ExperienceMemory:
    """A memory of the newest experiences, for single draws, batches and epochs.

    It has the interface of ObjectRL's ``ReplayBuffer``, and holds a ``TensorDictReplayBuffer``,
    :attr:`memory`. Where that one saves its counters alone, this one saves its contents too.
    Experiences are stored in memory-mapped files on the CPU, in tensors elsewhere; every batch
    comes with the ``index`` of its rows, and is a copy, on the working device.

    Args:
        device: device of drawn batches.
        storing_device: device of stored experiences.
        buffer_size: number of experiences that are kept, at least 1.
        print_gc_warning: whether to warn when the garbage collector runs to close unused files.
        generator: ``torch.Generator`` of draws, on ``storing_device``. Default: PyTorch's global
            generator.

    Raises:
        ArgumentError: ``buffer_size`` below 1.

    Examples:
        >>> buffer = ExperienceMemory("cpu", "cpu", buffer_size=1000)
        >>> buffer.add_batch(TensorDict({"obs": torch.randn(8, 3), "action": torch.zeros(8)}, [8]))
        >>> obs, action = buffer.sample_by_index_fields([0, 5], fields=["obs", "action"])
        >>> for _ in range(buffer.get_steps_and_iterator(n_epochs=2, max_iter=0, batch_size=4)):
        ...     train_step(buffer.get_next_batch(batch_size=4))
    """

    memory: TensorDictReplayBuffer
    epoch_iterator: Iterator[TensorDictBase] | None
    device: torch.device
    storing_device: torch.device

    def __init__(
        self,
        device: torch.device | str,
        storing_device: torch.device | str,
        buffer_size: int,
        print_gc_warning: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        self.device = as_device("device", device)
        self.storing_device = as_device("storing_device", storing_device)
        require_kind("generator", generator, torch.Generator, lambda value: value is None)
        self.print_gc_warning = print_gc_warning
        self._generator = generator
        self.reset(as_count("buffer_size", buffer_size))

    def reset(self, buffer_size: int | None = None) -> None:
        """Forget all experiences, and the epochs begun.

        Args:
            buffer_size: how many are kept from now on; by default as many as before.

        Raises:
            ArgumentError: ``buffer_size`` below 1.
        """
        self._hold(self._made(self.buffer_size if buffer_size is None else buffer_size))

    @property
    def buffer_size(self) -> int:
        """How many experiences are kept."""
        return int(self.memory.storage.max_size)

    @property
    def data_size(self) -> int:
        """How many experiences are stored."""
        return len(self.memory)

    @property
    def size(self) -> int:
        """How many experiences are stored, as :attr:`data_size`."""
        return len(self.memory)

    @property
    def pointer(self) -> int:
        """Where the next experience is written."""
        return write_cursor(self.memory.writer)

    def __len__(self) -> int:
        return len(self.memory)

    # Writing.

    def add(self, experience: TensorDictBase | Mapping[str, Any]) -> None:
        """Store one experience.

        Args:
            experience: TensorDict or mapping of batch size [].

        Raises:
            ShapeError: another batch size, or an entry of another shape or dtype than the stored.
            KeyMismatchError: keys are missing, or unknown to the memory.
        """
        item = _tensordict(experience)
        if item.ndim:
            raise ShapeError(f"experience must have batch size [], got {list(item.batch_size)}")
        self._write(lambda memory: memory.add(item))

    def add_batch(self, batch: TensorDictBase) -> None:
        """Store a batch, or its last experiences if it is longer than the memory.

        Each experience is where it would be if all were stored one by one, and so is the pointer.

        Args:
            batch: TensorDict of batch size [n].

        Raises:
            ShapeError, KeyMismatchError: as by :meth:`add`.
        """
        rows = _tensordict(batch)
        if rows.ndim != 1:
            raise ShapeError(f"batch must have batch size [n], got {list(rows.batch_size)}")
        if len(rows):
            self._write(lambda memory: memory.extend(rows))

    # Drawing.

    def sample_batch(self, batch_size: int) -> TensorDictBase:
        """Draw experiences uniformly, with replacement.

        Raises:
            ArgumentError: ``batch_size`` below 1.
            EmptyBufferError: nothing is stored.
        """
        as_count("batch_size", batch_size)
        self._require_some(f"draw {batch_size} experiences")
        return staged(self.memory.sample(batch_size), self.device)

    def sample_random(self, batch_size: int) -> TensorDictBase:
        """Draw experiences uniformly, with replacement, as :meth:`sample_batch` does."""
        return self.sample_batch(batch_size)

    def sample_by_index(self, indices: Indices) -> TensorDictBase:
        """Return experiences by their place.

        Args:
            indices: slots, integers in [-size, size), in any order. Negative ones count from the
                end. Repeated ones are allowed.

        Raises:
            ArgumentError: ``indices`` contains anything else.
        """
        return staged(self.memory.storage[self._places_of(indices)], self.device)

    def sample_by_index_fields(
        self, indices: Indices, fields: Sequence[NestedKey]
    ) -> Tensor | tuple[Tensor, ...]:
        """Return some fields of experiences by their place, and read no others.

        Args:
            indices: slots, integers in [-size, size), in any order. Negative ones count from the
                end. Repeated ones are allowed.
            fields: names of entries, at least one; a nested name is a tuple.

        Returns:
            The field, a tensor [n, ...], if there is one, a tuple of such if there are several.

        Raises:
            ArgumentError: other indices, or no field.
            KeyMismatchError: a field that does not exist.
        """
        places = self._places_of(indices)
        stored = self.memory.storage[:] if len(self) else TensorDict()
        held = set(stored.keys(True, True))
        if isinstance(fields, str) or not fields:
            raise ArgumentError(f"fields must be a list of at least one name, got {fields!r}")
        if unknown := [field for field in fields if field not in held]:
            known = sorted(map(str, held))
            raise KeyMismatchError(f"fields must be among {known}, got {unknown[0]!r}")
        values = [stored.get(field)[places].to(self.device) for field in fields]
        return values[0] if len(values) == 1 else tuple(values)

    def sample_all(self) -> TensorDictBase:
        """Return all experiences in the order of their places.

        Raises:
            EmptyBufferError: nothing is stored.
        """
        self._require_some("return all experiences")
        return self.sample_by_index(range(len(self)))

    # Epochs.

    def create_epoch_iterator(
        self, batch_size: int, n_epochs: int = 1, shuffle: bool = False
    ) -> Iterator[TensorDictBase]:
        """Return batches that run through all experiences, again and again.

        :meth:`get_next_batch` takes batches from the same iterator. Passes cover the slots that are
        in use now, with their content when a batch is taken.

        Args:
            batch_size: number of experiences in a batch; the last one of a pass may be smaller.
            n_epochs: number of passes over all experiences.
            shuffle: whether each pass has a new random order, or the order of the slots.

        Raises:
            ArgumentError: ``batch_size`` or ``n_epochs`` below 1.
            EmptyBufferError: nothing is stored.
        """
        as_count("batch_size", batch_size)
        as_count("n_epochs", n_epochs)
        self._require_some("create an epoch iterator")
        # Orders are drawn as epochs begin, of as many places as there are now.
        n, generator = len(self), self._generator
        device = None if generator is None else generator.device
        orders = (
            torch.randperm(n, generator=generator, device=device) if shuffle else torch.arange(n)
            for _ in range(n_epochs)
        )
        batches = (places for order in orders for places in order.split(batch_size))
        self.epoch_iterator = map(self.sample_by_index, batches)
        return self.epoch_iterator

    def get_next_batch(self, batch_size: int) -> TensorDictBase:
        """Return the next batch of the epochs begun, or without such a random one.

        Raises:
            StopIteration: the epochs are over.
        """
        if self.epoch_iterator is None:
            return self.sample_batch(batch_size)
        return next(self.epoch_iterator)

    def calculate_num_batches(self, batch_size: int) -> int:
        """Return how many batches make an epoch, the last and perhaps smaller one included.

        Raises:
            ArgumentError: ``batch_size`` below 1.
        """
        as_count("batch_size", batch_size)
        return -(-len(self) // batch_size)

    def get_steps_and_iterator(
        self, n_epochs: int, max_iter: int, batch_size: int, shuffle: bool = False
    ) -> int:
        """Return how many batches to take with :meth:`get_next_batch`, and prepare them.

        Args:
            n_epochs: number of passes over all experiences; 0 for ``max_iter`` random batches.
            max_iter: number of random batches, if ``n_epochs`` is 0.
            batch_size: number of experiences in a batch; the last one of a pass may be smaller.
            shuffle: whether each pass has a new random order, or the order of the slots.

        Raises:
            ArgumentError: ``n_epochs`` or ``max_iter`` below 0, or ``batch_size`` below 1.
            EmptyBufferError: epochs are asked for, and nothing is stored.
        """
        if n_epochs < 0 or max_iter < 0:
            raise ArgumentError(
                f"n_epochs and max_iter must be at least 0, got {n_epochs} and {max_iter}"
            )
        n_batches = self.calculate_num_batches(batch_size)
        if n_epochs == 0:
            self.epoch_iterator = None
            return max_iter
        self.create_epoch_iterator(batch_size, n_epochs, shuffle)
        return n_epochs * n_batches

    # Files.

    def save(self, path: str | PathLike[str]) -> None:
        """Save the contents with their own counters, and a file that ObjectRL can load.

        ``PATH.gfnrb`` contains the contents, see :func:`~gfn_rb.save_checkpoint`.
        ``PATH.metadata`` contains ``buffer_size``, ``data_size`` and ``pointer``, as ObjectRL's
        file does. Each replaces an older file in one step.

        Args:
            path: path of the files without their suffixes.

        Raises:
            CheckpointError: writing to the disk failed.
        """
        counters = self._counters()
        save_checkpoint(f"{fspath(path)}.gfnrb", self.memory, **counters)
        write_torch_file(f"{fspath(path)}.metadata", counters)

    def load(self, path: str | PathLike[str]) -> None:
        """Restore what :meth:`save` saved.

        ObjectRL's own file contains no experiences. The memory is then empty, of its
        ``buffer_size``, with a warning if the file counts some.

        Args:
            path: path of the files without their suffixes.

        Raises:
            CheckpointError: a file is missing, damaged or not of a replay buffer. The buffer is
                unchanged.
        """
        contents, file = f"{fspath(path)}.gfnrb", f"{fspath(path)}.metadata"
        if Path(contents).exists():
            counters = load_state(contents)
            if counters.keys() != self._counters().keys():
                raise CheckpointMismatchError(f"{contents} was not saved by an ExperienceMemory")
            memory = self._made(counters["buffer_size"])
            load_checkpoint(contents, memory)
            self._hold(memory)
            return
        metadata = read_torch_file(file)
        size: Any = metadata.get("buffer_size")
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{file} must contain a buffer_size above 0, got {size!r:.80}")
        if metadata.get("data_size"):
            warnings.warn(
                f"{file} has counters alone, of {metadata['data_size']} experiences: the memory is "
                "empty",
                stacklevel=2,
            )
        self.reset(size)

    # Within.

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("buffer_size", "data_size", "size", "pointer"):
            raise ArgumentError(
                f"{name} cannot be assigned, it is {getattr(self, name)} by what the memory holds: "
                "reset(buffer_size=...) makes another memory, add and add_batch fill it"
            )
        if name in ("device", "storing_device"):
            value = as_device(name, value)
        super().__setattr__(name, value)

    def _counters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("buffer_size", "data_size", "pointer")}

    def _made(self, buffer_size: int) -> TensorDictReplayBuffer:
        as_count("buffer_size", buffer_size)
        kind = LazyMemmapStorage if self.storing_device.type == "cpu" else LazyTensorStorage
        return fifo_buffer(
            buffer_size,
            storage=kind(buffer_size, device=self.storing_device),
            keep=(LOG_PROB, ESTIMATOR_OUTPUT),
            generator=self._generator,
        )

    def _hold(self, memory: TensorDictReplayBuffer) -> None:
        self.memory = memory
        self._generator = generator_of(memory)
        self.epoch_iterator = None

    def _write(self, write: Callable[[TensorDictReplayBuffer], Any]) -> None:
        try:
            write(self.memory)
        except OSError as error:
            if self.print_gc_warning:
                warnings.warn(f"running the garbage collector, because of {error}", stacklevel=3)
            gc.collect()
            if not self.memory.storage.initialized:
                self.reset()  # files are made on the first write, and the counters before them
            write(self.memory)

    def _places_of(self, indices: Indices) -> Int64[Tensor, "k"]:
        if isinstance(indices, range):
            places = torch.arange(indices.start, indices.stop, indices.step)
        else:
            places = indices if isinstance(indices, Tensor) else torch.tensor([*indices])
        if places.numel() == 0:
            places = places.long()  # an empty list makes floats
        if places.ndim != 1 or places.is_floating_point() or places.dtype == torch.bool:
            raise ArgumentError(f"indices must be a list of whole numbers, got {indices!r}")
        n = len(self)
        if places.numel() and not -n <= int(places.min()) <= int(places.max()) < n:
            raise ArgumentError(
                f"indices must lie in [{-n}, {n}), got {int(places.min())} to {int(places.max())}"
            )
        return (places.long() % max(n, 1)).to(self.storing_device)

    def _require_some(self, what: str) -> None:
        if not len(self):
            raise EmptyBufferError(f"cannot {what}: the memory is empty")


def _tensordict(data: Any) -> TensorDictBase:
    if isinstance(data, TensorDictBase):
        return data
    if isinstance(data, Mapping):
        return TensorDict(dict(data))
    raise ArgumentError(f"experiences must come in a TensorDict, got a {type(data).__name__}")
