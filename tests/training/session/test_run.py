import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import until
from training.training_runs import GRID, equal, grid, timeless

import gfn_rb
from gfn_rb.checkpoint import load_state
from gfn_rb.errors import ArgumentError, CheckpointCorruptError, CheckpointError
from gfn_rb.remote import ReplayBufferManager
from gfn_rb.training import ManagersOptions, Trainer, page, resume, train
from gfn_rb.training.session import RefusedError, launch, run as run_module
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics
from gfn_rb.training.session.signals import StopSignals
from gfn_rb.transports.launch import Launch


class Killed(BaseException):
    """Stands for what no code can handle."""


@pytest.fixture
def at_step(monkeypatch):
    """Have something happen once, right after a step was taken."""

    def arrange(step, action):
        original = Trainer.step

        def patched(self):
            loss = original(self)
            if self.steps_done == step:
                monkeypatch.setattr(Trainer, "step", original)
                action()
            return loss

        monkeypatch.setattr(Trainer, "step", patched)

    return arrange


def run(config, path):
    return train(replace(config, out=path))


def results(path):
    """All that must repeat: the table and the checkpoint, less their times."""
    folder = RunFolder(path)
    saved = load_state(folder.checkpoint)
    del saved["time"]
    saved["history"] = [timeless(row) for row in saved["history"]]
    return [timeless(row) for row in read_metrics(folder.metrics)], saved


def assert_same_results(one, other):
    equal(results(one), results(other))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "reference"
    run(GRID, path)
    return path


@pytest.fixture
def reference(finished, tmp_path):
    """A run of 12 steps that nothing interrupted, with its report."""
    return Path(shutil.copytree(finished, tmp_path / "reference"))


@pytest.fixture(autouse=True)
def _quick_reports(finished, monkeypatch):
    """Draw no report but that of the finished run, which is drawn before this takes effect."""
    monkeypatch.setattr(page, "write_report", lambda folder, _: folder.report.write_text(""))


def test_a_run_leaves_its_files(reference):
    names = "checkpoint.gfnrb config.json metrics.csv previous.gfnrb view.html"
    assert sorted(path.name for path in reference.iterdir()) == names.split()
    assert json.loads((reference / "config.json").read_text()) == GRID.to_dict()
    assert "Distance from policy to target" in (reference / "view.html").read_text()
    assert load_state(reference / "checkpoint.gfnrb")["steps_done"] == 12


def test_metrics_have_a_row_at_the_start_at_intervals_and_at_the_end(reference):
    rows = read_metrics(reference / "metrics.csv")
    assert [row["step"] for row in rows] == ["0", "5", "10", "12"]
    assert [row["reward_calls"] for row in rows] == ["0", "40", "80", "96"]
    assert rows[0]["loss"] == rows[0]["replay_loss"] == ""
    timed = {name.removeprefix("time_") for name in rows[0] if "time" in name}
    assert timed == {"total", "rollout", "buffer", "learning", "evaluation"}


@pytest.mark.parametrize("step", [1, 4, 6, 11, 12])
def test_a_killed_run_resumes_as_if_nothing_had_happened(step, reference, tmp_path, at_step):
    """Checkpoints are at steps 4, 8 and 12, rows at 5 and 10."""
    at_step(step, Mock(side_effect=Killed))
    with pytest.raises(Killed):
        run(GRID, tmp_path / "run")
    assert not (tmp_path / "run" / "view.html").exists()
    outcome = resume(tmp_path / "run")
    assert outcome.stopped_by is None
    assert_same_results(tmp_path / "run", reference)


def full_at(step, monkeypatch, of=Trainer):
    """Have the disk be full once so many steps are done; of a manager, at its end."""
    save = of.save

    def full(self, *path):
        if getattr(self, "steps_done", step) == step and getattr(self, "finished", True):
            raise CheckpointError("cannot write it: No space left on device")
        return save(self, *path)

    monkeypatch.setattr(of, "save", full)


