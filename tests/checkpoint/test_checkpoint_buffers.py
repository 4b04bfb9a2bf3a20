"""A restored buffer continues bit for bit like the one that was saved."""

import pickle
from itertools import product

import pytest
import torch
from checkpoint.checkpoint_runs import (
    CAPACITY,
    assert_same_content,
    buffer,
    continue_both,
    ensemble,
    generator,
    restored,
    rows,
    used,
)
from checkpoint.test_ragged_rows import make_buffer as ragged_buffer, make_rows as ragged_rows
from factories import assert_equal, trajectories
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from torchrl.data.replay_buffers.samplers import ConsumingSampler
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler, StepScheduler
from torchrl.envs.transforms import Compose, ExcludeTransform, Transform

from gfn_rb.buffers import (
    MergedReplayBuffer,
    diverse_buffer,
    reward_prioritized_buffer,
    terminating_state_buffer,
)
from gfn_rb.checkpoint import (
    AtomicCheckpoint,
    load_checkpoint,
    load_state,
    save_checkpoint,
    schedule_state,
)
from gfn_rb.errors import CheckpointError
from gfn_rb.samplers import PrioritySampler, SoftmaxRewardSampler

FRESH = pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "in use"])

# Every kind of part, into a fresh buffer and into one in use.

STORAGES = {
    "memory": lambda: LazyTensorStorage(CAPACITY),
    "disk": lambda: LazyMemmapStorage(CAPACITY),
}


