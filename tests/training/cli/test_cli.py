"""The command line, from its words to its exit code, and what a person reads."""

import inspect
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl import torchrl_logger
from training.training_runs import timeless

import gfn_rb
from gfn_rb.checkpoint import Journal, load_state
from gfn_rb.errors import CheckpointError
from gfn_rb.training import DRAW, Trainer, cli, report
from gfn_rb.training.cli import commands, main
from gfn_rb.training.config import CONFIGS, flat
from gfn_rb.training.session.folder import RunFolder
from gfn_rb.training.session.reading import read_metrics

QUICK = ["--batch-size", "8", "--hidden", "16", "--eval-every", "5", "--checkpoint-every", "4"]
GRID = ["train", "hypergrid", "--ndim", "2", "--height", "6", *QUICK]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def _quick_reports(request, monkeypatch):
    """Draw no reports, which takes longer than to train, but the first where they are looked at."""
    original = report.write_report
    to_draw = [True] if "report.png" in inspect.getsource(request.function) else []

    def write_report(path, data):
        if to_draw and to_draw.pop():
            original(path, data)
        else:
            path.write_text("")

    monkeypatch.setattr(report, "write_report", write_report)


def refusal(capsys, *words):
    """Run a command that must fail; return its exit code and its one line."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return code, line


def results(path):
    folder = RunFolder(Path(path))
    weights = load_state(folder.checkpoint)["policies"]
    return (
        [timeless(row) for row in read_metrics(folder.metrics)],
        {name: value.tolist() for name, value in weights.items()},
    )


def test_train_then_inspect_then_resume(capsys, tmp_path):
    assert main([*GRID, "--steps", "7", "--seed", "3", "--out", "run"]) == 0
    out, err = capsys.readouterr()
    for words in (
        "hypergrid, 7 steps of 8, seed 3", "total variation", "(exact)", "log Z", "true 2.451",
        "modes found", "of 4", "of 56", "wall time", "rollout", "buffer", "learning", "evaluation",
        "run/report.png", "gfn-rb resume run",
    ):  # fmt: skip
        assert words in out
    assert "7/7" in err
    assert main(["inspect", "run"]) == 0
    assert main(["inspect", "run/checkpoint.gfnrb"]) == 0
    assert "RewardPrioritizedWriter" in capsys.readouterr().out
    assert main(["resume", "run", "--steps", "12"]) == 0
    assert "12 steps of 8" in capsys.readouterr().out
    assert main([*GRID, "--steps", "12", "--seed", "3", "--out", "whole"]) == 0
    assert results("run") == results("whole")


def test_a_run_with_a_secret_goes_on_with_it_alone(capsys, monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    monkeypatch.setenv("GFN_RB_SECRET_FILE", str(secret))
    assert main([*GRID, "--steps", "7", "--out", "run"]) == 2
    assert "of mode 0644: chmod 600" in capsys.readouterr().err
    secret.chmod(0o600)
    assert main([*GRID, "--steps", "7", "--out", "run"]) == 0
    assert main(["inspect", "run"]) == 0
    monkeypatch.delenv("GFN_RB_SECRET_FILE")
    for words in (["inspect", "run"], ["resume", "run", "--steps", "9"]):
        assert main(words) == 1
        assert "was made with a secret, and none is given" in capsys.readouterr().err
    monkeypatch.setenv("GFN_RB_SECRET_FILE", str(secret))
    assert main(["resume", "run", "--steps", "9"]) == 0
    assert "9 steps of 8" in capsys.readouterr().out
    for path in Path("run").iterdir():
        assert bytes(range(32)) not in path.read_bytes()


def test_what_is_not_written_at_the_end_is_a_failure_beside_the_results(capsys, monkeypatch):
    def full(self, path):
        raise CheckpointError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(Trainer, "save", full)
    assert main([*GRID, "--steps", "2", "--out", "run"]) == 1
    out, err = capsys.readouterr()
    assert "hypergrid, 2 steps of 8" in out
    assert "gfn-rb: not written at the end: CheckpointError: cannot write run/checkpoint" in err
    assert [row["step"] for row in read_metrics(Path("run/metrics.csv"))] == ["0", "2"]


TOGETHER = (  # so that each option has an effect
    "--draw softmax --draw.temperature 2.5 --draw.temperature-end 0.5 --anneal exponential "
    "--anneal.steps 7 --teacher 0.5 --teacher.c 3.0 --teacher.alpha 0.5 --keep diverse "
    "--keep.cutoff 2.0 --loss subtb --subtb-lambda 0.8 --log-z 1.5 --regression linex",
    "--draw=quantile --draw.top-fraction 0.3 --draw.top-share 0.6 --keep recent --keep.no-unique "
    "--lr-log-z 0.2 --epsilon 0.1 --epsilon-end 0.2 --lr 0.01 --lr-end 0.1 --clip-grad-norm 1.0",
    "--draw rank --draw.k 0.1 --managers 1 --managers.send awaited --managers.send-every 2 "
    "--managers.baseline min --managers.journal --feed top --feed.quota 32 --patience 60.0 "
    "--max-age 9 --capacity 64 --compact none",
    "--draw teacher --draw.c 3.0 --draw.alpha 0.7 --replay terminal --form prepend_append "
    "--beta 2.0 --backward learned --share-trunk --modes published --keep.no-unique",
    "--steps 1 --seed 5 --batch-size 4 --replay-ratio 0.5 --search 1 --search.back-ratio 0.25 "
    "--workers 0 --hidden 8 4 --device cpu --threads 1 --eval-every 3 --checkpoint-every 2 "
    "--logger csv --out run --transport local --metrics elbo correlation --metrics.samples 20 "
    "--metrics.backward 3 --separated-modes 0.9 --separated-modes.cutoff 1.0",
    "--average-gradients --draw priority --keep top",
)


def test_every_option_reaches_the_configuration(monkeypatch):
    made, seen = [], set()
    monkeypatch.setattr(commands, "train", made.append)
    default = flat(CONFIGS["tfbind8"]().to_dict())
    for options in TOGETHER:
        assert main(["train", "tfbind8", *options.split()]) == 0
        made[-1].validate()
        given = flat(made[-1].to_dict())
        words = re.findall(r"--(\S+?)[ =]([^-]\S*)?", options + " ")
        for word, value in words:
            name = word.replace("no-", "").replace("-", "_")
            seen.add(name)
            if name not in ("out", "transport"):
                found = given.pop(name)
                assert str(found[0] if isinstance(found, list) else found) == (
                    value or str(not word.startswith("keep.no"))
                )
        assert all(default.get(name, value) == value for name, value in given.items())
    assert made[4].out == Path("run")
    assert made[4].transport == "local"
    assert default.keys() - {"env", "format"} <= seen


def test_options_of_other_kinds_are_refused_by_name(capsys):
    for words in (["--draw.temperature", "2"], ["--draw", "uniform", "--draw.k", "0.1"]):
        code, line = refusal(capsys, "train", "tfbind8", *words)
        assert code == 2
        assert words[-2] in line
    code, line = refusal(capsys, "train", "tfbind8", "--draw", "best")
    kinds = ", ".join(DRAW)
    assert (code, line) == (2, f"gfn-rb: draw must be one of {kinds}, got 'best'")
    assert refusal(capsys, "train", "tfbind")[1].endswith("did you mean tfbind8?")


def test_groups_have_boxes_of_their_own(capsys):
    with pytest.raises(SystemExit):
        main(["train", "hypergrid", "--draw", "softmax", "--help"])
    out = capsys.readouterr().out
    groups = ["draw", "keep", "search", "teacher", "anneal", "metrics", "separated-modes",
              "managers", "feed"]  # fmt: skip
    assert re.findall(r" ([\w-]+) options [^\w]{3}", out) == groups
    assert "--draw.temperature FLOAT" in out


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gfn-rb {gfn_rb.__version__}\n"


def test_torchrl_keeps_its_notes_to_itself(monkeypatch):
    monkeypatch.setattr(torchrl_logger, "level", logging.INFO)
    notes = []
    handler = logging.Handler()
    handler.emit = notes.append
    torchrl_logger.addHandler(handler)
    try:
        main([*GRID, "--steps", "1"])
    finally:
        torchrl_logger.removeHandler(handler)
    assert notes == []


def test_runs_are_compared(capsys, monkeypatch):
    for seed in ("1", "2"):
        main([*GRID, "--steps", "5", "--seed", seed, "--out", f"run{seed}"])
    capsys.readouterr()
    assert main(["compare", "run1", "run2"]) == 0
    title, heading, row, picture = capsys.readouterr().out.splitlines()
    assert title.startswith("hypergrid after 40 reward calls, mean ± standard deviation")
    assert heading.split() == ["configuration", "seeds", "modes", "found", "total", "variation",
                               "accuracy", "seconds"]  # fmt: skip
    assert row.split()[:2] == ["hypergrid", "2"]
    assert picture == "picture  comparison.png"
    assert Path("comparison.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    options = ["--metrics", "spearman", "loss", "--calls", "20", "--out", "two.svg"]
    assert main(["compare", "run1", *options]) == 0
    out = capsys.readouterr().out
    assert "hypergrid after 20 reward calls" in out
    assert "spearman" in out
    assert "\u2500\u2500\u2500" in out
    assert Path("two.svg").exists()
    assert refusal(capsys, "compare", "run1", "run1")[0] == 2
    assert refusal(capsys, "compare", "run1", "--out", "a.doc")[0] == 2


# Mistakes.


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("--steps 0", "gfn-rb: steps must be at least 1, got 0"),
        ("--height 1", "gfn-rb: height must be at least 2, got 1"),
        ("--draw.k 0", "gfn-rb: draw.k must be positive and finite, got 0.0"),
        (
            "--ndim 20 --metrics elbo eubo",
            "gfn-rb: metrics must be among elbo for HyperGrid, got 'eubo', which takes states that "
            "can be listed",
        ),
        (
            "--search.back-ratio 0.25",
            "gfn-rb: search.back_ratio has no effect unless search is given, got 0.25",
        ),
        (
            "--patience 5",
            "gfn-rb: patience has no effect unless several ranks are started, got 5.0 with 1",
        ),
    ],
)
def test_a_bad_value_is_named(options, line, capsys, tmp_path):
    assert refusal(capsys, *GRID, *options.split()) == (2, line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "tfbind8", "--loss", "mse"], ["--loss", "mse", "subtb"]),
        (["train", "tfbind8", "--stesp", "3"], ["--stesp", "--steps"]),
        (["train", "tfbind8", "--ndim", "3"], ["--ndim"]),
        (["train", "tfbind8", "--steps", "many"], ["--steps", "many"]),
        (["train", "tfbind8", "--form", "middle"], ["--form", "middle", "append"]),
        (["train"], ["tfbind8", "hypergrid"]),
        (["fly"], ["fly", "train", "resume", "inspect", "compare"]),
        ([], ["train", "resume", "inspect"]),
        (["resume"], ["PATH"]),
    ],
)
def test_words_that_make_no_sense_are_named(words, named, capsys, tmp_path):
    code, err = refusal(capsys, *words)
    assert code == 2
    assert [word for word in named if word not in err] == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_journal_is_recovered(capsys, tmp_path):
    rb = gfn_rb.fifo_buffer(9)
    journal = Journal(rb, "rb.journal", sync="always")
    for i in range(3):
        rb.extend(TensorDict({"state": torch.arange(2), "log_reward": torch.ones(2) * i}, [2]))
    journal.close()
    content = bytearray((tmp_path / "rb.journal").read_bytes())
    content[-1000] ^= 1  # in the last record, which was synced
    (tmp_path / "rb.journal").write_bytes(content)
    assert "path must name a journal" in refusal(capsys, "recover", "none")[1]
    assert main(["recover", "rb.journal", "--to", "new"]) == 0
    assert re.search(
        r"new, up to record \d\n.*left out +\d+ bytes: .*record", capsys.readouterr().out
    )
    again = gfn_rb.fifo_buffer(9)
    Journal(again, "new").close()
    assert 0 < len(again) < 6
    assert bytes(content) == (tmp_path / "rb.journal").read_bytes()


@pytest.mark.parametrize("env", CONFIGS)
def test_help_explains_every_option(env, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", env, "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "--replay-ratio FLOAT Replayed items per fresh one" in out
    for option in flat(CONFIGS[env]().to_dict()).keys() - {"env", "format"}:
        name = option.replace("_", "-")
        words = rf"--{name}(, --[\w.-]+)? [^-]*?[A-Za-z][^()]*[.,;:]"
        assert re.search(words, out), option


def test_what_cannot_be_resumed_is_named(capsys, tmp_path):
    code, line = refusal(capsys, "resume", "nothing")
    assert (code, line) == (
        2, "gfn-rb: run must be a folder that holds a config.json, got nothing",
    )  # fmt: skip
    main([*GRID, "--steps", "4", "--out", "run"])
    capsys.readouterr()
    assert refusal(capsys, "resume", "run", "--steps", "2")[1].startswith(
        "gfn-rb: steps must be at least the 4 taken already, got 2"
    )
    path = tmp_path / "run" / "checkpoint.gfnrb"
    path.write_bytes(path.read_bytes()[:-100])
    code, line = refusal(capsys, "resume", "run")
    assert code == 1
    assert line.startswith(f"gfn-rb: {Path.cwd()}/run/checkpoint.gfnrb is no sound checkpoint")
    assert refusal(capsys, "inspect", "run/checkpoint.gfnrb")[0] == 1
    assert refusal(capsys, "inspect", "elsewhere")[0] == 2


def test_a_place_that_cannot_be_written_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, line = refusal(capsys, *GRID, "--out", "file/run")
    assert code == 1
    assert "file" in line


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train tfbind8 --help", "watch run", "train tfbind8 --steps 1"])
def test_output_that_nobody_reads_ends_quietly(words, tmp_path):
    RunFolder.create(CONFIGS["hypergrid"](out=tmp_path / "run"))
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gfn_rb", *words.split()]
    path = {**os.environ, "PYTHONPATH": str(Path(gfn_rb.__file__).parents[1])}
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=path, timeout=120
    )
    os.close(writing)
    assert done.returncode == 0
    assert not re.search(r"Traceback|Err|pipe", done.stderr), done.stderr


@pytest.mark.parametrize("name", ["tyro", "rich"])
def test_a_missing_extra_is_named(name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    for module in ("commands", "tables"):
        monkeypatch.delitem(sys.modules, f"gfn_rb.training.cli.{module}", raising=False)
    assert refusal(capsys, *GRID) == (
        1, f"gfn-rb: {name} is not installed: pip install '.[train]' in a clone of gfn_rb",
    )  # fmt: skip


def test_another_missing_module_is_no_mistake_of_the_users(monkeypatch):
    monkeypatch.setitem(sys.modules, "gfn_rb.training.cli.commands", None)
    with pytest.raises(ModuleNotFoundError, match=r"gfn_rb\.training\.cli\.commands"):
        main(GRID)


# Stopping.


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_says_how_to_go_on(number, code, capsys, monkeypatch):
    original = Trainer.step

    def patched(self):
        if self.steps_done == 6:
            signal.raise_signal(number)
        return original(self)

    monkeypatch.setattr(Trainer, "step", patched)
    assert main([*GRID, "--steps", "12", "--out", "run"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        "stopped after 7 steps, which are saved; continue with: gfn-rb resume run"
    )
    monkeypatch.setattr(Trainer, "step", original)
    assert main(["resume", "run"]) == 0
    assert main([*GRID, "--steps", "12", "--out", "whole"]) == 0
    assert results("run") == results("whole")


def test_an_interrupt_before_training_ends_quietly(capsys, monkeypatch):
    def interrupted(self, config):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "__init__", interrupted)
    assert refusal(capsys, *GRID) == (130, "gfn-rb: interrupted")


@pytest.mark.slow
def test_killed_at_any_time_a_run_goes_on_as_if_it_had_not_been(tmp_path):
    """The real command, killed by SIGKILL wherever it happens to be."""
    words = [*GRID, "--steps", "60", "--out"]
    command = [
        sys.executable,
        "-c",
        "import sys; from gfn_rb.training.cli import main; sys.exit(main())",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(gfn_rb.__file__).parents[1])}
    child = subprocess.Popen([*command, *words, "run"], stderr=subprocess.DEVNULL, env=env)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoint.gfnrb").exists():
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert main(["resume", "run"]) == 0
    assert main([*words, "whole"]) == 0
    assert results("run") == results("whole")


def test_main_reads_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gfn-rb", "inspect", "nothing"])
    assert cli.main() == 2
    assert "got nothing" in capsys.readouterr().err
