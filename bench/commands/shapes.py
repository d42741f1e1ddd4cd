"""`bench shapes`: one function called with several shapes or dtypes, against every competitor.

Three kinds of calls: warm ones of the shape that a function met first; warm ones of shapes that it
met later; and the first three of each shape known once another was traced.

eqxjit is timed with the native back end where there is one, and again (`python`) without it, in
processes that take turns. Competitors take turns in each process, and a ratio is of figures of the
same processes.
"""

import json
import math
import os
from collections.abc import Callable
from statistics import fmean, median

import jax
from rich.progress import track
from rich.table import Table

import eqxjit

from ..harness.environment import write
from ..harness.measure import options
from ..harness.printing import met_or_missed, wide_console
from ..harness.processes import output_of
from ..models.shape_rows import ROWS

LATER_TARGET = 1.1  # of the floor, natively
OLDER_TARGET = 1.0  # of Equinox

PROCESSES = 2  # of each row and back end: they share the rounds

COLUMNS = {
    "first": "first shape",
    "later": "later shapes",
    "older": "older, after a trace",
}

Microseconds = dict[str, float]  # by competitor
Row = dict[str, dict[str, Microseconds]]  # by back end and column
Figures = dict[str, dict[str, list[list[float]]]]  # of a process: see the probe


def main(argv: list[str]) -> int:
    """Check that all competitors agree, time them, report and write."""
    parser = options("shapes", __doc__, rounds=16)
    parser.add_argument("--quick", action="store_true", help="2 short rounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names have this")
    args = parser.parse_args(argv)
    console = wide_console(150)
    # As in the processes of the rows: the setting is recorded.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    back_ends = ["eqxjit", "python"] if eqxjit.native_enabled() else ["python"]
    rounds, seconds = (2, 0.005) if args.quick else (args.rounds, 0.03)
    processes = 1 if args.quick else min(PROCESSES, rounds)
    chosen = [
        name
        for name in ROWS
        if not args.only or any(part.lower() in name.lower() for part in args.only)
    ]
    runs = [(name, ours) for name in chosen for _ in range(processes) for ours in back_ends]
    found: dict[str, dict[str, list[Figures]]] = {}
    for name, ours in track(runs, "rows", console=console, transient=True):
        figures = _figures(name, ours, math.ceil(rounds / processes), seconds)
        found.setdefault(name, {}).setdefault(ours, []).append(figures)

    best, middle = (
        {
            name: {ours: _microseconds(figures, of) for ours, figures in by_back_end.items()}
            for name, by_back_end in found.items()
        }
        for of in (min, median)
    )
    console.print(_table(best))
    for line in _verdicts(best):
        console.print(line)

    if args.output or not (args.quick or args.only):
        report = {"rounds": rounds, "best_us": best, "median_us": middle}
        console.print(f"written: {write('shapes', report, args.output)}")
    return 0


def _figures(name: str, ours: str, rounds: int, seconds: float) -> Figures:
    environment = {**os.environ, **({"EQXJIT_NATIVE": "0"} if ours == "python" else {})}
    arguments = (name, str(rounds), str(seconds))
    output = output_of("bench.probes.shapes", *arguments, environment=environment)
    figures = json.loads(output.splitlines()[-1])
    for by_competitor in figures.values():
        by_competitor[ours] = by_competitor.pop("eqxjit")
    return figures


def _microseconds(
    processes: list[Figures], of: Callable[[list[float]], float]
) -> dict[str, Microseconds]:
    """By column; the mean over its shapes, whose rounds all processes share."""

    def mean(column: str, competitor: str) -> float:
        shapes = zip(*(figures[column][competitor] for figures in processes), strict=True)
        return 1e6 * fmean(of([s for rounds in shape for s in rounds]) for shape in shapes)

    return {
        column: {competitor: mean(column, competitor) for competitor in by_competitor}
        for column, by_competitor in processes[0].items()
    }


def _table(best: dict[str, Row]) -> Table:
    ratios = [(ours, to) for to in ("floor", "eqx") for ours in next(iter(best.values()))]
    table = Table(title="µs per call, best round", row_styles=["", "dim"])
    table.add_column("row", no_wrap=True)
    table.add_column("calls of", no_wrap=True)
    competitors = ("floor", "jit", "eqx", "eqxjit", "python")
    for column in (*competitors, *(f"{ours} / {to}" for ours, to in ratios)):
        table.add_column(column, justify="right")
    for name, row in best.items():
        for column, calls in COLUMNS.items():
            # The others are nearly the same in both: those beside the native back end, if any.
            times = {
                k: v for by_column in reversed(row.values()) for k, v in by_column[column].items()
            }
            table.add_row(
                name if column == "first" else "",
                calls,
                *(f"{times[each]:.1f}" if each in times else "-" for each in competitors),
                *(f"{_ratio(row, ours, to, column):.2f}" for ours, to in ratios),
                end_section=column == "older",
            )
    return table


def _verdicts(best: dict[str, Row]) -> list[str]:
    """A line for each target and back end: its worst row."""
    lines = []
    for column, ours, to, target in (
        ("later", "eqxjit", "floor", LATER_TARGET),
        ("older", "eqxjit", "eqx", OLDER_TARGET),
        ("older", "python", "eqx", OLDER_TARGET),
    ):
        found = {name: _ratio(row, ours, to, column) for name, row in best.items() if ours in row}
        if found:
            worst = max(found, key=found.__getitem__)
            lines.append(
                f"{met_or_missed(found[worst] <= target)}: {COLUMNS[column]}, worst {ours} / {to} "
                f"({worst}) is {found[worst]:.2f}, at most {target}"
            )
    return lines


def _ratio(row: Row, ours: str, to: str, column: str) -> float:
    times = row[ours][column]
    return times[ours] / times[to]
