"""A training rank and its manager, in threads."""

from contextlib import suppress
from dataclasses import asdict, replace
from shutil import copytree
from typing import get_args

import pytest
import torch
from factories import assert_equal
from remote.remote_runs import threads
from training.session.distributed_runs import assert_same_account
from training.training_runs import DNA, WARM_GRID, changed, grid

from gfn_rb.buffers import MergedReplayBuffer
from gfn_rb.checkpoint import load_state
from gfn_rb.errors import (
    ArgumentError,
    KeyMismatchError,
    SecretError,
    TransportClosedError,
    TransportTimeoutError,
    WorkerError,
)
from gfn_rb.remote.ranks import assign_roles
from gfn_rb.training import FeedOptions, LineConfig, ManagersOptions, SearchOptions
from gfn_rb.training.options import SendName
from gfn_rb.training.session.distributed import check_journals, run_with_threads
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.joining import Star
from gfn_rb.training.session.rank_hooks import (
    PERCENTILES,
    ManagerHooks,
    longest_silence,
    make_manager,
    worker_silence,
)
from gfn_rb.training.trainer import Hooks, Trainer
from gfn_rb.transports import LocalTransport

STEPS = 6
CONFIG = grid(managers=ManagersOptions(1), feed=FeedOptions("top"), capacity=200, patience=10.0)
AWAITED = ManagersOptions(1, "awaited")


def roles_of(size):
    """Workers, and a manager as the last rank."""
    return assign_roles(size, 1)


