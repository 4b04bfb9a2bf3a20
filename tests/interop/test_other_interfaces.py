"""What the reference pages of other libraries promise: signatures, and behaviour not tested yet.

``other_interfaces.txt`` lists it, with the test that shows each line.
"""

import ast
import inspect
import math
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerEnsemble
from torchrl.data.replay_buffers.storages import StorageEnsemble
from torchrl.data.replay_buffers.writers import WriterEnsemble
from torchrl.envs.transforms import Transform

theirs = pytest.importorskip("gfn.containers")

from interop.test_manager import LIMIT, MANAGER, Noting, buffer, per_thread, run  # noqa: E402, F401
from interop.torchgfn_items import (  # noqa: E402
    GRID,
    KINDS,
    estimator as estimator_of,
    of_kind,
    rollouts,
)

import gfn_rb.interop.objectrl as objectrl  # noqa: E402
import gfn_rb.interop.torchgfn as ours  # noqa: E402
from gfn_rb.buffers import MergedReplayBuffer, StackedReplayBuffer  # noqa: E402
from gfn_rb.errors import ArgumentError, EmptyBufferError  # noqa: E402

HERE = Path(__file__).parent
LISTED = HERE / "other_interfaces.txt"
PAGE = HERE.parents[1] / "docs" / "compatibility.md"
COLUMNS = "whole", "partly", "refused", "private"


def pages():
    """Return of each page its lines: state, behaviour, and what shows it."""
    found = {}
    for line in LISTED.read_text().splitlines():
        if line.startswith("["):
            found[line[1:-1]] = []
        elif line and not line.startswith("#"):
            found[list(found)[-1]].append([part.strip() for part in line.split("|")])
    return found


def counts(lines):
    n = Counter()
    for state, what, _ in lines:
        n[state] += len(what.split()) if state == "private" else 1
    return [n[state] for state in COLUMNS]


def test_each_line_names_a_test():
    for page, lines in pages().items():
        for state, behaviour, shown in lines:
            assert state in COLUMNS, f"{page}: {behaviour}"
            if state != "private":
                file, name = shown.split("::")
                path = Path(__file__) if file == "here" else HERE / file
                assert f"\ndef {name}(" in path.read_text(), shown


def test_the_documentation_has_these_counts():
    table = PAGE.read_text()
    for page, lines in pages().items():
        assert f"| {page} | {' | '.join(map(str, counts(lines)))} |" in table


# Signatures, as the pages print them.

REMOTE = (
    "remote_manager_rank=None, remote_buffer_freq=1, communication_backend='mpi', timing=False, "
    "async_score=False, async_comm=False, lazy_sort=False, baseline_filtering=False, "
    "scoring_only=False, baseline_refresh_after=10"
)
BUFFERS = {
    ours.ReplayBuffer: (
        "capacity=1000, prioritized_capacity=False, prioritized_sampling=False, " + REMOTE
    ),
    ours.NormBasedDiversePrioritizedReplayBuffer: (
        "capacity=1000, cutoff_distance=0.0, p_norm_distance=1.0, " + REMOTE
    ),
    ours.TerminatingStateBuffer: "capacity=1000, communication_backend='mpi', timing=False",
    partial(ours.ReplayBufferManager, rank=2, num_training_ranks=2): (
        "diverse_replay_buffer=False, capacity=10000, remote_manager_rank=None, "
        "communication_backend='mpi', timing=False, store_locally=True, baseline_strategy='min', "
        "baseline_percentile=0.1, baseline_ema_alpha=0.1"
    ),
}
SAVED = "conditions=None, save_estimator_outputs=False, save_logprobs=False"
BACK = "back_steps=None, back_ratio=None"
METHODS = {
    ours.ReplayBuffer.add: "training_container",
    ours.ReplayBuffer.sample: "n_samples",
    ours.ReplayBuffer.drain_pending_score: "timeout_sec=30.0",
    ours.ReplayBuffer.save: "path",
    ours.ReplayBuffer.load: "path",
    ours.ReplayBufferManager.run: "async_send=True",
    ours.ReplayBufferManager.default_scoring_function: "obj, sender_rank=-1",
    ours.Sampler.__init__: "estimator",
    ours.Sampler.sample_actions: f"env, states, {SAVED}, ctx=None, **policy_kwargs",
    ours.Sampler.sample_trajectories: f"env, n=None, states=None, {SAVED}, **policy_kwargs",
    ours.LocalSearchSampler.__init__: "pf_estimator, pb_estimator",
    ours.LocalSearchSampler.local_search: (
        "env, trajectories, save_estimator_outputs=False, save_logprobs=False, "
        f"{BACK}, use_metropolis_hastings=True, debug=False, **policy_kwargs"
    ),
    ours.LocalSearchSampler.sample_trajectories: (
        f"env, n=None, states=None, {SAVED}, n_local_search_loops=0, {BACK}, "
        "use_metropolis_hastings=False, **policy_kwargs"
    ),
    objectrl.ReplayBuffer.sample_by_index_fields: "indices, fields",
}


