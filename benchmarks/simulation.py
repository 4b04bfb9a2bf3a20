"""Managers at a thousand ranks, from costs measured here: ``python -m benchmarks.simulation``.

    --quick        a smoke run, whose figures mean nothing
    --json PATH    also write the figures to a file
    --draw PATH    also draw them

Measured: what messages cost, as :mod:`benchmarks.message_costs` does.

Simulated: each worker makes 640 rows a second, and sends them once in an interval, each to the one
of m managers that owns it, in up to m frames; it waits for nothing, and sends nothing to a manager
that has left 8 unanswered, as ``mode="nonblocking"`` does. A manager serves frames in the order
they come, each by itself: frames that wait take less, as ``together`` beside ``waiting`` says.
Where cores are shared, all that ranks do takes turns on them. Networks take no time.

Checked: the same program on 2 to 16 ranks under mpiexec, on the cores that this machine has.

When a manager dies, its frames stay unanswered until that is noticed; then each worker sends the
others what was unanswered, and what it still holds of what the dead one owned.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks import ranks
from benchmarks.message_costs import (
    IN_FLIGHT,
    RATE,
    Costs,
    new_manager,
    new_worker,
    report,
    typical,
)
from benchmarks.records import measured as measured_now
from benchmarks.workloads import random_items
from gfn_rb.transports import MPITransport

HELD = 10_000  # rows of a worker's buffer
WORKERS, MANAGERS = (16, 64, 256, 1024, 4096), (1, 4, 16, 64)
INTERVALS = (0.1, 1.0, 10.0)  # seconds between exchanges
NOTICED = (0.1, 30.0)  # seconds: by a fault tolerant MPI; by the timeout of an answer
REAL = ((1, 1), (3, 1), (7, 1), (6, 2), (15, 1), (12, 4))  # workers and managers
REAL_INTERVALS, REAL_ROWS = (0.05, 0.01), 64  # idle seconds between exchanges of so many rows
DEATHS = ((64, 4, 1.0), (1024, 16, 10.0))  # workers, managers, seconds between exchanges


# Simulating.


@dataclass(frozen=True)
class Case:
    """What is simulated, and what came of it.

    Attributes:
        workers: how many.
        managers: how many.
        interval: seconds of work between exchanges.
        offered: rows per second that workers make.
        acknowledged: rows per second that managers answer, in the second half.
        busy: share of the time that the managers work, likewise.
        latency: seconds to the last answer to a batch, median.
        unanswered: rows that a dead manager never answers.
        skipped: rows that are sent to nobody after a death, since their owner left too many
            unanswered.
        recovery: seconds from the death until all that it had not answered, and all that workers
            hold of what it had, is answered by others.
    """

    workers: int
    managers: int
    interval: float
    offered: float
    acknowledged: float
    busy: float
    latency: float
    unanswered: int = 0
    skipped: int = 0
    recovery: float = 0.0

    @property
    def share(self) -> float:
        """Of the rows offered, those that managers answer."""
        return min(1.0, self.acknowledged / self.offered)


class Simulation:
    """Discrete events: in the order of their sends, workers send and managers serve.

    Args:
        costs: of messages.
        workers: how many.
        managers: how many.
        interval: seconds between exchanges, which need no core.
        rows: of a batch.
        cores: how many all ranks share; None for one each.
        seed: of who owns which rows, and when workers begin.
    """

    def __init__(
        self,
        costs: Costs,
        workers: int,
        managers: int,
        interval: float,
        rows: int,
        cores: int | None = None,
        seed: int = 0,
    ) -> None:
        self.costs, self.interval = costs, interval
        self.workers, self.managers, self.rows = workers, managers, rows
        self._rng = np.random.default_rng(seed)
        self._cores = None if cores is None else np.zeros(cores)
        self._free = np.zeros(managers)  # when each has served all that it was sent
        self._owns = np.full(managers, 1 / managers)  # shares of the rows
        # When each of the last frames from a worker to a manager is answered.
        self._answered = np.zeros((workers, managers, IN_FLIGHT))
        self._log: list[tuple[float, float, float, int]] = []  # sent, answered, service, rows

    def run(self, seconds: float, death: float = np.inf, notice: float = 0.0) -> Case:
        """Run for so many seconds.

        Args:
            seconds: of simulated time.
            death: when the first manager dies.
            notice: how long until workers know.
        """
        costs, recovery, lost, skipped = self.costs, 0.0, 0, 0
        starts = self._rng.random(self.workers) * self.interval
        events = [*zip(starts.tolist(), range(self.workers), strict=True), (death + notice, -1)]
        heapq.heapify(events)
        while events and (now := heapq.heappop(events))[0] < seconds:
            moment, worker = now
            if worker < 0:
                recovery = self._recover(moment, lost) - death
                continue
            moment = self._on_core(moment, costs.batch)
            after = death < moment
            moment, missed, kept = self._exchange(moment, self._answered[worker], death)
            lost, skipped = lost + missed, skipped + kept * after
            heapq.heappush(events, (moment + self.interval, worker))
        return self._case(seconds, lost, skipped, recovery)

    def _on_core(self, ready: float, duration: float) -> float:
        """Return when something is done that one core does."""
        if self._cores is None:
            return ready + duration
        core = int(self._cores.argmin())
        self._cores[core] = max(ready, self._cores[core]) + duration
        return float(self._cores[core])

    def _exchange(
        self, moment: float, answered: np.ndarray, death: float
    ) -> tuple[float, int, int]:
        """Send a batch to those that left few enough unanswered.

        Returns:
            When that is done, how many rows nobody will answer, and how many are sent to nobody.
        """
        rows = self._rng.multinomial(self.rows, self._owns)
        is_ready = answered.min(1) <= moment
        sent = np.flatnonzero(rows * is_ready)
        moment = self._on_core(moment, self.costs.worker * len(sent))
        service = self.costs.served(rows[sent], self.workers)
        if self._cores is None:
            done = np.maximum(self._free[sent], moment) + service
        else:
            ready = np.maximum(self._free[sent], moment)
            done = np.array([self._on_core(*each) for each in zip(ready, service, strict=True)])
        self._free[sent] = done
        dead = (sent == 0) & (done > death)
        answered[sent, answered[sent].argmin(1)] = np.where(dead, np.inf, done)
        lost, alive = int(rows[sent][dead].sum()), done[~dead]
        if len(alive):
            n = int(rows[sent].sum()) - lost
            self._log.append((moment, float(alive.max()), float(service.sum()), n))
        return moment, lost, int(rows[~is_ready].sum())

    def _recover(self, moment: float, lost: int) -> float:
        """Send again what the dead manager had, and return when all of it is answered."""
        others = np.arange(1, self.managers)
        self._owns = np.array([0.0, *np.full(len(others), 1 / len(others))])
        again = (lost / self.workers + HELD / self.managers) / len(others)  # rows of a frame
        service = self.workers * self.costs.served(again, self.workers)
        self._free[others] = np.maximum(self._free[others], moment) + service
        end = float(self._free[others].max())
        self._answered = np.minimum(self._answered, end)
        return end

    def _case(self, seconds: float, lost: int, skipped: int, recovery: float) -> Case:
        sent, answered, service, rows = np.array(self._log).T
        late = (answered > seconds / 2) & (answered <= seconds)
        offered = self.workers * self.rows / (self.interval + self.costs.batch)
        return Case(
            *(self.workers, self.managers, self.interval, offered),
            acknowledged=float(rows[late].sum()) / (seconds / 2),
            busy=float(service[late].sum() / (seconds / 2) / self.managers),
            latency=float(np.median((answered - sent)[late])) if late.any() else np.inf,
            unanswered=lost,
            skipped=skipped,
            recovery=recovery,
        )


# Checking.


def real_rank(workers: int, managers: int, interval: float, seconds: float) -> None:
    """Do the part of one rank of a real run, and print what the workers counted."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    torch.manual_seed(comm.Get_rank())
    rates: list[float] = []
    with MPITransport(comm) as transport:
        managing = [*range(workers, workers + managers)]
        if transport.rank in managing:
            new_manager(transport, managing).run()
        else:
            with new_worker(transport, managing) as worker:
                start = time.perf_counter()
                while time.perf_counter() - start < seconds:
                    time.sleep(interval)
                    worker.extend(random_items(REAL_ROWS))
                counted = worker.statistics
                answered = counted.stored + counted.rejected + counted.duplicates
                rates.append(answered / (time.perf_counter() - start))
    everybody = comm.gather(rates)
    if everybody is not None:
        print(json.dumps(sum(sum(each) for each in everybody)))


