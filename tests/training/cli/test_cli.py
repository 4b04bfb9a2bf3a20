"""The command line, from its words to its exit code, and what a person reads."""

import logging
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from factories import rows, until
from torchrl import torchrl_logger
from training.session.test_run import assert_same_results

import gfn_rb
from gfn_rb.checkpoint import Journal, load_state
from gfn_rb.errors import CheckpointError
from gfn_rb.training import Trainer, page
from gfn_rb.training.cli import main
from gfn_rb.training.config import CONFIGS, flat
from gfn_rb.training.session import launch
from gfn_rb.training.session.folder import RunFolder

QUICK = ["--batch-size", "8", "--hidden", "16", "--eval-every", "5", "--checkpoint-every", "4"]
GRID = ["train", "hypergrid", "--ndim", "2", "--height", "6", *QUICK]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(autouse=True)
def _quick_reports(monkeypatch):
    """Draw no reports, which takes longer than to train."""
    monkeypatch.setattr(page, "write_report", lambda folder, _: folder.report.write_text(""))


def refusal(capsys, *words):
    """Run a command that must fail; return its exit code and its one line."""
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return code, line


def python(*words, **options):
    """Run Python in a process that finds the package, wherever it is."""
    env = {**os.environ, "PYTHONPATH": str(Path(gfn_rb.__file__).parents[1])}
    return subprocess.run([sys.executable, *words], text=True, env=env, timeout=120, **options)


def test_train_then_inspect_then_resume(capsys, tmp_path):
    assert main([*GRID, "--steps", "7", "--seed", "3", "--out", "run"]) == 0
    out, err = capsys.readouterr()
    words = "hypergrid, 7 steps of 8, seed 3", "wall time", "run/view.html", "gfn-rb resume run"
    assert [word for word in words if word not in out] == []
    assert "7/7" in err
    assert main(["inspect", "run"]) == 0
    assert main(["inspect", "run/checkpoint.gfnrb"]) == 0
    assert "effective rows drawn" in capsys.readouterr().out
    assert main(["resume", "run", "--steps", "12"]) == 0
    assert "12 steps of 8" in capsys.readouterr().out


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


