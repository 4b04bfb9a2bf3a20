"""Random frames and messages, honest ones changed in some places: nobody is ended or bent by them.

Half of the frames have checksums that are right. The whole check is of 100,000 messages of each
kind: ``GFN_RB_FUZZ=100000 pytest tests/remote/test_fuzz.py``; ``GFN_RB_SECONDS`` ends it earlier.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from checkpoint.test_hostile_files import WORDS, memory, mutant
from factories import linear_policy, seeded
from remote.remote_runs import group, objects, trajectories
from tensordict import TensorDict, TensorDictBase

from gfn_rb import (
    RaggedStorage,
    Sampler,
    errors,
    fifo_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)
from gfn_rb.codec.frames import encode_frame
from gfn_rb.codec.layout import Prefix
from gfn_rb.codec.primitives import Secret
from gfn_rb.envs import HyperGrid
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, PROTOCOL, Kind

MESSAGES = int(os.environ.get("GFN_RB_FUZZ", "400"))  # of each kind
SECONDS = float(os.environ.get("GFN_RB_SECONDS", "inf"))  # after which a kind ends, however many

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unlogged")]
ERRORS = {name for name, each in vars(errors).items() if isinstance(each, type)} | {"refused"}
ENV = HyperGrid(2, 4)
PATHS = Sampler(linear_policy(ENV, False)).sample_trajectories(ENV, 8, generator=seeded())
PATHS = PATHS.to_tensordict()
HIGHEST = 1e5
NUMBERS = [0, 1, 2, 3, 7, 99, -1, 2**31, 2**53, 2**63, 10**30, 10**309, 0.5, 1e308, math.nan]
NUMBERS += [math.inf, -math.inf, True, None]
TAGS = [DATA_TAG, DATA_TAG, DATA_TAG, METADATA_TAG, 2, 3, 32, 33, 47, 48, 32_000]
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float64, torch.complex64, torch.uint16, torch.uint64, torch.float8_e4m3fn]
TERMS = {"quota": 3, "policy": "top", "own": False, "fresh": True}


def until(n: int) -> Iterator[int]:
    end = time.monotonic() + SECONDS
    for i in range(n):
        if time.monotonic() > end:
            return
        yield i


# Frames.


def bytes_of(
    kind: int, meta: dict[str, Any] | None = None, rows: Any = None, scores: Any = None
) -> bytes:
    transport = group(1)[0]
    transport.send(encode_frame(kind, rows, meta, scores=scores), 0)
    return transport.recv(0).data.tobytes()


SCORES = TensorDict({"each": torch.tensor([1.0, 2.0])}, [2])
QUESTIONS = [
    bytes_of(Kind.ITEMS, {"id": 1, "quota": 2}, objects([1, 2])),
    bytes_of(Kind.ITEMS, {"id": 1, "quota": 1}, objects([3])),
    bytes_of(Kind.ITEMS, {"id": 1, "quota": 0}, trajectories([1, 2, 3])),
    bytes_of(Kind.ITEMS, {"id": 1}, PATHS),
    bytes_of(Kind.ITEMS, {"id": 1}, objects(range(1500))),
    bytes_of(Kind.ITEMS, {"id": 1}, objects([1, 2]), SCORES),
    bytes_of(Kind.HELLO, {"protocol": PROTOCOL, "subscription": TERMS, "rows": None}),
    bytes_of(Kind.GOODBYE),
    bytes_of(Kind.METADATA),
    bytes_of(Kind.HELD),
]

# Messages.


def word(pick: random.Random) -> Any:
    chosen = pick.choice([WORDS, NUMBERS, [[], {}, "x", "top", [0, 1], [1], [1.0, 2.0]]])
    value = pick.choice(chosen)
    for _ in range(pick.choice([0, 0, 0, 0, 1, 2, 200])):
        value = [value] if pick.random() < 0.7 else {"to": value}
    return value


def random_meta(pick: random.Random, *honest: dict[str, Any]) -> dict[str, Any]:
    """Metadata that are honest but for some entries."""
    meta = dict(pick.choice(honest))
    for _ in range(pick.choice([0, 0, 1, 1, 2, 4])):
        inside = [each for each in (meta, *meta.values()) if isinstance(each, dict)]
        place = pick.choice(inside)
        names = [*place, "id", "to", "quota", "nested", "compact", "rows"]
        name = pick.choice(names)
        value = word(pick)
        if place is not meta:  # which others share
            name_of = next(key for key, each in meta.items() if each is place)
            meta[name_of] = {**place, name: value}
        else:
            meta[name] = value
    if pick.random() < 0.02:
        meta["id"] = "x" * pick.choice([1000, 1_000_000, (1 << 20) - 400])
    return meta


def random_rows(pick: random.Random) -> TensorDictBase | None:
    """Rows that are honest but for some columns."""
    kind = pick.randrange(6)
    if kind == 0:
        return None
    n = pick.choice([0, 1, 2, 5, 40])
    values = [pick.randrange(-3, 60) for _ in range(n)]
    rows = (objects(values), trajectories(values), PATHS[:n].clone())[max(kind - 3, 0)]
    n = len(rows)
    if pick.random() < 0.3:
        mask = torch.arange(rows["state"].shape[1]) <= torch.arange(n)[:, None] % 3
        rows.set("state_mask", mask)
    for _ in range(pick.choice([0, 0, 1, 1, 2, 4])):
        name = pick.choice([*rows.keys(), "condition", "is_terminating", "is_backward", "more"])
        how, value = pick.randrange(7), rows.get(name, torch.zeros(n))
        if isinstance(value, TensorDictBase):
            continue
        if how == 0:
            rows = rows.exclude(name)
        elif how == 1 and not value.is_complex():
            rows.set(name, value.to(pick.choice(DTYPES)))
        elif how == 2:
            rows.set(name, value.unsqueeze(-1))
        elif how == 3:
            rows.set(name, torch.zeros(n, pick.choice([0, 1, 2, 3, 500])))
        elif how == 4:
            rows.set(name, TensorDict({"x": value}, [n]))
        elif how == 5 and n and value.dtype in (torch.float32, torch.int64):
            number = pick.choice([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30, 99.0, 2.0**62])
            if value.is_floating_point() or abs(number) < 2**63:
                value = value.clone()
                value.view(-1)[: pick.randrange(1, 3)] = number
                rows.set(name, value)
        elif how == 6:
            rows.set(name, value[:, None].expand(n, 3, *value.shape[1:]).clone())
    return rows


ITEMS = {"id": 1}
ASKED = [
    *[(Kind.ITEMS, ITEMS, True)] * 4,
    *[(Kind.ITEMS, {**ITEMS, "quota": 2}, True)] * 2,
    (Kind.ITEMS, {**ITEMS, "quota": 0}, True),
    (Kind.HELLO, {"protocol": PROTOCOL, "subscription": TERMS, "rows": None}, False),
    (Kind.METADATA, {}, False),
    (Kind.HELD, {}, False),
    (Kind.GOODBYE, {}, False),
]


def sent_by(kind: int, pick: random.Random) -> tuple[int, int]:
    """Return which of the hostile ones sends a kind of frame, and the tag: mostly the right one."""
    asks = kind in (Kind.METADATA, Kind.HELD, Kind.CHECKPOINT)
    if pick.random() < 0.9:
        return 1, METADATA_TAG if asks else DATA_TAG
    return pick.randrange(2), pick.choice(TAGS)


# A manager.

BUFFERS = {
    "best": lambda: reward_prioritized_buffer(60),
    "newest": lambda: fifo_buffer(4000),
    "terminating": lambda: terminating_state_buffer(60),
    "compact": lambda: reward_prioritized_buffer(
        60, compact="rebuild", env=ENV, max_length=ENV.max_length
    ),
    "ragged": lambda: reward_prioritized_buffer(60, storage=RaggedStorage(60, {"state": 9})),
    "none": lambda: None,
    "secret": lambda: fifo_buffer(4000),  # which the hostile ones do not know
}


class Scene:
    """A manager, another one and a worker who are hostile, and an honest worker."""

    def __init__(self, kind: str) -> None:
        mine, *theirs = group(4)
        rb = BUFFERS[kind]()
        self.honest_rows = PATHS[:4].clone() if kind == "compact" else objects([70, 71, 72])
        self.honest_rows["log_reward"].fill_(HIGHEST - 1)
        self.manager = ReplayBufferManager(
            mine,
            rb,
            lambda rows, sender: {"each": rows["log_reward"], "n": len(rows)},
            managers=[0, 1],
            workers=[2, 3],
            rows=None if rb is None else self.honest_rows,
            log_reward_below=HIGHEST,
        )
        self.manager._channel._max_rows = 2000
        if kind == "secret":
            mine.secret = theirs[-1].secret = Secret(bytes(16))
        self.knows_secret = kind == "secret"
        self.transports = theirs
        self.peer, self.hostile, self.honest = map(FrameChannel, theirs)
        self.rb, self.found = rb, Counter()
        self.ask_honestly()

    def settle(self) -> None:
        while self.manager.step():
            pass
        for link in (self.peer, self.hostile):
            while (answer := link.receive(0)) is not None:
                assert (answer.error is None) != self.knows_secret
                self.found[answer.kind] += 1
                told = answer.meta.get("error")
                assert told is None or told["type"] in ERRORS, told
                assert answer.nbytes < 1 << 17

    def go_on(self, i: int) -> None:
        """Have the hostile one listened to again now and then, and ask honestly."""
        if i % 5 == 0:
            hello = {"protocol": PROTOCOL, "subscription": None if self.rb is None else TERMS}
            self.hostile.send(0, DATA_TAG, Kind.HELLO, hello)
        if i % 20 == 0:
            self.ask_honestly()

    def ask_honestly(self) -> None:
        """The other worker is answered, and its rows are there, whole."""
        self.honest.send(0, DATA_TAG, Kind.ITEMS, {"id": 5}, self.honest_rows)
        self.settle()
        while (answer := self.honest.receive(0)) is not None:
            last = answer
        assert (last.kind, last.meta["to"]) == (Kind.SCORES, 5)
        assert "error" not in last.meta, last.meta["error"]
        assert last.scores is None or len(last.scores) == len(self.honest_rows)
        if self.rb is None:
            return
        stored = self.rb[:]
        assert not self.knows_secret or len(stored) == len(self.honest_rows)
        assert not stored["log_reward"].isnan().any()
        assert (stored["log_reward"] < HIGHEST).all()
        mine = stored["log_reward"] == HIGHEST - 1
        assert mine.any()
        seen = stored["state"][mine].unique(dim=0)
        expected = self.honest_rows["state"].unique(dim=0)
        if seen.shape[1:] == expected.shape[1:]:
            known = {tuple(row.flatten().tolist()) for row in seen}
            assert {tuple(row.flatten().tolist()) for row in expected} <= known


def fuzz(kind: str, post: Callable[[Scene, random.Random], int]) -> None:
    """Post hostile messages to a manager, whose bytes ``post`` returns."""
    pick, scene = random.Random(kind), Scene(kind)
    peak, largest = memory(), 0
    for i in until(MESSAGES // len(BUFFERS)):
        largest = max(largest, post(scene, pick))
        scene.settle()
        scene.go_on(i)
    scene.ask_honestly()
    assert memory() - peak < (1 << 25) + 4 * largest
    print(kind, i + 1, dict(scene.found), f"grown by {(memory() - peak) >> 20} MB")


@pytest.mark.parametrize("kind", BUFFERS)
def test_no_message_ends_or_bends_a_manager(kind: str) -> None:
    def post(scene: Scene, pick: random.Random) -> int:
        number, honest, has_rows = pick.choice(ASKED)
        meta = random_meta(pick, honest)
        rows = random_rows(pick) if has_rows or pick.random() < 0.1 else None
        if pick.random() < 0.1:
            number = pick.choice([*Kind, 0, 14, 99, 65_535])
        by, tag = sent_by(number, pick)
        with suppress(errors.ArgumentError, errors.ShapeError):  # what cannot even be sent
            return (scene.peer, scene.hostile)[by].send(0, tag, number, meta, rows).nbytes
        return 0

    fuzz(kind, post)


@pytest.mark.parametrize("kind", BUFFERS)
def test_no_frame_ends_or_bends_a_manager(kind: str) -> None:
    def post(scene: Scene, pick: random.Random) -> int:
        content = pick.choice(QUESTIONS)
        frame = mutant(content, pick)
        by, tag = sent_by(Prefix.read(memoryview(content), "it").kind, pick)
        scene.transports[by].send([frame], 0, tag)
        return len(frame)

    fuzz(kind, post)
