"""`bench calls`: the cost of a warm call, against every competitor, over many workloads.

Each workload has a process of its own, in which the competitors take turns; large trees have three,
because where their arrays lie in memory makes more than what is measured.

Where there is a native back end, generated Python (`python`) is timed beside the floor in further
processes. Its figure is given as on the floor of the first ones: times one floor over the other.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping
from statistics import geometric_mean, median

import jax
from rich.progress import track
from rich.table import Table

import eqxjit

from ..harness import pictures
from ..harness.environment import write
from ..harness.measure import options
from ..harness.printing import met_or_missed, wide_console
from ..harness.processes import output_of
from ..models.workloads import WORKLOADS, Workload

SMALL_TARGETS = {"floor": 1.06, "jit": 0.70, "eqx": 1 / 4.2}  # eqxjit's geometric mean ratios
ALL_TARGETS = {"floor": 1.08}
PYTHON_TARGETS = {"floor": 1.20}  # of small models, in generated Python
LEAF_TARGETS = {"tree in": 0.05, "tree in and out": 0.2}  # microseconds above the floor, per leaf
NOISE = 1.05  # compute-bound workloads

LARGE_TREE = 1_000  # leaves
PROCESSES = 3  # of a large tree: they share the rounds

OURS = ("eqxjit", "python")  # what serves here, and generated Python

Microseconds = dict[str, float]  # by competitor
Seconds = dict[str, list[float]]  # by competitor and round


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report, write and draw."""
    parser = options("calls", __doc__, rounds=45)
    parser.add_argument("--quick", action="store_true", help="3 short rounds, no 10,000 leaves")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads whose names have this")
    args = parser.parse_args(argv)
    console = wide_console(150)
    # As in the processes of the workloads: the setting is recorded.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    if not eqxjit.native_enabled():
        console.print("No native back end here: eqxjit's column is generated Python's.")
    rounds = 3 if args.quick else args.rounds
    chosen = {name: w for name, w in WORKLOADS.items() if _chosen(name, w, args)}
    seconds = 0.005 if args.quick else 0.03
    figures = {
        name: _figures(name, workload, rounds, seconds)
        for name, workload in track([*chosen.items()], "workloads", console=console, transient=True)
    }

    def microseconds(name: str, of: Callable[[list[float]], float]) -> Microseconds:
        scale = 1e6 / chosen[name].calls
        here, python = figures[name]
        found = {each: of(rounds) * scale for each, rounds in here.items()}
        if python:
            found["python"] = found["floor"] * of(python["eqxjit"]) / of(python["floor"])
        return found

    times = {name: microseconds(name, min) for name in figures}
    console.print(_table(times))
    if _by_leaves(times, chosen):
        console.print(_leaf_table(times, chosen))
    for line in _verdicts(times, chosen):
        console.print(line)

    complete = not (args.quick or args.only)
    if args.output or complete:
        report = {
            "rounds": rounds,
            "native": eqxjit.native_enabled(),
            "geometric_means": {
                group: {ours: _means(of, ours) for ours in OURS}
                for group, of in _groups(times, chosen).items()
            },
            "workloads": {
                name: {
                    "group": chosen[name].group,
                    "best_us": times[name],
                    "median_us": microseconds(name, median),
                }
                for name in figures
            },
        }
        written = write("calls", report, args.output)
        platform = jax.default_backend()
        pictures.overview(times, written.with_name(f"overview-{platform}.png"))
        pictures.ratios(times, written.with_name(f"ratios-{platform}.png"))
        pictures.leaves(_by_leaves(times, chosen), written.with_name(f"leaves-{platform}.png"))
        console.print(f"written: {written} and three pictures beside it")
    return 0


def _figures(name: str, workload: Workload, rounds: int, seconds: float) -> tuple[Seconds, Seconds]:
    """Seconds per statement, by competitor and round: as eqxjit is here, and in generated Python.

    The latter are empty where the former are of generated Python, too.
    """
    processes = min(PROCESSES, rounds) if (workload.leaves or 0) >= LARGE_TREE else 1
    here: Seconds = {}
    python: Seconds = {}
    arguments = (name, str(math.ceil(rounds / processes)), str(seconds))
    for _ in range(processes):
        _run(here, arguments, os.environ)
        if eqxjit.native_enabled():
            environment = {**os.environ, "EQXJIT_NATIVE": "0"}
            _run(python, (*arguments, "--only", "floor", "eqxjit"), environment)
    return here, python


