"""Messages made to end a manager, fill it or bend it: each costs its sender alone."""

import math
import sys
from unittest.mock import Mock

import pytest
import torch
from factories import object_names
from remote.remote_runs import managed, objects, trajectories, values_of
from tensordict import TensorDict

from gfn_rb import fifo_buffer, reward_prioritized_buffer, terminating_state_buffer
from gfn_rb.remote.messages import DATA_TAG, METADATA_TAG, PROTOCOL, Kind


class Scene:
    """A manager, a hostile worker of rank 1, and an honest one of rank 2."""

    def __init__(self, rb=None, max_nbytes=1 << 30, **options):
        self.scored, self.rb = [], rb
        options.setdefault("score", self.score)
        self.manager, self.hostile, self.honest = managed(rb, **options)
        self.manager.transport.max_nbytes = max_nbytes

    def score(self, rows, sender):
        self.scored.append(len(rows))
        return {}

    def attack(self, kind=Kind.ITEMS, meta=None, rows=None, tag=DATA_TAG):
        return self.hostile.ask(kind, {"id": 1} if meta is None else meta, rows, tag)

    def check_alive(self, value=77):
        answer = self.honest.send(objects([value]), 5)
        assert (answer.kind, answer.meta["to"]) == (Kind.SCORES, 5)
        assert "error" not in answer.meta, answer.meta["error"]
        if self.rb is not None:
            assert value in values_of(self.rb)


def message_of(answer):
    return f"{answer.meta['error']['type']}: {answer.meta['error']['message']}"


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("kind", [Kind.ITEMS, 99])
@pytest.mark.parametrize(
    "number",
    ["x" * ((1 << 20) - 20), "x" * 1_000_000, 10**4200, 1 << 63, 1.5, True, [1], {"to": 1}],
)
def test_an_id_that_is_no_number_is_not_repeated(number, kind, caplog):
    scene = Scene(fifo_buffer(9))
    answer = scene.attack(kind, {"id": number}, objects([1]))
    assert (answer.kind, answer.meta["to"]) == (Kind.ERROR, None)
    assert answer.nbytes < 4096
    assert len(scene.rb) == len(scene.scored) == 0
    assert len(caplog.messages) == 1
    assert len(caplog.text) < 1000
    scene.check_alive()


def test_what_cannot_even_be_refused_ends_nothing(caplog):
    scene = Scene(fifo_buffer(9), max_nbytes=250)
    assert scene.hostile.ask(99, {"id": 1}) is None
    assert "manager 0: cannot refuse what rank 1 sent" in caplog.text


def test_a_subscription_nested_deep_can_be_saved_around(tmp_path):
    scene, deep = Scene(fifo_buffer(9), checkpoint=tmp_path / "m.ckpt"), nested(500)
    hello = {
        "protocol": PROTOCOL,
        "managers": [0],
        "subscription": {"quota": 1, "policy": "top", "more": deep},
    }
    assert scene.attack(Kind.HELLO, hello).kind == Kind.HELLO
    scene.manager.save()
    scene.manager.load()
    for terms in ({"quota": 1, "policy": deep}, {"quota": deep}, deep):
        answer = scene.attack(
            Kind.HELLO, {"protocol": PROTOCOL, "managers": [0], "subscription": terms}
        )
        assert message_of(answer).startswith("ArgumentError: ")
    assert scene.attack(Kind.HELLO, {"protocol": deep}).kind == Kind.ERROR
    scene.check_alive()


def test_nobody_is_fed_without_bounds():
    scene = Scene(fifo_buffer(9))
    answer = scene.hostile.subscribe(quota=10**30)
    assert "quota must be an integer from 1 to 4096" in message_of(answer)
    scene.hostile.subscribe(quota=4096)
    assert scene.hostile.send(objects([3]), quota=10**30).kind == Kind.SCORES
    for quota in (-1, True, "2", 1.0):
        answer = scene.hostile.send(objects([3]), quota=quota)
        assert "quota must be at least 0" in message_of(answer)
    scene.check_alive()