class Shift(Transform):
    """Has state, a buffer that moves with every batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, tensordict):
        self.shift += 1
        return tensordict.set("state", tensordict.get("state") + self.shift)


def paths(n):
    return trajectories(torch.randint(5, (n,)), torch.randint(-3, 4, (n,)).float(), n_steps=4)


def episodes(n):
    ids = torch.arange(n) // 3
    return TensorDict({"x": torch.randn(n), "episode": ids, "done": ids < 0}, [n])


def losses(n):
    return rows(n).set("loss", torch.rand(n))


def of_tensors(storage):
    parts = {"storage": storage(CAPACITY), "writer": RoundRobinWriter(), "batch_size": 3}
    return ReplayBuffer(**parts, generator=generator())


def stored(n):
    return TensorStorage(rows(n).set("index", torch.arange(n)))


KINDS = {
    "PyTorch's generator": lambda: buffer(generator=None),
    "no batch left over": lambda: buffer(
        sampler=SamplerWithoutReplacement(drop_last=True, shuffle=False)
    ),
    "generation stamps": lambda: buffer(writer=TensorDictRoundRobinWriter(track_generations=True)),
    "rows used up": lambda: buffer(
        sampler=ConsumingSampler(2), consume_after_n_samples=2, batch_size=1
    ),
    "slices": lambda: buffer(sampler=SliceSampler(num_slices=2, traj_key="episode"), batch_size=2),
    "transforms": lambda: buffer(transform=Compose(Shift(), ExcludeTransform("next"))),
    "a given storage": lambda: buffer(storage=stored(CAPACITY)),
    "late construction": lambda: buffer(
        storage=lambda: LazyTensorStorage(CAPACITY), writer=None, delayed_init=True
    ),
    "shared memory": lambda: buffer(shared=True),
    "highest rewards": lambda: reward_prioritized_buffer(CAPACITY, batch_size=4),
    "by priority": lambda: buffer(sampler=PrioritySampler(beta=0.7), priority_key="loss"),
    "by a stored priority": lambda: buffer(sampler=PrioritySampler("loss")),
    "far apart": lambda: diverse_buffer(CAPACITY, batch_size=4, cutoff_distance=1.5, p=2.0),
    "terminating states": lambda: terminating_state_buffer(CAPACITY, batch_size=4),
    "tensors": lambda: of_tensors(LazyTensorStorage),
    "tensors on disk": lambda: of_tensors(LazyMemmapStorage),
    "ragged": ragged_buffer,
    "ragged, drawn ahead": lambda: ragged_buffer(prefetch=2),
}
ROWS = {
    "slices": episodes, "by priority": losses, "by a stored priority": losses,
    "terminating states": paths, "ragged": ragged_rows, "ragged, drawn ahead": ragged_rows,
    "tensors": lambda n: torch.randn(n, 3), "tensors on disk": lambda n: torch.randn(n, 3),
}  # fmt: skip


@FRESH
@pytest.mark.parametrize("prefetch", [None, 1])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("storages", [*product(STORAGES, STORAGES)])
def test_a_run_continues(storages, sampler, prefetch, fresh, tmp_path):
    rb, target = (
        buffer(storage=STORAGES[each](), sampler=sampler(), prefetch=prefetch) for each in storages
    )
    if not fresh:
        used(target, n=17)
    continue_both(used(rb), restored(rb, target, tmp_path))


@pytest.mark.parametrize("n", [13, 45], ids=["half full", "overwritten"])
@FRESH
@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_continues(kind, fresh, n, tmp_path):
    make, make_rows = KINDS[kind], ROWS.get(kind, rows)
    rb, target = make(), make()
    for _ in range(n // 15 + 1):
        rb.extend(make_rows(min(n, 15)))
    if not fresh:
        used(target, make_rows)
    rb.sample()
    rb.synchronize()
    continue_both(rb, restored(rb, target, tmp_path), make_rows)


# Things that are easily forgotten.


def test_the_rest_of_an_epoch_bounds_what_is_prefetched(tmp_path):
    def make():
        return buffer(sampler=SamplerWithoutReplacement(drop_last=True), prefetch=2)

    rb = make()
    rb.extend(rows(16))  # four batches: two drawn, one waiting, one left
    for _ in range(2):
        rb.sample()
        rb.synchronize()
    assert (len(rb._prefetch_queue), rb.sampler._remaining_batches) == (1, 1)
    target = restored(rb, make(), tmp_path)
    assert (len(target._prefetch_queue), target.sampler._remaining_batches) == (1, 1)
    fresh = restored(make(), target, tmp_path)
    assert fresh.sampler._remaining_batches == make().sampler._remaining_batches


def test_the_generator_given_to_the_buffer_is_the_one_that_is_restored(tmp_path):
    mine = torch.Generator().manual_seed(99)
    rb = used(buffer())
    target = restored(rb, buffer(generator=mine), tmp_path)
    assert target._rng is mine
    assert target.sampler._rng is mine
    assert torch.equal(mine.get_state(), rb._rng.get_state())
    without = restored(rb, buffer(generator=None, batch_size=9), tmp_path)  # which gets one
    assert torch.equal(without._rng.get_state(), rb._rng.get_state())


@pytest.mark.parametrize("batch_size", [2, None])
def test_the_batch_size_of_the_constructor_stays(batch_size, tmp_path):
    rb = used(buffer(batch_size=4, prefetch=2 if batch_size else None))
    target = restored(
        rb, buffer(batch_size=batch_size, prefetch=2 if batch_size else None), tmp_path
    )
    assert target.batch_size == batch_size
    if batch_size:
        assert [len(target.sample()) for _ in range(4)] == [2, 2, 2, 2]


@FRESH
def test_a_buffer_without_rows_is_restored_and_continues(fresh, tmp_path):
    emptied = used(buffer())
    emptied.empty()
    for rb in (buffer(), emptied):
        target = restored(rb, buffer() if fresh else used(buffer()), tmp_path)
        assert len(target) == 0
        batch = rows(6)
        rb.extend(batch.clone())
        target.extend(batch.clone())
        continue_both(rb, target, n=3)


def test_only_the_rows_in_use_are_written(tmp_path):
    rb = buffer(storage=LazyMemmapStorage(10**6))
    rb.extend(rows(10))
    save_checkpoint(tmp_path / "rb", rb)
    assert (tmp_path / "rb").stat().st_size < 20_000


# Ensembles.


def merged(prefetch=None):
    members = [reward_prioritized_buffer(n, generator=generator()) for n in (CAPACITY, 9)]
    return MergedReplayBuffer(*members, batch_size=6, prefetch=prefetch)


@pytest.mark.parametrize("make", [ensemble, merged])
@pytest.mark.parametrize("prefetch", [None, 1])
@FRESH
def test_ensembles_continue(fresh, prefetch, make, tmp_path):
    rb, target = make(prefetch), make(prefetch)
    for each in (rb,) if fresh else (rb, target):
        each[0].extend(rows(12))
        each[1].extend(rows(12))
        each.sample()
        each.synchronize()
    restored(rb, target, tmp_path)
    for _ in range(6):
        state = torch.get_rng_state()
        batch = rb.sample()
        rb.synchronize()
        torch.set_rng_state(state)
        assert_equal(target.sample(), batch)
        target.synchronize()
        for member in (0, 1):
            fresh_rows = rows(3)
            came = target[member].extend(fresh_rows.clone())
            assert_equal(rb[member].extend(fresh_rows.clone()), came)
    for member in (0, 1):
        assert_same_content(rb[member], target[member])


# What is saved along.


def test_extra_values_come_back(tmp_path):
    path, rb = tmp_path / "rb", used(buffer())
    model = torch.nn.Linear(2, 2)
    save_checkpoint(path, rb, model=model.state_dict(), step=3, name=None)
    for extra in (load_checkpoint(path, buffer()), load_state(path)):
        assert list(extra) == ["model", "step", "name"]
        assert (extra["step"], extra["name"]) == (3, None)
        assert_equal(extra["model"], model.state_dict())


SCHEDULERS = {
    "linear": lambda rb: LinearScheduler(rb, "temperature", final_value=0.5, num_steps=7),
    "lambda": lambda rb: LambdaScheduler(rb, "temperature", lambda i: 1 / (1 + i), min_value=0.3),
    "multiplied": lambda rb: StepScheduler(rb, "temperature", gamma=0.8, n_steps=2),
    "added": lambda rb: StepScheduler(rb, "temperature", 0.25, mode="additive", max_value=4.0),
}


def scheduled(make):
    rb = buffer(sampler=SoftmaxRewardSampler(temperature=2.0, replacement=True))
    return rb, make(rb)


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_a_restored_schedule_goes_on_like_one_never_interrupted(make, tmp_path):
    (rb, anneal), (other, its) = scheduled(make), scheduled(make)
    rb.extend(rows(20))
    for _ in range(3):
        anneal.step()
    save_checkpoint(tmp_path / "rb", rb, anneal=schedule_state(anneal))
    its.step()  # it was in use
    its.load_state_dict(load_checkpoint(tmp_path / "rb", other)["anneal"])
    for _ in range(6):
        assert other.sampler.temperature == rb.sampler.temperature
        assert_equal(other.sample(), rb.sample())
        anneal.step()
        its.step()
    assert rb.sampler.temperature != 2.0


# A buffer as a component of TorchRL's Checkpoint.


def filled():
    rb = reward_prioritized_buffer(9, batch_size=4, prefetch=2)
    rb.extend(rows(9))
    rb.sample()
    return rb


@pytest.mark.parametrize("name", ["run", "run.zip"])
def test_torchrls_checkpoint_holds_one_file_and_nothing_pickled(name, tmp_path, monkeypatch):
    rb, again = (MergedReplayBuffer(filled(), filled(), p="size", batch_size=8) for _ in range(2))
    for each in ("load", "loads", "dump", "dumps"):
        monkeypatch.delattr(pickle, each)
    form = {"format": "archive"} if name.endswith("zip") else {}
    Checkpoint(rb=AtomicCheckpoint(rb), **form).save(tmp_path / name)
    Checkpoint(rb=AtomicCheckpoint(again)).load(tmp_path / name)
    for member in (0, 1):
        assert_equal(again[member][:], rb[member][:])
        assert_equal(again[member].sample(), rb[member].sample())


def test_a_folder_without_a_dump_is_refused(tmp_path):
    rb = filled()
    before = rb[:].clone()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        AtomicCheckpoint(rb).load(tmp_path)
    assert_equal(rb[:], before)