def check(costs: Costs, quick: bool) -> list[dict[str, float]]:
    """Compare real runs with what the simulation says of them, print that and return it."""
    cores = len(os.sched_getaffinity(0))
    print(f"\n{cores} cores shared: ranks, managers, ms of work: rows/s measured, simulated, ratio")
    found = []
    for (workers, managers), interval in product(REAL[:1] if quick else REAL, REAL_INTERVALS):
        words = [workers, managers, interval, 1 if quick else 4]
        line = ["-m", "benchmarks.simulation", "--real", *map(str, words)]
        command = ranks.command(workers + managers, line)
        out = subprocess.run(
            command, env=ranks.environment(), check=True, capture_output=True, text=True
        )
        real = float(out.stdout.split()[-1])
        shared = Simulation(costs, workers, managers, interval, REAL_ROWS, cores)
        simulated = shared.run(4.0).acknowledged
        case = {"ranks": workers + managers, "managers": managers, "interval": interval}
        found.append({**case, "real": real, "simulated": simulated, "ratio": simulated / real})
        print(
            f"{workers + managers:>5} {managers:>3} {1e3 * interval:>4.0f}: {real:>8,.0f} "
            f"{simulated:>8,.0f} {simulated / real:>6.2f}",
            flush=True,
        )
    print(f"mean ratio {mean(each['ratio'] for each in found):.2f}")
    return found


