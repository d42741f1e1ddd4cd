"""`bench shapes`: one function called with several shapes or dtypes, against every competitor.

Three kinds of calls: warm ones of the shape that a function met first; warm ones of shapes that it
met later; and the first three of each shape known once another was traced.

eqxjit is timed with the native back end where there is one, and again (`python`) without it, in
processes that take turns. Competitors take turns in each process, and a ratio is of figures of the
same processes.
"""

import math
import os
from collections.abc import Callable, Sequence
from statistics import fmean, median

import jax
from rich.progress import track
from rich.table import Table

import eqxjit

from ..harness.environment import record
from ..harness.measure import chosen, effort, options
from ..harness.printing import table_of, wide_console
from ..harness.processes import figures_of
from ..models.shape_rows import ROWS

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
    args = options("shapes", __doc__, rounds=16).parse_args(argv)
    console = wide_console()
    # As in the processes of the rows: the setting is recorded.
    jax.config.update("jax_cpu_enable_async_dispatch", False)

    back_ends = ["eqxjit", "python"] if eqxjit.native_enabled() else ["python"]
    rounds, seconds = effort(args)
    processes = 1 if args.quick else min(PROCESSES, rounds)
    runs = [
        (name, ours) for name in chosen(ROWS, args) for _ in range(processes) for ours in back_ends
    ]
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
    record("shapes", {"rounds": rounds, "best_us": best, "median_us": middle}, args)
    return 0


def _figures(name: str, ours: str, rounds: int, seconds: float) -> Figures:
    environment = {**os.environ, **({"EQXJIT_NATIVE": "0"} if ours == "python" else {})}
    arguments = (name, str(rounds), str(seconds))
    figures: Figures = figures_of("bench.probes.shapes", *arguments, environment=environment)
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
    competitors = ("floor", "jit", "eqx", "eqxjit", "python")
    lines: list[Sequence[object]] = []
    for name, row in best.items():
        for column, calls in COLUMNS.items():
            # The others are nearly the same in both: those beside the native back end, if any.
            times = {
                k: v for by_column in reversed(row.values()) for k, v in by_column[column].items()
            }
            lines.append(
                (
                    name,
                    calls,
                    *map(times.get, competitors),
                    *(row[ours][column][ours] / row[ours][column][to] for ours, to in ratios),
                )
            )
    headings = ("row", "calls of", *competitors, *(f"{ours} / {to}" for ours, to in ratios))
    return table_of("µs per call, best round", headings, lines)
