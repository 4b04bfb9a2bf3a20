import inspect
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from factories import objects, rows, trajectories, two_rows
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import Transform

import gfn_rb
from gfn_rb import Trajectories
from gfn_rb.buffers import (
    BufferOptions,
    GFNReplayBuffer,
    diverse_buffer,
    fifo_buffer,
    reward_prioritized_buffer,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.errors import EmptyBufferError, ShapeError
from gfn_rb.samplers import SoftmaxRewardSampler
from gfn_rb.writers import FIFOWriter

diverse_buffer = partial(diverse_buffer, cutoff_distance=0.0)  # no duplicates
PRESETS = [reward_prioritized_buffer, diverse_buffer, fifo_buffer]
ALL = [*PRESETS, terminating_state_buffer]
EVERY = [*ALL, transition_buffer, state_buffer]


def full_rows():
    """The two rows with every optional field, and one key that no container knows."""
    td = two_rows().to_tensordict()
    td.set("estimator_output", torch.arange(16.0).reshape(2, 4, 2))
    td.set("condition", torch.tensor([7, 8]))
    return td.set("weight", torch.tensor([0.5, 0.25]))


def states(log_reward, **more):
    log_reward = torch.as_tensor(log_reward, dtype=torch.float32)
    n = len(log_reward)
    return TensorDict({"state": torch.arange(n), "log_reward": log_reward, **more}, [n])


class Doubles(Transform):
    """Doubles x on the way in, and adds one to it on the way out."""

    def _inv_call(self, tensordict):
        return tensordict.copy().set("state", tensordict["state"] * 2)

    def forward(self, tensordict):
        return tensordict.set("state", tensordict["state"] + 1)


# What is kept, and what is drawn.


def test_the_best_are_kept_and_drawn_by_reward():
    rb = reward_prioritized_buffer(3, temperature=2.0, replacement=True)
    slots = rb.extend(states([0.0, 5.0, 1.0, 3.0])).tolist()
    assert (slots[0], sorted(slots[1:])) == (-1, [0, 1, 2])
    assert sorted(rb[:]["log_reward"].tolist()) == [1.0, 3.0, 5.0]
    assert isinstance(rb.sampler, SoftmaxRewardSampler)
    assert (rb.sampler.temperature, rb.sampler.replacement) == (2.0, True)


def test_the_best_that_are_far_apart_are_kept():
    options = {"cutoff_distance": 1.0, "p": 2.0, "tie": "oldest", "key": "score"}
    rb = diverse_buffer(3, features="x", near="reject", when="full", **options)
    writer = rb.writer
    assert (writer.near, writer.when, writer.tie, writer.p) == ("reject", "full", "oldest", 2.0)
    assert (writer.key, writer.features, rb.sampler.key) == ("score", "x", "score")
    rb = diverse_buffer(3, cutoff_distance=1.0, temperature=2.0)
    assert rb.extend(states([0.0, 5.0, 1.0, 3.0])).tolist() == [-1, 0, -1, 1]
    assert rb.sampler.temperature == 2.0


# On insertion.


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("keep", "dropped"),
    [
        ((), {"log_prob", "estimator_output"}),
        (("log_prob",), {"estimator_output"}),
        (("log_prob", "estimator_output"), set()),
    ],
)
def test_stale_entries_are_dropped_unless_kept(preset, keep, dropped):
    rb, td = preset(4, keep=keep), full_rows()
    rb.extend(td)
    drawn = set(rb.sample(2).keys()) - {"index", "draw_log_prob"}
    assert drawn == set(td.keys()) - {"index"} - dropped


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("n_steps", [3, 4, 6])
def test_trajectories_are_fitted_to_one_length_with_all_they_carry(preset, n_steps):
    rb, td = preset(4, max_length=n_steps, keep=["log_prob"]), full_rows()
    rb.extend(td)
    rb.extend(full_rows()[:1].exclude("index"))
    rows = rb[:][rb[:]["log_reward"].argsort()][:2]
    got = Trajectories.from_tensordict(rows)
    assert got.n_steps == n_steps
    expected = two_rows().pad_to(n_steps)[[1, 0]]
    for name in ("state", "action", "length", "log_prob", "is_backward"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert rows["condition"].tolist() == [8, 7]
    assert rows["weight"].tolist() == [0.25, 0.5]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_trajectory_too_long_is_refused_whole(preset):
    rb = preset(4, max_length=2)
    rb.extend(two_rows()[1].to_tensordict())
    with pytest.raises(ShapeError, match=r"of 3 actions does not fit.*at most max_length=2"):
        rb.extend(two_rows().to_tensordict())
    with pytest.raises(ShapeError, match="of 3 actions"):
        rb.add(two_rows().to_tensordict()[0])
    assert len(rb.extend(two_rows().to_tensordict()[:0])) == 0  # no row at all fits any length
    assert rb[:]["log_reward"].tolist() == [-2.0]
    with pytest.raises(ShapeError, match=r"'action' has shape \[2\]; expected \[n, T, \*A\]"):
        rb.extend(full_rows().set("action", torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_that_are_no_trajectories_need_no_padding(preset):
    rb, transitions = preset(9, max_length=6), two_rows().to_transitions().to_tensordict()
    rb.extend(transitions)
    assert sorted(rb[:]["action"].tolist()) == sorted(transitions["action"].tolist())


@pytest.mark.parametrize("preset", EVERY)
def test_the_callers_rows_are_left_alone(preset):
    rb, td = preset(8), full_rows()
    before = td.clone()
    rb.extend(td)
    assert set(td.keys()) == set(before.keys())
    assert (td == before).all()


# Terminating states.


def test_terminating_states_keep_what_is_not_of_their_trajectory():
    rb = terminating_state_buffer(4, writer=FIFOWriter())
    rb.extend(full_rows())
    rb.add(full_rows()[0])
    assert set(rb[:].keys()) - {"index"} == {"state", "log_reward", "condition", "weight"}
    assert rb[:]["weight"].tolist() == [0.5, 0.25, 0.5]
    assert rb[:]["state"].tolist() == [5, 2, 5]  # of a forward and a backward row
    assert rb[:]["log_reward"].tolist() == [1.5, -2.0, 1.5]
    assert rb[:]["condition"].tolist() == [7, 8, 7]
    assert rb.extend(rb.sample(2)).tolist() == [3, 0]  # without what a draw adds to rows


def test_a_terminating_state_is_kept_once_unless_asked_otherwise():
    for unique, stored in [({}, 2), ({"unique": None}, 3), ({"on_duplicate": "keep"}, 2)]:
        rb = terminating_state_buffer(4, **unique)
        rb.extend(objects([1, 2, 1]))
        assert len(rb) == stored


def test_regenerated_rows_are_what_is_sampled():
    def regenerate(rows):
        assert rows.ndim == 1
        n = len(rows)
        state = torch.stack([torch.full((n,), -1), rows["state"], torch.zeros_like(rows["state"])])
        return Trajectories(
            state=state.T.contiguous(),
            action=torch.tensor([9, 1]).expand(n, 2),
            length=torch.full((n,), 2),
            log_reward=rows["log_reward"],
            is_backward=torch.ones(n, dtype=torch.bool),
        ).to_tensordict()

    rb = terminating_state_buffer(4, regenerate=regenerate)
    rb.extend(two_rows().to_tensordict())
    batch = rb.sample(2)
    assert sorted(batch["index"].tolist()) == [0, 1]
    trajectories = Trajectories.from_tensordict(batch)
    assert sorted(trajectories.terminating_states.tolist()) == [2, 5]
    assert rb[0]["state"].tolist() == [-1, int(rb.storage.get(0)["state"]), 0]
    rb.extend(batch)  # what is drawn can be stored again, over itself
    assert sorted(rb.storage[:]["state"].tolist()) == [2, 5]


# Options.


@pytest.mark.parametrize("preset", EVERY)
def test_parts_are_replaced_by_those_of_the_user(preset):
    sampler, writer = SoftmaxRewardSampler(temperature=3.0), FIFOWriter()
    assert preset(4, sampler=sampler).sampler is sampler
    if preset not in (diverse_buffer, fifo_buffer):
        assert preset(4, writer=writer).writer is writer


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("preset", [reward_prioritized_buffer, fifo_buffer])
def test_rows_go_to_a_new_storage(preset, prefetch):
    rb, filled = (preset(4, batch_size=8, prefetch=prefetch) for _ in range(2))
    rb.extend(rows([0.0, 1.0]))
    rb.sample()
    filled.extend(rows([2.0, 3.0]))
    former = rb.set_storage(LazyTensorStorage(3))
    assert (len(former), len(rb)) == (2, 0)
    assert rb.extend(rows([7.0])).tolist() == [0]
    assert rb.sample()["log_reward"].tolist() == [7.0] * 8
    rb.set_storage(filled.storage)
    assert rb.extend(rows([9.0])).tolist() == [2]
    assert rb[:]["log_reward"].tolist() == [2.0, 3.0, 9.0]


def test_options_are_those_of_the_buffers():
    given = inspect.signature(ReplayBuffer.__init__).parameters.keys()
    given |= inspect.signature(GFNReplayBuffer.__init__).parameters.keys()
    of_presets = {"device", "compact", "env", "statistics", "priority_key"}
    of_presets |= {"group", "per_group"}
    of_parts = {"self", "options", "writer", "sampler"}
    assert set(BufferOptions.__annotations__) == (given - of_parts) | of_presets


@pytest.mark.slow
def test_type_checkers_find_a_misspelt_option(tmp_path):
    (tmp_path / "user.py").write_text(
        "from gfn_rb import fifo_buffer\nrb = fifo_buffer(4, batch_size=2, temprature=2.0)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "user.py"]
    env = {**os.environ, "MYPYPATH": str(Path(gfn_rb.__file__).parents[1])}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "temprature" in run.stdout
    assert run.stdout.count("error:") == 1


@pytest.mark.parametrize("preset", ALL)
def test_options_reach_the_buffer(preset):
    def made():
        generator = torch.Generator().manual_seed(3)
        rb = preset(8, batch_size=2, prefetch=2, generator=generator, transform=Doubles())
        rb.extend(states([0.0, 1.0, 2.0, 3.0]))
        return rb

    one, other = made(), made()
    assert one.batch_size == 2
    drawn = [rb.sample()["state"].tolist() for rb in (one, other)]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) <= {1, 3, 5, 7}  # 2 x + 1
    assert one.sample().batch_size == (2,)
    assert len(one._prefetch_queue) == 2
    one.shutdown()
    other.shutdown()


@pytest.mark.parametrize("preset", PRESETS)
def test_users_transforms_run_before_ours_on_the_way_in(preset):
    class Renames(Transform):
        def _inv_call(self, tensordict):
            return tensordict.copy().rename_key_("steps", "length")

        def forward(self, tensordict):
            return tensordict

    rb = preset(4, max_length=6, transform=Renames())
    rb.extend(two_rows().to_tensordict().rename_key_("length", "steps"))
    assert rb[:]["action"].shape == (2, 6)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_reading_through_a_transform_leaves_what_is_stored(storage):
    rb = reward_prioritized_buffer(2, storage=storage(2))
    rb.append_transform(
        lambda rows: rows.set("log_reward", 2 * rows["log_reward"]).set("y", rows["state"])
    )
    rb.extend(objects([1, 2], [1.0, 2.0]))
    for read in (lambda: rb[:], lambda: rb[0], lambda: rb["log_reward"], lambda: rb.sample(2)):
        read()
        assert sorted(rb[:]["log_reward"].tolist()) == [2.0, 4.0]
    rb.extend(objects([3], [3.0]))  # an entry more would have made the rows unlike it
    assert sorted(rb[:]["log_reward"].tolist()) == [4.0, 6.0]


def test_a_draw_of_no_rows_is_named_so_even_if_rows_come_meanwhile(monkeypatch):
    rb = fifo_buffer(4, batch_size=2)
    rb.extend(rows([1.0, 2.0]))
    rb.empty()
    sample = type(rb.sampler).sample

    def slow_sample(*args):
        try:
            return sample(*args)
        finally:
            rb.extend(rows([1.0, 2.0]))  # as another thread does

    monkeypatch.setattr(type(rb.sampler), "sample", slow_sample)
    with pytest.raises(EmptyBufferError, match="cannot draw 2 items: the buffer is empty"):
        rb.sample()


def test_buffers_of_torchrl_take_trajectories_of_all_lengths(tmp_path):
    """The first batch is the shortest, and no batch is padded by hand."""
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9),
        writer=gfn_rb.DiversityWriter(cutoff_distance=0.0),  # of terminating states
        sampler=SoftmaxRewardSampler(),
        transform=gfn_rb.PadTrajectories(6),
        batch_size=3,
    )
    batches = [trajectories([v], length=n) for v, n in ((1, 2), (2, 5), (3, 6), (3, 4))]
    for batch in batches:
        rb.extend(batch)
    held = Trajectories.from_tensordict(rb[:])
    assert (held.n_steps, sorted(held.length.tolist())) == (6, [2, 4, 5])
    assert sorted(held.terminating_states.reshape(-1).tolist()) == [1, 2, 3]
    with pytest.raises(ShapeError, match="at most max_length=6"):
        rb.extend(trajectories([4], length=7))
    gfn_rb.save_checkpoint(tmp_path / "rb.ckpt", rb)
    again = gfn_rb.open_buffer(tmp_path / "rb.ckpt")
    again.extend(trajectories([9], length=3))
    assert len(again) == 4
