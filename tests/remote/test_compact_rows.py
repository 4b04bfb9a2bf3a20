"""Items that travel as compactly as they are stored, over threads."""

import pytest
import torch
from factories import assert_equal, linear_policy, seeded
from remote.remote_runs import group, objects, threads

from gfn_rb import Sampler, States, fifo_buffer
from gfn_rb.buffers.compact import compact_rows_of
from gfn_rb.containers import convert
from gfn_rb.containers.steps import reduce_to_states
from gfn_rb.envs import ConditionalHyperGrid, HyperGrid, TFBind8
from gfn_rb.errors import ArgumentError, WireError
from gfn_rb.remote import ReplayBufferManager, ReplayBufferWorker, Subscription
from gfn_rb.remote.channel import FrameChannel
from gfn_rb.remote.messages import DATA_TAG, Kind

DNA, GRID, WARM = TFBind8(), HyperGrid(2, 9), ConditionalHyperGrid(2, 6)


def found(env, n=12):
    """Trajectories of one padding, every other one turned around."""
    conditions = None
    if env.condition_shape is not None:
        conditions = torch.rand(n, *env.condition_shape, generator=seeded())
    sampler = Sampler(linear_policy(env, False))
    rows = sampler.sample_trajectories(env, n, conditions=conditions, generator=seeded())
    return convert.turned(rows.drop("log_prob").to_tensordict(), torch.arange(n) % 2 == 1)


def stored(env, form, device="cpu"):
    own = {} if form is None else {"compact": form, "env": env}
    return fifo_buffer(99, max_length=env.max_length, device=device, **own)