@pytest.mark.parametrize("rb", [True, False])
@pytest.mark.parametrize("names", [(), ("state",), ("log_reward",), ("log_reward", "state")])
def test_rows_without_content_are_bounded_by_their_number(rb, names):
    n = (1 << 31) - 1
    scene = Scene(fifo_buffer(9) if rb else None)
    rows = TensorDict({name: torch.zeros(n, 0) for name in names}, [n])
    answer = scene.attack(rows=rows)
    assert "WireError: it has 2147483647 rows, expected max_rows=1048576" in message_of(answer)
    assert answer.meta["to"] == 1
    assert scene.scored == []
    scene.check_alive()


def spoilt(rows):
    """Rows that cannot be stored, by what is wrong with them."""
    n, one = len(rows), torch.ones(len(rows))
    inside = TensorDict({"x": one}, [n])
    yield "NaN", rows.clone().set("log_reward", one * math.nan)
    yield "inf", rows.clone().set("log_reward", one * math.inf)
    yield "no log-reward", rows.exclude("log_reward")
    for name in ("log_reward", "state", "length", "action", "condition", "is_terminating"):
        yield f"{name} nested", rows.clone().set(name, inside)
    for name in ("log_reward", "state", "action", "condition", "more"):
        for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint64):
            yield f"{name} {dtype}", rows.clone().set(name, one.to(dtype))
    for dtype in (torch.bool, torch.complex64):
        yield f"log_reward {dtype}", rows.clone().set("log_reward", one.to(dtype))
    yield "log_reward wide", rows.clone().set("log_reward", torch.ones(n, 2))
    paths = trajectories(range(n))
    for length in (0, -1, 99, 2**62, -(2**63)):
        yield f"length {length}", paths.clone().set("length", torch.full((n,), length))
    yield "length float", paths.clone().set("length", one)
    yield "length wide", paths.clone().set("length", torch.ones(n, 2, dtype=torch.int64))
    yield "state flat", paths.clone().set("state", one)
    yield "state of one step", paths.clone().set("state", torch.ones(n, 1, 1))
    yield "is_backward float", paths.clone().set("is_backward", one)


