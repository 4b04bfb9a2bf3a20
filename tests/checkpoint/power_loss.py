"""Use a buffer with a journal, lose power again and again, and look at what is left.

A child uses the buffer and tells, after each call, what the buffer then is and how many bytes of
events were recorded by then. What a loss after any event leaves must open as the buffer of the last
call before it, or of the one that was under way. With ``sync="never"`` it may be of an earlier
call, but not before the last one that syncs. The same holds for the checkpoint beside the journal.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoint.journals import items, state_of
from checkpoint.lossy_disk import Disk, Event, events_of, write_files
from factories import journaled, seeded
from tensordict import TensorDict
from xxhash import xxh3_64_hexdigest

from gfn_rb import PrioritySampler, load_checkpoint, reward_prioritized_buffer, save_checkpoint
from gfn_rb.errors import GfnRbError

CAPACITY, CALLS, PER_USE = 12, 60, 25
JOURNAL, SAVED = "rb.journal", "rb.saved"

# The child.


def make(path: Path | None = None, sync: str = "always") -> Any:
    rb = reward_prioritized_buffer(
        CAPACITY, unique="state", sampler=PrioritySampler(), generator=seeded()
    )
    return journaled(rb, path, sync)


def batch(pick: random.Random) -> TensorDict:
    """A few rows of 800 bytes, so that calls change several pages."""
    rows = items(pick.randint(1, 6), pick.randrange(1 << 30))
    return rows.set("payload", torch.arange(200.0) + rows["log_reward"][:, None])


def some(rb: Any, pick: random.Random) -> torch.Tensor:
    return torch.tensor(sorted(pick.sample(range(len(rb)), pick.randint(1, len(rb)))))


def priorities(rb: Any, pick: random.Random) -> None:
    slots = some(rb, pick)
    rb.update_priority(slots, torch.tensor([pick.uniform(0.1, 9.0) for _ in slots]))


def assign(rb: Any, pick: random.Random) -> None:
    """Assign a row past the writer; the next draw records it."""
    slot = pick.randrange(len(rb))
    rb[slot] = rb[slot].set("policy_version", torch.tensor(pick.randrange(1 << 30)))
    rb.sample(2)


CHANGES = {
    "extend": lambda rb, pick: rb.extend(batch(pick)),
    "remove": lambda rb, pick: rb.writer.remove(some(rb, pick)[:3]),
    "update": lambda rb, pick: rb.writer.update(some(rb, pick)[:1], torch.tensor([pick.random()])),
    "priorities": priorities,
    "assign": assign,
    "empty": lambda rb, _: rb.empty(),
    "sync": lambda rb, _: rb.journal.sync(),
    "save": lambda rb, _: None,
    "reopen": lambda rb, _: rb.journal.close(),
}
OFTEN = {"extend": 12, "priorities": 6, "remove": 3, "update": 3, "assign": 2}
SYNCED = (
    "",
    "open",
    "sync",
    "save",
    "reopen",
    "close",
)  # on disk when they return, whatever 'sync' is


def text_of(rb: Any) -> str:
    """What is to come back, with a checksum of each long tensor."""

    def plain(value: torch.Tensor) -> Any:
        return value.tolist() if value.numel() < 100 else xxh3_64_hexdigest(value.numpy().tobytes())

    return json.dumps(state_of(rb), default=plain, sort_keys=True)


def use(folder: Path, sync: str, seed: int) -> None:
    """Use a buffer with a journal, and tell what it is after each call."""
    pick = random.Random(seed)
    names, often = zip(*((name, OFTEN.get(name, 1)) for name in CHANGES), strict=True)
    with folder.with_suffix(".told").open("w") as stream:

        def tell(name: str) -> None:
            n = folder.with_suffix(".log").stat().st_size
            stream.write(json.dumps({"name": name, "end": n, "state": text_of(rb)}) + "\n")

        rb = make(folder / JOURNAL, sync)
        tell("open")
        for _ in range(CALLS):
            name = pick.choices(names, often)[0] if len(rb) else "extend"
            CHANGES[name](rb, pick)
            if name == "save":
                save_checkpoint(folder / SAVED, rb)
            elif name == "reopen":
                rb = make(folder / JOURNAL, sync)
            tell(name)
        rb.journal.close()
        tell("close")


class Told(NamedTuple):
    """What a buffer was after a call, and how many bytes of events were recorded by then."""

    name: str
    end: int
    state: str


def recorded_use(
    library: Path, folder: Path, sync: str, seed: int
) -> tuple[list[Told], list[Event]]:
    """Have a child use the journal in a folder; return what it told and recorded."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        "LD_PRELOAD": str(library),
        "RECORD_FOLDER": str(folder),
        "RECORD_LOG": str(folder.with_suffix(".log")),
    }
    program = "import sys; from checkpoint.power_loss import *; use(Path(sys.argv[1]), {}, {})"
    done = subprocess.run(
        [sys.executable, "-c", program.format(repr(sync), seed), str(folder)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = folder.with_suffix(".told").read_text().splitlines()
    return [Told(**json.loads(line)) for line in told], [*events_of(folder.with_suffix(".log"))]


# The promise.


class Use(NamedTuple):
    """What the journal was after each call, beginning with before the use, and the checkpoint."""

    told: list[Told]
    saved: list[Told]
    sync: str


def expected(told: list[Told], end: int, sync: str = "always") -> list[str]:
    """Return the states that may be there: of the last call on disk, up to the one under way."""
    n = last = sum(each.end <= end for each in told)
    while sync == "never" and last > 1 and told[last - 1].name not in SYNCED:
        last -= 1
    return [each.state for each in told[last - 1 : n + 1]]


def found(folder: Path) -> str:
    """Return what a buffer is that opens the journal in a folder; see that it then goes on."""
    path, rb = folder / JOURNAL, make(folder / JOURNAL)
    state = text_of(rb)
    rb.extend(batch(random.Random(0)))
    rb.journal.close()
    again = make(path)
    assert text_of(again) == text_of(rb), "it goes on otherwise"
    again.journal.close()
    return state


def found_saved(folder: Path) -> str:
    """Return what a buffer is that loads the checkpoint in a folder."""
    rb = make()
    if (folder / SAVED).exists():
        load_checkpoint(folder / SAVED, rb)
    return text_of(rb)


def faults_of(folder: Path, use: Use, end: int) -> list[str]:
    """Return what is wrong with the files that a loss left after so many bytes of events."""
    wrong = []
    for look, allowed in (
        (found_saved, expected(use.saved, end)),
        (found, expected(use.told, end, use.sync)),
    ):
        try:
            state = look(folder)
        except (GfnRbError, AssertionError) as error:
            wrong.append(f"{look.__name__}: {type(error).__name__}: {error}")
        else:
            if state not in allowed:
                same = [i for i, each in enumerate(use.told) if each.state == state]
                wrong.append(f"{look.__name__}: as after calls {same}, expected {allowed}")
    return wrong


def instants(events: list[Event], opened: int, n: int, pick: random.Random) -> Counter[int]:
    """Return how often power is lost after each event: while opening, around rare events, ever."""
    opening = [i for i, each in enumerate(events) if each.end <= opened]
    rare = [i for i, each in enumerate(events) if each.kind != "w" or each.at == 0]
    places = [opening, rare, [*range(len(events))]]
    return Counter(pick.choice(pick.choice(places)) for _ in range(n))


def lose(library: Path, folder: Path, sync: str, n_losses: int, seed: int) -> dict[str, Any]:
    """Lose power at random instants; return how often, where, and what was wrong.

    Each use begins with what a loss of the one before left, or with an empty folder.
    """
    pick, n, wrong = random.Random(seed), 0, []
    held: dict[str, bytes] = {}
    before = saved = nothing = text_of(make())
    during: Counter[str] = Counter()
    while n < n_losses:
        if pick.random() < 0.3:
            held, before, saved = {}, nothing, nothing
        place = folder / f"use{n}"
        write_files(place, held)
        told, events = recorded_use(library, place, sync, pick.randrange(1 << 30))
        saves = [each for each in told if each.name == "save"]
        use = Use([Told("", 0, before), *told], [Told("", 0, saved), *saves], sync)
        if told[0].state != before:
            wrong.append(f"{place}: opened as {told[0].state}, expected {before}")
        disk, at = Disk(held), instants(events, told[0].end, min(PER_USE, n_losses - n), pick)
        goes_on_at = pick.choice([*at])
        for i, event in enumerate(events):
            disk.feed(event)
            for _ in range(at[i]):
                n += 1
                left = disk.lost(pick)
                write_files(folder / f"{n}", left)
                if i == goes_on_at:
                    held = left
                faults = faults_of(folder / f"{n}", use, event.end)
                wrong += [f"{n}: {each}" for each in faults]
                during[next((each.name for each in told if each.end > event.end), "end")] += 1
                if not faults:
                    shutil.rmtree(folder / f"{n}")
        assert disk.held() == {each.name: each.read_bytes() for each in place.iterdir()}
        write_files(folder / "next", held)
        before, saved = found(folder / "next"), found_saved(folder / "next")
        shutil.rmtree(folder / "next")
    return {"n": n, "during": dict(during), "wrong": wrong}