class RecordingHooks(ManagerHooks):
    """Keeps what was fed at each step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.fed = []

    def store(self, rb, items):
        self.fed.append(super().store(rb, items))
        return self.fed[-1]


class Runs:
    """Workers that train one after the other, and their manager, which is the last rank."""

    def __init__(self, config, path, size=2):
        group, self.roles = LocalTransport.group(size, timeout=10.0), roles_of(size)
        self.manager = make_manager(config, group[-1], self.roles, RunFolder(path, size - 1))
        self.hooks = [RecordingHooks(config, each, self.roles) for each in group[:-1]]
        with threads(self.manager.run):
            self.trainers = [
                Trainer(config, stream=i, hooks=Hooks(each.replayed, each.store))
                for i, each in enumerate(self.hooks)
            ]
            for _ in range(STEPS):
                for trainer in self.trainers:
                    trainer.step()
            for hooks in self.hooks:
                hooks.worker.close()

    @property
    def sent(self):
        return [asdict(each.worker.statistics) for each in self.hooks]

    @property
    def received(self):
        senders = self.manager.metadata()["senders"]
        return [senders[str(rank)] for rank in self.roles.workers]


def objects(rb):
    """The terminating states that a buffer of trajectories holds."""
    return set(ends(rb[:]))


def ends(found):
    last = found["length"] - 1
    return [tuple(state[i].tolist()) for state, i in zip(found["state"], last, strict=True)]


def test_a_manager_keeps_what_all_workers_found_and_feeds_each_what_others_did(tmp_path):
    runs = Runs(CONFIG, tmp_path, size=3)
    for sent, received in zip(runs.sent, runs.received, strict=True):
        assert sent["offered"] == sent["sent"] == 8 * STEPS
        assert_same_account(sent, received)
    own = [objects(trainer.rb) for trainer in runs.trainers]
    assert objects(runs.manager.buffer) == set.union(*own)
    assert len(runs.manager.buffer) == len(set.union(*own))
    fed = [hooks.worker.subscription.buffer for hooks in runs.hooks]
    for i, trainer in enumerate(runs.trainers):
        assert isinstance(trainer.replayed, MergedReplayBuffer)
        assert trainer.replayed[0] is trainer.rb
        assert trainer.replayed[1] is fed[i]
        assert objects(fed[i])
        assert objects(fed[i]) <= own[1 - i]
    drawn = runs.trainers[0].replayed.sample(500)
    assert set(drawn["buffer_id"].tolist()) == {0, 1}


@pytest.mark.parametrize("send", ["awaited", "deferred"])
def test_each_item_that_is_fed_is_learnt_from_once_when_it_comes(send, tmp_path):
    config = replace(CONFIG, managers=ManagersOptions(1, send), feed=FeedOptions("top", 5))
    runs = Runs(config, tmp_path, size=3)
    for i, hooks in enumerate(runs.hooks):
        came = [[] if fed is None else ends(fed) for fed in hooks.fed]
        assert 0 < max(map(len, came)) <= 5
        learnt = [x for step in came for x in step]
        fed = objects(hooks.worker.subscription.buffer)
        assert len(learnt) == len(set(learnt))
        # The answer to the last batch comes when training is over, unless it was waited for.
        assert set(learnt) == fed if send == "awaited" else len(fed - set(learnt)) <= 5
        theirs = runs.trainers[1 - i].rb[:]
        log_reward = dict(zip(ends(theirs), theirs["log_reward"].tolist(), strict=True))
        for fed in hooks.fed:
            expected = fed is None or [log_reward[end] for end in ends(fed)]
            assert fed is None or fed["log_reward"].tolist() == expected


def test_what_is_fed_is_only_replayed_where_gradients_are_averaged(tmp_path):
    """Ranks would get out of step, each fed as many as it happens to be."""
    runs = Runs(replace(CONFIG, managers=AWAITED, average_gradients=True), tmp_path, size=3)
    for hooks in runs.hooks:
        assert len(hooks.worker.subscription.buffer) > 0
        assert hooks.fed == [None] * STEPS


@pytest.mark.parametrize(("draw", "p"), [("softmax", "mass"), ("uniform", "size")])
def test_members_are_drawn_from_as_from_one_buffer(draw, p, tmp_path):
    runs = Runs(changed(CONFIG, draw=draw), tmp_path)
    assert runs.trainers[0].replayed._shares == p


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "form"), [("rank", "narrow"), ("softmax", "rebuild")])
def test_how_rows_are_stored_and_sent_changes_nothing(draw, form, tmp_path_factory):
    config, runs = changed(CONFIG, draw=draw, feed=FeedOptions("newest"), managers=AWAITED), []
    for compact in ("none", form):
        folder = tmp_path_factory.mktemp(compact)
        runs.append(Runs(replace(config, compact=compact), folder, 3))
    plain, ours = runs
    for i in range(2):
        fed, expected = (
            [{} if fed is None else dict(sorted(fed.items())) for fed in each.hooks[i].fed]
            for each in runs
        )
        assert_equal(fed, expected)
        assert any(fed)
        assert_equal(*[dict(each.trainers[i].loss.state_dict()) for each in runs])
        assert ours.sent[i]["bytes_sent"] < plain.sent[i]["bytes_sent"]
        assert ours.sent[i]["bytes_received"] < plain.sent[i]["bytes_received"]
    assert ours.manager.buffer.storage[:]["action"].dtype is torch.int8
    assert objects(ours.manager.buffer) == objects(plain.manager.buffer)


@pytest.mark.parametrize("baseline", [name for name in PERCENTILES if name != "none"])
def test_a_baseline_leaves_out_items_that_are_worse(baseline, tmp_path):
    # Few rewards of a grid are distinct, so that the lowest of a batch is seldom below their mean.
    config = replace(DNA, managers=replace(AWAITED, baseline=baseline), capacity=4, patience=10.0)
    runs = Runs(config, tmp_path, size=3)
    filtered, offered = (sum(sent[each] for sent in runs.sent) for each in ("filtered", "offered"))
    assert 0 < filtered < offered
    for sent, received in zip(runs.sent, runs.received, strict=True):
        assert_same_account(sent, received)


@pytest.mark.parametrize("send", get_args(SendName))
def test_every_way_of_sending_accounts_for_all(send, tmp_path):
    runs = Runs(replace(CONFIG, managers=ManagersOptions(1, send, 2)), tmp_path)
    (sent,) = runs.sent
    assert sent["batches"] <= STEPS // 2
    if send != "nonblocking":
        assert sent["batches"] == STEPS // 2
        assert sent["skipped"] == 0
    assert_same_account(sent, runs.received[0])


@pytest.mark.parametrize("replay", ["trajectories", "transitions"])
def test_a_killed_manager_has_all_that_its_workers_have_saved(replay, tmp_path):
    loss = "db" if replay == "transitions" else "tb"
    config = changed(CONFIG, replay=replay, loss=loss, feed=FeedOptions())
    mine, theirs = LocalTransport.group(2, timeout=10.0)
    (tmp_path / "run").mkdir()
    manager = make_manager(config, theirs, roles_of(2), RunFolder(tmp_path / "run", 1))
    hooks, found = ManagerHooks(config, mine, roles_of(2)), set()

    def store(rb, items):
        found.update(ends(items))
        return hooks.store(rb, items)

    trainer = Trainer(config, hooks=Hooks(hooks.replayed, store, saving=hooks.saving))
    with threads(manager.run):
        for _ in range(3):
            trainer.step()
        trainer.save(tmp_path / "trainer.gfnrb")
        copytree(tmp_path / "run", tmp_path / "killed")  # as a kill would leave the files
        hooks.worker.close()
    killed = make_manager(
        config, LocalTransport.group(2)[1], roles_of(2), RunFolder(tmp_path / "killed", 1)
    )
    assert objects(killed.buffer) == found


def test_a_manager_goes_on_with_its_secret_alone(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(bytes(16))
    monkeypatch.setenv("GFN_RB_SECRET_FILE", str(secret))
    config = replace(CONFIG, managers=ManagersOptions(1, journal=True))
    first = Runs(config, tmp_path).manager
    first.buffer.journal.close()

    again = config, LocalTransport.group(2)[1], roles_of(2), RunFolder(tmp_path, 1)
    with monkeypatch.context() as without:
        without.delenv("GFN_RB_SECRET_FILE")
        with pytest.raises(SecretError, match="the journal"):
            make_manager(*again)
        with pytest.raises(SecretError, match=r"checkpoint-rank1\.gfnrb"):
            load_state(tmp_path / "checkpoint-rank1.gfnrb")
    assert objects(make_manager(*again).buffer) == objects(first.buffer)


def test_a_run_whose_manager_lost_its_journal_does_not_start(tmp_path):
    runs = Runs(CONFIG, tmp_path)
    runs.manager.save()
    runs.manager.buffer.journal.close()
    folder = RunFolder(tmp_path, 1)
    check_journals([folder])
    content = bytearray(folder.journal.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    for change, why in (
        (lambda: folder.journal.write_bytes(content), "is no sound journal"),
        (folder.journal.unlink, "is missing, which .*checkpoint-rank1.gfnrb belongs to"),
    ):
        change()
        with pytest.raises(ArgumentError, match=f"{why}.*: gfn-rb recover .*journal-rank1 --to"):
            run_with_threads(CONFIG, lambda: folder)
    folder.checkpoint.unlink()  # a run that has not begun
    check_journals([folder])
    assert not folder.journal.exists()


@pytest.mark.parametrize(
    ("patience", "is_to_stop", "why"),
    [(0.2, False, "within 0.2 s"), (60.0, True, "before this rank was to stop")],
)
def test_a_silent_manager_is_waited_for_as_long_as_patience_lasts(patience, is_to_stop, why):
    mine, _ = LocalTransport.group(2, timeout=60.0)
    config = replace(CONFIG, patience=patience)
    hooks = ManagerHooks(config, mine, roles_of(2), lambda: is_to_stop)
    with pytest.raises(TransportTimeoutError, match=f"rank 1 did not answer {why}"):
        Trainer(config, hooks=Hooks(hooks.replayed, hooks.store)).step()


@pytest.mark.parametrize(
    ("size", "send_every", "expected"),
    [(2, 1, 6), (4, 1, 18), (4, 2, 9), (2, 100, 1)],  # in batches of all its workers
)
def test_a_manager_saves_as_often_as_its_workers(size, send_every, expected, tmp_path):
    managers = ManagersOptions(1, send_every=send_every)
    config = replace(CONFIG, checkpoint_every=6, managers=managers)
    last, folder = LocalTransport.group(size)[-1], RunFolder(tmp_path, size - 1)
    assert make_manager(config, last, roles_of(size), folder)._checkpoint_every == expected


def test_ranks_that_train_have_time_to_lose_their_manager_first(tmp_path):
    for size in (4, 1000):  # whatever the number of ranks
        assert longest_silence(CONFIG, assign_roles(size, 0)) == CONFIG.patience
        assert longest_silence(CONFIG, assign_roles(size, 1)) == 2 * CONFIG.patience
    assert worker_silence(CONFIG) == 2 * CONFIG.patience


def test_a_worker_that_waits_for_other_ranks_is_not_silent_to_its_manager(tmp_path):
    config = replace(CONFIG, patience=1.0)
    roles = roles_of(3)  # ranks 0 and 1 train, and rank 2 manages
    group = LocalTransport.group(3, timeout=60.0)
    manager = make_manager(config, group[2], roles, RunFolder(tmp_path, 2))
    hooks = ManagerHooks(config, group[0], roles)
    trainer = Trainer(config, hooks=Hooks(hooks.replayed, hooks.store))
    star = Star(group[0], roles.workers, 3.5, waiting=hooks.keep_alive)
    with threads(manager.run):
        trainer.step()
        with pytest.raises(WorkerError, match=r"rank 1 is lost: it sent nothing within 3\.5 s"):
            star.gather()
        state = {rank: each.state for rank, each in manager._workers.items()}
        assert state == {0: "active", 1: "lost"}  # which was silent for 2 s
        hooks.worker.close()


def test_a_lost_manager_ends_the_run(tmp_path):
    group = LocalTransport.group(2, timeout=10.0)
    manager = make_manager(CONFIG, group[1], roles_of(2), RunFolder(tmp_path, 1))
    hooks = ManagerHooks(CONFIG, group[0], roles_of(2))
    trainer = Trainer(CONFIG, hooks=Hooks(hooks.replayed, hooks.store))
    with suppress(TransportClosedError), threads(manager.run):
        trainer.step()
        group[1].close()
    with pytest.raises(WorkerError, match="rank 1 is lost: "):
        trainer.step()


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, search=SearchOptions(1)),
        replace(CONFIG, compact="rebuild"),
        replace(WARM_GRID, managers=ManagersOptions(1)),
        LineConfig(batch_size=8, hidden=(8,), managers=ManagersOptions(1)),
    ],
)
def test_a_manager_knows_what_is_sent_before_it_comes(config, tmp_path):
    group = LocalTransport.group(2)
    manager = make_manager(config, group[1], roles_of(2), RunFolder(tmp_path, 1))
    assert len(manager.buffer) == 0
    assert manager.buffer.storage.initialized
    items = []

    def store(rb, fresh):
        items.append(fresh.exclude("log_prob", "estimator_output"))
        rb.extend(fresh)

    trainer = Trainer(config, hooks=Hooks(store=store))
    trainer.step()
    with pytest.raises(KeyMismatchError, match="missing keys"):
        manager.buffer.extend(items[0].exclude("policy_version"))
    assert (manager.buffer.extend(items[0]) >= 0).any()
