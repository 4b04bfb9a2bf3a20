"""Random frames and messages, honest ones changed in some places: no manager is ended or bent.

Half of the frames have checksums that are right. The whole check is of 200,000:
``GFN_RB_FUZZ=200000 pytest tests/remote/test_fuzz.py``; ``GFN_RB_SECONDS`` ends it earlier.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from checkpoint.test_hostile_files import WORDS, memory, mutant
from factories import joined, linear_policy, seeded
from remote.manager.test_attacks import spoilt
from remote.remote_runs import group, objects, trajectories
from tensordict import TensorDictBase

from gfn_rb import (
    RaggedStorage,
    Sampler,
    errors,
    fifo_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)
from gfn_rb.codec.frames import encode_frame
from gfn_rb.codec.primitives import Secret
from gfn_rb.envs import HyperGrid
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, PROTOCOL, Kind

MESSAGES = int(os.environ.get("GFN_RB_FUZZ", "800"))
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
TERMS = {"quota": 3, "policy": "top", "own": False, "fresh": True}


def until(n: int) -> Iterator[int]:
    end = time.monotonic() + SECONDS
    for i in range(n):
        if time.monotonic() > end:
            return
        yield i


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
    """Rows that are honest, or spoilt in one way or two."""
    n = pick.choice([0, 1, 2, 5, 40])
    values = [pick.randrange(-3, 60) for _ in range(n)]
    rows = pick.choice((objects(values), trajectories(values), PATHS[:n].clone()))
    if pick.random() < 0.3:
        n_states = rows["state"].shape[1]
        rows.set("state_mask", torch.arange(n_states) <= torch.arange(len(rows))[:, None] % 3)
    for _ in range(pick.choice([0, 0, 1, 2])):
        spoilt_rows = [each for _, each in spoilt(rows)]
        rows = pick.choice([*spoilt_rows, rows.exclude(pick.choice([*rows.keys(), "x"]))])
    return pick.choice([None, rows, rows, rows, rows, rows])


ITEMS = {"id": 1}
ASKED = [
    *[(Kind.ITEMS, ITEMS, True)] * 4,
    *[(Kind.ITEMS, {**ITEMS, "quota": 2}, True)] * 2,
    (Kind.ITEMS, {**ITEMS, "quota": 0}, True),
    (
        Kind.HELLO,
        {"protocol": PROTOCOL, "managers": [0, 1], "subscription": TERMS, "rows": None},
        False,
    ),
    (Kind.METADATA, {}, False),
    (Kind.HELD, {}, False),
    (Kind.GOODBYE, {}, False),
]


ROWS = [objects([1, 2]), objects([3]), trajectories([1, 2, 3]), PATHS, objects(range(1500))]
FRAMES = [
    (kind, joined(encode_frame(kind, rows, meta)))
    for kind, meta, has_rows in ASKED[3:]
    for rows in (ROWS if has_rows else [None])
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
            hello = {
                "protocol": PROTOCOL,
                "managers": [0, 1],
                "subscription": None if self.rb is None else TERMS,
            }
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


@pytest.mark.parametrize("kind", BUFFERS)
def test_no_frame_or_message_ends_or_bends_a_manager(kind: str) -> None:
    pick, scene = random.Random(kind), Scene(kind)
    peak, largest = memory(), 0
    for i in until(MESSAGES // len(BUFFERS)):
        if pick.random() < 0.5:
            number, honest_frame = pick.choice(FRAMES)
            by, tag = sent_by(number, pick)
            frame = mutant(honest_frame, pick)
            scene.transports[by].send([frame], 0, tag)
            largest = max(largest, len(frame))
        else:
            number, honest, has_rows = pick.choice(ASKED)
            meta = random_meta(pick, honest)
            rows = random_rows(pick) if has_rows or pick.random() < 0.1 else None
            if pick.random() < 0.1:
                number = pick.choice([*Kind, 0, 14, 99, 65_535])
            by, tag = sent_by(number, pick)
            with suppress(errors.ArgumentError, errors.ShapeError):  # what cannot even be sent
                sent = (scene.peer, scene.hostile)[by].send(0, tag, number, meta, rows)
                largest = max(largest, sent.nbytes)
        scene.settle()
        scene.go_on(i)
    scene.ask_honestly()
    assert memory() - peak < (1 << 25) + 4 * largest
    print(kind, i + 1, dict(scene.found), f"grown by {(memory() - peak) >> 20} MB")
