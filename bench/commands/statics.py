"""`bench statics`: configurations, structures in turn, deep and large trees, against Equinox.

Measured is the CPU time of the calling thread: none of these calls computes anything to speak of.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median

import jax
import numpy as np
from rich.table import Table

from ..harness import pictures
from ..harness.competitors import FILTER_JITS
from ..harness.environment import write
from ..harness.measure import Case, options, race_all
from ..harness.printing import met_or_missed, wide_console
from ..models.static_rows import ANEW, ROWS, SERIES, Row

TARGET = 1.0  # of upstream, each row

Microseconds = dict[str, float]  # by competitor


def rows() -> dict[str, Callable[[], Row]]:
    """What makes each row, by name: those of the series, for each size, and the others."""
    sized = {
        f"{series}: {size:,}": partial(make, size)
        for series, (make, sizes) in SERIES.items()
        for size in sizes
    }
    return {**sized, **ROWS}


def main(argv: list[str]) -> int:
    """Check that both agree, time them in turn, report, write and draw."""
    parser = options("statics", __doc__, rounds=15)
    parser.add_argument("--quick", action="store_true", help="2 short rounds")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names have this")
    args = parser.parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="A JAX array is being set as static")
    console = wide_console(120)

    rounds = 2 if args.quick else args.rounds
    seconds = 0.002 if args.quick else 0.02
    chosen = {
        name: partial(_cases, name, make) for name, make in rows().items() if _is_chosen(name, args)
    }
    races = race_all(chosen, rounds, console, seconds, time.thread_time)
    best, middle = (
        {name: race.microseconds(of) for name, race in races.items()} for of in (min, median)
    )
    console.print(_table(best))
    missed = [name for name, row in best.items() if _ratio(row) > TARGET]
    console.print(f"{len(best) - len(missed)} of {len(best)} rows at most {TARGET} x upstream")

    complete = not (args.quick or args.only)
    if args.output or complete:
        report = {"rounds": rounds, "best_us": best, "median_us": middle}
        written = write("statics", report, args.output)
        pictures.sizes(_by_size(best), ANEW, written.with_suffix(".png"))
        console.print(f"written: {written} and a picture beside it")
    return 0


def _is_chosen(name: str, args: argparse.Namespace) -> bool:
    return not args.only or any(part.lower() in name.lower() for part in args.only)


def _cases(name: str, make: Callable[[], Row]) -> dict[str, Case]:
    row = make()
    cases = {side: row(filter_jit) for side, filter_jit in FILTER_JITS.items()}
    outputs = {side: jax.tree.leaves(case.run(3)) for side, case in cases.items()}
    for ours, theirs in zip(outputs["eqxjit"], outputs["eqx"], strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    return cases


def _ratio(row: Microseconds) -> float:
    return row["eqxjit"] / row["eqx"]


def _table(best: dict[str, Microseconds]) -> Table:
    table = Table(title="µs of CPU time, best round", row_styles=["", "dim"])
    table.add_column("row", no_wrap=True)
    for column in ("eqx", "eqxjit", "eqxjit / eqx", ""):
        table.add_column(column, justify="right")
    for name, row in best.items():
        ratio = _ratio(row)
        verdict = met_or_missed(ratio <= TARGET)
        table.add_row(name, f"{row['eqx']:,.1f}", f"{row['eqxjit']:,.1f}", f"{ratio:.2f}", verdict)
    return table


def _by_size(best: dict[str, Microseconds]) -> dict[str, dict[int, Microseconds]]:
    """The rows of each series that was timed, by size."""
    found = {
        series: {size: best[name] for size in sizes if (name := f"{series}: {size:,}") in best}
        for series, (_, sizes) in SERIES.items()
    }
    return {series: by_size for series, by_size in found.items() if by_size}
