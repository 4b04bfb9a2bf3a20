"""How fast a replay buffer is saved and loaded, against what the machine can do.

A full buffer held in memory is saved, and loaded into a new one, or back into itself, which first
copies what it holds so that a failed load changes nothing. Peers of saving: ``torch.save`` of the
same tensors, synced as a checkpoint is, and TorchRL's ``dumps``, which neither syncs nor sums.
Peers of loading into a new buffer: ``torch.load`` alone, and ``torch.load(mmap=True)`` with a copy
into memory, since a mapped file that is replaced changes the rows. Peers of loading into a full
buffer: ``torch.load``, plain and mapped, copied to where the rows belong, and TorchRL's ``loads``.
The floor: the same bytes written and synced, or read, with nothing else done. All write new files,
and read what is in the page cache. A ratio of 1 means as much time as the peer takes, 2 twice as
much.

One percent of the rows, written to a journal on disk, is compared with a whole checkpoint; and
5,000 extends of 128 rows of 16 float32 and a reward, with a journal of each mode, with as many
without. A journal that syncs each extend is also compared with the floor of that, the same bytes
appended to a file and synced: relative to extends without a journal, its time is that of the disk.

    python -m benchmarks.checkpoint [--gigabytes 1] [--seconds 60] [--least 3] [--store]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from benchmarks.records import RESULTS
from benchmarks.timing import Contender, Effort, Result, header, interleave, row, store
from gfn_rb import FIFOWriter, fifo_buffer
from gfn_rb.checkpoint import Journal, load_checkpoint, save_checkpoint

_WIDTH = 248  # float32 per row; with the log-reward and TorchRL's index, 1 kB or so
_PIECE = 1 << 24
_ROWS, _EXTENDS = 100_000, 5_000


def full_buffer(nbytes: float) -> TensorDictReplayBuffer:
    """Return a buffer filled with so many bytes of random rows.

    Args:
        nbytes: roughly.
    """
    n = max(1, int(nbytes / (4 * _WIDTH + 12)))
    rb = empty_buffer(n)
    rb.extend(TensorDict({"state": torch.randn(n, _WIDTH), "log_reward": torch.randn(n)}, [n]))
    return rb


def empty_buffer(n: int) -> TensorDictReplayBuffer:
    """Return a buffer for so many rows.

    Args:
        n: rows.
    """
    return TensorDictReplayBuffer(storage=LazyTensorStorage(n), writer=FIFOWriter(), batch_size=128)


def tensors_of(rb: TensorDictReplayBuffer) -> dict[str, Tensor]:
    """Return the storage's tensors by name.

    Args:
        rb: a buffer that is full.
    """
    return dict(rb.storage[:].items())


# The contenders.


def torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write with torch.save, and sync."""
    with path.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


def torch_load(path: Path, mapped: bool) -> dict[str, Tensor]:
    """Read with torch.load; a mapped file is copied to memory."""
    read = torch.load(path, mmap=mapped)
    return {name: tensor.clone() for name, tensor in read.items()} if mapped else read


def torch_load_into(tensors: dict[str, Tensor], path: Path, mapped: bool) -> None:
    """Read with torch.load, and copy to where the rows belong."""
    for name, loaded in torch.load(path, mmap=mapped).items():
        tensors[name].copy_(loaded)


