from dataclasses import replace

import pytest
import torch
from buffers.test_calls import calls_of
from statistics_of_draws import chi_square_p
from training.training_runs import (
    BITS,
    DNA,
    GRID,
    RNA,
    WARM_GRID,
    equal,
    grid,
    take,
    timeless,
    trained,
)

from gfn_rb.containers import Trajectories
from gfn_rb.errors import CheckpointMismatchError
from gfn_rb.training import (
    Hooks,
    LineConfig,
    SearchOptions,
    SoftmaxDraw,
    TeacherOptions,
    TFBind8Config,
    Trainer,
)
from gfn_rb.training.objectives import WeightAverage

LINE = LineConfig(batch_size=8, hidden=(8,))
VARIANTS = {
    "trajectories": GRID,
    "terminal": grid(replay="terminal"),
    "terminal, recent": grid(replay="terminal", keep="recent", replay_ratio=2.5),
    "no replay": grid(replay_ratio=0.0, backward="uniform"),
    "explored": grid(epsilon=0.3, draw=SoftmaxDraw(temperature=0.5), log_z=1.0),
    "priorities": grid(draw="priority", replay_ratio=1.5, capacity=1000),
    "sub-trajectories": grid(loss="subtb", draw="quantile", replay="terminal"),
    "transitions": grid(loss="db", replay="transitions", capacity=200),
    "states": grid(loss="fm", replay="states", draw="priority", capacity=200),
    "Linex": grid(regression="linex", loss="db", clip_grad_norm=0.5),
    "line": replace(LINE, epsilon=0.2, search=SearchOptions(1), replay="terminal"),
    "line, both learned": replace(LINE, loss="db", backward="learned"),
    "less and less random": grid(epsilon=0.5, epsilon_end=0.0, anneal_steps=6),
    "annealed": grid(draw=SoftmaxDraw(temperature=4.0, temperature_end=0.5), anneal_steps=6),
    "falling rates": grid(lr_end=0.1, anneal_steps=6),
    "teacher": grid(teacher=TeacherOptions(0.5), replay="terminal", clip_grad_norm=1.0, log_z=0.0),
    "teacher of steps": grid(teacher=TeacherOptions(0.4, alpha=0.5), loss="db", draw="teacher"),
    "conditions, teacher": replace(WARM_GRID, teacher=TeacherOptions(0.5), search=SearchOptions(1)),
    "bits": replace(BITS, search=SearchOptions(1)),
    "rna": RNA,
    "letters on both sides": replace(DNA, form="prepend_append", backward="learned"),
}


def state(trainer):
    """Everything that the next step depends on."""
    return {
        "teacher": trainer.teacher and trainer.teacher.state_dict(),
        "weights": dict(trainer.loss.named_parameters()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.schedule.state_dict(),
        "rows": trainer.rb.storage[:].to_dict(),
        "writer": trainer.rb.writer.state_dict(),
        "generators": (trainer.generator.get_state(), trainer.rb._rng.get_state()),
        "discovery": trainer.discovery.state_dict(),
        "temperature": trainer.temperature,
        "steps_done": trainer.steps_done,
        "history": [timeless(row) for row in trainer.history],
        "row": timeless(trainer.measure()),
    }


def assert_same(one, other):
    equal(state(one), state(other))


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = trained(GRID, 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert_same(one, trained(GRID, 3))


def test_reading_the_buffer_while_items_are_stored_or_saved_changes_nothing(tmp_path):
    """A rank may send again what it holds; of terminating states that draws rollouts."""

    def store(rb, items):
        rb.extend(items)
        assert rb[:].get("action", None) is not None

    config = grid(replay="terminal")
    reading = Trainer(config, hooks=Hooks(store=store, saving=lambda: reading.rb[:]))
    take(reading, 2)
    reading.save(tmp_path / "checkpoint")
    take(reading, 1)
    assert_same(reading, trained(config, 3))


QUICK = "teacher", "bits", "priorities"  # of these, the short tests see that they go on


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, config in VARIANTS.items()
    ],
)
def test_a_restored_run_equals_one_never_interrupted(config, tmp_path):
    first = trained(config, 4)  # between two rows of the history
    first.save(tmp_path / "checkpoint")
    take(first, 4)
    restored = trained(config, 1)  # all of which is replaced
    restored.load(tmp_path / "checkpoint")
    take(restored, 4)
    assert_same(restored, first)


