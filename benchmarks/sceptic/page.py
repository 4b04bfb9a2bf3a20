"""The tables and the picture of the six tasks, from stored results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.published.page import panels_of, print_panels
from benchmarks.published.rows import Row
from benchmarks.published.runs import Result, ages, load, spread, typical
from benchmarks.sceptic.loss_guided import LOSS_GUIDED
from benchmarks.sceptic.questions import CHOSEN_ON, DISTILLED, LOOKS, QUESTIONS, SWITCHED
from benchmarks.sceptic.rows import ARMS, CALLS, FROZEN
from benchmarks.sceptic.tasks import TASKS

PICTURE = "published_sceptic.png"
PAID = ("defaults", "no_replay", "equal_steps", "equal_time")
COLORS = ("#0072B2", "#767676", "#000000", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7")


def table_of(part: str, folder: Path) -> str:
    """Return a table of the page, empty if nothing is stored.

    Args:
        part: "replay", where it pays, "ways", everything, "costs", Linex beside the square, or a
            table of ``questions`` or ``loss_guided``: "small", "unequal", "distilled", "guided".
        folder: where the results lie.
    """
    known = _known(folder)
    of_known: dict[str, Callable[[], list[str]]] = {
        "replay": lambda: _replay(known),
        "ways": lambda: _ways(known),
        "costs": lambda: _costs(known, folder),
    }
    if part in of_known:
        return "\n".join(of_known[part]()) if known else ""
    if part == "distilled":
        return "\n".join(_distilled(folder))
    rows = LOSS_GUIDED if part == "guided" else QUESTIONS
    start = "loss_guided" if part == "guided" else part
    return "\n".join(
        _compared([row for row in rows.values() if row.name.startswith(start)], folder)
    )


def draw(folder: Path) -> None:
    """Draw total variation against reward calls, the mean over the seeds.

    Args:
        folder: where the results lie.
    """
    known = _known(folder)
    tasks = [task for task in TASKS if (task, "defaults") in known]
    panels = panels_of(len(tasks), columns=3, size=(3.8, 2.8))
    for axes, task in zip(panels, tasks, strict=True):
        axes.set_title(TASKS[task].title.partition(" (")[0], loc="left", fontsize=9)
        for (arm, way), color in zip(ARMS.items(), COLORS, strict=True):
            if runs := known.get((task, arm)):
                calls, distance = np.array([run.fit for run in runs]).mean(0).T
                axes.plot(calls, distance, color=color, lw=1.3, label=way.title)
        axes.set_xlim(0, CALLS)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:,.0f}k" if x else "0")
    if panels:
        picture = panels[0].figure
        picture.supxlabel("reward calls", fontsize=10)
        picture.supylabel("total variation", fontsize=10)
        lines = {line.get_label(): line for axes in panels for line in axes.lines}
        picture.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=4)
        print_panels(panels, folder / PICTURE)


def _known(folder: Path) -> dict[tuple[str, str], list[Result]]:
    """Return the runs of every way that was measured."""
    return {key: found for key, row in FROZEN.items() if (found := load(folder, row))}


def _replay(known: dict[tuple[str, str], list[Result]]) -> list[str]:
    """Return the total variation with and without replay, where it pays least first."""
    rows = []
    for task in dict.fromkeys(task for task, _ in known):
        if any((task, arm) not in known for arm in PAID):
            continue
        runs = [known[task, arm] for arm in PAID]
        seeds = set.intersection(*({run.seed for run in each} for each in runs))
        runs = [[run for run in each if run.seed in seeds] for each in runs]
        distances = [[run.figures["total_variation"] for run in each] for each in runs]
        cells = [
            f"{spread(distance, 3)}; {mean(run.cpu_seconds for run in each):.0f} s"
            for distance, each in zip(distances, runs, strict=True)
        ]
        ours, most = mean(distances[0]), mean(distances[-1])
        rows.append((most / ours, f"| {task} | {' | '.join(cells)} | {len(seeds)} |"))
    titles = [ARMS[arm].title for arm in PAID]
    head = f"| task | {' | '.join(titles)} | seeds |"
    return [head, "| --- " * (2 + len(titles)) + "|", *(line for _, line in sorted(rows))]


def _ways(known: dict[tuple[str, str], list[Result]]) -> list[str]:
    """Return every figure of every way, with the age of the results."""
    titles = [figure.title for figure in FROZEN["nk", "defaults"].figures]
    head = f"| task | way | {' | '.join(titles)} | CPU s | seeds |"
    lines = [head, "| --- " * (4 + len(titles)) + "|"]
    for task, about in TASKS.items():
        title = about.title
        for arm, way in ARMS.items():
            if reason := way.not_measured.get(task):
                lines.append(f"| {title} | {way.title} | not measured: {reason} {'| ' * 4}|")
            elif runs := known.get((task, arm)):
                row = FROZEN[task, arm]
                cells = [
                    typical(figure, runs) if figure.key in runs[0].figures else ""
                    for figure in row.figures
                ]
                cells += [f"{mean(run.cpu_seconds for run in runs):.0f}", str(len(runs))]
                lines.append(f"| {title} | {way.title} | {' | '.join(cells)} |")
            else:
                continue
            title = ""
    runs = [run for each in known.values() for run in each]
    loads = [run.measured["load"] for run in runs if run.measured]
    lines += [
        "",
        f"{CALLS:,} reward calls where nothing else is said. The load of the machine of 2 cores "
        f"was {min(loads):.0f} to {max(loads):.0f}, which makes CPU seconds longer.",
        "",
    ]
    return [*lines, *dict.fromkeys(age for each in known.values() for age in ages(each))]


def _costs(known: dict[tuple[str, str], list[Result]], folder: Path) -> list[str]:
    """Return the total variation with Linex, the square, and one after the other."""
    titles = ["Linex", "the square", "Linex, then the square"]
    lines = [f"| task | {' | '.join(titles)} | seeds | |", "| --- " * 6 + "|"]
    for task in TASKS:
        runs = [known.get((task, "defaults"), []), known.get((task, "square"), [])]
        runs.append(load(folder, SWITCHED[task]))
        of = [{run.seed: run.figures["total_variation"] for run in each} for each in runs if each]
        if len(of) < len(runs):
            continue
        seeds = sorted(set.intersection(*({*each} for each in of)))
        cells = (spread([each[seed] for seed in seeds], 3) for each in of)
        use = "chosen on" if task in CHOSEN_ON else "reported on"
        lines.append(f"| {task} | {' | '.join(cells)} | {len(seeds)} | {use} |")
    return lines


def _compared(rows: Sequence[Row], folder: Path) -> list[str]:
    """Return the figures of some rows, with the age of their results."""
    titles = [figure.title for figure in rows[0].figures]
    lines = [f"| | {' | '.join(titles)} | CPU s | seeds |", "| --- " * (3 + len(titles)) + "|"]
    found = {row: runs for row in rows if (runs := load(folder, row))}
    for row, runs in found.items():
        cells = [
            typical(figure, runs) if figure.key in runs[0].figures else "" for figure in row.figures
        ]
        cells += [f"{mean(run.cpu_seconds for run in runs):.0f}", str(len(runs))]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    old = dict.fromkeys(age for runs in found.values() for age in ages(runs))
    return [*lines, "", *old] if found else []


def _distilled(folder: Path) -> list[str]:
    """Return the total variation before and after steps on the buffer alone."""
    found = {task: runs for task, row in DISTILLED.items() if (runs := load(folder, row))}
    keys = ["total_variation", *(f"total_variation_after_{n}" for n in LOOKS)]
    titles = ["before", *(f"{n} steps" for n in LOOKS), "log Z off, before", "after"]
    lines = [f"| task | {' | '.join(titles)} | seeds | |", "| --- " * (3 + len(titles)) + "|"]
    for task, runs in found.items():
        cells = [spread([run.figures[key] for run in runs], 3) for key in keys]
        for key in ("log_z_gap", f"log_z_gap_after_{LOOKS[-1]}"):
            cells.append(f"{mean(run.figures[key] for run in runs):.2f}")
        use = "chosen on" if task in CHOSEN_ON else "reported on"
        lines.append(f"| {task} | {' | '.join(cells)} | {len(runs)} | {use} |")
    old = dict.fromkeys(age for runs in found.values() for age in ages(runs))
    return [*lines, "", *old] if found else []