# Reporting.


def grid(costs: Costs, quick: bool) -> list[Case]:
    """Simulate all numbers of workers and managers at all intervals."""
    workers, managers = (WORKERS[:1], MANAGERS[:2]) if quick else (WORKERS, MANAGERS)
    found = [
        Simulation(costs, w, m, interval, round(RATE * interval)).run(30 * interval)
        for interval, m, w in product(INTERVALS, managers, workers)
    ]
    print("\nshare of the rows that managers answer, by workers; intervals and managers below")
    print(" " * 14 + "".join(f"{w:>8,}" for w in workers))
    for interval, m in product(INTERVALS, managers):
        row = [case.share for case in found if (case.interval, case.managers) == (interval, m)]
        print(f"{interval:>5} s {m:>4}   " + "".join(f"{share:>8.0%}" for share in row))
    return found


def deaths(costs: Costs) -> list[Case]:
    """Simulate the death of one manager, noticed soon and late."""
    print(
        "\none manager dies: workers, managers, interval, noticed after; rows unanswered, skipped"
    )
    found = []
    for (w, m, interval), notice in product(DEATHS, NOTICED):
        simulation = Simulation(costs, w, m, interval, round(RATE * interval))
        death = 20.5 * interval
        case = simulation.run(death + 2 * notice + 5 * interval, death, notice)
        found.append(case)
        print(
            f"{w:>6,} {m:>3} {interval:>5} {notice:>5}: {case.unanswered:>9,} {case.skipped:>9,} "
            f"{case.recovery:>6.1f} s"
        )
    return found


def draw(path: Path, cases: Sequence[Case], costs: Costs) -> None:
    """Draw the rows answered per second against the workers, a panel per interval."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(INTERVALS), sharey=True)
    for panel, interval in zip(panels, INTERVALS, strict=True):
        for m in sorted({case.managers for case in cases}):
            line = [c for c in cases if (c.interval, c.managers) == (interval, m)]
            label = f"{m} manager{'s' * (m > 1)}"
            panel.plot([c.workers for c in line], [c.share for c in line], "o-", label=label)
        panel.set(xscale="log", xlabel="workers", ylim=(0, 1.05))
        panel.set_title(f"{RATE * interval:,.0f} rows every {interval:g} s")
        panel.set_xticks(WORKERS, [f"{w:,}" for w in WORKERS], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of the rows answered")
    panels[0].legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate and check.

    Args:
        arguments: the command line, ``sys.argv`` if None.
    """
    parser = argparse.ArgumentParser(description="Managers at a thousand ranks.")
    parser.add_argument("--quick", action="store_true", help="smoke run: the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--draw", type=Path, metavar="PATH", help="also draw them here")
    parser.add_argument("--real", nargs=4, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.real is not None:
        workers, managers, interval, seconds = options.real
        real_rank(int(workers), int(managers), interval, seconds)
        return 0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    costs = typical(options.quick)
    carried = report(costs)
    checked = check(costs, options.quick)
    cases, dead = grid(costs, options.quick), deaths(costs)
    if options.draw:
        draw(options.draw, cases, costs)
    if options.json:
        found = {
            "measured": measured_now("simulation"),
            "quick": options.quick,
            "costs": asdict(costs),
            "carried": carried,
        }
        found |= {"check": checked, "cases": [*map(asdict, cases)], "deaths": [*map(asdict, dead)]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
