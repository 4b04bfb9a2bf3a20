"""Files that somebody has changed, whose checksums may be right: refused, and nothing else."""

import contextlib
import json
import os
import random
import resource
import time
from copy import deepcopy

import pytest
import torch
from checkpoint.checkpoint_runs import CAPACITY, buffer, ensemble, rows, used
from torchrl.data import LazyTensorStorage
from xxhash import xxh3_64_digest

from gfn_rb.checkpoint import (
    Secret,
    load_checkpoint,
    load_state,
    save_checkpoint,
)
from gfn_rb.checkpoint.api import outline
from gfn_rb.codec.layout import Prefix
from gfn_rb.errors import CheckpointError, GfnRbError, NaNError
from gfn_rb.samplers import PrioritySampler, SoftmaxRewardSampler
from gfn_rb.writers import DiversityWriter, FIFOWriter, RewardPrioritizedWriter

# The whole check is of 200,000 files: GFN_RB_FILES=200000 pytest tests/checkpoint/test_hostile...
FILES = int(os.environ.get("GFN_RB_FILES", "1200"))
SECONDS = float(os.environ.get("GFN_RB_SECONDS", "inf"))  # after which it ends, however many

pytestmark = pytest.mark.usefixtures("unlogged")
MAKES = {
    "plain": buffer,
    "best": lambda: buffer(
        writer=RewardPrioritizedWriter(track_generations=True), sampler=SoftmaxRewardSampler()
    ),
    "newest": lambda: buffer(writer=FIFOWriter(track_generations=True), sampler=PrioritySampler()),
    "diverse": lambda: buffer(
        writer=DiversityWriter(features="state"), sampler=PrioritySampler("log_reward", eps=9.0)
    ),
    "prefetching": lambda: buffer(prefetch=2, sampler=SoftmaxRewardSampler(replacement=True)),
    "ensemble": ensemble,
    "secret": buffer,  # which whoever changes files does not know
}
WORDS = [None, True, -1, 0, 1, 2, 3, 7, 19, 2**31, 2**63, 10**30, "", "x", "cpu", "cuda", "meta"]
WORDS += ["float32", "int64", "bool", "qint8", [], {}, [[]], {"float": "7ff8000000000000"}]
WORDS += [{"tensor": 0}, {"tuple": []}, {"dict": []}, {"list": [1]}, {"size": [-1]}, {"array": 1}]
WORDS += [{"lazy_stack": {"dim": 10**9, "items": []}}, {"device": "cuda:77"}, {"bytes": 2}, 0.5]
WORDS += [{"text": ["a", "b"]}, {"text": []}]
WORDS += [{"scalar": 1}, {"dtype": "float64"}, {"float": "c08f400000000000"}]


def positive(n):
    data = rows(n)
    return data.set("log_reward", data["log_reward"].abs())


def filled(rb):
    for each in rb._rbs if hasattr(rb, "_rbs") else [rb]:
        each.extend(positive(13))
    for _ in range(3):
        rb.sample()
    return rb