SPOILT = dict(spoilt(objects([1, 2])))
BUFFERS = {
    "fifo": fifo_buffer,
    "best": reward_prioritized_buffer,
    "unique": lambda n: fifo_buffer(n, unique="state"),
    "terminating": terminating_state_buffer,
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_what_cannot_be_stored_is_refused_whole_and_not_scored(kind, caplog):
    scene = Scene(BUFFERS[kind](9))
    scene.hostile.subscribe(own=True)
    scene.check_alive(7)
    for what, rows in SPOILT.items():
        answer = scene.attack(rows=rows)
        assert answer.meta["outcomes"] == {"refused": 2}, what
        assert values_of(scene.rb) == [7], what
        error = answer.meta["error"]["type"]
        assert error in ("ArgumentError", "KeyMismatchError", "NaNError", "ShapeError"), what
    assert scene.scored == [1]
    assert 3 <= len(caplog.messages) <= 4  # a line for each type
    scene.check_alive(8)


def test_rewards_may_be_bounded_integers_and_are_never_infinite():
    for limit in (math.inf, None):
        scene = Scene(fifo_buffer(9), log_reward_below=limit)
        answer = scene.attack(rows=objects([1, 2], [math.inf, 1.0]))
        assert message_of(answer).startswith("NaNError: key 'log_reward' is +inf in 1 of 2 items")
    scene = Scene(fifo_buffer(9), log_reward_below=5.0)
    rows = objects([4]).apply(lambda value: value.long())
    assert scene.attack(rows=rows).meta["outcomes"]["stored"] == 1
    assert scene.attack(rows=objects([5])).meta["outcomes"] == {"refused": 1}


# The layout of rows.


def wide(n):
    return objects([3] * n).set("state", torch.zeros(n, 100_000))


@pytest.mark.parametrize("kind", BUFFERS)
def test_the_layout_of_rows_is_declared_and_not_set_by_whoever_comes_first(kind):
    rows = objects([1])
    scene = Scene(BUFFERS[kind](9), rows=rows)
    assert len(scene.rb) == 0
    for other in (wide(1), objects([3]).set("condition", torch.zeros(1, 1)), trajectories([4])):
        answer = scene.attack(rows=other)
        assert answer.meta["outcomes"] == {"refused": 1}
        assert "storage" in message_of(answer)
        assert "'state'" in message_of(answer) or "keys" in message_of(answer)
    assert rows.keys() == objects([1]).keys()
    scene.check_alive()


def test_a_declared_layout_is_that_of_the_rows_that_a_buffer_holds():
    rb = fifo_buffer(9)
    rb.extend(objects([1]))
    scene = Scene(rb, rows=wide(1))
    assert scene.attack(rows=wide(2)).meta["outcomes"] == {"refused": 2}
    scene.check_alive()
    assert values_of(rb) == [1, 77]


# What is unknown, and what fails.


def test_what_is_unknown_costs_one_line_and_nothing_lasting(caplog):
    scene = Scene(fifo_buffer(9))
    size = sys.getsizeof(scene.manager._logged)
    for i in range(100):
        assert scene.attack(100 + i).kind == Kind.ERROR
        assert scene.attack(rows=objects([1]), tag=200 + i) is None  # nobody reads that tag
        assert scene.attack(100 + i, tag=METADATA_TAG).kind == Kind.ERROR
    assert len([line for line in caplog.messages if "rank 1" in line]) == 1
    assert len(scene.manager._logged) == 1
    assert sys.getsizeof(scene.manager._logged) == size
    scene.check_alive()


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), RecursionError()])
@pytest.mark.parametrize(
    "place", ["take", "decode", "batch", "feed", "baseline", "subscribe", "metadata", "follow"]
)
def test_whatever_a_message_causes_is_answered_once_and_costs_its_sender_alone(
    place, error, monkeypatch, caplog
):
    broken = Mock(side_effect=error)
    scene = Scene(fifo_buffer(9), metadata=broken)
    handler = scene.manager
    target = {
        "take": (scene.manager._channel, "take"),
        "decode": ("gfn_rb.remote.channel.decode_frame",),
        "batch": (handler._store, "store"),
        "feed": ("gfn_rb.remote.feeding.Subscriber.next",),
        "baseline": (handler._baseline, "value"),
        "subscribe": (handler._index, "subscribe"),
        "metadata": (handler, "batches"),
        "follow": (handler._index, "refresh"),
    }[place]
    kind, meta, tag = Kind.ITEMS, {"id": 3}, DATA_TAG
    if place == "subscribe":
        kind, meta = Kind.HELLO, {"protocol": PROTOCOL, "managers": [0], "subscription": {}}
    if place == "metadata":
        kind, tag = Kind.METADATA, METADATA_TAG
    if place == "feed":
        scene.hostile.subscribe(quota=1)
    scene.hostile.link.send(0, tag, kind, meta, objects([1]))
    with monkeypatch.context() as patch:
        if place == "follow":  # which is looked up before rows are stored, and after
            known = iter([scene.manager._index.refresh()])
            patch.setattr(*target, lambda: next(known, None) if len(scene.rb) == 0 else broken())
        elif place != "metadata":
            patch.setattr(*target, broken)
        scene.manager.step()
    monkeypatch.undo()
    answer = scene.hostile.link.receive()
    assert scene.hostile.link.receive() is None
    assert (
        len([line for line in caplog.messages if "cannot be fed" in line or "rank 1" in line]) == 1
    )
    if place != "follow":
        assert answer.meta["error"]["type"] == type(error).__name__
    stored = place in ("feed", "baseline", "follow")  # and then it says so
    assert values_of(scene.rb) == [1] * stored
    assert not stored or answer.meta["outcomes"]["stored"] == 1
    scene.check_alive()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_who_is_to_end_ends(error):
    scene = Scene(fifo_buffer(9), score=Mock(side_effect=error))
    scene.hostile.link.send(0, DATA_TAG, Kind.ITEMS, {"id": 1}, objects([1]))
    with pytest.raises(error):
        scene.manager.step()


def test_a_state_of_odd_strides_is_an_object_too():
    scene = Scene(terminating_state_buffer(9))
    state = torch.zeros(1, 4, 1, dtype=torch.bfloat16)
    rows = trajectories([1], length=3).set("state", state)
    assert scene.attack(rows=rows).meta["outcomes"]["stored"] == 1
    flat = torch.zeros(4, dtype=torch.bfloat16).as_strided((2, 1), (1, 4))
    assert object_names(objects([1, 2]).set("state", flat)) == [b"\0" * 8] * 2
