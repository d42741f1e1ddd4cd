"""`bench statics`: static values, structures in turn and deep trees, against `equinox.filter_jit`.

Measured is the CPU time of the calling thread: none of these calls computes anything to speak of.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from . import pictures
from .competitors import FILTER_JITS
from .environment import facts
from .measure import Case, Race
from .static_rows import ROWS, SERIES, Row

RESULTS = Path(__file__).parent / "results"
TARGET = 1.0  # of upstream, each row

Microseconds = dict[str, float]  # by competitor


def rows() -> dict[str, Row]:
    """All rows by name: those of the series, for each size, and the others."""
    sized = {
        f"{series}: {size:,}": make(size)
        for series, (make, sizes) in SERIES.items()
        for size in sizes
    }
    return {**sized, **ROWS}


def main(argv: list[str]) -> int:
    """Check that both agree, time them in turn, report, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m bench statics", description=__doc__)
    parser.add_argument("--rounds", type=int, help="at least 9 for figures to quote (default: 15)")
    parser.add_argument("--quick", action="store_true", help="2 short rounds, no size over 1,000")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows whose names have this")
    parser.add_argument(
        "--output", type=Path, help="folder for JSON and the picture (default: bench/results)"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    warnings.filterwarnings("ignore", message="A JAX array is being set as static")
    console = Console(width=None if sys.stdout.isatty() else 120)

    rounds = args.rounds or (2 if args.quick else 15)
    seconds = 0.002 if args.quick else 0.02
    chosen = {name: row for name, row in rows().items() if _is_chosen(name, args)}
    races: dict[str, Race] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(chosen) * (1 + rounds))
        for name, row in chosen.items():
            progress.update(task, description=f"{name}: compiling, checking")
            races[name] = Race(_cases(name, row), seconds, time.thread_time)
            progress.advance(task)
        for _ in range(rounds):
            for name, race in races.items():
                progress.update(task, description=name)
                race.round()
                progress.advance(task)

    best, middle = (
        {
            name: {side: of(values) * 1e6 for side, values in race.figures.items()}
            for name, race in races.items()
        }
        for of in (min, median)
    )
    console.print(_table(best))
    missed = [name for name, row in best.items() if _ratio(row) > TARGET]
    console.print(f"{len(best) - len(missed)} of {len(best)} rows at most {TARGET} x upstream")

    complete = not (args.quick or args.only)
    if args.output or complete:
        folder = args.output or RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        platform = jax.default_backend()
        report = facts() | {"rounds": rounds, "best_us": best, "median_us": middle}
        written = folder / f"statics-{platform}.json"
        written.write_text(json.dumps(report, indent=1) + "\n")
        pictures.sizes(_by_size(best), folder / f"statics-{platform}.png")
        console.print(f"written: {written} and a picture beside it")
    return 0


def _is_chosen(name: str, args: argparse.Namespace) -> bool:
    if args.only:
        return any(part.lower() in name.lower() for part in args.only)
    size = name.rpartition(": ")[2].replace(",", "")
    return not (args.quick and size.isdecimal() and int(size) > 1_000)


def _cases(name: str, row: Row) -> dict[str, Case]:
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
        verdict = "[green]met[/]" if ratio <= TARGET else "[red]missed[/]"
        table.add_row(name, f"{row['eqx']:,.1f}", f"{row['eqxjit']:,.1f}", f"{ratio:.2f}", verdict)
    return table


def _by_size(best: dict[str, Microseconds]) -> dict[str, dict[int, Microseconds]]:
    """The rows of each series, by size."""
    return {
        series: {size: best[name] for size in sizes if (name := f"{series}: {size:,}") in best}
        for series, (_, sizes) in SERIES.items()
    }