class Parts:
    """A file taken apart, so that it can be put together again with other content."""

    def __init__(self, content):
        prefix = Prefix.read(memoryview(content), "it")
        meta_at = 64 + prefix.structure_nbytes
        texts_end = meta_at + prefix.meta_nbytes
        self.structure = json.loads(content[64:meta_at])
        self.meta = json.loads(content[meta_at:texts_end])
        self.prefix = prefix
        self.small = bytearray(content[-(-texts_end // 64) * 64 : prefix.head_nbytes])
        self.body = bytearray(content[prefix.head_nbytes :])[:-8]

    def sealed(self):
        structure, meta = (json.dumps(each).encode() for each in (self.structure, self.meta))
        head = bytearray(-(-(64 + len(structure) + len(meta)) // 64) * 64) + self.small
        head[64 : 64 + len(structure) + len(meta)] = structure + meta
        sums = xxh3_64_digest(bytes(self.body)) if self.body else b""
        nbytes = len(head) + len(self.body) + len(sums)
        sizes = {"nbytes": nbytes, "head_nbytes": len(head), "meta_nbytes": len(meta)}
        self.prefix._replace(structure_nbytes=len(structure), **sizes).seal(memoryview(head))
        return bytes(head) + bytes(self.body) + sums


def places(value, path=()):
    """Every place in nested values."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [
        place
        for key, each in inner
        for place in (
            (*path, key),
            *(places(each, (*path, key)) if isinstance(each, (dict, list)) else ()),
        )
    ]


def at(value, path):
    for key in path:
        value = value[key]
    return value


def changed(parts, pick):
    """Change the texts or the tensors of a file in some place."""
    root = pick.choice([parts.structure, parts.meta, parts.meta, parts.meta])
    *path, key = pick.choice(places(root))
    inside = at(root, tuple(path))
    kind = pick.randrange(6)
    if kind == 0 and isinstance(inside, list) and inside:
        inside.append(pick.choice(inside))
    elif kind == 1:
        del inside[key]
    elif kind == 2 and isinstance(inside, dict):
        inside[pick.choice(["tensor", "x", "tuple", "members"])] = inside.pop(key)
    elif kind == 3:
        inside[key] = deepcopy(at(root, pick.choice(places(root))))
    elif kind == 4 and (content := pick.choice([parts.small, parts.body])):
        for _ in range(pick.randrange(1, 20)):
            content[pick.randrange(len(content))] = pick.randrange(256)
    else:
        inside[key] = deepcopy(pick.choice(WORDS))


def mutant(content, pick):
    """Return a changed file or frame; of every other one the checksums are right."""
    if pick.random() < 0.5:
        damaged = bytearray(content)
        for _ in range(pick.randrange(1, 5)):
            damaged[pick.randrange(len(damaged))] ^= pick.randrange(1, 256)
        return bytes(damaged[: pick.choice([None, None, None, pick.randrange(len(damaged))])])
    parts = Parts(content)
    for _ in range(pick.choice([1, 1, 1, 2, 5])):
        # Nothing is left to change, or it is no JSON.
        with contextlib.suppress(IndexError, TypeError, ValueError, RecursionError):
            changed(parts, pick)
            # Copies: what is put in is otherwise shared with the next one that it is put in.
            parts.structure = json.loads(json.dumps(parts.structure))
            parts.meta = json.loads(json.dumps(parts.meta))
    return parts.sealed()


def memory():
    """Return the most memory that this process had so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fingerprint(rb):
    members = list(rb._rbs) if hasattr(rb, "_rbs") else [rb]
    stored = [each[:].sum().to_dict() if len(each) else {} for each in members]
    return str([stored, rb.writer.state_dict(), rb.sampler.state_dict(), rb._rng.get_state().sum()])


@pytest.mark.parametrize("kind", MAKES)
def test_changed_files_are_refused_by_this_library_alone(kind, tmp_path):
    pick, path = random.Random(kind), tmp_path / "rb.ckpt"
    source = filled(MAKES[kind]())
    extra = {"a": [1.5, {"b": torch.zeros(3)}], "c": (None, b"abc", torch.float16), 3: "x"}
    secret = Secret(bytes(16)) if kind == "secret" else None
    save_checkpoint(path, source, secret=secret, extra=extra)
    content = path.read_bytes()
    target = filled(MAKES[kind]())
    load_checkpoint(path, MAKES[kind](), secret=secret)
    start = time.process_time()
    for _ in range(5):
        load_checkpoint(path, MAKES[kind](), secret=secret)
    honest = max((time.process_time() - start) / 5, 0.01)  # which no other process disturbs
    before, peak, end = fingerprint(target), memory(), time.monotonic() + SECONDS / len(MAKES)
    found = {"files": 0, "taken": 0, "slowest": 0.0}
    for i in range(FILES // len(MAKES)):
        if time.monotonic() > end:
            break
        path.write_bytes(mutant(content, pick))
        start = time.process_time()
        refused = None
        try:
            pick.choice([outline, load_state])(path, secret=secret)
            load_checkpoint(path, target, secret=secret)
        except CheckpointError as error:
            refused = str(error)
            assert "\n" not in refused
        took = (time.process_time() - start) / honest
        if took > 20:  # the collector may have come, or others: they do not each time
            took = min(took, *(timed(path, filled(MAKES[kind]())) / honest for _ in range(5)))
        found["slowest"] = max(found["slowest"], took)
        found["files"] += 1
        if refused is None:
            assert secret is None
            found["taken"] += 1
            use(target)
            target = filled(MAKES[kind]())
            before = fingerprint(target)
        elif i % 10 == 0:
            assert fingerprint(target) == before
    assert fingerprint(target) == before
    assert found["slowest"] < 50, found
    assert memory() - peak < (1 << 27), found


def timed(path, target):
    start = time.process_time()
    with contextlib.suppress(CheckpointError):
        load_checkpoint(path, target)
    return time.process_time() - start


def use(rb):
    """A buffer that took a file works, whatever was in it."""
    for each in rb._rbs if hasattr(rb, "_rbs") else [rb]:
        with contextlib.suppress(NaNError):  # features may have become it
            each.extend(rows(3))
            each.extend(rows(CAPACITY + 1))
        assert len(each) <= each.storage.max_size
    if rb.batch_size in range(2, 1000, 2):  # and not 2^31 rows, nor what no ensemble draws
        with contextlib.suppress(GfnRbError):  # a key may have become NaN
            rb.sample()


def test_a_tensor_stands_for_one_value_alone(tmp_path):
    path = tmp_path / "rb.ckpt"
    save_checkpoint(path, used(buffer()), x=[torch.zeros(99), torch.zeros(99)])
    parts = Parts(path.read_bytes())
    first, second = parts.meta["values"]["dict"][0][1]["list"]
    second["tensor"] = first["tensor"]
    path.write_bytes(parts.sealed())
    with pytest.raises(CheckpointError, match=f"tensor {first['tensor']} occurs twice"):
        load_state(path)


def entry(node, name):
    """The node of an entry of a dict, of which other content may be set."""
    return next(each for each in node["dict"] if each[0] == name)


def test_rows_and_their_number_agree(tmp_path):
    path, target = tmp_path / "rb.ckpt", buffer(storage=LazyTensorStorage(CAPACITY))
    save_checkpoint(path, used(buffer()))
    content = path.read_bytes()
    for name, value in (("length", 14), ("length", 12), ("cursor", 20), ("length", True)):
        parts = Parts(content)
        state = entry(parts.meta["buffers"]["list"][0], "storage")[1]
        entry(state, name)[1] = value
        path.write_bytes(parts.sealed())
        with pytest.raises(CheckpointError, match=r"the storage (has length|was written to at)"):
            load_checkpoint(path, target)
        assert not target.storage.initialized


@pytest.mark.parametrize(
    ("i", "value", "why"),
    [
        (0, {"float": "3ff0000000000000"}, "TypeError: a prefetched batch has no rows"),
        (0, {"tuple": []}, "TypeError: a prefetched batch has no rows"),
        (1, {"float": "3ff0000000000000"}, "TypeError: a prefetched batch is no pair"),
        (1, {"dict": [[3, 3]]}, "TypeError: a prefetched batch has 3, expected a name"),
        (1, {"dict": [["index", "cuda"]]}, "TypeError: "),
        (1, {"dict": [["index", {"list": [1]}]]}, "ValueError: a prefetched batch has 'index' of"),
    ],
)
def test_prefetched_batches_are_what_they_should_be(i, value, why, tmp_path):
    path, target = tmp_path / "rb.ckpt", buffer(prefetch=2)
    save_checkpoint(path, filled(buffer(prefetch=2)))
    parts = Parts(path.read_bytes())
    queue = entry(parts.meta["buffers"]["list"][0], "queue")[1]
    queue["tuple"][0]["tuple"][i] = value
    path.write_bytes(parts.sealed())
    with pytest.raises(CheckpointError, match=why):
        load_checkpoint(path, target)
    assert len(target) == 0
