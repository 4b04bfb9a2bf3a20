import pytest
import torch
from hypothesis import given, settings, strategies as st
from remote.remote_runs import objects, trajectories

from gfn_rb import fifo_buffer, reward_prioritized_buffer
from gfn_rb.containers.objects import objects_in
from gfn_rb.errors import ArgumentError
from gfn_rb.remote.feeding import ObjectIndex

VALUES = range(8)


def keys(values):
    return objects_in(objects(values))


def visited(values, whole):
    """Visited states; those that are whole are terminating and stand for an object."""
    return objects(values).set("is_terminating", torch.tensor(whole, dtype=torch.bool))


def known(index, values):
    """Those of some values that are known."""
    return [v for v, number in zip(values, index.find(keys(values)), strict=True) if number >= 0]


def held(index):
    return (index._objects.table.link[:, 2] != -2).sum()  # -2 marks a slot that holds nothing


# Against a plain model: a dictionary of what is known of each object.

values = st.lists(st.tuples(st.sampled_from(VALUES), st.booleans()), min_size=1, max_size=5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), values),
        st.tuples(st.just("overwrite"), values),
        st.tuples(st.sampled_from(["relabel", "give"]), st.integers(0, 4)),
        st.tuples(st.just("load"), st.integers(1, 20)),  # into an index of so many ranks
        st.tuples(st.sampled_from(["empty", "swap"]), st.none()),
    ),
    max_size=12,
)


class Model:
    """What is to be known of the objects of a buffer, object by object."""

    def __init__(self, rb):
        self.rb, self.rows, self.known = rb, [], {}

    def follow(self, index):
        """Read every row, and forget what is held no more."""
        stored = self.rb[:] if len(self.rb) else visited([], [])
        pairs = zip(stored["state"][:, 0].tolist(), stored["is_terminating"].tolist(), strict=True)
        self.rows = [value if is_whole else None for value, is_whole in pairs]
        held = {value for value in self.rows if value is not None}
        latest = max((each["arrival"] for each in self.known.values()), default=-1)
        self.known = {value: each for value, each in self.known.items() if value in held}
        for value in held - self.known.keys():
            arrival = int(index.arrival[index.find(keys([value]))[0]])
            assert arrival > latest
            self.known[value] = {"sent": set(), "given": set(), "arrival": arrival}

    def add(self, name, rows, rank):
        for row in rows:
            if self.rows[row] is not None:
                self.known[self.rows[row]][name].add(rank)

    def forget_ranks(self, n):
        for each in self.known.values():
            for name in ("sent", "given"):
                each[name] &= {*range(n)}

    def check(self, index):
        assert known(index, VALUES) == sorted(self.known)
        assert held(index) == len(self.known)
        number = index.number[: len(self.rows)]
        assert (index.number[len(self.rows) :] == -1).all()
        assert len({*number.tolist()}) == len(self.known) + self.rows.count(None)
        for row, value in enumerate(self.rows):
            if value is None:
                continue
            assert number[row] == index.find(keys([value]))[0]
            assert index.arrival[number[row]] == self.known[value]["arrival"]
            for name in ("sent", "given"):
                flags = getattr(index, name)
                ranks = {r for r in range(flags.n_ranks) if flags.has(number[row : row + 1], r)}
                assert ranks == self.known[value][name]


@pytest.mark.parametrize("make", [fifo_buffer, reward_prioritized_buffer])
@settings(max_examples=100)
@given(steps)
def test_an_index_knows_what_a_dictionary_of_objects_would(make, steps):
    rb = make(5)
    index, model = ObjectIndex(rb, 3), Model(rb)
    for number, (action, argument) in enumerate(steps):
        n, written = len(rb), []
        if action == "extend":
            slots = rb.extend(visited(*zip(*argument, strict=True)))
            written = slots[slots >= 0].tolist()
        elif action == "overwrite" and n >= len(argument):
            rb[: len(argument)] = visited(*zip(*argument, strict=True))
        elif action == "relabel" and argument < n:
            rb[:]["log_reward"][argument] += 1.0
        elif action == "swap" and n:
            rb[:n] = rb[:][torch.arange(n - 1, -1, -1)]
        elif action == "empty":
            rb.empty()
        elif action == "load":
            rb.extend(visited([VALUES[number % 8]], [True]))  # which no refresh has seen
            other, state = ObjectIndex(rb, argument), index.state_dict()
            other.refresh()
            other.given.packed[:] = other.sent.packed[:] = 255
            other.load_state_dict(state)
            model.forget_ranks(min(argument, index.sent.n_ranks))
            index = other
        rows, rank = index.refresh(), number % index.sent.n_ranks
        assert len(rows) == len(rows.unique())
        model.follow(index)
        if action == "give" and argument < n:
            index.given.add(index.number[[argument]], rank)
            model.add("given", [argument], rank)
        index.sent.add(index.number[written], rank)
        model.add("sent", written, rank)
        model.check(index)


# Following a storage.


def test_only_rows_that_changed_are_read_again():
    rb = fifo_buffer(40)
    index = ObjectIndex(rb)
    rb.extend(objects(range(40)))
    assert index.refresh().tolist() == list(range(40))
    assert index.refresh().tolist() == []
    rb.extend(objects([50, 51]))
    assert index.refresh().tolist() == [0, 1]


def test_a_row_that_is_no_object_is_named_until_it_is_put_right():
    rb = fifo_buffer(3)
    index = ObjectIndex(rb)
    rb.extend(trajectories([5, 6, 7]))
    index.refresh()
    rb[1:2] = trajectories([8]).set("length", torch.tensor([9]))
    for _ in range(2):
        with pytest.raises(ArgumentError, match="length must be 1 to 2 in every row, got"):
            index.refresh()
    rb[1:2] = trajectories([8])
    assert index.refresh().tolist() == [0, 1, 2]
    assert (index.find(objects_in(trajectories([5, 6, 7, 8]))) >= 0).tolist() == [
        *(True, False, True, True)
    ]