def _run(figures: Seconds, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Add the figures of one more process."""
    output = output_of("bench.probes.call", *arguments, environment=environment)
    for competitor, found in json.loads(output.splitlines()[-1]).items():
        figures.setdefault(competitor, []).extend(found)


def _chosen(name: str, workload: Workload, args: argparse.Namespace) -> bool:
    if args.only:
        return any(part.lower() in name.lower() for part in args.only)
    return not (args.quick and (workload.leaves or 0) >= 10_000)


def _groups(
    times: dict[str, Microseconds], chosen: dict[str, Workload]
) -> dict[str, list[Microseconds]]:
    small = [times[name] for name, workload in chosen.items() if workload.group == "small"]
    return {"small": small, "all": [*times.values()]} if small else {}


def _means(rows: list[Microseconds], ours: str) -> dict[str, float]:
    """The geometric mean ratios of one of `OURS` to the others."""
    if not rows or any(ours not in row for row in rows):
        return {}
    return {to: geometric_mean(row[ours] / row[to] for row in rows) for to in SMALL_TARGETS}


def _table(times: dict[str, Microseconds]) -> Table:
    competitors = list(dict.fromkeys(name for row in times.values() for name in row))
    table = Table(title="µs per call, best round", row_styles=["", "dim"])
    table.add_column("workload", no_wrap=True)
    for name in (*competitors, "of floor", "of jit", "eqx over eqxjit"):
        table.add_column(name, justify="right")
    for workload, row in times.items():
        ours = row["eqxjit"]
        table.add_row(
            workload,
            *(_short(row.get(name)) for name in competitors),
            f"{ours / row['floor']:.2f}",
            f"{ours / row['jit']:.2f}",
            f"{row['eqx'] / ours:.2f}x",
        )
    return table


def _short(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    decimals = max(0, 2 - math.floor(math.log10(microseconds)))
    return f"{microseconds:,.{decimals}f}"


def _by_leaves(
    times: dict[str, Microseconds], chosen: dict[str, Workload]
) -> dict[str, dict[int, Microseconds]]:
    """Times of the tree workloads, by group and number of leaves."""
    groups: dict[str, dict[int, Microseconds]] = {}
    for name, workload in chosen.items():
        if workload.leaves is not None:
            groups.setdefault(workload.group, {})[workload.leaves] = times[name]
    return groups


def _leaf_table(times: dict[str, Microseconds], chosen: dict[str, Workload]) -> Table:
    table = Table(title="µs per leaf above the floor")
    rows = [row for rows in _by_leaves(times, chosen).values() for row in rows.values()]
    names = [name for name in ("jit", "eqx", *OURS, "unchecked") if all(name in r for r in rows)]
    for column in ("tree", "leaves", *names):
        table.add_column(column, justify="right")
    for group, rows in _by_leaves(times, chosen).items():
        for leaves, row in rows.items():
            above = ((row[name] - row["floor"]) / leaves for name in names)
            table.add_row(group, f"{leaves:,}", *(f"{value:.3f}" for value in above))
    return table


def _verdicts(times: dict[str, Microseconds], chosen: dict[str, Workload]) -> list[str]:
    """A line for each target: what it is, what came out."""
    targets = {
        ("small", "eqxjit"): SMALL_TARGETS,
        ("small", "python"): PYTHON_TARGETS,
        ("all", "eqxjit"): ALL_TARGETS,
    }
    groups = _groups(times, chosen)
    lines = [
        _verdict(f"{group} models, geometric mean of {ours} / {to}", means[to], target)
        for (group, ours), by_competitor in targets.items()
        for means in [_means(groups.get(group, []), ours)]
        for to, target in by_competitor.items()
        if to in means
    ]
    for kind, compute_bound, limit in (("dispatch", False, 1.0), ("compute", True, NOISE)):
        against_jit = {
            name: times[name]["eqxjit"] / times[name]["jit"]
            for name, workload in chosen.items()
            if workload.compute_bound == compute_bound
        }
        if against_jit:
            worst = max(against_jit, key=against_jit.__getitem__)
            what = f"{kind}-bound workloads, worst eqxjit / jit ({worst})"
            lines.append(_verdict(what, against_jit[worst], limit))
    for group, rows in _by_leaves(times, chosen).items():
        for leaves, row in rows.items():
            if leaves >= 100:
                above = (row["eqxjit"] - row["floor"]) / leaves
                what = f"{leaves:,} leaves {group[5:]}, µs a leaf"
                lines.append(_verdict(what, above, LEAF_TARGETS[group]))
    return lines


def _verdict(what: str, value: float, target: float) -> str:
    verdict = met_or_missed(value <= target)
    return f"{verdict}: {what} is {value:.3f}, at most {target:.3f}"
