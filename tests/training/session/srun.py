"""Stands in for srun without PMI: runs gfn-rb as the tasks of a step on this machine.

It is told how many by SLURM_NTASKS, as srun is in a batch script.
"""

import os
import sys

from gfn_rb.training.cli import main

SIZE = int(os.environ["SLURM_NTASKS"])


def run(rank, _, *words):
    os.environ |= {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(SIZE),
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_PROCID": str(rank),
    }
    return main(words)


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