def test_a_full_disk_at_the_end_ends_a_run_that_can_be_resumed(reference, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        full_at(12, patch)
        with pytest.raises(CheckpointError, match="No space left on device"):
            run(GRID, tmp_path / "run")
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", reference)


def test_a_disk_that_is_full_for_a_while_costs_nothing(reference, tmp_path, monkeypatch, caplog):
    write = run_module.write_metrics

    def full(path, rows):
        if rows[-1]["step"] == 5:
            raise OSError("No space left on device")
        write(path, rows)

    monkeypatch.setattr(run_module, "write_metrics", full)
    full_at(8, monkeypatch)
    log = Mock(**{"isatty.return_value": False, "write.side_effect": OSError})
    monkeypatch.setattr(sys, "stderr", log)
    run(GRID, tmp_path / "run")
    assert log.write.called
    assert caplog.text.count("No space left on device") == 2
    assert not [*(tmp_path / "run").glob(".*")]
    assert_same_results(tmp_path / "run", reference)


@pytest.mark.parametrize("step", [4, 7])
def test_a_full_disk_ends_one_of_several_ranks_and_a_run_that_is_stopped(
    step, tmp_path, monkeypatch, at_step
):
    full_at(step, monkeypatch)
    at_step(7, lambda: signal.raise_signal(signal.SIGTERM))
    config = replace(GRID, out=tmp_path / "run")
    stops = (lambda: False) if step == 4 else None
    with pytest.raises(CheckpointError, match="No space left"), StopSignals() as stop:
        run_module.run_training(Trainer(config), RunFolder.create(config), stop, stops=stops)


def test_a_manager_that_cannot_save_at_its_end_ends_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # of what is imported late
    full_at(0, monkeypatch, ReplayBufferManager)
    config = grid(managers=ManagersOptions(1, send="awaited"), checkpoint_every=50)
    with pytest.raises(RefusedError, match="CheckpointError: cannot write it"):
        run(config, tmp_path / "run")
    assert "cannot write it: No space left on device; continue with: gfn-rb resume" in caplog.text
    assert (tmp_path / "run" / "checkpoint.gfnrb").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint(number, reference, tmp_path, at_step):
    at_step(7, lambda: signal.raise_signal(number))
    before = signal.getsignal(number)
    outcome = run(GRID, tmp_path / "run")
    assert outcome.stopped_by == number
    assert signal.getsignal(number) is before
    assert load_state(tmp_path / "run" / "checkpoint.gfnrb")["steps_done"] == 7
    assert not (tmp_path / "run" / "view.html").exists()
    resume(tmp_path / "run")
    assert_same_results(tmp_path / "run", reference)


@pytest.mark.slow
def test_a_second_signal_acts_at_once():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_other_threads_leave_signals_alone():
    def received():
        with StopSignals() as stop:
            return stop.received

    with ThreadPoolExecutor(1) as pool:  # signal.signal raises there
        assert pool.submit(received).result() is None


def test_an_extended_run_equals_a_long_one(reference, tmp_path):
    run(grid(steps=7), tmp_path / "run")  # ends with a row at 7, which the long run does not have
    resume(tmp_path / "run", steps=12)
    assert_same_results(tmp_path / "run", reference)
    assert RunFolder(tmp_path / "run").read_config() == GRID


def test_fewer_steps_than_taken_are_refused(reference):
    before = results(reference)
    with pytest.raises(ArgumentError, match="steps must be at least the 12 taken already, got 11"):
        resume(reference, 11)
    assert RunFolder(reference).read_config() == GRID
    equal(results(reference), before)


def test_a_damaged_checkpoint_is_refused_and_left(reference):
    path = reference / "checkpoint.gfnrb"
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointCorruptError, match=r"checkpoint\.gfnrb is no sound") as refused:
        resume(reference)
    assert path.read_bytes() == damaged
    previous = reference / "previous.gfnrb"
    assert str(refused.value).endswith(f"to go on from the one before it: mv {previous} {path}")
    previous.replace(path)
    before = load_state(path)["steps_done"]
    assert 0 < before < resume(reference).trainer.steps_done == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 1}, "height must be at least 2, got 1"),
        ({"logger": "wandb"}, "logger wandb is not installed"),
    ],
)
def test_a_run_that_cannot_start_writes_nothing(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr("gfn_rb.envs.enumerable.MAX_STATES", 10_000)
    monkeypatch.setattr(run_module, "find_spec", lambda name: None if name == "wandb" else name)
    with pytest.raises(ArgumentError, match=message):
        run(grid(**options), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_restart_by_torchrun_begins_no_second_run(tmp_path, monkeypatch):
    started = Launch(0, 2, "tcp", "torchrun", "env://", restarts=1)
    monkeypatch.setattr(launch, "find_launch", lambda transport: started)
    monkeypatch.setattr(launch.distributed, "run_distributed", lambda *args: args[2]())
    with pytest.raises(ArgumentError, match="got a restart by torchrun after a failure"):
        run(GRID, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_with_trust_alone(reference, tmp_path):
    path = reference / "checkpoint.gfnrb"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    content = (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(ArgumentError, match=r"without links, got .*gfnrb: --trust follows them"):
        resume(reference, 14)
    assert (tmp_path / "elsewhere").read_bytes() == content
    assert resume(reference, 14, trust=True).row["step"] == 14
    assert load_state(tmp_path / "elsewhere")["steps_done"] == 14


def test_what_a_killed_run_left_half_written_is_removed(reference):
    names = ".report.json.0123456789abcdef.tmp", ".checkpoint.0123456789abcdef.tmp", ".thesis.tmp"
    for name in names:
        (reference / name).write_text("half")
    resume(reference)
    assert [(reference / name).exists() for name in names] == [False, False, True]


def test_a_run_that_goes_on_is_not_resumed_a_second_time(at_step, tmp_path):
    path, refused = tmp_path / "run", []

    def resume_again():
        with pytest.raises(ArgumentError, match=r"going on already, got .*run, which another"):
            resume(path)
        refused.append(True)

    at_step(3, resume_again)
    assert run(GRID, path).row["step"] == GRID.steps
    assert refused
    assert resume(path, GRID.steps + 1).row["step"] == GRID.steps + 1


@pytest.mark.parametrize(("step", "what"), [(3, "step 2 is saved"), (1, "nothing is saved")])
def test_a_second_interrupt_says_what_is_saved_and_how_to_go_on(
    step, what, at_step, tmp_path, capsys
):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_step(step, twice)
    with pytest.raises(KeyboardInterrupt):
        run(grid(steps=6, checkpoint_every=2), tmp_path / "run")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"interrupted: {what}; continue with: gfn-rb resume {tmp_path / 'run'}"


THRICE = """
import signal
from gfn_rb.training.session.signals import StopSignals

with StopSignals():
    for _ in range(3):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            print("second", flush=True)
"""


@pytest.mark.slow
def test_a_third_interrupt_ends_the_process_without_a_word():
    done = subprocess.run([sys.executable, "-c", THRICE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "second\n", "")


def test_an_interrupt_that_became_another_error_is_one():
    def twice():
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:  # as extension modules do
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(KeyboardInterrupt), StopSignals():
        twice()


LAST_LINES = ("; continue with: gfn-rb resume run", "gfn-rb: interrupted")


@pytest.mark.slow
def test_interrupts_in_quick_succession_leave_no_traceback(tmp_path):
    """Real signals to the real command, at gaps of 0 to 9 ms."""
    words = ["train", "hypergrid", "--steps", "1000000", "--checkpoint-every", "100000"]
    env = {**os.environ, "PYTHONPATH": str(Path(gfn_rb.__file__).parents[1])}
    command = [sys.executable, "-m", "gfn_rb", *words, "--out", "run"]
    for i in range(10):
        (folder := tmp_path / str(i)).mkdir()
        with (folder / "err").open("w+") as err:
            child = subprocess.Popen(command, cwd=folder, stderr=err, env=env)
            until((folder / "run" / "metrics.csv").exists)
            time.sleep(i % 5 * 0.02)
            for _ in range(3):
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGINT)
                time.sleep(i % 10 * 0.001)
            assert child.wait(60) == 130
            err.seek(0)
            said = err.read()
        assert not re.search("Traceback|Exception", said), said
        assert said.rstrip().endswith(LAST_LINES), said
