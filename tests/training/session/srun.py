"""Stands in for srun without PMI: runs gfn-rb as the tasks of a step on this machine.

It is told how many by SLURM_NTASKS, as srun is in a batch script. Where its first word is a file,
that tells the command lines to run one after the other, and those of single ranks.
"""

import json
import os
import sys
from pathlib import Path

from gfn_rb.training.cli import main

SIZE = int(os.environ["SLURM_NTASKS"])


def run(rank, program, *words):
    os.environ |= {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(SIZE),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_PROCID": str(rank),
    }
    if program == "gfn-rb":
        return main(words)
    codes = [
        main(each[rank] if isinstance(each[0], list) else each)
        for each in json.loads(Path(program).read_text())
    ]
    Path(f"{program}.{rank}").write_text(json.dumps(codes))
    return codes[-1]


def ended(rank):
    code = 1
    try:
        code = run(rank, *sys.argv[1:])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Forked after the imports, which take longer than the runs.
    tasks = [os.fork() or ended(rank) for rank in range(SIZE)]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) for task in tasks))