def arguments_of(text):
    """Return names and defaults of a printed signature, in order."""
    args = ast.parse(f"def f({text}): pass").body[0].args
    names = [each.arg for each in args.args]
    defaults = [ast.literal_eval(each) for each in args.defaults]
    required = [inspect.Parameter.empty] * (len(names) - len(defaults))
    return dict(zip(names, required + defaults, strict=True))


def test_arguments_have_the_names_order_and_defaults_of_the_others() -> None:
    for make, text in BUFFERS.items():
        defaults = arguments_of(text)
        made = make(GRID)
        assert {name: getattr(made, name) for name in defaults} == defaults
        if not isinstance(make, partial):
            assert vars(make(GRID, *defaults.values())).keys() == vars(made).keys()
            assert make(GRID, 7, **{"timing": True}).timing
    for method, text in METHODS.items():
        given = inspect.signature(method).parameters.values()
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
        found = {each.name: each.default for each in given if each.kind in kinds}
        found.pop("self")
        assert found == arguments_of(text), method
    manager = inspect.signature(ours.ReplayBufferManager).parameters
    assert [*manager][:4] == ["env", "rank", "num_training_ranks", "scoring_function"]
    assert [*inspect.signature(objectrl.ReplayBuffer).parameters][:4] == [
        *("device", "storing_device", "buffer_size", "print_gc_warning")
    ]
    pf, pb = estimator_of(GRID), estimator_of(GRID, True)
    search = ours.LocalSearchSampler(pf, pb)
    assert search.estimator is pf
    assert search.backward_sampler.estimator is pb


def test_containers_have_the_names_of_torchgfns() -> None:
    assert (ours.DATA_TAG, ours.METADATA_TAG) == (0, 1)
    for kind in ours.ContainerUnion.__args__:
        for name in ("__getitem__", "__len__", "extend", "log_rewards", "terminating_states"):
            assert hasattr(ours.Container, name)
            assert hasattr(kind, name)


# torchgfn's buffers.


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_without_a_manager(kind) -> None:
    rb, items = ours.ReplayBuffer(GRID, 100), of_kind(kind, rollouts(n=4))
    with pytest.raises(ValueError, match="empty"):
        rb.sample(1)
    assert rb.add(items) is None
    assert len(rb) == len(items)
    assert type(rb.sample(2)) is type(items)
    assert len(rb.sample(2)) == 2
    assert len(rb.initialize(items)) == 0
    with pytest.raises(ValueError, match="Unsupported type"):
        rb.initialize([])
    assert rb.drain_pending_score() is None
    assert isinstance(rb.timing_log(), str)
    with pytest.raises(ValueError, match="requires remote_manager_rank"):
        ours.ReplayBuffer(GRID, baseline_filtering=True)


def test_a_diverse_buffer_keeps_by_reward_and_draws_uniformly() -> None:
    rb = ours.NormBasedDiversePrioritizedReplayBuffer(GRID, 10)
    assert rb.prioritized_capacity
    assert not rb.prioritized_sampling