class Exchange:
    """What one worker adds, a manager scores and stores, and another worker is fed."""

    def __init__(self, env, rows, form, manager=None, frequency=1):
        finder, keeper, learner = group(3)
        self.scored = []
        self.manager = ReplayBufferManager(
            keeper,
            stored(env, form) if manager is None else manager,
            lambda items, _: self.scored.append(items.clone()) or {"state": items["log_reward"]},
            workers=[0, 2],
            managers=[1],
        )
        self.finder = ReplayBufferWorker(finder, 1, stored(env, form), frequency=frequency)
        subscription = Subscription(stored(env, form), 99, "top", own=True)
        compact = compact_rows_of(subscription.buffer)
        self.learner = ReplayBufferWorker(learner, 1, subscription=subscription, compact=compact)
        self.fed_to = subscription.buffer
        with threads(self.manager.run):
            with self.finder, self.learner:
                for part in rows.split(len(rows) // 3):
                    self.reply = self.finder.extend(part) or self.finder.drain()[-1]
                self.finder.drain()
                self.learner.extend(rows[:1])  # whose reply brings all rows
            self.fed = self.learner.take_fed()


def in_order(rows):
    """Columns by name, of rows by log-reward, and by the object where these are equal."""
    keys = list(zip(rows["log_reward"].tolist(), ends(rows), strict=True))
    rows = rows[sorted(range(len(rows)), key=keys.__getitem__)]
    return {key: rows[key] for key in sorted(rows.keys()) if key != "index"}


def ends(rows):
    """The object that each row stands for."""
    step = torch.where(rows["is_backward"], 1, rows["length"] - 1)
    content = [rows["state"][torch.arange(len(rows)), step].flatten(1).float()]
    return torch.cat([*content, *(rows.get(key, content[0]) for key in ["condition"])], 1).tolist()


def first_of_each(rows):
    """The rows that a manager keeps."""
    known = ends(rows)
    return rows[[i for i, end in enumerate(known) if end not in known[:i]]]


@pytest.mark.parametrize("form", ["narrow", "rebuild"])
@pytest.mark.parametrize("env", [DNA, GRID, WARM], ids=["TFBind8", "grid", "condition"])
def test_what_is_fed_is_what_was_found(env, form):
    rows = found(env)
    whole, ours = (Exchange(env, rows, each, frequency=2) for each in (None, form))
    expected = in_order(convert.padded_to(first_of_each(rows), env.max_length))
    for run in (whole, ours):
        assert_equal(in_order(run.fed), expected)
        assert_equal(in_order(run.fed_to[:]), expected)
        assert_equal(in_order(run.manager.buffer[:]), expected)
    assert_equal(
        [in_order(each) for each in ours.scored], [in_order(each) for each in whole.scored]
    )
    assert ours.reply.scores["state"].equal(whole.reply.scores["state"])  # no states, though named
    sent, came = ours.finder.statistics, ours.learner.statistics
    assert sent.bytes_sent < whole.finder.statistics.bytes_sent
    assert came.bytes_received < whole.learner.statistics.bytes_received
    assert sent.stored == whole.finder.statistics.stored == len(expected["length"])


@pytest.mark.parametrize(
    ("manager", "is_smaller"),
    [
        (stored(DNA, "narrow"), True),
        (stored(DNA, "rebuild"), False),
        (stored(DNA, None), False),
        (stored(TFBind8("prepend_append"), "narrow"), False),
    ],
    ids=["the same", "another form", "none", "another environment"],
)
def test_rows_travel_whole_to_ranks_that_store_them_otherwise(manager, is_smaller):
    rows = found(DNA)
    plain, ours = Exchange(DNA, rows, None), Exchange(DNA, rows, "narrow", manager)
    assert_equal(in_order(ours.fed), in_order(plain.fed))
    smaller = ours.finder.statistics.bytes_sent < plain.finder.statistics.bytes_sent
    assert smaller == is_smaller


def test_states_alone_travel_whole_where_actions_are_stored():
    (mine, theirs), rb = group(2), fifo_buffer(99)
    with (
        threads(ReplayBufferManager(theirs, rb).run),
        ReplayBufferWorker(mine, 1, compact=compact_rows_of(stored(DNA, "rebuild"))) as worker,
    ):
        worker.extend(reduce_to_states(found(DNA)))
    assert States.from_tensordict(rb[:]).is_terminating.all()
    assert len(rb) == worker.statistics.stored > 0


def test_what_does_not_fit_the_environment_travels_whole_and_is_refused_where_it_is_stored():
    mine, theirs = group(2)
    form = stored(DNA, "narrow")
    with threads(ReplayBufferManager(theirs, form).run):
        worker = ReplayBufferWorker(mine, 1, fifo_buffer(9), on_error="log")
        worker._channel = FrameChannel(mine, compact_rows_of(form))
        with worker:
            reply = worker.extend(objects([1, 2]))
    assert reply.outcomes == {"refused": 2}
    assert "'state' must be torch.int64 of shape ['...', 8]" in str(reply.error)


def test_compact_rows_that_cannot_be_read_are_refused_by_name():
    one, other = group(2)
    form = compact_rows_of(stored(DNA, "narrow"))
    sender = FrameChannel(one, form)
    sender.learn_form(1, repr(form))
    sender.send(1, DATA_TAG, Kind.ITEMS, rows=found(DNA))
    grid = FrameChannel(other, compact_rows_of(stored(HyperGrid(3, 150), "narrow")))
    error = grid.receive().error
    assert isinstance(error, WireError)
    assert "rows cannot be read as CompactRows(states='narrow') of HyperGrid" in str(error)
    sender.send(1, DATA_TAG, Kind.ITEMS, rows=found(DNA))
    assert "rows came compact, expected whole ones" in str(FrameChannel(other).receive().error)


def test_a_rank_that_comes_back_without_the_form_is_sent_whole_rows():
    one, other = group(2)
    form = compact_rows_of(stored(DNA, "narrow"))
    sender = FrameChannel(one, form)
    for known in (form, None):
        sender.learn_form(1, None if known is None else repr(known))
        sender.send(1, DATA_TAG, Kind.ITEMS, rows=found(DNA))
        assert FrameChannel(other, known).receive().error is None


@pytest.mark.parametrize("rows_fit", [True, False])
def test_rows_of_large_states_are_bounded_however_few_their_bytes(rows_fit, monkeypatch):
    env, (one, other) = HyperGrid(600, 2), group(2)  # a step of one byte becomes 4,800
    form, rows = compact_rows_of(stored(env, "rebuild")), found(env, 3)
    sender, receiver = FrameChannel(one, form), FrameChannel(other, form)
    sender.learn_form(1, repr(form))
    other.max_nbytes = rows.bytes() + (1 if rows_fit else -100_000)
    assert sender.send(1, DATA_TAG, Kind.ITEMS, rows=rows).nbytes << 10 < other.max_nbytes
    made, forward = [], type(form).forward
    monkeypatch.setattr(type(form), "forward", lambda *a: made.append(len(a[1])) or forward(*a))
    frame = receiver.receive()
    assert (frame.error is None) == rows_fit
    assert made == ([1, 3] if rows_fit else [])


def test_all_rows_are_not_made_whole_where_they_fit_no_message():
    mine, rb, rows = group(2)[0], stored(DNA, "rebuild"), found(DNA, 99)
    manager = ReplayBufferManager(mine, rb)
    rb.extend(rows)
    mine.max_nbytes = rows.bytes() // 2
    with pytest.raises(ArgumentError, match=r"rows have \d+ bytes whole, expected \d+ at most"):
        manager.items()
    mine.max_nbytes = 2 * rows.bytes()
    assert len(manager.items()) == len(rb)


def test_ranks_without_buffers_can_be_given_a_form():
    rows, sent = found(DNA), []
    for form in (None, compact_rows_of(stored(DNA, "narrow"))):
        mine, theirs = group(2)
        scored = []

        def score(items, sender, scored=scored):
            scored.append(items)
            return {}

        manager = ReplayBufferManager(theirs, score=score, compact=form)
        with threads(manager.run), ReplayBufferWorker(mine, 1, compact=form) as worker:
            worker.extend(rows)
        assert_equal(in_order(scored[0]), in_order(rows))
        sent.append(worker.statistics.bytes_sent)
    assert sent[1] < sent[0] / 3