def test_time_goes_on_from_the_checkpoint(tmp_path):
    first = trained(GRID, 4)
    first.watch.seconds["rollout"] = 1000.0
    first.save(tmp_path / "checkpoint")
    restored = Trainer(GRID)
    restored.load(tmp_path / "checkpoint")
    row = restored.measure()
    assert 1000 <= row["time_rollout"] < 1001
    parts = [row[f"time_{name}"] for name in ("rollout", "buffer", "learning", "evaluation")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= row["time_total"] < 1100


@pytest.mark.parametrize(
    ("config", "named"),
    [(grid(lr=0.5), "lr is 0.003, expected 0.5"), (DNA, "env is 'hypergrid', expected 'tfbind8'")],
)
def test_a_checkpoint_of_another_configuration_is_refused(config, named, tmp_path):
    trained(GRID, 4).save(tmp_path / "checkpoint")
    trainer = Trainer(config)
    with pytest.raises(CheckpointMismatchError, match=named):
        trainer.load(tmp_path / "checkpoint")
    take(trainer, 2)
    assert_same(trainer, trained(config, 2))


@pytest.mark.slow
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_reward_calls_are_counted_exactly(config, monkeypatch):
    trainer = Trainer(config)
    asked = []
    log_reward = trainer.env.log_reward
    monkeypatch.setattr(
        trainer.env, "log_reward", lambda x, *rest: asked.append(x) or log_reward(x, *rest)
    )
    take(trainer, 5)
    states = torch.cat(asked)
    monkeypatch.undo()
    row, x = trainer.measure(), states.unique(dim=0)
    assert row["reward_calls"] == len(states) == 40 * (1 + config.search.loops)
    assert row["distinct_reward_calls"] == len(x)
    assert row["modes_found"] == len(trainer.env.modes_reached(states).unique())
    if config.env != "conditional_hypergrid":
        score = trainer.env.score(x, trainer.env.log_reward(x))
        best = score.sort(descending=True).values[:100]
        assert row["top_100_score"] == pytest.approx(float(best.mean()), rel=1e-5)


class Recorded(Trainer):
    """Keeps the batches it learnt from."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.batches = []

    def _learn(self, batch):
        self.batches.append(batch)
        return super()._learn(batch)


@pytest.mark.parametrize(
    ("ratio", "sizes"), [(0, [8]), (1, [8, 8]), (2.5, [8, 8, 8, 4]), (0.3, [8, 2]), (0.05, [8])]
)
def test_replayed_batches_follow_the_ratio(ratio, sizes):
    trainer = Recorded(grid(replay_ratio=float(ratio)))
    take(trainer, 2)
    assert [len(batch) for batch in trainer.batches] == sizes * 2
    assert (trainer.measure()["replay_loss"] is None) is (len(sizes) == 1)


def test_terminal_replay_regenerates_paths():
    """The same terminating state is reached along different paths in different draws."""
    config = grid(
        replay="terminal", keep="recent", draw="softmax", capacity=8, replay_ratio=4.0, seed=2
    )
    trainer = Recorded(config)
    trainer.step()
    drawn = Trajectories.cat(trainer.batches[1:])
    inner = (drawn.terminating_states > 0).all(1)
    x, path = drawn.terminating_states[inner], drawn.action[inner]
    assert len(x.unique(dim=0)) < len(torch.cat([x, path], 1).unique(dim=0))


def test_metrics_are_of_averaged_weights():
    trainer, weights = Trainer(GRID), []
    for _ in range(4):
        trainer.step()
        weights.append(float(trainer.loss.estimate_log_z().detach()))
    assert trainer.log_z != weights[-1]
    assert min(weights) <= trainer.log_z <= max(weights)
    average = WeightAverage(trainer.loss)
    for n, value in enumerate([2.0, 4.0, 8.0]):
        with torch.no_grad():
            trainer.loss.log_z.value.fill_(value)
        average.update()
        expected = value if n == 0 else expected + (value - expected) * 9 / (n + 9)
    assert float(average.loss.estimate_log_z()) == pytest.approx(expected)


def test_gradients_are_shortened():
    """Over all parameters together, log Z included; those that are short enough stay."""
    trainer, norms = Trainer(grid(clip_grad_norm=0.01)), []

    def measure(*_):
        grads = [p.grad for p in trainer.loss.parameters()]
        norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))

    trainer.optimizer.register_step_pre_hook(measure)
    trainer.step()
    assert norms == pytest.approx([0.01, 0.01], rel=1e-3)
    equal(state(trained(grid(clip_grad_norm=1e9), 2)), state(trained(GRID, 2)))


def test_what_is_annealed_reaches_its_part():
    draw = SoftmaxDraw(temperature=4.0, temperature_end=2.0)
    ends = {"epsilon": 1.0, "epsilon_end": 0.0, "lr": 0.01, "lr_log_z": 0.1, "lr_end": 0.2}
    trainer = Trainer(grid(draw=draw, anneal_steps=4, **ends))
    epsilons, temperatures, rates, sampler = [], [], [], trainer.sampler
    sample = sampler.sample_trajectories
    sampler.sample_trajectories = lambda *a, **k: epsilons.append(k["epsilon"]) or sample(*a, **k)
    for _ in range(6):
        rates.append([group["lr"] for group in trainer.optimizer.param_groups])
        trainer.step()
        temperatures.append(trainer.rb.sampler.temperature)
    assert epsilons == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert temperatures == [4.0, 3.5, 3.0, 2.5, 2.0, 2.0]
    shares = [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert rates == [pytest.approx([0.01 * share, 0.1 * share]) for share in shares]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {}, {"replay": "terminal"}, {"replay_ratio": 0.0}, {"regression": "linex"},
        {"teacher": TeacherOptions(0.5)},
        *({"loss": loss} for loss in ("subtb", "db", "mdb", "fm")),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)  # fmt: skip
def test_the_target_is_learnt_by_every_rule(options):
    rates = {"lr_log_z": 0.1, "log_z": None} if "loss" not in options else {}
    config = grid(batch_size=16, hidden=(32,), lr=5e-3, capacity=4000, **rates, **options)
    trainer = trained(config, 60)
    end = trainer.measure()
    assert end["total_variation"] < 0.25
    assert end["modes_found"] == 4
    assert end["log_z"] == pytest.approx(trainer.env.log_partition(), abs=0.5)


@pytest.mark.parametrize("loops", [1, 2])
def test_what_a_search_finds_is_learnt_in_batches_of_the_usual_size(loops):
    trainer = Recorded(grid(search=SearchOptions(loops), replay_ratio=1.5))
    trainer.step()
    sizes = [len(batch) for batch in trainer.batches]
    assert sizes[: 1 + loops] == [8] * (1 + loops)
    assert sum(sizes[1 + loops :]) == 12 * (1 + loops)
    assert max(sizes) == 8


def test_streams_share_their_weights_and_nothing_else():
    """Three ranks of a run start alike and sample differently; stream 0 is the plain run."""
    trainers = [Trainer(GRID, stream=stream) for stream in range(3)]
    first, *others = [dict(trainer.loss.state_dict()) for trainer in trainers]
    for weights in others:
        equal(weights, first)
    drawn = [trainer.sample(50).terminating_states for trainer in trainers]
    generators = [each for trainer in trainers for each in (trainer.rb._rng, trainer.generator)]
    assert len({each.initial_seed() for each in generators}) == 6
    assert len({str(x.tolist()) for x in drawn}) == 3
    equal(drawn[0], Trainer(GRID).sample(50).terminating_states)
    name = "forward_policy.head.weight"
    assert not torch.equal(first[name], Trainer(grid(seed=9)).loss.state_dict()[name])


def test_hooks_see_every_step():
    seen = []
    hooks = Hooks(
        store=lambda rb, items: seen.append(("store", len(items))),
        gradients=lambda loss: seen.append(("gradients", loss.log_z.value.grad is not None)),
        stepped=lambda trainer: seen.append(("stepped", trainer.steps_done)),
    )
    trainer = Trainer(GRID, hooks=hooks)
    trainer.rb.extend(trainer.sample(8).to_tensordict())
    take(trainer, 2)
    step = [("store", 8), ("gradients", True), ("gradients", True)]
    assert seen == [*step, ("stepped", 1), *step, ("stepped", 2)]


@pytest.mark.parametrize(
    ("brought", "sizes"),
    [(0, [8, 8]), (1, [8, 1, 5, 4]), (11, [8, 11, 10, 9]), (12, [8, 6, 6, 7, 7, 6])],
)
def test_what_others_found_is_learnt_like_what_was_sampled(brought, sizes):
    """In batches of about 8, after the 8 sampled; as many of all are replayed as both together."""
    elsewhere = Trainer(grid(seed=9)).sample(16)[:brought]

    def store(rb, items):
        rb.extend(items)
        return elsewhere.to_tensordict() if brought else None

    trainer = Recorded(GRID, hooks=Hooks(store=store))
    trainer.step()
    assert [len(batch) for batch in trainer.batches] == sizes
    n_brought = len(sizes) // 2 - 1
    learnt = [state for batch in trainer.batches[1 : 1 + n_brought] for state in batch.state]
    assert len(learnt) == brought
    assert all(map(torch.equal, learnt, elsewhere.state))
    row = trainer.record()
    assert (row["reward_calls"], row["buffer_size"]) == (8, 8)


def test_what_is_replayed_is_no_older_than_it_may_be(monkeypatch):
    trainer = Trainer(grid(max_age=2, batch_size=8, keep="recent", draw="uniform"))
    ages, draw = [], trainer.rb.sample

    def sample(n):
        drawn = draw(n)
        ages.extend((trainer.steps_done - drawn["policy_version"]).tolist())
        return drawn

    monkeypatch.setattr(trainer.rb, "sample", sample)
    for steps in (3, 4):
        ages.clear()
        for _ in range(steps):
            trainer.step()
        row = trainer.record()
        assert (row["largest_age"], row["mean_age"]) == (2, sum(ages) / len(ages))
        assert max(ages) == 2
    assert (row["offered"], row["accepted"], row["evicted"], row["drawn"]) == (56, 56, 32, 56)
    assert trainer.measure()["mean_age"] is None


def test_losses_are_means_over_batches_since_the_last_row(monkeypatch):
    trainer = Trainer(grid(replay_ratio=2.0))
    losses = iter([5.0, 1.0, 2.0, 7.0, 3.0, 6.0, 9.0, 1.0, 1.0])

    def learn(batch):
        trainer.optimizer.step()  # changes nothing, and must come before that of the schedule
        return next(losses), torch.zeros(len(batch))

    monkeypatch.setattr(trainer, "_learn", learn)
    assert [trainer.step(), trainer.step()] == [5.0, 7.0]
    for row in (trainer.measure(), trainer.record()):
        assert (row["loss"], row["replay_loss"]) == (6.0, 3.0)
    assert trainer.measure()["loss"] is None
    trainer.step()
    assert trainer.record()["loss"] == 9.0


def test_the_exact_policy_is_the_one_that_is_sampled():
    """Pearson's chi-square of 4,000 samples against the exact distribution, fixed seed."""
    trainer = trained(GRID, 12)
    p = trainer.fit.policy_log_prob().exp()
    fresh = trainer.sample(4000)
    index = trainer.env.terminating_index(fresh.terminating_states)
    assert chi_square_p(torch.bincount(index, minlength=len(p)), p) > 1e-3


@pytest.mark.cuda
def test_it_trains_on_cuda(tmp_path):
    config = grid(device="cuda", replay="terminal")
    trained(config, 5).save(tmp_path / "checkpoint")
    restored = Trainer(config)
    restored.load(tmp_path / "checkpoint")
    assert restored.steps_done == 5
    assert restored.loss.log_z.value.device.type == "cuda"


@pytest.mark.slow
def test_a_walk_on_the_line_learns_the_exact_log_z():
    trainer = trained(LineConfig(), 200)
    exact = trainer.env.true_log_z
    assert trainer.log_z == pytest.approx(exact, rel=0.05)
    row = trainer.measure()
    assert row["modes_found"] == 2
    assert row["log_z_gap"] == pytest.approx(trainer.log_z - exact)
    assert trainer.rb[:]["state"].dtype == trainer.rb[:]["action"].dtype == torch.float32


# Per step. Trajectories to terminating states are sampled backward.
LIMITS = {"trajectories": 695, "terminal": 805}


@pytest.mark.parametrize("replay", LIMITS)
def test_a_step_makes_few_calls(replay):
    trainer = Trainer(TFBind8Config(seed=1, replay=replay))
    for _ in range(30):  # until nothing is set up any more
        trainer.step()
    assert 100 < calls_of(trainer.step) <= LIMITS[replay]