def test_derived_buffers_change_what_is_stored() -> None:
    class Halved(ours.ReplayBuffer):
        def _local_add(self, training_container) -> None:
            super()._local_add(training_container[::2])

    rb = Halved(GRID, 10)
    rb.add(rollouts(n=6))
    assert len(rb) == 3


def test_a_buffer_of_terminating_states_keeps_states_and_rewards() -> None:
    rb, items = ours.TerminatingStateBuffer(GRID, 10, prioritized_sampling=True), rollouts(n=4)
    assert rb.prioritized_sampling
    rb.add(items)
    held = rb.training_container
    assert isinstance(held, theirs.StatesContainer)
    assert torch.equal(held.states.tensor, items.terminating_states.tensor)
    assert torch.equal(held.log_rewards, items.log_rewards)


@pytest.mark.parametrize("mode", ["async_score", "async_comm"])
def test_scores_come_one_add_later(mode) -> None:
    score = Noting(lambda each: type(each).__name__)
    found = []

    def train():
        rb = buffer(1, scoring_only=True, **{mode: True})
        found.append(rb.add(rollouts(n=3)))
        if mode == "async_score":
            assert rb.add(rollouts(n=5))["n"] == 3
        else:
            rb.add(rollouts(n=5))
        assert rb.drain_pending_score(LIMIT)["n"] == 5

    run(ours.ReplayBufferManager, train, scoring_function=score)
    assert found == [None]
    assert score.seen == ["StatesContainer"] * 2


@pytest.mark.parametrize("option", ["baseline_filtering", "scoring_only"])
def test_transitions_are_not_reduced(option) -> None:
    def train():
        with pytest.raises(AssertionError, match="Trajectories or StatesContainer"):
            buffer(1, **{option: True}).add(of_kind("transitions", rollouts(n=2)))
        buffer(1).add(rollouts(n=1))

    run(ours.ReplayBufferManager, train)


def test_a_manager_scores_by_default_and_has_no_manager_itself() -> None:
    manager = ours.ReplayBufferManager(GRID, 2, 2)
    assert manager.default_scoring_function(rollouts(n=1)) == {"score": math.inf}
    with pytest.raises(NotImplementedError, match="remote_manager_rank of a manager must be None"):
        ours.ReplayBufferManager(GRID, 2, 2, remote_manager_rank=1)


def test_one_action_is_drawn_with_what_is_asked_for() -> None:
    sampler, states = ours.Sampler(estimator_of(GRID)), GRID.reset((5,))
    actions, log_probs, outputs = sampler.sample_actions(GRID, states)
    assert len(actions) == 5
    assert log_probs is outputs is None
    kept = {"save_logprobs": True, "save_estimator_outputs": True}
    _, log_probs, outputs = sampler.sample_actions(GRID, states, **kept)
    assert log_probs.shape == (5,)
    assert outputs.shape == (5, GRID.n_actions)


# ObjectRL's memory.


def test_a_memory_stores_and_draws_as_objectrls_does() -> None:
    cpu = torch.device("cpu")
    rb = objectrl.ReplayBuffer(device=cpu, storing_device=cpu, buffer_size=10)
    assert isinstance(rb.memory, TensorDictReplayBuffer)
    assert isinstance(rb.memory.storage, LazyMemmapStorage)
    for empty in (rb.sample_all, partial(rb.create_epoch_iterator, 2)):
        with pytest.raises(EmptyBufferError):
            empty()
    rb.add_batch(TensorDict({"obs": torch.arange(7)}, [7]))
    assert len(rb) == rb.size == rb.data_size == rb.pointer == 7
    assert rb.sample_all()["obs"].tolist() == [*range(7)]
    assert rb.calculate_num_batches(3) == 3
    assert rb.get_steps_and_iterator(n_epochs=2, max_iter=5, batch_size=3) == 6
    assert [len(rb.get_next_batch(3)) for _ in range(6)] == [3, 3, 1] * 2
    assert rb.get_steps_and_iterator(n_epochs=0, max_iter=5, batch_size=3) == 5
    assert len(rb.get_next_batch(4)) == 4
    with pytest.raises(ArgumentError, match="n_epochs"):
        rb.create_epoch_iterator(2, 0)
    rb.reset()
    assert (len(rb), rb.buffer_size, rb.pointer) == (0, 10, 0)
    rb.reset(4)
    assert rb.buffer_size == 4