def raw_write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write the bytes, and sync."""
    with path.open("wb", buffering=0) as stream:
        for tensor in tensors.values():
            for piece in tensor.reshape(-1).view(torch.uint8).split(_PIECE):
                stream.write(piece.numpy())
        os.fsync(stream.fileno())


def raw_read(tensors: dict[str, Tensor], path: Path) -> None:
    """Read the bytes to where they belong."""
    with path.open("rb", buffering=0) as stream:
        for tensor in tensors.values():
            for piece in tensor.reshape(-1).view(torch.uint8).split(_PIECE):
                stream.readinto(piece.numpy())


def savers(rb: TensorDictReplayBuffer, folder: Path) -> dict[str, Contender]:
    """Return what is timed for saving, ours first.

    Args:
        rb: a full buffer.
        folder: where to write.
    """
    tensors = tensors_of(rb)
    runs: dict[str, tuple[str, Callable[[Path], None]]] = {
        "save_checkpoint": ("ours", lambda path: save_checkpoint(path, rb)),
        "torch.save + fsync": ("torch", lambda path: torch_save(tensors, path)),
        "rb.dumps": ("torchrl", rb.dumps),
        "write + fsync": ("raw", lambda path: raw_write(tensors, path)),
    }
    return {
        name: Contender(run, lambda file=file: removed(folder / file))
        for name, (file, run) in runs.items()
    }


def loaders_new(rb: TensorDictReplayBuffer, folder: Path) -> dict[str, Contender]:
    """Return what is timed for loading into new memory, ours first.

    Args:
        rb: a full buffer.
        folder: where the savers wrote.
    """
    tensors = tensors_of(rb)

    def empty() -> dict[str, Tensor]:
        return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    return {
        "load_checkpoint": Contender(
            lambda new: load_checkpoint(folder / "ours", new), lambda: empty_buffer(len(rb))
        ),
        "torch.load": Contender(lambda _: torch_load(folder / "torch", mapped=False)),
        "torch.load(mmap), copied": Contender(lambda _: torch_load(folder / "torch", mapped=True)),
        "read": Contender(lambda new: raw_read(new, folder / "raw"), empty),
    }


def loaders_full(rb: TensorDictReplayBuffer, folder: Path) -> dict[str, Contender]:
    """Return what is timed for loading into a full buffer, ours first.

    Args:
        rb: a full buffer.
        folder: where the savers wrote.
    """
    tensors, file = tensors_of(rb), folder / "torch"
    return {
        "load_checkpoint into itself": Contender(lambda _: load_checkpoint(folder / "ours", rb)),
        "torch.load, copied into it": Contender(lambda _: torch_load_into(tensors, file, False)),
        "torch.load(mmap), copied": Contender(lambda _: torch_load_into(tensors, file, True)),
        "rb.loads": Contender(lambda _: rb.loads(folder / "torchrl")),
        "read": Contender(lambda _: raw_read(tensors, folder / "raw")),
    }


def increments(rb: TensorDictReplayBuffer, folder: Path, opened: ExitStack) -> dict[str, Contender]:
    """Return what is timed for saving one percent of the rows.

    Args:
        rb: a full buffer, which has a journal from now on.
        folder: where to write.
        opened: closes the journal.
    """
    n = max(1, len(rb) // 100)
    rows = rb[:n].exclude("index").clone()
    journal = Journal(rb, folder / "one percent", sync="never")
    opened.callback(journal.close)

    def change(_: object) -> None:
        rb.extend(rows)
        journal.sync()

    whole = Contender(lambda path: save_checkpoint(path, rb), lambda: removed(folder / "ours"))
    return {"journal, 1% of the rows": Contender(change), "save_checkpoint": whole}


def extenders(folder: Path, opened: ExitStack) -> dict[str, Contender]:
    """Return what is timed for 5,000 extends, the one without a journal last but one.

    The last one appends the bytes of as many batches to a file, and syncs each.

    Args:
        folder: where journals lie.
        opened: closes them.
    """
    made = {}
    for name in ("interval", "always", "never", "extend"):
        made[name] = fifo_buffer(_ROWS)
        if name != "extend":
            opened.callback(Journal(made[name], folder / name, name).close)
        made[name].extend(_small(_ROWS))
    rows = _small(128)

    def extend(rb: TensorDictReplayBuffer) -> None:
        for _ in range(_EXTENDS):
            rb.extend(rows)

    def append(path: Path) -> None:
        with path.open("wb", buffering=0) as stream:
            for _ in range(_EXTENDS):
                for tensor in rows.values():
                    stream.write(tensor.numpy())
                os.fsync(stream.fileno())

    timed = {
        name if name == "extend" else f"journal, {name}": Contender(
            partial(lambda rb, _: extend(rb), rb)
        )
        for name, rb in made.items()
    }
    return {**timed, "write + fsync of each": Contender(append, lambda: removed(folder / "raw"))}


def _small(n: int) -> TensorDict:
    return TensorDict({"state": torch.randn(n, 16), "log_reward": torch.randn(n)}, [n])


def removed(path: Path) -> Path:
    """Return a path where nothing is, with nothing left for the disk to do.

    Args:
        path: a file or folder, or neither.
    """
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.sync()
    return path


def compare(
    contenders: dict[str, Contender],
    nbytes: int,
    effort: Effort,
    pairs: Sequence[tuple[str, str]] = (),
) -> list[Result]:
    """Run the contenders in turn, and compare some with others.

    Args:
        contenders: what to time.
        nbytes: how much each moves.
        effort: when to stop.
        pairs: which to compare, by default the first with each other one.
    """
    ours, *others = contenders
    ready = {name: Contender(c.run, partial(_ready, c, nbytes)) for name, c in contenders.items()}
    seconds = interleave(ready, effort)
    results = [
        Result.of(f"{one}, against {other}", nbytes, seconds[one], seconds[other], None)
        for one, other in pairs or [(ours, other) for other in others]
    ]
    print("\n".join(map(row, results)), flush=True)
    return results


def _ready(contender: Contender, nbytes: int) -> object:
    """Set a contender up, and have as much free memory that was in use a moment before.

    The host of a virtual machine takes free pages back within seconds, and needs 2 s to return a
    gigabyte: without this, that time is the one of whichever contender comes after a pause.
    """
    argument = contender.setup()
    torch.ones(nbytes, dtype=torch.uint8)
    return argument


JOURNALS = [
    *((f"journal, {mode}", "extend") for mode in ("interval", "always", "never")),
    ("journal, always", "write + fsync of each"),
]
"""Which extends are compared with which."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="per table")
    parser.add_argument("--least", type=int, default=3, help="rounds of each table in any case")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--store", action="store_true", help="keep them in benchmarks/results")
    options = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # it logs a line for every storage
    rb = full_buffer(1e9 * options.gigabytes)
    nbytes = sum(tensor.nbytes for tensor in tensors_of(rb).values())
    effort = Effort(seconds=options.seconds, least=options.least, most=15, warmup=1)
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(f"{len(rb):,} rows, {nbytes / 1e9:.2f} GB; medians of paired runs")
        print(header("bytes"))
        parts = {
            "save": compare(savers(rb, folder), nbytes, effort),
            "load into a new buffer": compare(loaders_new(rb, folder), nbytes, effort),
            "load into a full buffer": compare(loaders_full(rb, folder), nbytes, effort),
        }
        with ExitStack() as opened:
            parts["journal"] = compare(increments(rb, folder, opened), nbytes, effort)
            timed = extenders(folder, opened)
            parts["extend"] = compare(timed, _EXTENDS, effort, JOURNALS)
        places = [options.json, RESULTS / "checkpoint.json" if options.store else None]
        facts = {name: vars(options)[name] for name in ("gigabytes", "seconds", "least")}
        for path in filter(None, places):
            store(path, "checkpoint", parts, facts)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
