"""Runs that torchrun and srun start, as docs/cluster.md says."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from training.session.distributed_runs import assert_same_account, read_json, rows, said
from transports.ranks import environment

pytestmark = pytest.mark.slow

SRUN = str(Path(__file__).with_name("srun.py"))
DOCS = Path(__file__).parents[3] / "docs" / "cluster.md"
BLOCKS = re.findall(r"^```bash\n(.*?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL)
QUICK = [*("--batch-size", "8", "--hidden", "16", "--eval-every", "3"),
         *("--checkpoint-every", "2", "--patience", "60")]  # fmt: skip
STEPS = 6
SECONDS = 120  # then it hangs


def documented(word):
    """The script that holds a word, of few steps."""
    (block,) = (block for block in BLOCKS if word in block)
    assert "--steps 1000 " in block
    return block.replace("--steps 1000 ", f"--steps {STEPS} {' '.join(QUICK)} ")


def job_id():
    """A job that leads to a port which is free."""
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as place:
            if place.connect_ex(("localhost", 15_000 + job % 10_000)):
                return str(job)
    raise AssertionError("no port is free")


def finished(command, place, **variables):
    done = subprocess.run(
        command, cwd=place, env={**environment(), **variables}, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.replace("\r", "\n").splitlines()


def in_slurm(place, n_tasks):
    """What Slurm tells a batch script, where srun is ours and gfn-rb is not looked for."""
    (place / "bin").mkdir(exist_ok=True)
    srun = place / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(SRUN)} "$@"\n')
    srun.chmod(0o755)
    return {
        "PATH": f"{srun.parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": job_id(),
        "SLURM_NTASKS": str(n_tasks),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_PROCID": "0",
    }


def assert_one_run(folder, manager, workers):
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    report = read_json(folder / "report.json")
    assert report["managers"] == [manager]
    assert sorted(report["ranks"]) == [str(rank) for rank in workers]
    senders = read_json(folder / f"manager-rank{manager}.json")["senders"]
    for rank in workers:
        counters = report["ranks"][str(rank)]["counters"]
        assert_same_account(counters, senders[str(rank)])
        assert rows(folder, rank)[-1]["step"] == str(STEPS)


def test_torchrun_starts_one_run(tmp_path):
    script = documented("torchrun --nproc-per-node 3").replace("-node 3", "-node 2")
    words = shlex.split(script.replace("torchrun", "-m torch.distributed.run"))
    code, out, lines = finished([sys.executable, *words], tmp_path)
    assert code == 0, lines
    folder = tmp_path / "runs" / "three"
    assert_one_run(folder, 1, [0])
    assert f"torchrun --nproc-per-node 2 -m gfn_rb resume {folder} --steps {2 * STEPS}" in out


def test_a_batch_script_starts_one_run(tmp_path):
    variables = in_slurm(tmp_path, 3)
    script = documented("#SBATCH").replace("--managers 2", "--managers 1")
    code, out, lines = finished(["bash", "-c", script], tmp_path, **variables)
    assert code == 0, lines
    folder = tmp_path / "runs" / variables["SLURM_JOB_ID"]
    assert_one_run(folder, 2, [0, 1])
    assert f"srun -n 3 gfn-rb resume {folder} --steps {2 * STEPS}" in out


def test_what_srun_starts_is_refused_by_name_on_all_ranks(tmp_path):
    words = ["gfn-rb", "train", "tfbind8", *QUICK, "--out", "run", "--managers", "2"]
    code, out, lines = finished(["srun", *words], tmp_path, **in_slurm(tmp_path, 2))
    assert (code, out) == (2, "")
    assert len(said(lines)) == 1, lines
    (why,) = said(lines)
    assert why.startswith("gfn-rb: rank 0: managers must be at least 0 and fewer than the ranks")
    assert not (tmp_path / "run").exists()
