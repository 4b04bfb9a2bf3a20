"""Rows of different lengths in a RaggedStorage and a list of rows: ``python -m benchmarks.ragged``.

    --quick        a smoke run on small buffers, whose figures mean nothing
    --parts ...    some of: bytes extend draw unique journal
    --json PATH    also write the figures to a file

Rows are completions of 1 to L tokens (int64) with log-probabilities (float32), L uniform. The peer
is TorchRL's ``LazyStackStorage`` with its round-robin writer, which keeps the given rows without a
copy, and random draws. Ours gets batches padded with lengths, or lazy stacks; the peer gets lazy
stacks, the only form that it takes. Both return padded tensors, except "as stored": there the peer
returns a lazy stack of the tensors that it holds, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, TensorDictReplayBuffer

from benchmarks.timing import Contender, Effort, Result, compare, row, run_parts
from gfn_rb import RaggedStorage, fifo_buffer, load_checkpoint, save_checkpoint
from gfn_rb.checkpoint import Journal

KEYS = "tokens", "log_p"
TOKEN_BYTES = 12


@dataclass(frozen=True)
class Scale:
    """How large and how long the comparisons are.

    Args:
        capacity: rows of the buffers that are timed.
        stored: rows of the buffer whose bytes are counted.
        cases: highest length and rows of a batch.
        effort: when to stop.
    """

    capacity: int
    stored: int
    cases: tuple[tuple[int, int], ...]
    effort: Effort


FULL = Scale(
    capacity=4_096,
    stored=100_000,
    cases=((32, 64), (32, 1024), (256, 64), (256, 1024), (4_096, 64)),
    effort=Effort(seconds=6, most=200),
)
QUICK = Scale(200, 500, ((32, 64), (256, 64)), Effort(seconds=0.1, warmup=1))


def padded(n: int, longest: int) -> TensorDict:
    """Return n completions, padded, with their lengths."""
    length = torch.randint(1, longest + 1, (n,))
    width = int(length.max())
    rows = {"tokens": torch.randint(9, (n, width)), "log_p": torch.rand(n, width)}
    return TensorDict({**rows, "tokens_length": length, "log_reward": torch.rand(n)}, [n])


def apart(batch: TensorDict) -> Any:
    """Return the same completions as a lazy stack of rows with memory of their own."""
    rows = []
    for each, n in zip(batch.unbind(0), batch["tokens_length"].tolist(), strict=True):
        cut = {key: each[key][:n].clone() for key in KEYS}
        rows.append(TensorDict({**cut, "log_reward": each["log_reward"].clone()}))
    return lazy_stack(rows)


def content_bytes(scale: Scale) -> list[Result]:
    """Compare the bytes of a full buffer, rows written over, with those of its content."""
    storage = RaggedStorage(scale.stored, {"tokens": 4096, "log_p": "tokens"})
    rb, lengths = fifo_buffer(scale.stored, storage=storage), []
    for _ in range(-(-3 * scale.stored // 256)):
        batch = padded(256, 4096)
        lengths.append(batch["tokens_length"])
        rb.extend(batch)
    content = int(torch.cat(lengths)[-scale.stored :].sum()) * TOKEN_BYTES + 12 * scale.stored
    ratio = storage.nbytes / content
    figures = storage.nbytes / scale.stored, content / scale.stored, ratio, ratio, ratio, 1, 1.05
    results = [Result("bytes per row, against content", scale.stored, *figures)]
    print(row(results[0]), flush=True)
    return results


def extend(scale: Scale) -> list[Result]:
    """Compare writing a batch into a full buffer."""
    results = []
    for longest, n in scale.cases:
        ours, peer = _pair(scale, longest)
        its = Contender(peer.extend, lambda n=n, longest=longest: apart(padded(n, longest)))
        for form, make in (("padded", lambda batch: batch), ("lazy stack", apart)):
            mine = Contender(
                ours.extend, lambda n=n, longest=longest, make=make: make(padded(n, longest))
            )
            name = f"extend {n} rows up to {longest}, {form}"
            results.append(compare(name, scale.capacity, mine, its, scale.effort, 0.1))
    return results


def draw(scale: Scale) -> list[Result]:
    """Compare drawing a batch."""
    results = []
    for longest, n in scale.cases:
        ours, peer = _pair(scale, longest)
        mine = Contender(lambda _, rb=ours, n=n: rb.sample(n))
        raw = Contender(lambda _, rb=peer, n=n: rb.sample(n))
        its = Contender(lambda _, rb=peer, n=n: _as_padded(rb.sample(n)))
        name = f"draw {n} rows up to {longest}"
        results.append(compare(name, scale.capacity, mine, its, scale.effort, 0.1))
        results.append(compare(f"{name}, as stored", scale.capacity, mine, raw, scale.effort))
    return results


def unique(scale: Scale) -> list[Result]:
    """Compare writing one row per completion with writing all rows."""
    results = []
    for longest, n in scale.cases:
        ours, peer = (_ours(scale, longest, unique=key) for key in ("tokens", None))
        mine, its = (Contender(rb.extend, partial(padded, n, longest)) for rb in (ours, peer))
        name = f"extend {n} up to {longest}, unique, against all"
        results.append(compare(name, scale.capacity, mine, its, scale.effort))
    return results


def journal(scale: Scale) -> list[Result]:
    """Compare rows of tokens and text with a journal on disk with the same rows without one."""

    def make() -> TensorDictReplayBuffer:
        lengths: dict[Any, Any] = {"tokens": 256, "text": 1024}
        storage = RaggedStorage(scale.stored // 2, lengths, text=["text"])
        return fifo_buffer(scale.stored // 2, storage=storage)

    def answers(n: int = 32) -> dict[str, Any]:
        rows = padded(n, 256).select("tokens", "tokens_length", "log_reward")
        texts = ["answer " * length for length in (rows["tokens_length"] // 2).tolist()]
        return {**dict(rows.items()), "text": texts}

    with TemporaryDirectory(dir=".") as folder:
        path, saved = Path(folder, "rb.journal"), Path(folder, "rb.gfnrb")
        ours, peer = make(), make()
        kept = Journal(ours, path, sync="always")
        for rb in (ours, peer):
            for _ in range(scale.stored // 2 // 500):
                rb.extend(answers(500))
        pair = (Contender(rb.extend, answers) for rb in (ours, peer))
        name = "extend 32 rows of text, sync='always'"
        results = [compare(name, scale.stored // 2, *pair, scale.effort)]
        save_checkpoint(saved, ours)
        kept.close()
        opened = Contender(lambda _: Journal(make(), path).close())
        loaded = Contender(lambda _: load_checkpoint(saved, make()))
        name = "open a journal of text, against a checkpoint"
        return [*results, compare(name, scale.stored // 2, opened, loaded, scale.effort)]


PARTS: dict[str, Callable[[Scale], list[Result]]] = {
    "bytes": content_bytes,
    "extend": extend,
    "draw": draw,
    "unique": unique,
    "journal": journal,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons and print the table.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    run_parts("Rows of different lengths against lists.", PARTS, FULL, QUICK, arguments)


def _ours(scale: Scale, longest: int, **options: Any) -> TensorDictReplayBuffer:
    """Return a full buffer of ours."""
    storage = RaggedStorage(scale.capacity, {"tokens": longest, "log_p": "tokens"})
    rb = fifo_buffer(scale.capacity, storage=storage, **options)
    rb.extend(padded(scale.capacity, longest))
    return rb


def _pair(scale: Scale, longest: int) -> tuple[TensorDictReplayBuffer, ...]:
    """Return full buffers of ours and of the peer."""
    peer = TensorDictReplayBuffer(storage=LazyStackStorage(scale.capacity))
    peer.extend(apart(padded(scale.capacity, longest)))
    return _ours(scale, longest), peer


def _as_padded(rows: Any) -> list[torch.Tensor]:
    return [*(rows.get(key, as_padded_tensor=True) for key in KEYS), rows["log_reward"]]


if __name__ == "__main__":
    main()
