"""Compact rows: exact inverses, refusals, and every part of a buffer over them."""

from functools import partial

import pytest
import torch
from factories import Ladder, assert_equal, seeded
from hypothesis import given, strategies as st
from tensordict import TensorDict

from gfn_rb import (
    CompactRows,
    DiversityWriter,
    Trajectories,
    diverse_buffer,
    fifo_buffer,
    load_checkpoint,
    reward_prioritized_buffer,
    save_checkpoint,
    state_buffer,
    terminating_state_buffer,
    transition_buffer,
)
from gfn_rb.containers import convert
from gfn_rb.envs import BitSequence, ConditionalHyperGrid, HyperGrid, TFBind8
from gfn_rb.errors import ArgumentError, CheckpointMismatchError, ShapeError

ENVS = {
    "TFBind8": TFBind8(),
    "both ends": TFBind8("prepend_append"),
    "wide words": BitSequence(16, 8, n_modes=2),
    "odd words": BitSequence(24, 8, "prepend_append", n_modes=2),
    "grid": HyperGrid(3, 5),
    "high grid": HyperGrid(2, 150),
    "nine dimensions": HyperGrid(9, 2),
    "condition": ConditionalHyperGrid(2, 4),
    "scalar states": Ladder(5),
}
FORMS = ["narrow", "rebuild"]
diverse_buffer = partial(diverse_buffer, cutoff_distance=0.0)  # no duplicates
PRESETS = [fifo_buffer, reward_prioritized_buffer, diverse_buffer]
GRID = ENVS["condition"]


def walks(env, n=6, seed=0, backward=False):
    """Trajectories of a uniform policy, padded to the longest, every other row turned around."""
    generator = seeded(seed)
    states, actions = [env.source(n)], []
    while not env.is_sink(states[-1]).all() or not actions:
        mask = env.forward_mask(states[-1])
        over = ~mask.any(1)
        mask[over, -1] = True
        action = torch.multinomial(mask.float(), 1, generator=generator)[:, 0]
        actions.append(action.where(~over, -1))
        states.append(env.forward_step(states[-1], actions[-1]))
    action = torch.stack(actions, 1)
    td = TensorDict(
        {
            "state": torch.stack(states, 1),
            "action": action,
            "length": (action >= 0).sum(1),
            "log_reward": torch.randn(n, generator=generator),
            "tag": torch.arange(n) + 2**40,
        },
        [n],
    )
    if env.condition_shape is not None:
        td["condition"] = torch.rand(n, *env.condition_shape, generator=generator)
    return convert.turned(td, torch.arange(n) % 2 == 1) if backward else td


def buffer(form, env=GRID, capacity=64, preset=fifo_buffer, **options):
    options = {"max_length": env.max_length, "generator": seeded(), **options}
    return preset(capacity, compact=form, env=env, **options)


def contents(rb):
    """What a buffer returns whole, without bookkeeping, in a fixed order of keys."""
    rows = rb[:].exclude("index")
    return {key: rows[key] for key in sorted(rows.keys(True, True), key=str)}


def stored_bytes(rb):
    return sum(leaf.nbytes for leaf in rb.storage._storage.exclude("index").values(True, True))


def assert_alike(ours, plain, n, n_batches=4):
    """Two buffers of one seed keep the same rows in the same slots, and draw the same."""
    for seed in range(n_batches):
        rows = walks(GRID, n, seed, backward=True)
        assert ours.extend(rows.clone()).equal(plain.extend(rows))
        assert_equal(contents(ours), contents(plain))
        drawn = [rb.sample(5).exclude("index") for rb in (ours, plain)]
        for key in drawn[1].keys(True, True):
            assert drawn[0][key].equal(drawn[1][key])


# What comes out is what went in.