# TorchRL's ensemble.


def member(start, n=6):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    rb.extend(TensorDict({"x": torch.arange(n).float() + start}, [n]))
    return rb


def raised(rows):
    return rows.set("y", rows["x"] + 1)


class Cut(Transform):
    """Sets x to 0."""

    def forward(self, tensordict):
        return tensordict.set("x", tensordict["x"] * 0)


@pytest.mark.parametrize("kind", [MergedReplayBuffer, StackedReplayBuffer])
def test_an_ensemble_draws_and_indexes_its_members(kind, tmp_path) -> None:
    def made(**options):
        options.setdefault("p", [0.5, 0.5])
        return kind(member(0), member(100), **options)

    shape = (4,) if kind is MergedReplayBuffer else (2, 2)
    assert made(batch_size=4).sample().shape == made().sample(4).shape == shape
    for p in ([1.0, 0.0], torch.tensor([1.0, 0.0])):
        assert made(p=p).sample(40)["x"].max() < 6
    join = torch.cat if kind is MergedReplayBuffer else torch.stack
    joined = made(collate_fn=lambda batches: raised(join([*batches])))
    assert joined.sample(4)["y"].shape == shape
    assert made(collate_fns=[raised, raised]).sample(4)["y"].shape == shape
    rows, info = made().sample(4, return_info=True)
    assert rows.shape == shape
    assert "index" in info
    rb = made()
    row = TensorDict({"x": torch.ones(1)}, [1])
    for write, given in ((rb.add, row[0]), (rb.extend, row)):
        with pytest.raises((ArgumentError, RuntimeError), match="routing_key"):
            write(given)
    assert rb.append_transform(raised) is rb
    assert rb.insert_transform(0, Cut()) is rb
    assert (rb.sample(4)["y"] == 1).all()
    rb.register_save_hook(lambda rows: rows)
    rb.register_load_hook(lambda rows: rows)
    for save, load in (("dumps", "loads"), ("dump", "load"), ("save", "load")):
        getattr(made(), save)(tmp_path / save)
        other = kind(member(0, 1), member(0, 1), p=[0.5, 0.5])
        getattr(other, load)(tmp_path / save)
        assert [len(other[i]) for i in range(2)] == [6, 6]
    assert isinstance(rb.sampler, SamplerEnsemble)
    storage, writer = rb.storage, rb.writer
    assert rb.set_storage(storage) is storage
    assert rb.set_writer(writer) is writer
    assert isinstance(storage, StorageEnsemble)
    assert isinstance(writer, WriterEnsemble)
    rb.empty()
    assert [len(rb[i]) for i in range(2)] == [0, 0]
    for options in ({"sample_from_all": True}, {"num_buffer_sampled": 2}):
        if kind is MergedReplayBuffer:
            with pytest.raises(ArgumentError, match="StackedReplayBuffer"):
                made(**options)
        else:
            assert made(p=None, **options).sample(4).shape == (2, 2)
    assert isinstance(rb, ReplayBuffer)


def test_another_sampler_of_a_stacked_buffer_stacks(unchecked) -> None:
    rb = StackedReplayBuffer(member(0), member(100))
    former = rb.sampler
    assert rb.set_sampler(SamplerEnsemble(RandomSampler(), RandomSampler())) is former
    assert type(rb.sampler) is type(former)
    for wrong in (RandomSampler(), SamplerEnsemble(RandomSampler())):
        with pytest.raises(ArgumentError, match="sampler must be a"):
            rb.set_sampler(wrong)
    assert repr(rb).startswith("StackedReplayBuffer(")