def test_a_disk_that_is_full_at_the_end_is_a_failure_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "save", Mock(side_effect=CheckpointError("no space left")))
    assert main([*GRID, "--steps", "2", "--out", "run"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "gfn-rb: no space left"


TOGETHER = (  # so that each option has an effect
    "--draw softmax --draw.temperature 2.5 --draw.temperature-end 0.5 "
    "--anneal-steps 7 --teacher 0.5 --teacher.c 3.0 --teacher.alpha 0.5 --keep diverse "
    "--keep.cutoff 2.0 --loss subtb --subtb-lambda 0.8 --log-z 1.5 --regression linex "
    "--linex-alpha 0.5",
    "--draw=quantile --draw.top-fraction 0.3 --draw.top-share 0.6 --keep recent --keep.no-unique "
    "--lr-log-z 0.2 --epsilon 0.1 --epsilon-end 0.2 --lr 0.01 --lr-end 0.1 --clip-grad-norm 1.0 "
    "--temperature 1.5 --min-log-reward 0.5",
    "--draw rank --draw.k 0.1 --managers 1 --managers.send awaited --managers.send-every 2 "
    "--managers.baseline min --managers.journal --feed top --feed.quota 32 --patience 60.0 "
    "--metrics-port 9100 --metrics-address 0.0.0.0 --max-age 9 --capacity 64 --compact none",
    "--draw teacher --draw.c 3.0 --draw.alpha 0.7 --replay terminal --form prepend_append "
    "--beta 2.0 --backward learned --modes published --share-trunk --keep.no-unique",
    "--steps 1 --seed 5 --batch-size 4 --replay-ratio 0.5 --search 1 --search.back-ratio 0.25 "
    "--hidden 8 4 --device cpu --threads 1 --eval-every 3 --checkpoint-every 2 "
    "--logger csv --out run --transport local --metrics elbo correlation --metrics.samples 20 "
    "--metrics.backward 3 --offline-data known.csv --offline-share 0.5",
    "--average-gradients --gradient-sum tree --draw priority --keep top",
    "--managers node --managers.exchange-every 5.0 --managers.exchange-quota 7",
)


def test_every_option_reaches_the_configuration(monkeypatch):
    made, seen = [], set()
    monkeypatch.setattr(launch, "train", made.append)
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
                expected = value or str(not word.startswith("keep.no"))
                assert str(found[0] if isinstance(found, list) else found) == expected
        assert all(default.get(name, value) == value for name, value in given.items())
    assert made[4].out == Path("run")
    assert made[4].transport == "local"
    assert default.keys() - {"env", "format"} <= seen


def test_the_version_is_told_and_nothing_by_torchrl(capsys, monkeypatch):
    monkeypatch.setattr(torchrl_logger, "level", logging.INFO)
    notes = []
    monkeypatch.setattr(torchrl_logger, "handle", notes.append)
    main([*GRID, "--steps", "1"])
    assert notes == []
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gfn-rb {gfn_rb.__version__}\n"


def test_runs_are_compared(capsys):
    for seed in ("1", "2"):
        main([*GRID, "--steps", "5", "--seed", seed, "--out", f"run{seed}"])
    capsys.readouterr()
    assert main(["compare", "run1", "run2"]) == 0
    title, heading, row = capsys.readouterr().out.splitlines()
    assert title.startswith("hypergrid after 40 reward calls, mean ± standard deviation")
    names = "configuration seeds modes found total variation accuracy seconds"
    assert heading.split() == names.split()
    assert row.split()[:2] == ["hypergrid", "2"]
    options = ["--metrics", "spearman", "loss", "--calls", "20"]
    assert main(["compare", "run1", "run1", *options]) == 0
    out, err = capsys.readouterr()
    assert "hypergrid after 20 reward calls" in out
    assert "spearman" in out
    assert "gfn-rb: ignored run1, which repeats seed 1 of run1\n" in err
    assert refusal(capsys, "compare", "run1", "--metrics", "modes")[1].endswith("mean modes_found?")


def test_a_damaged_journal_is_recovered(capsys, tmp_path):
    rb = gfn_rb.fifo_buffer(9)
    journal = Journal(rb, "rb.journal", sync="always")
    for i in range(3):
        rb.extend(rows([i, i]))
    journal.close()
    content = bytearray(Path("rb.journal").read_bytes())
    content[content.rindex(rb[3]["x"].numpy().tobytes())] ^= 1
    Path("rb.journal").write_bytes(content)
    assert "path must name an existing journal" in refusal(capsys, "recover", "none")[1]
    assert main(["recover", "rb.journal", "--to", "new"]) == 0
    told = r"new, up to transaction 4\n.*left out +1 rows: .*a row is damaged"
    assert re.search(told, capsys.readouterr().out)
    again = gfn_rb.fifo_buffer(9)
    Journal(again, "new").close()
    assert len(again) == 5


HELP = "--help", "-h", "train --help", "train tfbind8 --help", "train tfbind8 --help-all"
REFUSED = "fly", "train", "train tfbind8 --step 5", "train tfbind8 --lr 0", "train TFBind8"
LOADED = """
import sys
from gfn_rb.training.cli import main
for words in {lines!r}:
    try:
        status = main(words.split())
    except SystemExit as end:
        status = end.code
    heavy = {{"torch", "torchrl", "bokeh", "numpy"}}
    print(status, *heavy & {{*sys.modules}}, file=sys.stderr)
"""


@pytest.mark.slow
def test_words_are_parsed_without_torch(tmp_path):
    """What it imports is seen: a command that needs torch has it."""
    lines = [*HELP, "--version", *REFUSED, "train tfbind8 --patience 5"]
    done = python("-c", LOADED.format(lines=lines), capture_output=True)
    *others, last = (e for e in done.stderr.splitlines() if not e.startswith("gfn-rb: "))
    assert others == ["0"] * (len(HELP) + 1) + ["2"] * len(REFUSED)
    assert {*last.split()} >= {"2", "torch", "numpy"}


def test_help_shows_the_main_options_and_help_all_the_others(capsys):
    shown = []
    for words in ("--help", "--help-all", "--draw softmax --help"):
        with pytest.raises(SystemExit):
            main(["train", "tfbind8", *words.split()])
        lines = capsys.readouterr().out.splitlines()
        shown.append({found[1] for line in lines if (found := re.match(r"\W (--[\w.-]+)", line))})
    main_options, every, of_softmax = shown
    assert {"--steps", "--draw", "--draw.k", "--form"} < main_options < every
    assert len(main_options) < 20 < 55 < len(every)
    assert of_softmax - main_options == {"--draw.temperature", "--draw.temperature-end"}


@pytest.mark.parametrize(
    "words",
    ["tfbind8 --steps 3 --hidden 8 4", "--steps 3 --hidden 8 4 tfbind8", "--steps 3 tfbind8 "
     "--hidden 8 4", "--out hypergrid tfbind8 --steps 3 --hidden 8 4"],
)  # fmt: skip
def test_the_environment_stands_before_or_after_its_options(words, monkeypatch):
    made = []
    monkeypatch.setattr(launch, "train", made.append)
    assert main(["train", *words.split()]) == 0
    assert (made[0].env, made[0].steps, made[0].hidden) == ("tfbind8", 3, (8, 4))


@pytest.mark.parametrize("env", CONFIGS)
def test_help_explains_every_option(env, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", env, "--help-all"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    groups = ["draw", "keep", "search", "teacher", "metrics", "managers", "feed"]
    assert re.findall(r" ([\w-]+) options\s+-{3}", out) == groups  # each has a rule of its own
    out = " ".join(out.replace("│", "").split())
    assert "--replay-ratio FLOAT Replayed items per fresh one" in out
    for option in flat(CONFIGS[env]().to_dict()).keys() - {"env", "format"}:
        name = option.replace("_", "-")
        words = rf"--{name}(, --[\w.-]+)? [^-]*?[A-Za-z][^()]*[.,;:]"
        assert re.search(words, out), option


@pytest.mark.slow
@pytest.mark.parametrize("words", ["train tfbind8 --help", "inspect run", "train box --steps 1"])
def test_output_that_nobody_reads_ends_quietly(words, tmp_path):
    RunFolder.create(CONFIGS["hypergrid"](out=tmp_path / "run"))
    reading, writing = os.pipe()
    os.close(reading)
    done = python("-m", "gfn_rb", *words.split(), stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 0
    assert not re.search(r"Traceback|Err|pipe", done.stderr), done.stderr


def test_streams_may_be_closed(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert (main(["--version"]), main(["inspect", "nothing"])) == (0, 2)
    for each in (sys.stdout, sys.stderr):
        each.close()


def test_a_missing_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tyro", None)
    monkeypatch.delitem(sys.modules, "gfn_rb.training.cli.commands", raising=False)
    line = "gfn-rb: tyro is not installed: pip install '.[train]' in a clone of gfn_rb"
    assert refusal(capsys, *GRID) == (1, line)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "bokeh", None)
    line = "gfn-rb: bokeh is not installed: pip install '.[train]' in a clone of gfn_rb"
    assert refusal(capsys, *GRID, "--out", tmp_path / "run") == (2, line)
    assert not (tmp_path / "run").exists()
    # Another missing module is no mistake of the user's.
    monkeypatch.setitem(sys.modules, "gfn_rb.training.cli.commands", None)
    with pytest.raises(ModuleNotFoundError, match=r"gfn_rb\.training\.cli\.commands"):
        main(GRID)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_says_how_to_go_on(number, code, capsys, monkeypatch):
    step = Trainer.step

    def interrupted(self):
        if self.steps_done == 6:
            signal.raise_signal(number)
        return step(self)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main([*GRID, "--steps", "12", "--out", "run"]) == code
    assert load_state(RunFolder(Path("run")).checkpoint)["steps_done"] == 7
    out, err = capsys.readouterr()
    last = "stopped after 7 steps, which are saved; continue with: gfn-rb resume run"
    assert (out, err.splitlines()[-1]) == ("", last)


def test_an_interrupt_before_training_ends_quietly(capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "__init__", Mock(side_effect=KeyboardInterrupt))
    assert refusal(capsys, *GRID) == (130, "gfn-rb: interrupted")


COLORED = """
import colorama, sys
colorama.init()  # as numba does where it formats an error
from gfn_rb.training.cli import main
sys.exit(main(["--version"]))
"""


@pytest.mark.slow
def test_a_terminal_gets_no_escape_code_at_the_end():
    ours, theirs = pty.openpty()  # mpiexec gives one to each rank, also where it writes to a file
    done = subprocess.run([sys.executable, "-c", COLORED], stdout=theirs, check=True)
    os.close(theirs)
    assert done.returncode == 0
    assert os.read(ours, 1000).decode() == f"gfn-rb {gfn_rb.__version__}\r\n"
    os.close(ours)


INTERRUPTED = """
import signal, sys

class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
from gfn_rb.training.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["tyro", "torch._C", "numpy", "tensordict", "torchrl", "tqdm"])
def test_an_interrupt_during_imports_ends_quietly(module):
    done = python("-c", INTERRUPTED, module, *GRID, "--steps", "1", capture_output=True)
    assert done.returncode == 130
    assert done.stderr in ("", "gfn-rb: interrupted\n")


@pytest.mark.slow
def test_killed_at_any_time_a_run_goes_on_as_if_it_had_not_been(tmp_path):
    """The real command, killed by SIGKILL wherever it happens to be."""
    words = [*GRID, "--steps", "60", "--out"]
    command = [sys.executable, "-m", "gfn_rb"]
    env = {**os.environ, "PYTHONPATH": str(Path(gfn_rb.__file__).parents[1])}
    child = subprocess.Popen([*command, *words, "run"], stderr=subprocess.DEVNULL, env=env)
    until((tmp_path / "run" / "checkpoint.gfnrb").exists)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert main(["resume", "run"]) == 0
    assert main([*words, "whole"]) == 0
    assert_same_results(Path("run"), Path("whole"))


def test_without_words_the_help_is_printed(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: gfn-rb COMMAND [OPTIONS]")


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize(
    ("words", "shown"),
    {
        "view --help": "PATH [PATH ...]",
        "compare --help": "--metrics STR ...",
        "inspect --help": "--export PATH",
        "resume --help": "--steps INT",
        "recover --help": "--to PATH",
        "train tfbind8 --help": "--draw {softmax,rank,",
        "train tfbind8 --help-all": "--hidden INT ...",
        "train rna_binding --help-all": "--metrics {distances,elbo,eubo,accuracy,correlation} ...",
    }.items(),
)
def test_help_is_in_words_that_people_write(words, shown, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main(words.split())
    text = capsys.readouterr().out
    for odd in ("{None}", "[[", " [...", "...]]", "(default: )", "None)", "\x1b"):
        assert odd not in text
    assert max(map(len, text.splitlines())) <= int(columns)
    assert shown in text