@given(
    st.sampled_from(list(ENVS)),
    st.sampled_from(FORMS),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_trajectories_come_back_exactly(name, form, n, backward, seed):
    rows = walks(ENVS[name], n, seed, backward)
    compact = CompactRows(ENVS[name], form)
    before = rows.clone()
    held = compact.inv(rows)
    assert_equal(dict(rows), dict(before))  # what is given stays as it was
    assert ("packed_state" in set(held.keys())) == (form == "narrow" and "scalar" not in name)
    assert held["action"].dtype.itemsize < 8
    assert held["length"].dtype.itemsize == 1 + (ENVS[name].max_length > 255)
    whole = compact(held.clone())
    assert_equal({key: whole[key] for key in before.keys()}, dict(before))  # noqa: SIM118
    assert set(whole.keys()) == set(before.keys())
    one = compact(compact.inv(rows[0]))
    assert_equal({key: one[key] for key in before.keys()}, dict(before[0]))  # noqa: SIM118


@pytest.mark.parametrize("name", ENVS)
def test_transitions_and_states_come_back_exactly(name):
    compact = CompactRows(ENVS[name])
    trajectories = Trajectories.from_tensordict(walks(ENVS[name], backward=True))
    for container in (trajectories.to_transitions(), trajectories.to_states()):
        rows = container.to_tensordict()
        rows["flag"] = rows["log_reward"] > 0
        before = rows.clone()
        whole = compact(compact.inv(rows))
        assert bool((before == rows).all())  # what is given stays as it was
        assert set(whole.keys(True, True)) == set(rows.keys(True, True))
        for key in rows.keys(True, True):
            assert whole[key].dtype == rows[key].dtype
            assert whole[key].equal(rows[key])


def test_bytes_of_a_row():
    # 8 letters under 10 steps, 9 actions, a length of one byte each, and a reward.
    sizes = {None: 8 * (80 + 9 + 1) + 4, "narrow": 80 + 9 + 1 + 4, "rebuild": 9 + 1 + 4}
    for form, size in sizes.items():
        rb = buffer(form, TFBind8(), 100)
        rb.extend(walks(ENVS["TFBind8"], 3).exclude("tag"))
        assert stored_bytes(rb) == 100 * size
    grid = HyperGrid(16, 5)
    rb = buffer("rebuild", grid, 100_000, max_length=60)
    rb.extend(walks(grid, 2).exclude("tag"))
    assert stored_bytes(rb) - 4 * 100_000 <= 12_000_000


# Buffers.


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("form", FORMS)
def test_presets_keep_and_draw_what_they_do_over_plain_rows(preset, form):
    ours, plain = (buffer(each, preset=preset, capacity=20) for each in (form, None))
    assert_alike(ours, plain, 8, 6)
    before = stored_bytes(ours)
    assert_equal(contents(ours), contents(ours))  # reading a full storage leaves it compact
    assert stored_bytes(ours) == before
    assert ours[0]["state"].equal(plain[0]["state"])
    assert stored_bytes(ours) < stored_bytes(plain) / 2


MEASURES = [
    *(
        {"preset": diverse_buffer, "cutoff_distance": 1.0, "features": key}
        for key in (
            "state",
            "log_reward",
            "condition",
            lambda td: td["state"][:, 0].double() + td["tag"][:, None],
        )
    ),
    *(
        {"preset": preset, "capacity": 20, "unique": unique}
        for preset in (reward_prioritized_buffer, fifo_buffer)
        for unique in ("state", lambda td: td["state"][:, -1, 0])
    ),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", MEASURES)
def test_features_and_objects_are_those_of_whole_rows(form, options):
    ours, plain = buffer(form, **options), buffer(None, **options)
    assert_alike(ours, plain, 30)
    ours.load_state_dict(ours.state_dict())  # which makes the index read the storage anew
    assert_alike(ours, plain, 30, 1)


def test_a_writer_that_is_given_measures_whole_rows_too():
    ours, plain = (
        terminating_state_buffer(
            50,
            writer=DiversityWriter(cutoff_distance=1.0),
            compact=form,
            env=GRID,
            generator=seeded(),
        )
        for form in ("narrow", None)
    )
    assert_alike(ours, plain, 30)


@pytest.mark.parametrize("preset", [terminating_state_buffer, transition_buffer, state_buffer])
def test_single_states_and_steps_are_stored_narrow(preset):
    ours = preset(200, compact="narrow", env=GRID, generator=seeded())
    assert_alike(ours, preset(200, generator=seeded()), 20)


# Checkpoints.


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_hold_compact_rows(form, tmp_path):
    path = tmp_path / "rb.ckpt"
    rb, again, alone = (buffer(form, preset=diverse_buffer) for _ in range(3))
    for each in (rb, alone):
        each.extend(walks(GRID, 20, backward=True))
    save_checkpoint(path, rb)
    load_checkpoint(path, again)
    for each in (again, alone):
        each.extend(walks(GRID, 20, 1, backward=True))
    assert_equal(contents(again), contents(alone))
    assert again.sample(5)["state"].equal(alone.sample(5)["state"])
    by_torchrl = buffer(form, preset=diverse_buffer)
    by_torchrl.load_state_dict(rb.state_dict())
    assert_equal(contents(by_torchrl), contents(rb))


@pytest.mark.parametrize("saved", [None, *FORMS])
@pytest.mark.parametrize("filled", [False, True])
def test_checkpoints_of_another_form_are_refused(saved, filled, tmp_path):
    path = tmp_path / "rb.ckpt"
    rb = buffer(saved)
    if filled:
        rb.extend(walks(GRID, 4))
    save_checkpoint(path, rb)
    others = [buffer(form) for form in (None, *FORMS) if form != saved]
    if saved is not None:
        others.append(buffer(saved, ConditionalHyperGrid(2, 5), max_length=GRID.max_length))
    for other in others:
        with pytest.raises(CheckpointMismatchError, match=r"transform|stored as|key|entr|dtype"):
            load_checkpoint(path, other)
        assert len(other) == 0


# Bad input.


def changed(key, value, row=1):
    rows = walks(GRID)
    rows[key][row] = value
    return rows


REFUSED = {
    "large state": (changed("state", 300), ArgumentError, r"'state' .*\[-1, 3\].*got 300"),
    "low state": (changed("state", -2), ArgumentError, r"'state' .*\[-1, 3\].*got -2"),
    "lowest": (changed("state", torch.iinfo(torch.int64).min), ArgumentError, r"got -92"),
    "large action": (changed("action", 259), ArgumentError, r"'action' .*\[-1, 2\].*got 259"),
    "long": (changed("length", 257), ArgumentError, r"'length' .*\[1, 7\].*got 257"),
    "no action": (changed("length", 0), ArgumentError, r"'length' .*\[1, 7\].*got 0"),
    "int32": (walks(GRID).update({"action": walks(GRID)["action"].int()}), ShapeError, "int64"),
    "wide": (
        walks(GRID).update({"state": walks(GRID)["state"].repeat(1, 1, 2)}),
        ShapeError,
        r"state.* shape",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(form, case):
    rows, error, message = REFUSED[case]
    rb = buffer(form, preset=reward_prioritized_buffer, max_length=None)
    rb.extend(walks(GRID))
    before = contents(rb)
    if form == "rebuild" and "state" in case:
        error = ArgumentError
        message = r"must be what the actions lead to.*got .* at step \d of row \d, expected \["
    if form == "rebuild" and case == "lowest":
        message = "lead to"
    with pytest.raises(error, match=message):
        rb.extend(rows)
    assert_equal(contents(rb), before)
